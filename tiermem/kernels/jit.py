"""The kernels compiled by numba: the fallback where csrc/ was not compiled. Same bits, the same records.

A row of masters and gradients is widened to fp32 in the first-level cache, stepped and narrowed, and moments that take
less than fp32 are decoded and encoded a tile at a time. csrc/ keeps them in registers, as LLVM would not by itself.
The update's loops run over addresses. Each access says which plane it goes to, and LLVM is told that planes of one
group do not overlap: it would compare their ends before every row, and give up on loops over so many.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Final, TypeVar

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from tiermem.kernels import Kernels
from tiermem.kernels.abi import (
    ADAGRAD,
    ADAM,
    ADAMW,
    AMSGRAD,
    AMSGRADW,
    BF16,
    BLOCK_NUMEL,
    F32,
    INT8,
    LANES,
    LION,
    MOMENTS_MAX,
    PIECE_NUMEL,
    SGD,
    SGD_NESTEROV,
    AccumulateTask,
    UpdateTask,
)

ROW_NUMEL: Final = 64  # of masters and gradients that are widened at once
AHEAD_NUMEL: Final = 768  # memory is asked for so far ahead; csrc/pass.h says why
TILE_NUMEL: Final = 512  # of moments that are decoded at once, in the first-level cache: whole blocks
TILE_NUMEL_BF16: Final = 256
SUM_TILE_NUMEL: Final = 1024  # of the sums of gradients; a multiple of LANES, and pieces are multiples of it
UNIT_NUMEL: Final = 64 * 1024  # of the update: what one thread takes at once
UNIT_PIECES: Final = 16  # of the sums of gradients
HALF_BF16: Final = 0x8000  # in place of noise: rounds to nearest
HALF_INT8: Final = 0x80
NUMEL_PER_THREAD_MIN: Final = 256 * 1024  # below, handing work to a Python thread costs more than it gains

_NAN: Final = np.float32(np.nan)  # 0x7fc00000
_SCRATCH: Final = np.dtype(  # of one thread
    [
        ("masters", np.float32, ROW_NUMEL),
        ("grads", np.float32, ROW_NUMEL),
        ("moments", np.float32, (MOMENTS_MAX, TILE_NUMEL)),
        ("noise", np.uint16, (2, TILE_NUMEL)),
        ("digits", np.float32, TILE_NUMEL // BLOCK_NUMEL),
    ]
)
_OFFSETS: Final = {name: np.uint64(field[1]) for name, field in (_SCRATCH.fields or {}).items()}
_GRADS_AT: Final = _OFFSETS["grads"]
_MOMENTS_AT: Final = _OFFSETS["moments"]
_NOISE_AT: Final = _OFFSETS["noise"]
_DIGITS_AT: Final = _OFFSETS["digits"]
_SCRATCH_BYTES: Final = _SCRATCH.itemsize + 64  # and what its alignment takes
_UPDATE_TASK: Final = np.dtype(UpdateTask)
_ACCUMULATE_TASK: Final = np.dtype(AccumulateTask)
_MASTER_TASK: Final = np.dtype([("master", "u8"), ("weight", "u8"), ("residual", "u8"), ("numel", "i8")])

F = TypeVar("F", bound=Callable[..., Any])

_intrinsic: Callable[[Callable[..., Any]], Any] = intrinsic


def _compiled(function: F, **options: bool) -> F:
    """njit without the GIL and with IEEE arithmetic, cached on disk where there is a place that can be written."""
    try:
        return njit(nogil=True, error_model="numpy", cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # numba found no directory for its cache
        return njit(nogil=True, error_model="numpy", **options)(function)  # type: ignore[no-any-return]


def _inlined(function: F) -> F:
    """Compiled into its callers: a loop whose length is a constant there is unrolled."""
    return _compiled(function, forceinline=True)


# ---- bits, as in csrc/numbers.h. numba would widen the integers to 64 bits, so the instructions are given.


@_intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.uint64), generate


@_intrinsic
def _widen(typing: Any, value: Any) -> Any:
    """bf16 bits or fp32 to fp32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if value == types.float32:
            return arguments[0]
        high = builder.shl(builder.zext(arguments[0], ir.IntType(32)), ir.IntType(32)(16))
        return builder.bitcast(high, ir.FloatType())

    return types.float32(value), generate


