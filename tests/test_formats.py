"""Formats of moments: what is kept, what is lost, and that it is lost by chance and without bias."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_kernels import (
    HOSTILE,
    HOSTILE_SIZES,
    IMPLEMENTATIONS,
    Planes,
    Scalars,
    assert_same_bits,
    assert_same_planes,
    grads,
    random_planes,
    update,
)

from tiermem import kernels, moments
from tiermem.kernels import reference
from tiermem.kernels.abi import ADAMW, BF16, BLOCK_NUMEL, F32, INT8, SGD_MOMENTUM
from tiermem.layout import MOMENT_FORMATS, MOMENTS_PLANNED, PARAMETER_ALIGNMENT_BYTES, Chunk, ParameterSpec, lay_out

NEAREST = np.uint32(0x80)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> kernels.Kernels:
    return IMPLEMENTATIONS[request.param]


def nearest(numel: int) -> np.ndarray:
    return np.full(numel, NEAREST)


def positive(numel: int, seed: int = 0) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(0, 3, numel)).astype(np.float32)


@pytest.mark.parametrize("numel", HOSTILE_SIZES)
@pytest.mark.parametrize("non_negative", [False, True])
def test_decoded_int8_moments_are_encoded_as_they_were(numel: int, non_negative: bool) -> None:
    values = positive(numel) if non_negative else grads(numel, F32, 1)
    codes, scales = reference.encode_int8(values, reference.noise(5, numel, INT8), non_negative=non_negative)
    decoded = reference.decode_int8(codes, scales, non_negative=non_negative)
    again = reference.encode_int8(decoded, nearest(numel), non_negative=non_negative)
    assert_same_bits(again[0], codes)
    assert_same_bits(again[1], scales)


def test_the_error_of_int8_is_a_digit_of_the_largest_in_the_block() -> None:
    noise = reference.noise(0, 10_000, INT8)
    signed = grads(10_000, F32, 1)
    decoded = reference.decode_int8(*reference.encode_int8(signed, noise, non_negative=False), non_negative=False)
    largest = np.repeat(np.abs(np.pad(signed, (0, 112))).reshape(-1, BLOCK_NUMEL).max(1), BLOCK_NUMEL)[:10_000]
    assert (np.abs(decoded - signed) <= largest / 127 * 1.01).all()
    squares = positive(10_000)
    decoded = reference.decode_int8(*reference.encode_int8(squares, noise, non_negative=True), non_negative=True)
    largest = np.repeat(np.sqrt(np.pad(squares, (0, 112)).reshape(-1, BLOCK_NUMEL).max(1)), BLOCK_NUMEL)[:10_000]
    assert (np.abs(np.sqrt(decoded) - np.sqrt(squares)) <= largest / 256 * 1.01).all()
    assert (decoded > 0).all()


@pytest.mark.parametrize("moment_dtype", [BF16, INT8])
def test_rounding_has_no_bias(moment_dtype: int) -> None:
    """Over many steps' noise, the mean of what a value becomes is the value."""
    numel, repeats = 512, 4000
    values = grads(numel, F32, 3)
    total = np.zeros(numel)
    for step in range(repeats):
        noise = reference.noise(step * 977 * numel, numel, moment_dtype)
        if moment_dtype == BF16:
            total += reference.widen(reference.encode_bf16(values, noise))
        else:
            codes, scales = reference.encode_int8(values, noise, non_negative=False)
            total += reference.decode_int8(codes, scales, non_negative=False)
    digit = np.abs(values) / 128 if moment_dtype == BF16 else np.float32(np.abs(values).max() / 127)
    # A rounding by chance has a standard deviation of at most half a digit.
    assert (np.abs(total / repeats - values) <= digit * (0.5 * 5 / repeats**0.5 + 1 / 256)).all()


