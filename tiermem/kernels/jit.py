"""The kernels compiled by numba: the fallback where csrc/ was not compiled. Same bits, the same records.

A run is taken in tiles that stay in the first-level cache: widened to fp32, stepped, narrowed. LLVM vectorises each of
these loops, but would give up on one loop over all planes, because it cannot tell that so many do not overlap.
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

TILE_NUMEL: Final = 1024  # of all loops; a multiple of LANES, and pieces are multiples of it
UNIT_NUMEL: Final = 64 * 1024  # of the update: what one thread takes at once
UNIT_PIECES: Final = 16  # of the sums of gradients
HALF_BF16: Final = 0x8000  # in place of noise: rounds to nearest
HALF_INT8: Final = 0x80
NUMEL_PER_THREAD_MIN: Final = 256 * 1024  # below, handing work to a Python thread costs more than it gains

_NAN: Final = np.float32(np.nan)  # 0x7fc00000
_UPDATE_TASK: Final = np.dtype(UpdateTask)
_ACCUMULATE_TASK: Final = np.dtype(AccumulateTask)
_MASTER_TASK: Final = np.dtype([("master", "u8"), ("weight", "u8"), ("residual", "u8"), ("numel", "i8")])

F = TypeVar("F", bound=Callable[..., Any])

_intrinsic: Callable[[Callable[..., Any]], Any] = intrinsic


def _compiled(function: F) -> F:
    """njit without the GIL and with IEEE arithmetic, cached on disk where there is a place that can be written."""
    try:
        return njit(nogil=True, error_model="numpy", cache=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # numba found no directory for its cache
        return njit(nogil=True, error_model="numpy")(function)  # type: ignore[no-any-return]


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
    """The random word of element first + index."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        weyl = builder.mul(builder.add(arguments[0], builder.trunc(arguments[1], word)), word(0x9E3779B9))
        mixed = builder.mul(builder.xor(weyl, builder.lshr(weyl, word(16))), word(0x85EBCA6B))
        return builder.xor(mixed, builder.lshr(mixed, word(16)))

    return types.uint32(types.uint32, types.int64), generate


