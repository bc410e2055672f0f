"""The kernels in numpy, one readable line for each operation; for tests. Same bits as the fast ones.

Arrays are uint16 (bf16 bits) or float32. Every operation rounds to float32, as the compiled loops do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tiermem.kernels.abi import (
    ADAGRAD,
    ADAM,
    ADAMW,
    AMSGRAD,
    AMSGRADW,
    BF16,
    BLOCK_NUMEL,
    LANES,
    LION,
    PIECE_NUMEL,
    SGD,
    SGD_MOMENTUM,
    SGD_NESTEROV,
    UpdateTask,
)

Bits: TypeAlias = npt.NDArray[np.uint16]
Floats: TypeAlias = npt.NDArray[np.float32]


def widen(values: Bits | Floats) -> Floats:
    """bf16 bits as float32; float32 as it is."""
    if values.dtype == np.float32:
        return values  # type: ignore[return-value]
    return (values.astype(np.uint32) << 16).view(np.float32)


def one_nan(values: Floats) -> Floats:
    """Every NaN becomes 0x7fc00000."""
    return np.where(np.isnan(values), np.float32(np.nan), values)


def split(master: Floats) -> tuple[Bits, Bits]:
    """(weight, residual): master rounded to bf16, ties away from zero, and its low half."""
    bits = one_nan(master).view(np.uint32)
    return ((bits + 0x8000) >> 16).astype(np.uint16), (bits & 0xFFFF).astype(np.uint16)


def join(weight: Bits, residual: Bits) -> Floats:
    """The master whose halves are `weight` and `residual`."""
    high = weight.astype(np.uint32) - (residual >> 15)
    return ((high << 16) + residual).view(np.float32)


def multiply_add(a: Floats | float, b: Floats, c: Floats) -> Floats:
    """a * b + c with one rounding, to float32.

    The product is exact in float64. The sum is rounded to odd there (Boldo and Melquiond, "Emulation of a FMA and
    correctly rounded sums: proved algorithms using rounding to odd"), so that rounding twice gives what once would.
    """
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    added = total - product
    error = (product - (total - added)) + (c - added)
    is_even = total.view(np.int64) & 1 == 0
    to_odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & is_even & np.isfinite(total), to_odd, total).astype(np.float32)


def update(task: UpdateTask, param: Floats, moments: Sequence[Floats], grad: Bits | Floats) -> None:
    """Applies the scalars of `task` to float32 masters and moments, in place. Its addresses are not read."""
    with np.errstate(all="ignore"):
        g = widen(grad) * np.float32(task.grad_scale)
        stepped = _FORMULAS[task.formula](task, param, g, *moments)
        for array, values in zip((param, *moments), stepped, strict=True):
            array[:] = one_nan(values)


def _adam(task: UpdateTask, p: Floats, g: Floats, m: Floats, v: Floats, *v_max: Floats) -> tuple[Floats, ...]:
    scalar: Any = np.float32
    if task.formula in (ADAMW, AMSGRADW):
        p = p * scalar(task.decay)
    elif task.weight_decay:
        g = multiply_add(task.weight_decay, p, g)
    # As torch.lerp: from the nearer end.
    if task.one_minus_beta1 < 0.5:
        m = multiply_add(task.one_minus_beta1, g - m, m)
    else:
        m = multiply_add(scalar(task.one_minus_beta1) - scalar(1), g - m, g)
    v = multiply_add(scalar(task.one_minus_beta2) * g, g, v * scalar(task.beta2))
    v_max = tuple(np.where(largest >= v, largest, v) for largest in v_max)
    root = np.sqrt(v_max[0] if v_max else v)
    p = p - scalar(task.step_size) * m / (root / scalar(task.bias_correction2_sqrt) + scalar(task.eps))
    return p, m, v, *v_max


def _sgd(task: UpdateTask, p: Floats, g: Floats, *buffer: Floats) -> tuple[Floats, ...]:
    if task.weight_decay:
        g = multiply_add(task.weight_decay, p, g)
    if buffer:
        buffer = (multiply_add(task.one_minus_beta1, g, buffer[0] * np.float32(task.beta1)),)
        g = multiply_add(task.beta2, buffer[0], g) if task.formula == SGD_NESTEROV else buffer[0]
    return multiply_add(-task.step_size, g, p), *buffer


def _lion(task: UpdateTask, p: Floats, g: Floats, m: Floats) -> tuple[Floats, ...]:
    scalar: Any = np.float32
    direction = multiply_add(task.one_minus_beta1, g, m * scalar(task.beta1))
    sign = np.copysign(np.sign(direction), direction)  # zeros keep theirs, as in the compiled loops
    p = p * scalar(task.decay) - scalar(task.step_size) * sign
    return p, multiply_add(task.one_minus_beta2, g, m * scalar(task.beta2))


def _adagrad(task: UpdateTask, p: Floats, g: Floats, total: Floats) -> tuple[Floats, ...]:
    scalar: Any = np.float32
    if task.weight_decay:
        g = multiply_add(task.weight_decay, p, g)
    total = multiply_add(g, g, total + scalar(task.initial_sum))
    return p - scalar(task.step_size) * g / (np.sqrt(total) + scalar(task.eps)), total


_FORMULAS: dict[int, Callable[..., tuple[Floats, ...]]] = {
    **dict.fromkeys((ADAMW, ADAM, AMSGRADW, AMSGRAD), _adam),
    **dict.fromkeys((SGD, SGD_MOMENTUM, SGD_NESTEROV), _sgd),
    LION: _lion,
    ADAGRAD: _adagrad,
}


# ---- moments that take less than fp32


def noise(first: int, numel: int, moment_dtype: int) -> npt.NDArray[np.uint32]:
    """The random bits of elements `first` and on: moment 0 takes the low ones, moment 1 those from bit 16 on.

    16 each for bf16; 8 each for int8, where two elements share a hash.
    """
    step = 1 if moment_dtype == BF16 else 2
    weyl = np.arange(first, first + numel, step, dtype=np.uint64).astype(np.uint32) * np.uint32(0x9E3779B9)
    mixed = (weyl ^ (weyl >> 16)) * np.uint32(0x85EBCA6B)
    words = mixed ^ (mixed >> 16)
    if moment_dtype == BF16:
        return np.asarray(words, np.uint32)
    halves = np.stack([words & 0xFFFF, words >> 16], 1).reshape(-1)[:numel]
    return np.asarray(halves & 0xFF | halves >> 8 << 16, np.uint32)


def decode_bf16(codes: Bits) -> Floats:
    return widen(codes)


def encode_bf16(values: Floats, chances: npt.NDArray[np.uint32]) -> Bits:
    """Rounded up with the chance `chances` / 65536 and what is cut off."""
    return ((values.view(np.uint32) + (chances & 0xFFFF)) >> 16).astype(np.uint16)


def decode_int8(codes: npt.NDArray[np.uint8], scales: Floats, *, non_negative: bool) -> Floats:
    scale = np.repeat(scales, BLOCK_NUMEL)[: codes.size]
    with np.errstate(all="ignore"):
        if non_negative:
            root = (codes.astype(np.float32) + np.float32(1)) * (scale * np.float32(1 / 256))
            return root * root
        return codes.view(np.int8).astype(np.float32) * np.float32(1 / 127) * scale


def encode_int8(
    values: Floats, chances: npt.NDArray[np.uint32], *, non_negative: bool
) -> tuple[npt.NDArray[np.uint8], Floats]:
    """Codes and scales. Rounded up with the chance `chances` / 256 and what lies above a whole digit."""
    largest = np.float32(1.8446742974197924e19 if non_negative else 3.4028234663852886e38)
    smallest = 2.0**-76 if non_negative else 2.0**-108
    codes, scales = np.empty(values.size, np.uint8), np.empty(-(-values.size // BLOCK_NUMEL), np.float32)
    with np.errstate(all="ignore"):
        roots = np.sqrt(values) if non_negative else values
        for block in range(scales.size):
            inside = slice(block * BLOCK_NUMEL, (block + 1) * BLOCK_NUMEL)
            numbers = np.where(np.isnan(roots[inside]), np.float32(0), np.clip(roots[inside], -largest, largest))
            maximum = np.abs(numbers).max()
            scales[block] = 0 if maximum < smallest else maximum
            if np.isnan(roots[inside]).any():
                scales[block], maximum = np.nan, largest
            digits = np.float32(65536 if non_negative else 127 * 256)
            parts = numbers * (np.float32(0) if maximum < smallest else digits / maximum)
            parts = np.rint(parts).astype(np.int64) - (256 if non_negative else 0)
            parts = np.maximum(parts, 0) if non_negative else parts
            codes[inside] = (parts + (chances[inside] & 0xFF)) >> 8
    return codes, scales


def accumulate(source: Bits | Floats, previous: Bits | Floats | None, previous_scale: float) -> Floats:
    """The values that an accumulation gives."""
    if previous is None:
        return widen(source)
    with np.errstate(all="ignore"):
        return one_nan(widen(previous) * np.float32(previous_scale) + widen(source))


def sums_of_squares(values: Floats, first_piece: int) -> npt.NDArray[np.float64]:
    """One sum per piece: element i goes to lane i % LANES, lanes are added in order."""
    bounds = range(first_piece, values.size, PIECE_NUMEL)
    return np.array([_sum_of_squares(piece) for piece in np.split(values, bounds) if piece.size])


def _sum_of_squares(values: Floats) -> np.float64:
    padded = np.zeros(-(-values.size // LANES) * LANES)
    sums = np.zeros(LANES)
    with np.errstate(all="ignore"):
        padded[: values.size] = values
        for group in padded.reshape(-1, LANES):
            sums += group * group
        total = np.float64(0)
        for lane in sums:
            total += lane
    return total if total == total else np.float64(np.nan)


def checksum(data: bytes) -> int:
    """As csrc/checksum.cpp defines it."""
    mask, weyl = 2**64 - 1, 0x9E3779B97F4A7C15
    words = np.frombuffer(data + bytes(8 - len(data) % 8), np.uint64)
    plain = keyed = 0
    for i, word in enumerate(words.tolist(), start=1):
        plain += word
        word ^= weyl * i & mask
        keyed += (word & 0xFFFFFFFF) * (word >> 32)
    return _scramble((plain ^ _scramble((keyed + weyl * len(data)) & mask)) & mask)


def _scramble(value: int) -> int:
    mask = 2**64 - 1
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
    return value ^ (value >> 31)
