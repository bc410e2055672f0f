"""The kernels in numpy, one readable line for each operation; for tests. Same bits as the fast ones.

Arrays are uint16 (bf16 bits) or float32. Every operation rounds to float32, as the compiled loops do.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tiermem.kernels.abi import ADAM, LANES, PIECE_NUMEL, UpdateTask

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


def update(task: UpdateTask, param: Floats, exp_avg: Floats, exp_avg_sq: Floats, grad: Bits | Floats) -> None:
    """Applies the scalars of `task` to float32 masters and moments, in place. Its addresses are not read."""
    scalar: Any = np.float32
    with np.errstate(all="ignore"):
        g = widen(grad) * scalar(-task.grad_scale if task.maximize else task.grad_scale)
        p, m, v = param, exp_avg, exp_avg_sq
        if task.formula == ADAM:
            if task.weight_decay:
                g = multiply_add(task.weight_decay, p, g)
        else:
            p = p * scalar(task.decay)
        # As torch.lerp: from the nearer end.
        if task.one_minus_beta1 < 0.5:
            m = multiply_add(task.one_minus_beta1, g - m, m)
        else:
            m = multiply_add(scalar(task.one_minus_beta1) - scalar(1), g - m, g)
        v = multiply_add(scalar(task.one_minus_beta2) * g, g, v * scalar(task.beta2))
        p = p - scalar(task.step_size) * m / (np.sqrt(v) / scalar(task.bias_correction2_sqrt) + scalar(task.eps))
        param[:], exp_avg[:], exp_avg_sq[:] = one_nan(p), one_nan(m), one_nan(v)


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
