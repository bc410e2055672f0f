"""The records that both kernel implementations read; csrc/abi.h mirrors them field by field.

An array of them describes one call. Addresses are plain integers, so that an array can be kept and only its scalars
rewritten from step to step.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar, Final

BF16: Final = 0
F32: Final = 1

ADAMW: Final = 0  # decoupled weight decay: the parameter is multiplied by `decay`
ADAM: Final = 1  # L2: weight_decay * parameter is added to the gradient

PIECE_NUMEL: Final = 4096  # one sum of squares each
LANES: Final = 16  # accumulators of one sum of squares


class UpdateTask(ctypes.Structure):
    """One contiguous run of parameters that share their hyperparameters, updated in place."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("weight", ctypes.c_void_p),  # uint16 (bf16) or float32
        ("residual", ctypes.c_void_p),  # uint16 low halves of the masters; None for float32 weights
        ("exp_avg", ctypes.c_void_p),  # float32
        ("exp_avg_sq", ctypes.c_void_p),  # float32
        ("grad", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("weight_dtype", ctypes.c_int32),
        ("grad_dtype", ctypes.c_int32),
        ("formula", ctypes.c_int32),
        ("maximize", ctypes.c_int32),
        ("grad_scale", ctypes.c_float),
        ("decay", ctypes.c_float),  # 1 - lr * weight_decay, read by ADAMW
        ("weight_decay", ctypes.c_float),  # read by ADAM
        ("one_minus_beta1", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("one_minus_beta2", ctypes.c_float),
        ("step_size", ctypes.c_float),  # lr / bias_correction1
        ("bias_correction2_sqrt", ctypes.c_float),
        ("eps", ctypes.c_float),
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
