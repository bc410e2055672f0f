"""The records that both kernel implementations read; csrc/abi.h mirrors them field by field.

An array of them describes one call. Addresses are plain integers, so that an array can be kept and only its scalars
rewritten from step to step.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar, Final

BF16: Final = 0
F32: Final = 1
INT8: Final = 2  # moments only: codes of blocks that share a scale

ADAMW: Final = 0  # decoupled weight decay: the parameter is multiplied by `decay`
ADAM: Final = 1  # L2: weight_decay * parameter is added to the gradient
AMSGRADW: Final = 2
AMSGRAD: Final = 3
SGD: Final = 4
SGD_MOMENTUM: Final = 5
SGD_NESTEROV: Final = 6
LION: Final = 7
ADAGRAD: Final = 8

NON_NEGATIVE: Final[dict[int, tuple[bool, ...]]] = {
    ADAMW: (False, True),
    ADAM: (False, True),
    AMSGRADW: (False, True, True),
    AMSGRAD: (False, True, True),
    SGD: (),
    SGD_MOMENTUM: (False,),
    SGD_NESTEROV: (False,),
    LION: (False,),
    ADAGRAD: (True,),
}
"""The moments of each formula, in the order in which they rest: whether they are sums of squares, which have a code of
their own in int8."""

MOMENTS_MAX: Final = 3
BLOCK_NUMEL: Final = 128  # int8 codes that share a scale

PIECE_NUMEL: Final = 4096  # one sum of squares each
LANES: Final = 16  # accumulators of one sum of squares


class UpdateTask(ctypes.Structure):
    """One contiguous run of parameters that share their hyperparameters, updated in place.

    With int8 moments it starts at the start of a block.
    """

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("weight", ctypes.c_void_p),  # uint16 (bf16) or float32
        ("residual", ctypes.c_void_p),  # uint16 low halves of the masters; None for float32 weights
        ("grad", ctypes.c_void_p),
        ("moments", ctypes.c_void_p * MOMENTS_MAX),  # as many as the formula has
        ("scales", ctypes.c_void_p * MOMENTS_MAX),  # float32, one per block; INT8 only
        ("numel", ctypes.c_int64),
        ("weight_dtype", ctypes.c_int32),
        ("grad_dtype", ctypes.c_int32),
        ("moment_dtype", ctypes.c_int32),
        ("formula", ctypes.c_int32),
        ("noise", ctypes.c_uint32),  # of the first element, the next one's is one more; not read with F32 moments
        ("grad_scale", ctypes.c_float),  # negative to maximize
        ("decay", ctypes.c_float),  # 1 - lr * weight_decay, read by ADAMW, AMSGRADW and LION
        ("weight_decay", ctypes.c_float),  # read by the others
        ("beta1", ctypes.c_float),  # LION; SGD: the momentum, 0 in the first step
        ("one_minus_beta1", ctypes.c_float),  # SGD: 1 - dampening, 1 in the first step
        ("beta2", ctypes.c_float),  # SGD_NESTEROV: the momentum
        ("one_minus_beta2", ctypes.c_float),
        ("step_size", ctypes.c_float),  # the learning rate, with ADAM and its kin divided by bias_correction1
        ("bias_correction2_sqrt", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("initial_sum", ctypes.c_float),  # ADAGRAD: what the sum starts from, in the first step; 0 later
    ]


class AccumulateTask(ctypes.Structure):
    """target = source, or previous * previous_scale + source; and the sums of squares of the result."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("source", ctypes.c_void_p),
        ("source_dtype", ctypes.c_int32),
        ("previous", ctypes.c_void_p),  # None: nothing to add to; may be the target itself
        ("previous_dtype", ctypes.c_int32),
        ("previous_scale", ctypes.c_float),
        ("target", ctypes.c_void_p),  # None: measure only
        ("target_dtype", ctypes.c_int32),  # BF16 only from a BF16 source with nothing to add to
        ("numel", ctypes.c_int64),
        ("first_piece", ctypes.c_int64),  # elements before the first piece boundary, 1..PIECE_NUMEL
        ("partials", ctypes.c_void_p),  # float64, one per piece; None: do not measure
    ]


def piece_count(numel: int, first_piece: int) -> int:
    """How many partial sums a run of `numel` elements has whose first piece holds at most `first_piece` of them."""
    if numel == 0:
        return 0
    return 1 + max(0, -(-(numel - first_piece) // PIECE_NUMEL))