@_intrinsic
def _join(typing: Any, weight: Any, residual: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        high, low = (builder.zext(half, word) for half in arguments)
        high = builder.shl(builder.sub(high, builder.lshr(low, word(15))), word(16))
        return builder.bitcast(builder.add(high, low), ir.FloatType())

    return types.float32(types.uint16, types.uint16), generate


@_intrinsic
def _split_weight(typing: Any, master: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        rounded = builder.add(builder.bitcast(arguments[0], word), word(0x8000))
        return builder.trunc(builder.lshr(rounded, word(16)), ir.IntType(16))

    return types.uint16(types.float32), generate


@_intrinsic
def _split_residual(typing: Any, master: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.trunc(builder.bitcast(arguments[0], ir.IntType(32)), ir.IntType(16))

    return types.uint16(types.float32), generate


@_intrinsic
def _add_squares(typing: Any, values: Any, groups: Any, sums: Any) -> Any:
    """sums[lane] += values[group, lane] ** 2 for each group of LANES values, in float64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values_pointer, sums_pointer = (
            context.make_array(array)(context, builder, argument).data
            for array, argument in ((values, arguments[0]), (sums, arguments[2]))
        )
        doubles = ir.VectorType(ir.DoubleType(), LANES)
        floats = ir.VectorType(ir.FloatType(), LANES)
        values_pointer = builder.bitcast(values_pointer, floats.as_pointer())
        sums_pointer = builder.bitcast(sums_pointer, doubles.as_pointer())
        accumulated = cgutils.alloca_once_value(builder, builder.load(sums_pointer, align=8))
        with cgutils.for_range(builder, arguments[1]) as loop:
            group = builder.load(builder.gep(values_pointer, [loop.index]), align=4)
            group = builder.fpext(group, doubles)
            builder.store(builder.fadd(builder.load(accumulated), builder.fmul(group, group)), accumulated)
        builder.store(builder.load(accumulated), sums_pointer, align=8)
        return context.get_dummy_value()

    return types.none(values, types.int64, sums), generate


@_intrinsic
def _multiply_add(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@_intrinsic
def _noise(typing: Any, first: Any, index: Any) -> Any:
    """The random word of element first + index, but for the last mixing: the high half goes into the low one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        weyl = builder.mul(builder.add(arguments[0], builder.trunc(arguments[1], word)), word(0x9E3779B9))
        return builder.mul(builder.xor(weyl, builder.lshr(weyl, word(16))), word(0x85EBCA6B))

    return types.uint32(types.uint32, types.int64), generate


@_intrinsic
def _low_half(typing: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.trunc(arguments[0], ir.IntType(16))

    return types.uint16(types.uint32), generate


@_intrinsic
def _high_half(typing: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.trunc(builder.lshr(arguments[0], ir.IntType(32)(16)), ir.IntType(16))

    return types.uint16(types.uint32), generate


@_intrinsic
def _xor(typing: Any, a: Any, b: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.xor(*arguments)

    return types.uint16(types.uint16, types.uint16), generate


@_intrinsic
def _low_byte(typing: Any, half: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.and_(arguments[0], ir.IntType(16)(0xFF))

    return types.uint16(types.uint16), generate


@_intrinsic
def _high_byte(typing: Any, half: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.lshr(arguments[0], ir.IntType(16)(8))

    return types.uint16(types.uint16), generate


@_intrinsic
def _round_bf16(typing: Any, value: Any, noise: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        value, noise = arguments
        rounded = builder.add(builder.bitcast(value, word), builder.zext(noise, word))
        return builder.trunc(builder.lshr(rounded, word(16)), ir.IntType(16))

    return types.uint16(types.float32, types.uint16), generate


@_intrinsic
def _second_byte(typing: Any, bits: Any, noise: Any) -> Any:
    """Of `bits` plus noise."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        half = ir.IntType(16)
        bits, noise = arguments
        rounded = builder.add(builder.trunc(bits, half), noise)
        return builder.trunc(builder.lshr(rounded, half(8)), ir.IntType(8))

    return types.uint8(types.int32, types.uint16), generate


@_intrinsic
def _to_bits(typing: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@_intrinsic
def _magnitude(typing: Any, value: Any) -> Any:
    """The bits without the sign: ordered as the magnitudes are, NaN above all."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        return builder.and_(builder.bitcast(arguments[0], word), word(0x7FFFFFFF))

    return types.int32(types.float32), generate


@_intrinsic
def _is_nan(typing: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.zext(builder.fcmp_unordered("uno", arguments[0], arguments[0]), ir.IntType(32))

    return types.int32(types.float32), generate


@_intrinsic
def _or(typing: Any, a: Any, b: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.or_(*arguments)

    return types.int32(types.int32, types.int32), generate


@_intrinsic
def _from_bits(typing: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


# ---- memory


def _mark(builder: Any, access: Any, plane: str, group: tuple[str, ...]) -> None:
    """Tells LLVM which plane of a group is accessed. Planes of different groups may overlap."""
    if not group:
        return
    module = builder.module
    domain = module.add_metadata([f"tiermem {' '.join(group)}"])
    scopes = {name: module.add_metadata([name, domain]) for name in group}
    access.set_metadata("alias.scope", module.add_metadata([scopes.pop(plane)]))
    access.set_metadata("noalias", module.add_metadata(list(scopes.values())))


def _load(scalar: Any, plane: str = "", group: tuple[str, ...] = ()) -> Any:
    """load(address, i): element i."""

    @_intrinsic
    def load(typing: Any, address: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            base = builder.inttoptr(arguments[0], context.get_value_type(scalar).as_pointer())
            loaded = builder.load(builder.gep(base, [arguments[1]]), align=scalar.bitwidth // 8)
            _mark(builder, loaded, plane, group)
            return loaded

        return scalar(types.uint64, types.int64), generate

    return load


def _store(scalar: Any, plane: str = "", group: tuple[str, ...] = ()) -> Any:
    """store(address, i, value)"""

    @_intrinsic
    def store(typing: Any, address: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            base = builder.inttoptr(arguments[0], context.get_value_type(scalar).as_pointer())
            stored = builder.store(arguments[2], builder.gep(base, [arguments[1]]), align=scalar.bitwidth // 8)
            _mark(builder, stored, plane, group)
            return context.get_dummy_value()

        return types.none(types.uint64, types.int64, scalar), generate

    return store


_ROW: Final = ("weight", "residual", "grad", "master", "wide grad", "moment 0", "moment 1", "moment 2")
_CODED: Final = ("values", "codes", "noise", "high noise", "scales", "digits")

_load_weight, _load_residual, _load_grad = (_load(types.uint16, plane, _ROW) for plane in _ROW[:3])
_store_weight, _store_residual = (_store(types.uint16, plane, _ROW) for plane in _ROW[:2])
_load_p, _load_g, _load_m0, _load_m1, _load_m2 = (_load(types.float32, plane, _ROW) for plane in _ROW[3:])
_store_p, _store_g, _store_m0, _store_m1, _store_m2 = (_store(types.float32, plane, _ROW) for plane in _ROW[3:])

_load_value, _store_value = _load(types.float32, "values", _CODED), _store(types.float32, "values", _CODED)
_load_half, _store_half = _load(types.uint16, "codes", _CODED), _store(types.uint16, "codes", _CODED)
_load_signed, _load_unsigned = (_load(scalar, "codes", _CODED) for scalar in (types.int8, types.uint8))
_store_code = _store(types.uint8, "codes", _CODED)
_load_noise, _store_noise = _load(types.uint16, "noise", _CODED), _store(types.uint16, "noise", _CODED)
_store_high_noise = _store(types.uint16, "high noise", _CODED)
_load_scale, _store_scale = _load(types.float32, "scales", _CODED), _store(types.float32, "scales", _CODED)
_load_digits, _store_digits = _load(types.float32, "digits", _CODED), _store(types.float32, "digits", _CODED)

_load_any, _store_any = _load(types.float32), _store(types.float32)


@_intrinsic
def _prefetch_line(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        pointer = builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))
        name = "llvm.prefetch.p0"
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        builder.call(function, [pointer, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.none(types.uint64), generate


@_inlined
def _prefetch(address: Any, nbytes: int) -> None:
    """Ask for memory that is needed soon; what lies past the end of a plane does no harm."""
    for line in range(0, nbytes, 64):
        _prefetch_line(address + np.uint64(line))


@_inlined
def _one_nan(value: float) -> Any:
    return value if value == value else _NAN


# ---- rows of an update


@_inlined
def _widen_row(grad: Any, wide: Any, numel: int) -> None:
    for i in range(numel):
        _store_g(wide, i, _widen(_load_grad(grad, i)))


@_inlined
def _join_row(weight: Any, residual: Any, master: Any, numel: int) -> None:
    for i in range(numel):
        _store_p(master, i, _join(_load_weight(weight, i), _load_residual(residual, i)))


@_inlined
def _split_row(master: Any, weight: Any, residual: Any, numel: int) -> None:
    for i in range(numel):
        value = _one_nan(_load_p(master, i))
        _store_weight(weight, i, _split_weight(value))
        _store_residual(residual, i, _split_residual(value))


@_inlined
def _adam(task: Any, params: Any, grads: Any, means: Any, squares: Any, largest: Any, numel: int) -> Any:
    """csrc/formulas.h has all formulas with their sources; it says what `roots` are. Whether there are NaNs."""
    decoupled = task.formula == ADAMW or task.formula == AMSGRADW
    amsgrad = task.formula >= AMSGRADW
    l2 = not decoupled and task.weight_decay != 0
    decay = task.decay if decoupled else np.float32(1.0)
    weight_decay = task.weight_decay
    from_end = task.one_minus_beta1 >= np.float32(0.5)
    towards_grad = task.one_minus_beta1 - np.float32(1.0) if from_end else task.one_minus_beta1
    beta2 = task.beta2
    one_minus_beta2 = task.one_minus_beta2
    step_size = task.step_size
    bias_correction2_sqrt = task.bias_correction2_sqrt
    eps = task.eps
    grad_scale = task.grad_scale
    roots = task.moment_dtype == INT8
    nans = np.int32(0)
    for i in range(numel):
        p = _load_p(params, i)
        g = _load_g(grads, i) * grad_scale
        m = _load_m0(means, i)
        v = _load_m1(squares, i)
        g = _multiply_add(weight_decay, p, g) if l2 else g
        p = p * decay
        m = _multiply_add(towards_grad, g - m, g if from_end else m)
        v = _multiply_add(one_minus_beta2 * g, g, v * beta2)
        top = v
        if amsgrad:
            before = _load_m2(largest, i)
            top = before if before >= v else v
        root = np.sqrt(top)
        p = p - step_size * m / (root / bias_correction2_sqrt + eps)
        if amsgrad:
            _store_m2(largest, i, root if roots else top)
            _store_m1(squares, i, np.sqrt(v) if roots else v)
        else:
            _store_m1(squares, i, root if roots else v)
        _store_m0(means, i, m)
        _store_p(params, i, p)
        nans = _or(nans, _is_nan(p))
    return nans


@_inlined
def _sgd(task: Any, params: Any, grads: Any, numel: int) -> Any:
    weight_decay = task.weight_decay
    l2 = weight_decay != 0
    step_size = task.step_size
    grad_scale = task.grad_scale
    nans = np.int32(0)
    for i in range(numel):
        p = _load_p(params, i)
        g = _load_g(grads, i) * grad_scale
        g = _multiply_add(weight_decay, p, g) if l2 else g
        p = _multiply_add(-step_size, g, p)
        _store_p(params, i, p)
        nans = _or(nans, _is_nan(p))
    return nans


@_inlined
def _sgd_momentum(task: Any, params: Any, grads: Any, buffers: Any, numel: int) -> Any:
    nesterov = task.formula == SGD_NESTEROV
    weight_decay = task.weight_decay
    l2 = weight_decay != 0
    keep = task.beta1
    take = task.one_minus_beta1
    look_ahead = task.beta2
    step_size = task.step_size
    grad_scale = task.grad_scale
    nans = np.int32(0)
    for i in range(numel):
        p = _load_p(params, i)
        g = _load_g(grads, i) * grad_scale
        g = _multiply_add(weight_decay, p, g) if l2 else g
        buffer = _multiply_add(take, g, _load_m0(buffers, i) * keep)
        g = _multiply_add(look_ahead, buffer, g) if nesterov else buffer
        p = _multiply_add(-step_size, g, p)
        _store_m0(buffers, i, buffer)
        _store_p(params, i, p)
        nans = _or(nans, _is_nan(p))
    return nans


@_inlined
def _lion(task: Any, params: Any, grads: Any, means: Any, numel: int) -> Any:
    decay = task.decay
    beta1 = task.beta1
    one_minus_beta1 = task.one_minus_beta1
    beta2 = task.beta2
    one_minus_beta2 = task.one_minus_beta2
    step_size = task.step_size
    grad_scale = task.grad_scale
    nans = np.int32(0)
    for i in range(numel):
        g = _load_g(grads, i) * grad_scale
        m = _load_m0(means, i)
        direction = _multiply_add(one_minus_beta1, g, m * beta1)
        below = np.float32(-1.0) if direction < 0 else direction
        sign = np.float32(1.0) if direction > 0 else below
        p = _load_p(params, i) * decay - step_size * sign
        _store_m0(means, i, _multiply_add(one_minus_beta2, g, m * beta2))
        _store_p(params, i, p)
        nans = _or(nans, _is_nan(p))
    return nans


@_inlined
def _adagrad(task: Any, params: Any, grads: Any, sums: Any, numel: int) -> Any:
    weight_decay = task.weight_decay
    l2 = weight_decay != 0
    step_size = task.step_size
    eps = task.eps
    initial_sum = task.initial_sum
    grad_scale = task.grad_scale
    roots = task.moment_dtype == INT8
    nans = np.int32(0)
    for i in range(numel):
        p = _load_p(params, i)
        g = _load_g(grads, i) * grad_scale
        g = _multiply_add(weight_decay, p, g) if l2 else g
        total = _multiply_add(g, g, _load_m0(sums, i) + initial_sum)
        root = np.sqrt(total)
        p = p - step_size * g / (root + eps)
        _store_m0(sums, i, root if roots else total)
        _store_p(params, i, p)
        nans = _or(nans, _is_nan(p))
    return nans


@_inlined
def _step(task: Any, params: Any, grads: Any, m0: Any, m1: Any, m2: Any, numel: int) -> Any:
    if task.formula <= AMSGRAD:
        return _adam(task, params, grads, m0, m1, m2, numel)
    if task.formula == SGD:
        return _sgd(task, params, grads, numel)
    if task.formula <= SGD_NESTEROV:
        return _sgd_momentum(task, params, grads, m0, numel)
    if task.formula == LION:
        return _lion(task, params, grads, m0, numel)
    return _adagrad(task, params, grads, m0, numel)


@_compiled
def _only_one_nan(values: Any, numel: int) -> None:
    for i in range(numel):
        _store_any(values, i, _one_nan(_load_any(values, i)))


@_inlined
def _update_row(task: Any, first: int, m0: Any, m1: Any, m2: Any, scratch: Any, numel: int) -> None:
    """Elements from number `first` on; the moments' addresses are theirs."""
    narrow, wide = np.uint64(2 * first), np.uint64(4 * first)
    if task.weight_dtype == BF16:
        params = scratch
        _join_row(task.weight + narrow, task.residual + narrow, params, numel)
    else:
        params = task.weight + wide
    if task.grad_dtype == BF16:
        grads = scratch + _GRADS_AT
        _widen_row(task.grad + narrow, grads, numel)
    else:
        grads = task.grad + wide
    nans = _step(task, params, grads, m0, m1, m2, numel)
    if nans != 0:
        _only_one_nan(params, numel)
        for moment, values in enumerate((m0, m1, m2)):
            if moment < _moment_count(task.formula):
                _only_one_nan(values, numel)
    if task.weight_dtype == BF16:
        _split_row(params, task.weight + narrow, task.residual + narrow, numel)


@_compiled
def _update_rows(task: Any, begin: int, numel: int, m0: Any, m1: Any, m2: Any, scratch: Any) -> None:
    """Elements from number `begin` on, whose moments in fp32 lie at m0, m1 and m2."""
    exact = task.moment_dtype == F32
    count = _moment_count(task.formula)
    rows = numel // ROW_NUMEL
    for index in range(rows):
        row = index * ROW_NUMEL
        later = begin + row + AHEAD_NUMEL
        if task.weight_dtype == BF16:
            _prefetch(task.weight + np.uint64(2 * later), 2 * ROW_NUMEL)
            _prefetch(task.residual + np.uint64(2 * later), 2 * ROW_NUMEL)
        else:
            _prefetch(task.weight + np.uint64(4 * later), 4 * ROW_NUMEL)
        if task.grad_dtype == BF16:
            _prefetch(task.grad + np.uint64(2 * later), 2 * ROW_NUMEL)
        else:
            _prefetch(task.grad + np.uint64(4 * later), 4 * ROW_NUMEL)
        at = np.uint64(4 * row)
        if exact:
            ahead = at + np.uint64(4 * AHEAD_NUMEL)
            if count > 0:
                _prefetch(m0 + ahead, 4 * ROW_NUMEL)
            if count > 1:
                _prefetch(m1 + ahead, 4 * ROW_NUMEL)
            if count > 2:
                _prefetch(m2 + ahead, 4 * ROW_NUMEL)
        _update_row(task, begin + row, m0 + at, m1 + at, m2 + at, scratch, ROW_NUMEL)
    row = rows * ROW_NUMEL
    at = np.uint64(4 * row)
    if row < numel:
        _update_row(task, begin + row, m0 + at, m1 + at, m2 + at, scratch, numel - row)


# ---- moments that take less than fp32; csrc/moments.h says how


@_compiled
def _make_noise(first: Any, low: Any, high: Any, numel: int) -> None:
    for i in range(numel):
        word = _noise(first, i)
        upper = _high_half(word)
        _store_noise(low, i, _xor(_low_half(word), upper))
        _store_high_noise(high, i, upper)


@_compiled
def _make_byte_noise(first: Any, low: Any, high: Any, numel: int) -> None:
    """Two elements share a hash. The last one of an odd number has the other's room behind it: tiles are even."""
    for pair in range((numel + 1) // 2):
        word = _noise(first, 2 * pair)
        upper = _high_half(word)
        lower = _xor(_low_half(word), upper)
        _store_noise(low, 2 * pair, _low_byte(lower))
        _store_noise(low, 2 * pair + 1, _low_byte(upper))
        _store_high_noise(high, 2 * pair, _high_byte(lower))
        _store_high_noise(high, 2 * pair + 1, _high_byte(upper))


@_compiled
def _fill_noise(value: Any, noise: Any, numel: int) -> None:
    for i in range(numel):
        _store_noise(noise, i, value)


@_compiled
def _decode_bf16(codes: Any, values: Any, numel: int) -> None:
    for i in range(numel):
        _store_value(values, i, _widen(_load_half(codes, i)))


@_compiled
def _encode_bf16(values: Any, noise: Any, codes: Any, numel: int) -> None:
    for i in range(numel):
        _store_half(codes, i, _round_bf16(_load_value(values, i), _load_noise(noise, i)))


@_inlined
def _decode_block(codes: Any, scale: Any, values: Any, numel: int, non_negative: bool) -> None:
    if non_negative:
        unit = scale * np.float32(1.0 / 256.0)
        for i in range(numel):
            root = (np.float32(_load_unsigned(codes, i)) + np.float32(1.0)) * unit
            _store_value(values, i, root * root)
    else:
        for i in range(numel):
            _store_value(values, i, np.float32(_load_signed(codes, i)) * np.float32(1.0 / 127.0) * scale)


@_compiled
def _decode_int8(codes: Any, scales: Any, values: Any, numel: int, non_negative: bool) -> None:
    blocks = numel // BLOCK_NUMEL
    for block in range(blocks):
        first = np.uint64(block * BLOCK_NUMEL)
        scale = _load_scale(scales, block)
        _decode_block(codes + first, scale, values + np.uint64(4) * first, BLOCK_NUMEL, non_negative)
    first = np.uint64(blocks * BLOCK_NUMEL)
    if blocks * BLOCK_NUMEL < numel:
        rest = numel - blocks * BLOCK_NUMEL
        scale = _load_scale(scales, blocks)
        _decode_block(codes + first, scale, values + np.uint64(4) * first, rest, non_negative)


@_compiled
def _clamp(largest: Any, values: Any, numel: int) -> None:
    for i in range(numel):
        value = _load_value(values, i)
        if value > largest:
            _store_value(values, i, largest)
        elif value < -largest:
            _store_value(values, i, -largest)
        elif value != value:
            _store_value(values, i, np.float32(0.0))


@_inlined
def _measure(values: Any, scales: Any, digits: Any, block: int, numel: int, non_negative: bool) -> None:
    """The scale of a block, and how many 256ths of a digit its values have per unit."""
    smallest = np.float32(2.0**-76 if non_negative else 2.0**-108)
    largest = np.float32(1.8446742974197924e19 if non_negative else 3.4028234663852886e38)
    whole = np.float32(256.0 * 256.0 if non_negative else 127.0 * 256.0)
    magnitude = np.int32(0)
    for i in range(numel):
        bits = _magnitude(_load_value(values, i))
        magnitude = bits if bits > magnitude else magnitude
    maximum = _from_bits(magnitude)
    scale = maximum
    if not maximum < largest:
        scale = largest if maximum == maximum else maximum
        maximum = largest
        _clamp(largest, values, numel)
    if maximum < smallest:
        scale = np.float32(0.0)
    _store_scale(scales, block, scale)
    _store_digits(digits, block, np.float32(0.0) if maximum < smallest else whole / maximum)


@_inlined
def _quantise(values: Any, digits: Any, noise: Any, codes: Any, numel: int, non_negative: bool) -> None:
    magic = np.float32(1.5 * 2.0**23)
    offset = magic - np.float32(256.0) if non_negative else magic
    least = _to_bits(magic) if non_negative else np.int32(0)
    for i in range(numel):
        digit = _to_bits(_load_value(values, i) * digits + offset)
        digit = digit if digit > least else least
        _store_code(codes, i, _second_byte(digit, _load_noise(noise, i)))


@_compiled
def _encode_int8(values: Any, noise: Any, codes: Any, scales: Any, digits: Any, numel: int, non_negative: bool) -> None:
    blocks = numel // BLOCK_NUMEL
    rest = numel - blocks * BLOCK_NUMEL
    size = np.uint64(BLOCK_NUMEL)
    for block in range(blocks):
        _measure(values + np.uint64(4 * block) * size, scales, digits, block, BLOCK_NUMEL, non_negative)
    if rest > 0:
        _measure(values + np.uint64(4 * blocks) * size, scales, digits, blocks, rest, non_negative)
    for block in range(blocks):
        first = np.uint64(block) * size
        wide, narrow = values + np.uint64(4) * first, noise + np.uint64(2) * first
        _quantise(wide, _load_digits(digits, block), narrow, codes + first, BLOCK_NUMEL, non_negative)
    if rest > 0:
        first = np.uint64(blocks) * size
        wide, narrow = values + np.uint64(4) * first, noise + np.uint64(2) * first
        _quantise(wide, _load_digits(digits, blocks), narrow, codes + first, rest, non_negative)


@_compiled
def _decode(task: Any, moment: int, start: int, values: Any, numel: int) -> None:
    codes = task.moments[moment]
    if task.moment_dtype == BF16:
        _decode_bf16(codes + np.uint64(2 * start), values, numel)
        return
    scales = task.scales[moment] + np.uint64(4 * (start // BLOCK_NUMEL))
    _decode_int8(codes + np.uint64(start), scales, values, numel, _is_non_negative(task.formula, moment))


@_compiled
def _encode(task: Any, moment: int, start: int, scratch: Any, numel: int) -> None:
    codes = task.moments[moment]
    values = scratch + _MOMENTS_AT + np.uint64(4 * TILE_NUMEL * moment)
    noise = scratch + _NOISE_AT + np.uint64(2 * TILE_NUMEL * (moment % 2))
    if task.moment_dtype == BF16:
        _encode_bf16(values, noise, codes + np.uint64(2 * start), numel)
        return
    scales = task.scales[moment] + np.uint64(4 * (start // BLOCK_NUMEL))
    kind = _is_non_negative(task.formula, moment)
    _encode_int8(values, noise, codes + np.uint64(start), scales, scratch + _DIGITS_AT, numel, kind)


@_compiled
def _is_non_negative(formula: int, moment: int) -> bool:
    return moment > 0 or formula == ADAGRAD


@_compiled
def _moment_count(formula: int) -> int:
    if formula <= ADAM:
        return 2
    if formula <= AMSGRAD:
        return 3
    return 0 if formula == SGD else 1


@_compiled
def _copy(source: Any, target: Any) -> None:
    for i in range(target.size):
        target[i] = source[i]


@_compiled
def _convert(source: Any, target: Any) -> None:
    for i in range(target.size):
        target[i] = _widen(source[i])


@_compiled
def _scale_and_add(scale: Any, source: Any, target: Any) -> None:
    for i in range(target.size):
        target[i] = _one_nan(target[i] * scale + _widen(source[i]))


@_compiled
def _square(values: Any, sums: Any) -> None:
    groups = values.size // LANES
    _add_squares(values, groups, sums)
    for i in range(groups * LANES, values.size):
        value = np.float64(values[i])
        sums[i - groups * LANES] += value * value


@_compiled
def _total(sums: Any) -> float:
    total = 0.0
    for lane in range(LANES):
        total += sums[lane]
    return total if total == total else np.nan


# ---- runs: units first..last of an array of tasks


@_compiled
def _update_tile(task: Any, start: int, numel: int, scratch: Any) -> None:
    """A tile whose moments take less than fp32."""
    count = _moment_count(task.formula)
    half_size = task.moment_dtype == BF16
    size = 2 if half_size else 1
    values = scratch + _MOMENTS_AT
    plane = np.uint64(4 * TILE_NUMEL)
    for moment in range(count):
        _prefetch(task.moments[moment] + np.uint64(size * (start + 2 * TILE_NUMEL)), size * numel)
        _decode(task, moment, start, values + np.uint64(moment) * plane, numel)
    _update_rows(task, start, numel, values, values + plane, values + plane + plane, scratch)
    noise = scratch + _NOISE_AT
    high_noise = noise + np.uint64(2 * TILE_NUMEL)
    if half_size:
        _make_noise(task.noise + np.uint32(start), noise, high_noise, numel)
    else:
        _make_byte_noise(task.noise + np.uint32(start), noise, high_noise, numel)
    for moment in range(count):
        if moment == 2:  # a maximum has no mean that chance would keep
            _fill_noise(np.uint16(HALF_BF16 if half_size else HALF_INT8), noise, numel)
        _encode(task, moment, start, scratch, numel)


@_compiled
def _update(tasks: Any, first: int, last: int) -> None:
    scratch = np.empty(_SCRATCH_BYTES, np.uint8)
    scratch_at = (np.uint64(scratch.ctypes.data) + np.uint64(63)) & ~np.uint64(63)
    unit = 0
    for index in range(tasks.size):
        task = tasks[index]
        begin = max(first - unit, 0) * UNIT_NUMEL
        end = min((last - unit) * UNIT_NUMEL, task.numel)
        unit += (task.numel + UNIT_NUMEL - 1) // UNIT_NUMEL
        if task.moment_dtype == F32 or task.formula == SGD:
            if begin < end:
                # What a formula does not have may point anywhere: it is not read.
                at = np.uint64(4 * begin)
                m0, m1, m2 = task.moments[0] + at, task.moments[1] + at, task.moments[2] + at
                _update_rows(task, begin, end - begin, m0, m1, m2, scratch_at)
        else:
            tile_numel = TILE_NUMEL_BF16 if task.moment_dtype == BF16 else TILE_NUMEL
            for start in range(begin, end, tile_numel):
                _update_tile(task, start, min(tile_numel, end - start), scratch_at)
    scratch[0] = 0  # it lives until here: the addresses do not keep it


@_compiled
def _combine(task: Any, source: Any, begin: int, values: Any) -> None:
    if task.previous == 0:
        _convert(source, values)
        return
    if task.previous_dtype == BF16:
        _convert(carray(_pointer(task.previous + np.uint64(2 * begin)), values.size, np.uint16), values)
    elif task.previous != task.target:
        _convert(carray(_pointer(task.previous + np.uint64(4 * begin)), values.size, np.float32), values)
    _scale_and_add(task.previous_scale, source, values)


@_compiled
def _accumulate_tile(task: Any, begin: int, scratch: Any) -> Any:
    """The values of the tile that starts at `begin`, and as long as `scratch`: in the target or in `scratch`."""
    numel = scratch.size
    values = scratch
    if task.target != 0 and task.target_dtype == F32:
        values = carray(_pointer(task.target + np.uint64(4 * begin)), numel, np.float32)
    if task.source_dtype == BF16:
        source = carray(_pointer(task.source + np.uint64(2 * begin)), numel, np.uint16)
        if task.target != 0 and task.target_dtype == BF16:
            _copy(source, carray(_pointer(task.target + np.uint64(2 * begin)), numel, np.uint16))
        _combine(task, source, begin, values)
    else:
        source_f32 = carray(_pointer(task.source + np.uint64(4 * begin)), numel, np.float32)
        _combine(task, source_f32, begin, values)
    return values


@_compiled
def _accumulate(tasks: Any, first: int, last: int) -> None:
    scratch = np.empty(SUM_TILE_NUMEL, np.float32)
    sums = np.empty(LANES, np.float64)
    unit = 0
    for index in range(tasks.size):
        task = tasks[index]
        pieces = 1 + max(0, (task.numel - task.first_piece + PIECE_NUMEL - 1) // PIECE_NUMEL) if task.numel else 0
        first_piece = max(first - unit, 0) * UNIT_PIECES
        last_piece = min((last - unit) * UNIT_PIECES, pieces)
        unit += (pieces + UNIT_PIECES - 1) // UNIT_PIECES
        for piece in range(first_piece, last_piece):
            for lane in range(LANES):
                sums[lane] = 0
            start = 0 if piece == 0 else task.first_piece + (piece - 1) * PIECE_NUMEL
            end = min(task.first_piece + piece * PIECE_NUMEL, task.numel)
            for begin in range(start, end, SUM_TILE_NUMEL):
                values = _accumulate_tile(task, begin, scratch[: min(SUM_TILE_NUMEL, end - begin)])
                if task.partials != 0:
                    _square(values, sums)
            if task.partials != 0:
                carray(_pointer(task.partials + np.uint64(8 * piece)), 1, np.float64)[0] = _total(sums)


@_compiled
def _split(tasks: Any, first: int, last: int) -> None:
    task = tasks[0]
    begin = first * UNIT_NUMEL
    numel = min(last * UNIT_NUMEL, task.numel) - begin
    narrow, wide = np.uint64(2 * begin), np.uint64(4 * begin)
    _split_row(task.master + wide, task.weight + narrow, task.residual + narrow, numel)


@_compiled
def _join_all(tasks: Any, first: int, last: int) -> None:
    task = tasks[0]
    begin = first * UNIT_NUMEL
    numel = min(last * UNIT_NUMEL, task.numel) - begin
    narrow, wide = np.uint64(2 * begin), np.uint64(4 * begin)
    _join_row(task.weight + narrow, task.residual + narrow, task.master + wide, numel)


@_compiled
def _scramble(value: Any) -> Any:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@_compiled
def _checksum(address: Any, nbytes: int) -> Any:
    """csrc/checksum.cpp says what it computes."""
    weyl = np.uint64(0x9E3779B97F4A7C15)
    low = np.uint64(0xFFFFFFFF)
    words = carray(_pointer(address), nbytes // 8, np.uint64)
    plain = np.uint64(0)
    keyed = np.uint64(0)
    key = weyl
    for i in range(words.size):
        plain += words[i]
        word = words[i] ^ key
        keyed += (word & low) * (word >> np.uint64(32))
        key += weyl
    rest = np.uint64(0)
    tail = carray(_pointer(address + np.uint64(8 * words.size)), nbytes % 8, np.uint8)
    for i in range(tail.size):
        rest |= np.uint64(tail[i]) << np.uint64(8 * i)
    plain += rest
    rest ^= key
    keyed += (rest & low) * (rest >> np.uint64(32))
    return _scramble(plain ^ _scramble(keyed + weyl * np.uint64(nbytes)))


# ---- calling them


class _FloatEnvironment:
    """Sets a thread to round to nearest and keep denormals, which torch.set_flush_denormal changes, and back."""

    _DEFAULT: Final = ctypes.c_void_p(-1)  # FE_DFL_ENV of glibc and musl
    _SIZE: Final = 128  # more than any fenv_t

    def __init__(self) -> None:
        self._libm = ctypes.CDLL(None)

    def __call__(self, function: Callable[..., None], *arguments: object) -> None:
        saved = ctypes.create_string_buffer(self._SIZE)
        self._libm.fegetenv(saved)
        self._libm.fesetenv(self._DEFAULT)
        try:
            function(*arguments)
        finally:
            self._libm.fesetenv(saved)


def _records(tasks: Any, dtype: np.dtype[Any], count: int) -> Any:
    return np.frombuffer(tasks, dtype, count)


class NumbaKernels(Kernels):
    """Kernels compiled by numba at their first call."""

    name = "numba"

    def __init__(self) -> None:
        self._in_default_environment = _FloatEnvironment()
        self._executor: ThreadPoolExecutor | None = None
        self._executor_pid = 0

    def update(self, tasks: ctypes.Array[UpdateTask], count: int, threads: int) -> None:
        records = _records(tasks, _UPDATE_TASK, count)
        self._share(_update, records, -(-records["numel"] // UNIT_NUMEL), threads)

    def accumulate(self, tasks: ctypes.Array[AccumulateTask], count: int, threads: int) -> None:
        records = _records(tasks, _ACCUMULATE_TASK, count)
        numel, first_piece = records["numel"], records["first_piece"]
        pieces = np.where(numel == 0, 0, 1 + np.maximum(0, -(-(numel - first_piece) // PIECE_NUMEL)))
        self._share(_accumulate, records, -(-pieces // UNIT_PIECES), threads)

    def split(self, master: int, weight: int, residual: int, numel: int, threads: int) -> None:
        records = np.array([(master, weight, residual, numel)], _MASTER_TASK)
        self._share(_split, records, -(-records["numel"] // UNIT_NUMEL), threads)

    def join(self, weight: int, residual: int, master: int, numel: int, threads: int) -> None:
        records = np.array([(master, weight, residual, numel)], _MASTER_TASK)
        self._share(_join_all, records, -(-records["numel"] // UNIT_NUMEL), threads)

    def checksum(self, address: int, nbytes: int) -> int:
        return int(_checksum(np.uint64(address), nbytes))

    def _share(self, run: Callable[..., None], records: Any, units: Any, threads: int) -> None:
        """Calls run(records, first, last) on equal ranges of all units, the last of them on this thread."""
        total = int(units.sum())
        shares = max(1, min(threads, total, int(records["numel"].sum()) // NUMEL_PER_THREAD_MIN))
        bounds = [total * share // shares for share in range(shares + 1)]
        others: list[Future[None]] = []
        for first, last in pairwise(bounds[:-1]):
            try:
                others.append(self._threads().submit(self._in_default_environment, run, records, first, last))
            except RuntimeError:  # at the end of the interpreter, threads take nothing more
                self._in_default_environment(run, records, first, last)
        self._in_default_environment(run, records, bounds[-2], bounds[-1])
        for other in others:
            other.result()

    def _threads(self) -> ThreadPoolExecutor:
        if self._executor is None or self._executor_pid != os.getpid():  # a forked child has none of the threads
            self._executor = ThreadPoolExecutor(thread_name_prefix="tiermem-kernels")
            self._executor_pid = os.getpid()
        return self._executor