@_intrinsic
def _round_bf16(typing: Any, value: Any, noise: Any, shift: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        value, noise, shift = arguments
        chance = builder.and_(builder.lshr(noise, shift), word(0xFFFF))
        rounded = builder.add(builder.bitcast(value, word), chance)
        return builder.trunc(builder.lshr(rounded, word(16)), ir.IntType(16))

    return types.uint16(types.float32, types.uint32, types.uint32), generate


@_intrinsic
def _second_byte(typing: Any, value: Any, noise: Any, shift: Any) -> Any:
    """Of the bits of `value` plus 8 bits of noise."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        value, noise, shift = arguments
        chance = builder.and_(builder.lshr(noise, shift), word(0xFF))
        rounded = builder.add(builder.bitcast(value, word), chance)
        return builder.trunc(builder.lshr(rounded, word(8)), ir.IntType(8))

    return types.uint8(types.float32, types.uint32, types.uint32), generate


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


def _load(scalar: Any) -> Any:
    """load(address, i): element i. Loops over addresses have no arrays, whose references numba would count."""

    @_intrinsic
    def load(typing: Any, address: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            base = builder.inttoptr(arguments[0], context.get_value_type(scalar).as_pointer())
            return builder.load(builder.gep(base, [arguments[1]]), align=scalar.bitwidth // 8)

        return scalar(types.uint64, types.int64), generate

    return load


def _store(scalar: Any) -> Any:
    """store(address, i, value)"""

    @_intrinsic
    def store(typing: Any, address: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            base = builder.inttoptr(arguments[0], context.get_value_type(scalar).as_pointer())
            builder.store(arguments[2], builder.gep(base, [arguments[1]]), align=scalar.bitwidth // 8)
            return context.get_dummy_value()

        return types.none(types.uint64, types.int64, scalar), generate

    return store


@_intrinsic
def _prefetch_line(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        pointer = builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))
        name = "llvm.prefetch.p0"
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        builder.call(function, [pointer, word(1), word(3), word(1)])
        return context.get_dummy_value()

    return types.none(types.uint64), generate


@_compiled
def _prefetch(address: Any, nbytes: int) -> None:
    """Ask for memory that is needed soon; what lies past the end of a plane does no harm."""
    for line in range(0, nbytes, 64):
        _prefetch_line(address + np.uint64(line))


_load_f32, _load_u32, _load_u8, _load_i8 = (
    _load(scalar) for scalar in (types.float32, types.uint32, types.uint8, types.int8)
)
_store_f32, _store_u8 = _store(types.float32), _store(types.uint8)


@_compiled
def _one_nan(value: float) -> Any:
    return value if value == value else _NAN


# ---- loops over one tile


@_compiled
def _widen_scaled(source: Any, scale: Any, target: Any) -> None:
    for i in range(target.size):
        target[i] = _widen(source[i]) * scale


@_compiled
def _join_halves(weight: Any, residual: Any, master: Any) -> None:
    for i in range(master.size):
        master[i] = _join(weight[i], residual[i])


@_compiled
def _split_halves(master: Any, weight: Any, residual: Any) -> None:
    for i in range(master.size):
        value = _one_nan(master[i])
        weight[i] = _split_weight(value)
        residual[i] = _split_residual(value)


@_compiled
def _adam(task: Any, params: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any) -> None:
    """csrc/formulas.h has all formulas with their sources; it says what `roots` are."""
    decoupled = task.formula == ADAMW
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
    roots = task.moment_dtype == INT8
    nans = np.int32(0)
    for i in range(params.size):
        p = params[i]
        g = grad[i]
        m = exp_avg[i]
        v = exp_avg_sq[i]
        g = _multiply_add(weight_decay, p, g) if l2 else g
        p = p * decay
        m = _multiply_add(towards_grad, g - m, g if from_end else m)
        v = _multiply_add(one_minus_beta2 * g, g, v * beta2)
        root = np.sqrt(v)
        p = p - step_size * m / (root / bias_correction2_sqrt + eps)
        params[i] = p
        exp_avg[i] = m
        exp_avg_sq[i] = root if roots else v
        nans = _or(nans, _is_nan(p))
    if nans != 0:
        for i in range(params.size):
            params[i] = _one_nan(params[i])
            exp_avg[i] = _one_nan(exp_avg[i])
            exp_avg_sq[i] = _one_nan(exp_avg_sq[i])


@_compiled
def _amsgrad(task: Any, params: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, max_exp_avg_sq: Any) -> None:
    """In three loops: LLVM would not vectorise one over so many arrays."""
    decoupled = task.formula == AMSGRADW
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
    roots = task.moment_dtype == INT8
    for i in range(params.size):
        p = params[i]
        g = grad[i]
        m = exp_avg[i]
        g = _multiply_add(weight_decay, p, g) if l2 else g
        params[i] = p * decay
        exp_avg[i] = _multiply_add(towards_grad, g - m, g if from_end else m)
        exp_avg_sq[i] = _multiply_add(one_minus_beta2 * g, g, exp_avg_sq[i] * beta2)
    for i in range(params.size):
        v = exp_avg_sq[i]
        v_max = max_exp_avg_sq[i] if max_exp_avg_sq[i] >= v else v
        max_exp_avg_sq[i] = v_max
        exp_avg_sq[i] = _one_nan(np.sqrt(v) if roots else v)
    for i in range(params.size):
        m = exp_avg[i]
        v_max = max_exp_avg_sq[i]
        root = np.sqrt(v_max)
        params[i] = _one_nan(params[i] - step_size * m / (root / bias_correction2_sqrt + eps))
        exp_avg[i] = _one_nan(m)
        max_exp_avg_sq[i] = _one_nan(root if roots else v_max)


@_compiled
def _sgd(task: Any, params: Any, grad: Any) -> None:
    weight_decay = task.weight_decay
    step_size = task.step_size
    for i in range(params.size):
        p = params[i]
        g = grad[i]
        g = _multiply_add(weight_decay, p, g) if weight_decay != 0 else g
        params[i] = _one_nan(_multiply_add(-step_size, g, p))


@_compiled
def _sgd_momentum(task: Any, params: Any, grad: Any, buffers: Any) -> None:
    nesterov = task.formula == SGD_NESTEROV
    weight_decay = task.weight_decay
    keep = task.beta1
    take = task.one_minus_beta1
    look_ahead = task.beta2
    step_size = task.step_size
    for i in range(params.size):
        p = params[i]
        g = grad[i]
        g = _multiply_add(weight_decay, p, g) if weight_decay != 0 else g
        buffer = _multiply_add(take, g, buffers[i] * keep)
        buffers[i] = _one_nan(buffer)
        g = _multiply_add(look_ahead, buffer, g) if nesterov else buffer
        params[i] = _one_nan(_multiply_add(-step_size, g, p))


@_compiled
def _lion(task: Any, params: Any, grad: Any, exp_avg: Any) -> None:
    decay = task.decay
    beta1 = task.beta1
    one_minus_beta1 = task.one_minus_beta1
    beta2 = task.beta2
    one_minus_beta2 = task.one_minus_beta2
    step_size = task.step_size
    for i in range(params.size):
        g = grad[i]
        m = exp_avg[i]
        direction = _multiply_add(one_minus_beta1, g, m * beta1)
        below = np.float32(-1.0) if direction < 0 else direction
        sign = np.float32(1.0) if direction > 0 else below
        params[i] = _one_nan(params[i] * decay - step_size * sign)
        exp_avg[i] = _one_nan(_multiply_add(one_minus_beta2, g, m * beta2))


@_compiled
def _adagrad(task: Any, params: Any, grad: Any, sums: Any) -> None:
    weight_decay = task.weight_decay
    step_size = task.step_size
    eps = task.eps
    initial_sum = task.initial_sum
    roots = task.moment_dtype == INT8
    for i in range(params.size):
        p = params[i]
        g = grad[i]
        g = _multiply_add(weight_decay, p, g) if weight_decay != 0 else g
        total = _multiply_add(g, g, sums[i] + initial_sum)
        root = np.sqrt(total)
        sums[i] = _one_nan(root if roots else total)
        params[i] = _one_nan(p - step_size * g / (root + eps))


@_compiled
def _step(task: Any, params: Any, grad: Any, moments: Any) -> None:
    if task.formula <= ADAM:
        _adam(task, params, grad, moments[0], moments[1])
    elif task.formula <= AMSGRAD:
        _amsgrad(task, params, grad, moments[0], moments[1], moments[2])
    elif task.formula == SGD:
        _sgd(task, params, grad)
    elif task.formula <= SGD_NESTEROV:
        _sgd_momentum(task, params, grad, moments[0])
    elif task.formula == LION:
        _lion(task, params, grad, moments[0])
    else:
        _adagrad(task, params, grad, moments[0])


# ---- moments that take less than fp32; csrc/moments.h says how


@_compiled
def _make_noise(first: Any, noise: Any) -> None:
    for i in range(noise.size):
        noise[i] = _noise(first, i)


@_compiled
def _fill(value: Any, noise: Any) -> None:
    for i in range(noise.size):
        noise[i] = value


@_compiled
def _encode_bf16(values: Any, noise: Any, shift: Any, codes: Any) -> None:
    for i in range(values.size):
        codes[i] = _round_bf16(values[i], noise[i], shift)


@_compiled
def _decode_signed(codes: Any, scale: Any, values: Any, numel: int) -> None:
    for i in range(numel):
        _store_f32(values, i, np.float32(_load_i8(codes, i)) * np.float32(1.0 / 127.0) * scale)


@_compiled
def _decode_root(codes: Any, scale: Any, values: Any, numel: int) -> None:
    unit = scale * np.float32(1.0 / 256.0)
    for i in range(numel):
        root = (np.float32(_load_u8(codes, i)) + np.float32(1.0)) * unit
        _store_f32(values, i, root * root)


@_compiled
def _largest_magnitude(values: Any, numel: int) -> Any:
    magnitude = np.int32(0)
    for i in range(numel):
        bits = _magnitude(_load_f32(values, i))
        magnitude = bits if bits > magnitude else magnitude
    return _from_bits(magnitude)


@_compiled
def _clamp(largest: Any, values: Any, numel: int) -> None:
    for i in range(numel):
        value = _load_f32(values, i)
        if value > largest:
            _store_f32(values, i, largest)
        elif value < -largest:
            _store_f32(values, i, -largest)
        elif value != value:
            _store_f32(values, i, np.float32(0.0))


@_compiled
def _encode_block(
    values: Any,
    noise: Any,
    shift: Any,
    codes: Any,
    numel: int,
    smallest: Any,
    largest: Any,
    digits: Any,
    offset: Any,
    least: Any,
) -> Any:
    """The scale."""
    maximum = _largest_magnitude(values, numel)
    scale = maximum
    if not maximum < largest:
        scale = largest if maximum == maximum else maximum
        maximum = largest
        _clamp(largest, values, numel)
    if maximum < smallest:
        scale = np.float32(0.0)
    to_digits = np.float32(0.0) if maximum < smallest else digits / maximum
    for i in range(numel):
        digit = _load_f32(values, i) * to_digits + offset
        digit = digit if digit > least else least
        _store_u8(codes, i, _second_byte(digit, _load_u32(noise, i), shift))
    return scale


@_compiled
def _encode_signed(values: Any, noise: Any, shift: Any, codes: Any, numel: int) -> Any:
    return _encode_block(
        values,
        noise,
        shift,
        codes,
        numel,
        np.float32(2.0**-108),
        np.float32(3.4028234663852886e38),
        np.float32(127.0 * 256.0),
        np.float32(1.5 * 2.0**23),
        np.float32(0.0),
    )


@_compiled
def _encode_root(values: Any, noise: Any, shift: Any, codes: Any, numel: int) -> Any:
    return _encode_block(
        values,
        noise,
        shift,
        codes,
        numel,
        np.float32(2.0**-76),
        np.float32(1.8446742974197924e19),
        np.float32(256.0 * 256.0),
        np.float32(1.5 * 2.0**23 - 256.0),
        np.float32(1.5 * 2.0**23),
    )


@_compiled
def _decode(task: Any, moment: int, start: int, values_at: Any, numel: int) -> None:
    codes_at = task.moments[moment]
    if task.moment_dtype == BF16:
        codes = carray(_pointer(codes_at + np.uint64(2 * start)), numel, np.uint16)
        _convert(codes, carray(_pointer(values_at), numel, np.float32))
        return
    codes_at += np.uint64(start)
    scales_at = task.scales[moment] + np.uint64(4 * (start // BLOCK_NUMEL))
    non_negative = _is_non_negative(task.formula, moment)
    for block in range(-(-numel // BLOCK_NUMEL)):
        first = block * BLOCK_NUMEL
        size = min(BLOCK_NUMEL, numel - first)
        values = values_at + np.uint64(4 * first)
        scale = _load_f32(scales_at, block)
        if non_negative:
            _decode_root(codes_at + np.uint64(first), scale, values, size)
        else:
            _decode_signed(codes_at + np.uint64(first), scale, values, size)


@_compiled
def _encode(task: Any, moment: int, start: int, values_at: Any, noise_at: Any, numel: int) -> None:
    codes_at = task.moments[moment]
    shift = np.uint32(moment % 2 * 16)
    if task.moment_dtype == BF16:
        codes = carray(_pointer(codes_at + np.uint64(2 * start)), numel, np.uint16)
        noise = carray(_pointer(noise_at), numel, np.uint32)
        _encode_bf16(carray(_pointer(values_at), numel, np.float32), noise, shift, codes)
        return
    codes_at += np.uint64(start)
    scales_at = task.scales[moment] + np.uint64(4 * (start // BLOCK_NUMEL))
    non_negative = _is_non_negative(task.formula, moment)
    for block in range(-(-numel // BLOCK_NUMEL)):
        first = block * BLOCK_NUMEL
        size = min(BLOCK_NUMEL, numel - first)
        values, words = values_at + np.uint64(4 * first), noise_at + np.uint64(4 * first)
        if non_negative:
            scale = _encode_root(values, words, shift, codes_at + np.uint64(first), size)
        else:
            scale = _encode_signed(values, words, shift, codes_at + np.uint64(first), size)
        _store_f32(scales_at, block, scale)


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
def _update(tasks: Any, first: int, last: int) -> None:
    masters = np.empty(TILE_NUMEL, np.float32)
    grads = np.empty(TILE_NUMEL, np.float32)
    scratch = np.empty((MOMENTS_MAX + 1) * TILE_NUMEL, np.float32)
    scratch_at = np.uint64(scratch.ctypes.data)
    noise_at = scratch_at + np.uint64(4 * MOMENTS_MAX * TILE_NUMEL)
    unit = 0
    for index in range(tasks.size):
        task = tasks[index]
        begin = max(first - unit, 0) * UNIT_NUMEL
        end = min((last - unit) * UNIT_NUMEL, task.numel)
        unit += (task.numel + UNIT_NUMEL - 1) // UNIT_NUMEL
        count = _moment_count(task.formula)
        exact = task.moment_dtype == F32 or count == 0
        for start in range(begin, end, TILE_NUMEL):
            numel = min(TILE_NUMEL, end - start)
            later = start + TILE_NUMEL
            grad = grads[:numel]
            if task.grad_dtype == BF16:
                source = carray(_pointer(task.grad + np.uint64(2 * start)), numel, np.uint16)
                _widen_scaled(source, task.grad_scale, grad)
            else:
                source_f32 = carray(_pointer(task.grad + np.uint64(4 * start)), numel, np.float32)
                _widen_scaled(source_f32, task.grad_scale, grad)
            # What a formula does not have may point anywhere: it is not read.
            moments = (
                carray(_pointer(_moment_at(task, 0, start, exact, scratch_at)), numel, np.float32),
                carray(_pointer(_moment_at(task, 1, start, exact, scratch_at)), numel, np.float32),
                carray(_pointer(_moment_at(task, 2, start, exact, scratch_at)), numel, np.float32),
            )
            if not exact:
                # The loops over a tile leave memory idle, and the hardware does not see far; far enough with fp32
                # moments, where more asking only gets in the way.
                _prefetch(task.weight + np.uint64(2 * later), 2 * TILE_NUMEL)
                for moment in range(count):
                    size = 2 if task.moment_dtype == BF16 else 1
                    _prefetch(task.moments[moment] + np.uint64(size * later), size * TILE_NUMEL)
                    _decode(task, moment, start, scratch_at + np.uint64(4 * moment * TILE_NUMEL), numel)
            if task.weight_dtype == BF16:
                weight = carray(_pointer(task.weight + np.uint64(2 * start)), numel, np.uint16)
                residual = carray(_pointer(task.residual + np.uint64(2 * start)), numel, np.uint16)
                master = masters[:numel]
                _join_halves(weight, residual, master)
                _step(task, master, grad, moments)
                _split_halves(master, weight, residual)
            else:
                master = carray(_pointer(task.weight + np.uint64(4 * start)), numel, np.float32)
                _step(task, master, grad, moments)
            if not exact:
                _prefetch(task.residual + np.uint64(2 * later), 2 * TILE_NUMEL)
                noise = carray(_pointer(noise_at), numel, np.uint32)
                _make_noise(task.noise + np.uint32(start), noise)
                _prefetch(task.grad + np.uint64(2 * later), 2 * TILE_NUMEL)
                for moment in range(count):
                    if moment == 2:  # a maximum has no mean that chance would keep
                        _fill(np.uint32(HALF_BF16 if task.moment_dtype == BF16 else HALF_INT8), noise)
                    _encode(task, moment, start, scratch_at + np.uint64(4 * moment * TILE_NUMEL), noise_at, numel)
    scratch[0] = 0  # it lives until here: the addresses do not keep it


@_compiled
def _moment_at(task: Any, moment: int, start: int, exact: bool, scratch_at: Any) -> Any:
    if exact:
        return task.moments[moment] + np.uint64(4 * start)
    return scratch_at + np.uint64(4 * moment * TILE_NUMEL)


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
    scratch = np.empty(TILE_NUMEL, np.float32)
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
            for begin in range(start, end, TILE_NUMEL):
                values = _accumulate_tile(task, begin, scratch[: min(TILE_NUMEL, end - begin)])
                if task.partials != 0:
                    _square(values, sums)
            if task.partials != 0:
                carray(_pointer(task.partials + np.uint64(8 * piece)), 1, np.float64)[0] = _total(sums)


@_compiled
def _split(tasks: Any, first: int, last: int) -> None:
    task = tasks[0]
    for begin in range(first * UNIT_NUMEL, min(last * UNIT_NUMEL, task.numel), UNIT_NUMEL):
        numel = min(UNIT_NUMEL, task.numel - begin)
        master = carray(_pointer(task.master + np.uint64(4 * begin)), numel, np.float32)
        weight = carray(_pointer(task.weight + np.uint64(2 * begin)), numel, np.uint16)
        residual = carray(_pointer(task.residual + np.uint64(2 * begin)), numel, np.uint16)
        _split_halves(master, weight, residual)


@_compiled
def _join_all(tasks: Any, first: int, last: int) -> None:
    task = tasks[0]
    for begin in range(first * UNIT_NUMEL, min(last * UNIT_NUMEL, task.numel), UNIT_NUMEL):
        numel = min(UNIT_NUMEL, task.numel - begin)
        master = carray(_pointer(task.master + np.uint64(4 * begin)), numel, np.float32)
        weight = carray(_pointer(task.weight + np.uint64(2 * begin)), numel, np.uint16)
        residual = carray(_pointer(task.residual + np.uint64(2 * begin)), numel, np.uint16)
        _join_halves(weight, residual, master)


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