@pytest.mark.parametrize("moment_dtype", [BF16, INT8])
def test_noise_is_even_and_its_parts_are_independent(moment_dtype: int) -> None:
    noise = reference.noise(123, 1 << 20, moment_dtype)
    low, high = (noise & 0xFF).astype(int), (noise >> 16 & 0xFF).astype(int)
    parts = [low, high, (noise & 0xFFFF) >> 8, noise >> 24] if moment_dtype == BF16 else [low, high]
    for part in parts:
        for some in (part, part[::2], part[1::2]):
            counts = np.bincount(some, minlength=256)
            assert np.abs(counts - some.size / 256).max() < 6 * (some.size / 256) ** 0.5
    joint = np.bincount(low // 16 * 16 + high // 16, minlength=256)
    assert np.abs(joint - 4096).max() < 6 * 64
    for first, second in itertools.product([low, high], repeat=2):
        for distance in (1, 2, 3, BLOCK_NUMEL):
            assert abs(np.corrcoef(first[distance:], second[:-distance])[0, 1]) < 0.01
    assert abs(np.corrcoef(low, high)[0, 1]) < 0.01


@pytest.mark.parametrize("moment_dtype", [F32, BF16, INT8])
def test_second_moments_forget_as_exact_ones_do(implementation: kernels.Kernels, moment_dtype: int) -> None:
    """At beta2 = 0.999 each step is less than half a digit of bf16: rounded to nearest, it would never be made."""
    numel = 64 * BLOCK_NUMEL
    scalars = Scalars(betas=(0.9, 0.999), lr=0.0, weight_decay=0.0)
    planes = random_planes(numel, is_split=False, grad_dtype=F32).encoded(
        [np.zeros(numel, np.float32), np.ones(numel, np.float32)], ADAMW, moment_dtype, None
    )
    # One element of each block stays large, so that int8's scale does too.
    planes.grad = np.full(numel, 0.1, np.float32)
    planes.grad[::BLOCK_NUMEL] = 1.0
    steps = 1500
    for step in range(steps):
        planes = update(implementation, planes, replace(scalars, step=step + 1, noise=step * 7919))
    small = planes.decoded(ADAMW)[1].reshape(-1, BLOCK_NUMEL)[:, 1:]
    exact = 0.999**steps + (1 - 0.999**steps) * 0.01
    assert abs(small.mean() / exact - 1) < 0.02
    assert 0.5 * exact < small.min()
    assert small.max() < 2 * exact


def test_a_moment_that_is_rounded_to_nearest_in_bf16_does_not_forget() -> None:
    """Why it is not."""
    value = np.ones(1, np.float32)
    for _ in range(1500):
        value = value * np.float32(0.999)
        value = reference.widen(reference.encode_bf16(value, np.full(1, 0x8000, np.uint32)))
    assert value[0] == 1


def test_a_nan_poisons_its_block_and_no_other(implementation: kernels.Kernels) -> None:
    planes = random_planes(4 * BLOCK_NUMEL, is_split=True, grad_dtype=F32, moment_dtype=INT8)
    planes.grad[BLOCK_NUMEL + 3] = np.nan
    updated = update(implementation, planes, Scalars())
    for values in updated.decoded(ADAMW):
        is_nan = np.isnan(values).reshape(4, BLOCK_NUMEL)
        assert is_nan[1].all()
        assert not is_nan[[0, 2, 3]].any()
    assert np.isnan(updated.master()).sum() == 1


def test_infinities_count_as_the_largest_number(implementation: kernels.Kernels) -> None:
    planes = random_planes(BLOCK_NUMEL, is_split=False, grad_dtype=F32, moment_dtype=INT8)
    planes.grad[3] = 1e30  # its square is infinite
    updated = update(implementation, planes, Scalars())
    assert all(np.isfinite(values).all() for values in updated.decoded(ADAMW))
    assert np.isfinite(updated.weight).all()


def test_a_block_of_zeros_stays_zero(implementation: kernels.Kernels) -> None:
    zeros = np.zeros(300, np.float32)
    planes = Planes.of(np.ones(300, np.float32), [zeros, zeros], zeros, is_split=False)
    planes = planes.encoded([zeros, zeros], ADAMW, INT8, None)
    fresh = replace(planes, moments=[np.zeros(300, np.uint8)] * 2, scales=[np.zeros(3, np.float32)] * 2)
    for start in (planes, fresh):
        updated = update(implementation, start, Scalars(weight_decay=0.0))
        assert all((values == 0).all() for values in updated.decoded(ADAMW))
        assert (updated.weight == 1).all()


def test_rounding_depends_on_the_elements_number_only(implementation: kernels.Kernels) -> None:
    """Chunks and threads cut where they like, at blocks."""
    numel = 40 * BLOCK_NUMEL + 17
    for moment_dtype in (BF16, INT8):
        planes = random_planes(numel, is_split=True, grad_dtype=BF16, moment_dtype=moment_dtype)
        whole = update(implementation, planes, Scalars())
        cut = 23 * BLOCK_NUMEL
        first = update(implementation, planes.part(0, cut), Scalars())
        rest = planes.part(cut, numel)
        rest.scales = [scales[cut // BLOCK_NUMEL :] for scales in planes.scales]
        second = update(implementation, rest, Scalars(noise=Scalars().noise + cut))
        first.scales = [scales[: cut // BLOCK_NUMEL] for scales in first.scales]
        joined = Planes(
            *(np.concatenate(pair) for pair in zip(first.fields()[:3], second.fields()[:3], strict=True)),
            [np.concatenate(pair) for pair in zip(first.moments, second.moments, strict=True)],
            [np.concatenate(pair) for pair in zip(first.scales, second.scales, strict=True)],
        )
        assert_same_planes(joined, whole)


# ---- in the extents


def chunk_of(numel: int, moment_format: str, kind: str = "torch.bfloat16") -> Chunk:
    itemsize = 2 if kind == "torch.bfloat16" else 4
    specs = [ParameterSpec(5, kind, itemsize, True), ParameterSpec(numel, kind, itemsize, True)]
    return lay_out(specs, 1 << 20, MOMENT_FORMATS[moment_format]).chunks[0]


@pytest.mark.parametrize("numel", [*HOSTILE_SIZES, 100_003])
@pytest.mark.parametrize("kind", ["torch.bfloat16", "torch.float32"])
@pytest.mark.parametrize("moment_format", MOMENT_FORMATS)
def test_planes_of_an_extent_are_aligned_and_do_not_overlap(moment_format: str, kind: str, numel: int) -> None:
    chunk = chunk_of(numel, moment_format, kind)
    form = chunk.format
    ranges = [(0, 2 * chunk.numel)] if chunk.split else []
    for moment in range(MOMENTS_PLANNED):
        start = chunk.moment_offset(moment)
        ranges.append((start, start + form.itemsize * chunk.numel))
        if form.block_numel:
            start = chunk.scales_offset(moment)
            ranges.append((start, start + 4 * -(-chunk.numel // form.block_numel)))
    assert all(start % PARAMETER_ALIGNMENT_BYTES == 0 for start, _ in ranges)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    assert ranges[-1][1] <= chunk.state_bytes
    assert all(segment.chunk_start % (form.block_numel or 1) == 0 for segment in chunk.segments)


@pytest.mark.parametrize("numel", HOSTILE_SIZES)
@pytest.mark.parametrize("moment_format", MOMENT_FORMATS)
def test_what_is_written_to_an_extent_is_read_back(moment_format: str, numel: int) -> None:
    chunk = chunk_of(numel, moment_format)
    state = torch.full((chunk.state_bytes,), 0xAB, dtype=torch.uint8)
    kept = [torch.tensor([1.0, 2, 3, 4, 5]), torch.tensor([1.0, 4, 9, 16, 25])]
    values = [torch.from_numpy(grads(numel, F32, 1)), torch.from_numpy(positive(numel))]
    before, segment = chunk.segments
    for moment, non_negative in enumerate((False, True)):
        moments.write(state, chunk, before, moment, kept[moment], non_negative=non_negative)
        moments.write(state, chunk, segment, moment, values[moment], non_negative=non_negative)
    for moment, non_negative in enumerate((False, True)):
        once = moments.read(state, chunk, segment, moment, non_negative=non_negative).clone()
        torch.testing.assert_close(once, values[moment], rtol=1e-2, atol=0.02 * float(values[moment].abs().max()))
        moments.write(state, chunk, segment, moment, once, non_negative=non_negative)
        assert torch.equal(moments.read(state, chunk, segment, moment, non_negative=non_negative), once)
        neighbours = moments.read(state, chunk, before, moment, non_negative=non_negative)
        torch.testing.assert_close(neighbours, kept[moment], rtol=2e-2, atol=0.0)


@pytest.mark.parametrize("non_negative", [False, True])
def test_the_conversion_for_state_dict_is_that_of_the_kernels(non_negative: bool) -> None:
    numel = 20 * BLOCK_NUMEL
    values = np.random.default_rng(0).choice(HOSTILE, numel).astype(np.float32)
    values[: 10 * BLOCK_NUMEL] = positive(10 * BLOCK_NUMEL)
    values = np.abs(values) if non_negative else values
    chunk = lay_out([ParameterSpec(numel, "torch.float32", 4, True)], 1 << 20, MOMENT_FORMATS["int8"]).chunks[0]
    state = torch.zeros(chunk.state_bytes, dtype=torch.uint8)
    moments.write(state, chunk, chunk.segments[0], 0, torch.from_numpy(values), non_negative=non_negative)
    codes, scales = reference.encode_int8(values, nearest(numel), non_negative=non_negative)
    assert_same_bits(state[:numel].numpy(), codes)
    stored = state[chunk.scales_offset(0) :][: 4 * 20].view(torch.float32).numpy()
    np.testing.assert_array_equal(stored, scales)
    decoded = moments.read(state, chunk, chunk.segments[0], 0, non_negative=non_negative).numpy()
    np.testing.assert_array_equal(decoded, reference.decode_int8(codes, scales, non_negative=non_negative))


def test_formulas_without_moments_need_no_format(implementation: kernels.Kernels) -> None:
    planes = random_planes(999, is_split=True, grad_dtype=BF16, formula=SGD_MOMENTUM, moment_dtype=BF16)
    assert planes.moment_dtype == BF16
    update(implementation, planes, Scalars(formula=SGD_MOMENTUM))
