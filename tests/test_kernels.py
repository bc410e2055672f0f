"""The CPU kernels: right numbers, the same bits everywhere, and good manners as a library."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies
from hypothesis.extra.numpy import arrays

import tiermem._native
from tiermem import kernels
from tiermem.kernels import native, reference
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
    LION,
    NON_NEGATIVE,
    SGD,
    SGD_MOMENTUM,
    SGD_NESTEROV,
    AccumulateTask,
    UpdateTask,
    piece_count,
)
from tiermem.kernels.cores import available_cores

ROOT = Path(__file__).parent.parent
HOSTILE_SIZES = [1, 7, 199, 513, 4095, 4097]


def every_implementation() -> dict[str, kernels.Kernels]:
    compiled = {isa: kernels.load("native", isa=isa) for isa in native.isa_names()}
    return {**compiled, "numba": kernels.load("numba")}


IMPLEMENTATIONS = every_implementation()


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> kernels.Kernels:
    return IMPLEMENTATIONS[request.param]


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(f"u{values.itemsize}")


def assert_same_bits(actual: np.ndarray, expected: np.ndarray, message: str = "") -> None:
    np.testing.assert_array_equal(bits(actual), bits(expected), err_msg=message)


def floats(words: Iterable[int]) -> np.ndarray:
    return np.array(list(words), np.uint32).view(np.float32)


HOSTILE = floats(
    [
        *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000),  # zeros, denormals
        *(0x3F800000, 0xBF800000, 0x3F808000, 0x3F807FFF, 0x3F808001),  # one, a tie and its neighbours
        *(0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x60AD78EC),  # the largest, what rounds to infinity, 1e20
        *(0x7F800000, 0xFF800000),  # infinities
        *(0x7FC00000, 0xFFC00000, 0x7F800001, 0x7F807FFF, 0xFF808000, 0x7FFFFFFF, 0x7FFF8000),  # NaNs
    ]
)


# ---- split masters


def split(implementation: kernels.Kernels, master: np.ndarray, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
    weight, residual = np.full((2, master.size), 0xABCD, np.uint16)
    implementation.split(master.ctypes.data, weight.ctypes.data, residual.ctypes.data, master.size, threads)
    return weight, residual


def join(implementation: kernels.Kernels, weight: np.ndarray, residual: np.ndarray, threads: int = 1) -> np.ndarray:
    master = np.empty(weight.size, np.float32)
    implementation.join(weight.ctypes.data, residual.ctypes.data, master.ctypes.data, weight.size, threads)
    return master


def assert_split_is_right(implementation: kernels.Kernels, master: np.ndarray) -> None:
    weight, residual = split(implementation, master)
    joined = join(implementation, weight, residual)
    is_nan = np.isnan(master)
    assert_same_bits(joined[~is_nan], master[~is_nan])
    assert np.isnan(joined[is_nan]).all()
    assert np.isnan(reference.widen(weight)[is_nan]).all()
    expected_weight, expected_residual = reference.split(master)
    assert_same_bits(weight, expected_weight)
    assert_same_bits(residual, expected_residual)
    assert_same_bits(joined, reference.join(weight, residual))


def test_every_high_half_survives_the_split(implementation: kernels.Kernels) -> None:
    high = np.arange(2**16, dtype=np.uint32) << 16
    for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        assert_split_is_right(implementation, (high | np.uint32(low)).view(np.float32))


def test_every_low_half_survives_the_split(implementation: kernels.Kernels) -> None:
    low = np.arange(2**16, dtype=np.uint32)
    for high in (0x0000, 0x007F, 0x3F80, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF, 0x8000, 0xFF7F, 0xFF80, 0xFFFF):
        assert_split_is_right(implementation, (np.uint32(high << 16) | low).view(np.float32))


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(arrays(np.uint32, strategies.integers(1, 67)))
def test_any_values_survive_the_split(words: np.ndarray) -> None:
    for implementation in IMPLEMENTATIONS.values():
        assert_split_is_right(implementation, words.view(np.float32))


def test_weights_are_rounded_as_torch_rounds_but_ties_away_from_zero() -> None:
    words = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32)
    words[::3] = words[::3] & 0xFFFF0000 | 0x8000
    master = words.view(np.float32)[~np.isnan(words.view(np.float32))]
    weight, _ = split(kernels.load(), master)
    rounded = torch.from_numpy(master).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    is_tie = bits(master) & 0xFFFF == 0x8000
    assert_same_bits(weight[~is_tie], rounded[~is_tie])
    assert_same_bits(weight[is_tie], ((bits(master[is_tie]) >> 16) + 1).astype(np.uint16))


def test_masters_above_the_largest_bf16_have_infinite_weights_and_come_back(implementation: kernels.Kernels) -> None:
    master = floats([0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF])
    weight, residual = split(implementation, master)
    np.testing.assert_array_equal(weight, [0x7F80, 0xFF80, 0x7F80, 0x7F7F])
    assert_same_bits(join(implementation, weight, residual), master)


@pytest.mark.parametrize("numel", [0, *HOSTILE_SIZES, 1_000_003])
def test_split_and_join_give_the_same_bits_for_any_size_and_thread_count(
    implementation: kernels.Kernels, numel: int
) -> None:
    master = np.random.default_rng(numel).integers(0, 2**32, numel, np.uint32).view(np.float32)
    expected = reference.split(master)
    for threads in (1, 3):
        halves = split(implementation, master, threads)
        assert_same_bits(np.stack(halves), np.stack(expected))
        assert_same_bits(join(implementation, *halves, threads), reference.join(*expected))


# ---- the optimizer pass


@dataclass(frozen=True)
class Scalars:
    formula: int = ADAMW
    maximize: bool = False
    grad_scale: float = 1.0
    lr: float = 1e-3
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    step: int = 3
    noise: int = 12345

    def fill(self, task: UpdateTask) -> None:
        beta1, beta2 = self.betas
        task.formula, task.noise = self.formula, self.noise
        task.grad_scale = -self.grad_scale if self.maximize else self.grad_scale
        task.decay, task.weight_decay = 1 - self.lr * self.weight_decay, self.weight_decay
        task.beta1, task.one_minus_beta1, task.beta2, task.one_minus_beta2 = beta1, 1 - beta1, beta2, 1 - beta2
        adam = self.formula <= AMSGRAD
        task.step_size, task.eps = self.lr / (1 - beta1**self.step) if adam else self.lr, self.eps
        task.bias_correction2_sqrt = (1 - beta2**self.step) ** 0.5
        task.initial_sum = 0.0625 if self.step == 3 else 0.0


@dataclass
class Planes:
    """What a task points at. `weight` and `grad` are uint16 for bf16."""

    weight: np.ndarray
    residual: np.ndarray
    grad: np.ndarray
    moments: list[np.ndarray]  # float32; uint16 for bf16; uint8 for int8
    scales: list[np.ndarray]  # int8 only

    @classmethod
    def of(cls, master: np.ndarray, moments: Iterable[np.ndarray], grad: np.ndarray, *, is_split: bool) -> Planes:
        halves = reference.split(master) if is_split else (master.copy(), np.empty(0, np.uint16))
        return cls(*halves, grad.copy(), [moment.copy() for moment in moments], [])

    def copy(self) -> Planes:
        return Planes(*([one.copy() for one in p] if isinstance(p, list) else p.copy() for p in self.fields()))

    def part(self, first: int, last: int) -> Planes:
        return Planes(
            *([one[first:last] for one in p] if isinstance(p, list) else p[first:last] for p in self.fields())
        )

    def fields(self) -> list[Any]:
        return [self.weight, self.residual, self.grad, self.moments, self.scales]

    def master(self) -> np.ndarray:
        return reference.join(self.weight, self.residual) if self.weight.dtype == np.uint16 else self.weight

    @property
    def moment_dtype(self) -> int:
        return {4: F32, 2: BF16, 1: INT8}[self.moments[0].itemsize] if self.moments else F32

    def fill(self, task: UpdateTask, first: int = 0, last: int | None = None) -> None:
        last = self.weight.size if last is None else last
        task.weight = self.weight[first:].ctypes.data
        task.residual = self.residual[first:].ctypes.data if self.residual.size else None
        task.grad = self.grad[first:].ctypes.data
        for index, moment in enumerate(self.moments):
            task.moments[index] = moment[first:].ctypes.data
        for index, scales in enumerate(self.scales):
            task.scales[index] = scales[first // BLOCK_NUMEL :].ctypes.data
        task.numel = last - first
        task.weight_dtype, task.grad_dtype = dtype_of(self.weight), dtype_of(self.grad)
        task.moment_dtype = self.moment_dtype

    def decoded(self, formula: int) -> list[np.ndarray]:
        """The moments as float32."""
        if self.moment_dtype != INT8:
            return [reference.widen(moment).copy() for moment in self.moments]
        pairs = zip(self.moments, self.scales, NON_NEGATIVE[formula], strict=True)
        return [reference.decode_int8(codes, scales, non_negative=kind) for codes, scales, kind in pairs]

    def encoded(self, moments: list[np.ndarray], formula: int, moment_dtype: int, first: int | None) -> Planes:
        """With these moments in that format, rounded to nearest where `first`, the noise, is None."""
        if moment_dtype == F32:
            return replace(self, moments=moments, scales=[])
        noise = None if first is None else reference.noise(first, self.weight.size, moment_dtype)
        result = replace(self, moments=[], scales=[])
        for index, (values, non_negative) in enumerate(zip(moments, NON_NEGATIVE[formula], strict=True)):
            nearest = np.full(values.size, 0x8000 if moment_dtype == BF16 else 0x80, np.uint32)
            chances = nearest if noise is None or index == 2 else noise >> (index % 2 * 16)
            if moment_dtype == BF16:
                result.moments.append(reference.encode_bf16(values, chances))
            else:
                codes, scales = reference.encode_int8(values, chances, non_negative=non_negative)
                result.moments.append(codes)
                result.scales.append(scales)
        return result


def dtype_of(plane: np.ndarray) -> int:
    return F32 if plane.dtype == np.float32 else BF16


def update(implementation: kernels.Kernels, planes: Planes, scalars: Scalars, threads: int = 1) -> Planes:
    updated = planes.copy()
    tasks = (UpdateTask * 1)()
    updated.fill(tasks[0])
    scalars.fill(tasks[0])
    implementation.update(tasks, 1, threads)
    return updated


def update_by_reference(planes: Planes, scalars: Scalars) -> Planes:
    updated = planes.copy()
    task = UpdateTask()
    scalars.fill(task)
    master, moments = updated.master().copy(), updated.decoded(scalars.formula)
    reference.update(task, master, moments, updated.grad)
    if planes.weight.dtype == np.uint16:
        updated.weight, updated.residual = reference.split(master)
    else:
        updated.weight = master
    return updated.encoded(moments, scalars.formula, planes.moment_dtype, scalars.noise)


def assert_same_planes(actual: Planes, expected: Planes) -> None:
    assert_same_bits(actual.weight, expected.weight, "weight")
    assert_same_bits(actual.residual, expected.residual, "residual")
    for name in ("moments", "scales"):
        pairs = zip(getattr(actual, name), getattr(expected, name), strict=True)
        for index, (one, other) in enumerate(pairs):
            assert_same_bits(one, other, f"{name} {index}")


def random_planes(
    numel: int,
    *,
    is_split: bool,
    grad_dtype: int,
    seed: int = 0,
    formula: int = ADAMW,
    moment_dtype: int = F32,
    hostile: bool = False,
) -> Planes:
    """Random values; `hostile`: among them all sorts of others."""
    random = np.random.default_rng(seed)
    kinds = NON_NEGATIVE[formula]
    master, grad, *moments = random.standard_normal((2 + len(kinds), numel), np.float32)
    moments = [moment**2 if kind else moment * np.float32(0.1) for moment, kind in zip(moments, kinds, strict=True)]
    if hostile:
        for plane, kind in ((master, False), (grad, False), *zip(moments, kinds, strict=True)):
            where = random.random(numel) < 0.3
            values = random.choice(HOSTILE, int(where.sum()))
            plane[where] = np.abs(values) if kind else values
    grad_plane = (bits(grad) >> 16).astype(np.uint16) if grad_dtype == BF16 else grad
    planes = Planes.of(master, moments, grad_plane, is_split=is_split)
    return planes.encoded([reference.one_nan(moment) for moment in moments], formula, moment_dtype, None)


def hostile_planes(numel: int, **choices: Any) -> Planes:
    return random_planes(numel, seed=numel, hostile=True, **choices)


LAYOUTS = list(itertools.product([True, False], [BF16, F32]))  # is_split, grad_dtype

VARIANTS = [
    Scalars(),
    Scalars(weight_decay=0.0, eps=0.0, grad_scale=0.37),
    Scalars(formula=ADAM, maximize=True),
    Scalars(formula=ADAM, weight_decay=0.0, step=1),
    Scalars(betas=(0.5, 0.9), grad_scale=1e-30),
    Scalars(formula=ADAM, betas=(0.0, 0.999), eps=1e-30, step=100_000),
]
FORMULAS = [
    Scalars(formula=AMSGRADW),
    Scalars(formula=AMSGRAD, maximize=True),
    Scalars(formula=AMSGRAD, weight_decay=0.0),
    Scalars(formula=SGD),
    Scalars(formula=SGD, weight_decay=0.0, maximize=True),
    Scalars(formula=SGD_MOMENTUM),
    Scalars(formula=SGD_MOMENTUM, weight_decay=0.0, betas=(0.0, 0.0)),
    Scalars(formula=SGD_NESTEROV, betas=(0.9, 0.9)),
    Scalars(formula=LION, betas=(0.9, 0.99)),
    Scalars(formula=LION, weight_decay=0.0, maximize=True),
    Scalars(formula=ADAGRAD, lr=1e-2),
    Scalars(formula=ADAGRAD, weight_decay=0.0, eps=0.0),
]


@pytest.mark.parametrize("scalars", VARIANTS + FORMULAS)
@pytest.mark.parametrize(("is_split", "grad_dtype"), LAYOUTS)
def test_update_gives_the_bits_of_the_reference(
    implementation: kernels.Kernels, is_split: bool, grad_dtype: int, scalars: Scalars
) -> None:
    for numel, hostile, moment_dtype in itertools.product(HOSTILE_SIZES, [False, True], [F32, BF16, INT8]):
        planes = random_planes(
            numel,
            is_split=is_split,
            grad_dtype=grad_dtype,
            seed=numel,
            formula=scalars.formula,
            moment_dtype=moment_dtype,
            hostile=hostile,
        )
        actual, expected = planes, planes
        for step in (scalars.step, scalars.step + 1):  # the second starts from what hostile values left
            actual = update(implementation, actual, replace(scalars, step=step))
            expected = update_by_reference(expected, replace(scalars, step=step))
            assert_same_planes(actual, expected)


@pytest.mark.parametrize(("is_split", "grad_dtype"), LAYOUTS)
def test_update_gives_the_same_bits_for_any_thread_count(
    implementation: kernels.Kernels, is_split: bool, grad_dtype: int
) -> None:
    for moment_dtype in (F32, BF16, INT8):
        planes = random_planes(1_000_003, is_split=is_split, grad_dtype=grad_dtype, moment_dtype=moment_dtype)
        planes.grad[777_777] = np.nan if grad_dtype == F32 else 0x7FC0
        expected = update_by_reference(planes, Scalars())
        for threads in (1, 2, 5):
            assert_same_planes(update(implementation, planes, Scalars(), threads), expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_segments_of_one_call_are_updated_each_with_its_own_scalars(
    implementation: kernels.Kernels, threads: int
) -> None:
    bounds = [0, 1, 8, 8, 207, 300_001, 300_514, 600_000]
    planes = random_planes(bounds[-1], is_split=True, grad_dtype=BF16)
    tasks = (UpdateTask * len(bounds))()
    updated = planes.copy()
    expected = planes.copy()
    for index, (first, last) in enumerate(itertools.pairwise(bounds)):
        scalars = replace(VARIANTS[index % len(VARIANTS)], lr=1e-3 * (index + 1))
        scalars.fill(tasks[index])
        updated.fill(tasks[index], first, last)
        done = update_by_reference(planes.part(first, last), scalars)
        for name in ("weight", "residual"):
            getattr(expected, name)[first:last] = getattr(done, name)
        for whole, part in zip(expected.moments, done.moments, strict=True):
            whole[first:last] = part
    implementation.update(tasks, len(bounds) - 1, threads)  # the last task of the array is not looked at
    assert_same_planes(updated, expected)


def test_update_leaves_what_lies_around_its_planes_alone(implementation: kernels.Kernels) -> None:
    planes = random_planes(4097, is_split=True, grad_dtype=F32)
    updated = planes.copy()
    tasks = (UpdateTask * 1)()
    updated.fill(tasks[0], 13, 13 + 199)
    Scalars().fill(tasks[0])
    implementation.update(tasks, 1, 1)
    pairs = [(planes.weight, updated.weight), (planes.residual, updated.residual), (planes.grad, updated.grad)]
    for before, after in [*pairs, *zip(planes.moments, updated.moments, strict=True)]:
        assert_same_bits(after[:13], before[:13])
        assert_same_bits(after[212:], before[212:])
    assert not np.array_equal(updated.weight, planes.weight)


@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize("is_split", [True, False])
def test_the_loop_that_sets_the_limit_changes_nothing(isa: str, is_split: bool) -> None:
    """It may run between updates that are measured: values that it changed would be NaNs and denormals some day."""
    planes = random_planes(70_001, is_split=is_split, grad_dtype=BF16 if is_split else F32)
    updated = planes.copy()
    tasks = (UpdateTask * 1)()
    updated.fill(tasks[0])
    native.NativeKernels(isa).traffic(tasks, 1, 2)
    assert_same_planes(updated, planes)


def test_nan_masters_stay_nan_in_the_weight_plane(implementation: kernels.Kernels) -> None:
    numel = 33
    grad = np.full(numel, np.nan, np.float32)
    zeros = np.zeros(numel, np.float32)
    planes = Planes.of(np.ones(numel, np.float32), [zeros, zeros], grad, is_split=True)
    updated = update(implementation, planes, Scalars())
    assert np.isnan(reference.widen(updated.weight)).all()
    assert np.isnan(updated.master()).all()
    assert np.isnan(update(implementation, updated, Scalars()).master()).all()


def test_zero_second_moment_with_zero_eps_is_nan_as_in_torch(implementation: kernels.Kernels) -> None:
    zeros = np.zeros(17, np.float32)
    planes = Planes.of(np.ones(17, np.float32), [zeros, zeros], zeros, is_split=False)
    assert np.isnan(update(implementation, planes, Scalars(eps=0.0)).weight).all()


def test_flushing_denormals_in_the_calling_thread_changes_nothing(implementation: kernels.Kernels) -> None:
    numel = 200_003
    planes = random_planes(numel, is_split=False, grad_dtype=F32)
    planes.grad *= np.float32(1e-20)
    planes.moments[1] *= np.float32(1e-39)
    expected = update_by_reference(planes, Scalars())
    assert (np.abs(expected.moments[1][expected.moments[1] != 0]) < np.finfo(np.float32).tiny).any()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        actual = [update(implementation, planes, Scalars(), threads) for threads in (1, 3)]
        still_flushing = float(torch.tensor([1e-39]) * 1) == 0
    finally:
        torch.set_flush_denormal(False)
    assert still_flushing
    for planes in actual:
        assert_same_planes(planes, expected)


# ---- against torch


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize(
    "scalars",
    [
        Scalars(),
        Scalars(weight_decay=0.3, lr=3e-3),
        Scalars(formula=ADAM, weight_decay=0.1),
        Scalars(formula=ADAM, weight_decay=0.0, maximize=True),
        Scalars(grad_scale=0.25, betas=(0.5, 0.99)),
        Scalars(betas=(0.0, 0.9), maximize=True, eps=1e-4),
    ],
)
def test_hundred_steps_equal_torch(implementation: kernels.Kernels, scalars: Scalars, is_split: bool) -> None:
    random = np.random.default_rng(1)
    master = random.standard_normal(1000, np.float32)
    zeros = np.zeros_like(master)
    planes = Planes.of(master, [zeros, zeros], zeros, is_split=is_split)
    parameter = torch.nn.Parameter(torch.from_numpy(master.copy()))
    optimizer_class = torch.optim.AdamW if scalars.formula == ADAMW else torch.optim.Adam
    optimizer = optimizer_class(
        [parameter],
        lr=scalars.lr,
        betas=scalars.betas,
        eps=scalars.eps,
        weight_decay=scalars.weight_decay,
        maximize=scalars.maximize,
        foreach=False,
    )
    for step in range(1, 101):
        planes.grad = random.standard_normal(1000, np.float32) * np.float32(0.1 * step)
        planes = update(implementation, planes, replace(scalars, step=step))
        parameter.grad = torch.from_numpy(planes.grad * np.float32(scalars.grad_scale))
        optimizer.step()
    np.testing.assert_allclose(planes.master(), parameter.detach().numpy(), rtol=1e-5, atol=1e-6)
    state = optimizer.state[parameter]
    np.testing.assert_allclose(planes.moments[0], state["exp_avg"].numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(planes.moments[1], state["exp_avg_sq"].numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("grad_dtype", [BF16, F32])
@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize(
    "scalars",
    [
        Scalars(weight_decay=0.1),
        Scalars(weight_decay=0.0, betas=(0.4, 0.95), maximize=True),
        Scalars(formula=ADAM, weight_decay=0.1, grad_scale=0.3),
        Scalars(formula=ADAM, weight_decay=0.1, maximize=True, betas=(0.0, 0.99)),
        Scalars(formula=ADAM, weight_decay=0.0, lr=0.1, eps=1e-4),
    ],
)
def test_the_bits_are_those_of_torch_fused(
    implementation: kernels.Kernels, scalars: Scalars, is_split: bool, grad_dtype: int
) -> None:
    optimizer_class = torch.optim.AdamW if scalars.formula == ADAMW else torch.optim.Adam
    for numel in (16, 1008, 4099, 70_000):
        random = np.random.default_rng(numel)
        master = random.standard_normal(numel, np.float32)
        zeros = np.zeros_like(master)
        planes = Planes.of(master, [zeros, zeros], zeros, is_split=is_split)
        parameter = torch.nn.Parameter(torch.from_numpy(master.copy()))
        optimizer = optimizer_class(
            [parameter],
            lr=scalars.lr,
            betas=scalars.betas,
            eps=scalars.eps,
            weight_decay=scalars.weight_decay,
            maximize=scalars.maximize,
            fused=True,
        )
        for step in range(1, 41):
            planes.grad = grads(numel, grad_dtype, seed=step)
            planes = update(implementation, planes, replace(scalars, step=step))
            parameter.grad = torch.from_numpy(reference.widen(planes.grad) * np.float32(scalars.grad_scale))
            optimizer.step()
        state = optimizer.state[parameter]
        whole = numel // 16 * 16  # torch's scalar loop at the end of a tensor rounds the second moment otherwise
        for actual, expected in (
            (planes.master(), parameter.detach()),
            (planes.moments[0], state["exp_avg"]),
            (planes.moments[1], state["exp_avg_sq"]),
        ):
            assert_same_bits(actual[:whole], expected.numpy()[:whole])
            np.testing.assert_allclose(actual[whole:], expected.numpy()[whole:], rtol=1e-5)


SMALL: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("scalars", "build"),
    [
        (
            Scalars(formula=AMSGRADW, betas=(0.9, 0.9), **SMALL),
            lambda p: torch.optim.AdamW(p, betas=(0.9, 0.9), amsgrad=True, fused=True, **SMALL),
        ),
        (
            Scalars(formula=AMSGRAD, betas=(0.9, 0.9), maximize=True, **SMALL),
            lambda p: torch.optim.Adam(p, betas=(0.9, 0.9), amsgrad=True, maximize=True, fused=True, **SMALL),
        ),
        (Scalars(formula=SGD, **SMALL), lambda p: torch.optim.SGD(p, fused=True, **SMALL)),
        (Scalars(formula=SGD, **SMALL), lambda p: torch.optim.SGD(p, foreach=False, **SMALL)),
        (
            Scalars(formula=SGD_MOMENTUM, maximize=True, **SMALL),
            lambda p: torch.optim.SGD(p, momentum=0.9, maximize=True, foreach=False, **SMALL),
        ),
        (
            Scalars(formula=SGD_NESTEROV, **SMALL),
            lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True, foreach=False, **SMALL),
        ),
        (
            Scalars(formula=ADAGRAD, eps=1e-10, **SMALL),
            lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.0625, fused=True, **SMALL),
        ),
    ],
)
def test_other_formulas_have_torchs_bits(
    implementation: kernels.Kernels, scalars: Scalars, build: Callable[[Any], torch.optim.Optimizer]
) -> None:
    numel = 1008
    random = np.random.default_rng(1)
    master = random.standard_normal(numel, np.float32)
    zeros = [np.zeros_like(master) for _ in NON_NEGATIVE[scalars.formula]]
    planes = Planes.of(master, zeros, master, is_split=False)
    parameter = torch.nn.Parameter(torch.from_numpy(master.copy()))
    optimizer = build([parameter])
    for step in range(1, 41):
        planes.grad = random.standard_normal(numel, np.float32)
        tasks = (UpdateTask * 1)()
        planes.fill(tasks[0])
        scalars_now = replace(scalars, step=step)
        scalars_now.fill(tasks[0])
        tasks[0].initial_sum = 0.0625 if step == 1 else 0.0
        if SGD <= scalars.formula <= SGD_NESTEROV:
            tasks[0].beta1, tasks[0].one_minus_beta1, tasks[0].beta2 = (0.0, 1.0, 0.9) if step == 1 else (0.9, 1.0, 0.9)
        implementation.update(tasks, 1, 1)
        parameter.grad = torch.from_numpy(planes.grad.copy())
        optimizer.step()
        assert_same_bits(planes.weight, parameter.detach().numpy(), f"step {step}")
    names = [name for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum")
             if isinstance(optimizer.state[parameter].get(name), torch.Tensor)]  # fmt: skip
    for moment, name in zip(planes.moments, names, strict=True):
        assert_same_bits(moment, optimizer.state[parameter][name].numpy(), name)


def step_in_float64(master: np.ndarray, m: np.ndarray, v: np.ndarray, g: np.ndarray, scalars: Scalars) -> np.ndarray:
    master, m, v, g = (plane.astype(np.float64) for plane in (master, m, v, g))
    beta1, beta2 = scalars.betas
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    denominator = np.sqrt(v / (1 - beta2**scalars.step)) + scalars.eps
    return master * (1 - scalars.lr * scalars.weight_decay) - scalars.lr / (1 - beta1**scalars.step) * m / denominator


@pytest.mark.parametrize("step", [1, 10, 10_000])
@pytest.mark.parametrize("lr", [1e-4, 1e-1])
def test_the_error_of_a_step_is_no_larger_than_that_of_torch(lr: float, step: int) -> None:
    numel = 200_000
    random = np.random.default_rng(step)
    scalars = Scalars(lr=lr, step=step, weight_decay=0.1)
    master, m, g = random.standard_normal((3, numel), np.float32)
    m *= np.float32(0.3)
    v = random.random(numel, np.float32)
    exact = step_in_float64(master, m, v, g, scalars)

    parameter = torch.nn.Parameter(torch.from_numpy(master.copy()))
    parameter.grad = torch.from_numpy(g)
    optimizer = torch.optim.AdamW([parameter], lr=lr, weight_decay=scalars.weight_decay, foreach=False)
    optimizer.state[parameter] = {
        "step": torch.tensor(float(step - 1)),
        "exp_avg": torch.from_numpy(m.copy()),
        "exp_avg_sq": torch.from_numpy(v.copy()),
    }
    optimizer.step()
    error_of_torch = np.abs(parameter.detach().numpy() - exact)

    error = np.abs(update(kernels.load(), Planes.of(master, [m, v], g, is_split=False), scalars).weight - exact)
    # Both are mostly the last rounding, of the parameter itself: equal to within chance, which the margins allow for.
    assert error.mean() <= error_of_torch.mean() * 1.002
    assert np.quantile(error, 0.999) <= np.quantile(error_of_torch, 0.999) * 1.01


# ---- sums of gradients


@dataclass
class Accumulation:
    source: np.ndarray
    previous: np.ndarray | None
    target: np.ndarray | None
    first_piece: int
    measure: bool = True

    def run(self, implementation: kernels.Kernels, threads: int = 1) -> np.ndarray:
        """The partial sums; values are in `target`."""
        numel = self.source.size
        partials = np.full(piece_count(numel, self.first_piece), -1.0)
        tasks = (AccumulateTask * 1)()
        task = tasks[0]
        task.source, task.source_dtype, task.numel = self.source.ctypes.data, dtype_of(self.source), numel
        if self.previous is not None:
            task.previous, task.previous_dtype = self.previous.ctypes.data, dtype_of(self.previous)
            task.previous_scale = 0.75
        if self.target is not None:
            task.target, task.target_dtype = self.target.ctypes.data, dtype_of(self.target)
        task.first_piece = self.first_piece
        task.partials = partials.ctypes.data if self.measure else None
        implementation.accumulate(tasks, 1, threads)
        return partials


def grads(numel: int, dtype: int, seed: int, *, hostile: bool = False) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = random.standard_normal(numel, np.float32)
    if hostile:
        where = random.random(numel) < 0.2
        values[where] = random.choice(HOSTILE, int(where.sum()))
    return values if dtype == F32 else (bits(values) >> 16).astype(np.uint16)


ACCUMULATIONS = [  # source, previous, target
    *itertools.product([BF16, F32], [None, BF16, F32], [None, F32]),
    (BF16, None, BF16),
]


@pytest.mark.parametrize(("source_dtype", "previous_dtype", "target_dtype"), ACCUMULATIONS)
def test_accumulate_gives_the_bits_of_the_reference(
    implementation: kernels.Kernels, source_dtype: int, previous_dtype: int | None, target_dtype: int | None
) -> None:
    for numel, hostile in itertools.product([*HOSTILE_SIZES, 20_000], [False, True]):
        source = grads(numel, source_dtype, 1, hostile=hostile)
        previous = None if previous_dtype is None else grads(numel, previous_dtype, 2, hostile=hostile)
        values = reference.accumulate(source, previous, 0.75)
        target = None
        if target_dtype is not None:
            target = np.zeros(numel, np.float32 if target_dtype == F32 else np.uint16)
        for first_piece in (1, 4096, 1234):
            partials = Accumulation(source, previous, target, first_piece).run(implementation)
            assert_same_bits(partials, reference.sums_of_squares(values, first_piece))
            if target is not None:
                assert_same_bits(target, source if target_dtype == BF16 else values)


def test_accumulating_in_place_gives_the_same_bits(implementation: kernels.Kernels) -> None:
    source, previous = grads(10_007, BF16, 1), grads(10_007, F32, 2)
    values = reference.accumulate(source, previous, 0.75)
    partials = Accumulation(source, previous, previous, 99).run(implementation)
    assert_same_bits(previous, values)
    assert_same_bits(partials, reference.sums_of_squares(values, 99))


def test_accumulate_without_measuring_writes_no_sums(implementation: kernels.Kernels) -> None:
    source, target = grads(5000, BF16, 1), np.zeros(5000, np.float32)
    partials = Accumulation(source, None, target, 4096, measure=False).run(implementation)
    assert (partials == -1).all()
    assert_same_bits(target, reference.widen(source))


def test_sums_of_squares_depend_neither_on_threads_nor_on_chunks(implementation: kernels.Kernels) -> None:
    numel, first_piece = 1_000_003, 777
    source = grads(numel, BF16, 1)
    whole = Accumulation(source, None, np.empty(numel, np.float32), first_piece).run(implementation)
    shared = Accumulation(source, None, np.empty(numel, np.float32), first_piece).run(implementation, threads=4)
    assert_same_bits(shared, whole)
    cut = first_piece + 4096 * 17
    parts = [
        Accumulation(source[:cut], None, np.empty(cut, np.float32), first_piece).run(implementation),
        Accumulation(source[cut:], None, None, 4096).run(implementation),
    ]
    assert_same_bits(np.concatenate(parts), whole)
    exact = (reference.widen(source).astype(np.float64) ** 2).sum()
    np.testing.assert_allclose(whole.sum(), exact, rtol=1e-12)


def test_many_small_accumulations_in_one_call(implementation: kernels.Kernels) -> None:
    source = grads(300 * 1000, F32, 1)
    partials = np.zeros(300 * 2)
    tasks = (AccumulateTask * 300)()
    for index, task in enumerate(tasks):
        task.source, task.source_dtype = source[index * 1000 :].ctypes.data, F32
        task.numel, task.first_piece = 1000, 1 + index
        task.partials = partials[2 * index :].ctypes.data
    implementation.accumulate(tasks, 300, 3)
    expected = [reference.sums_of_squares(source[i * 1000 : (i + 1) * 1000], 1 + i) for i in range(300)]
    assert_same_bits(partials, np.concatenate(expected))


# ---- checksums


def checksums(data: bytes) -> set[int]:
    buffer = np.frombuffer(data, np.uint8)
    return {loaded.checksum(buffer.ctypes.data, buffer.size) for loaded in IMPLEMENTATIONS.values()}


def test_every_implementation_gives_the_same_checksum() -> None:
    data = np.random.default_rng(0).bytes(100_003)
    for nbytes in (0, 1, 7, 8, 9, 63, 64, 65, 4095, 4097):
        assert checksums(data[:nbytes]) == {reference.checksum(data[:nbytes])}
    assert len(checksums(data)) == 1


def test_a_checksum_changes_with_every_bit_with_order_and_with_length() -> None:
    data = np.random.default_rng(0).bytes(131)
    seen = {reference.checksum(data)}
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        seen |= checksums(bytes(changed))
    seen |= checksums(data[8:16] + data[:8] + data[16:])
    seen |= checksums(data + b"\0") | checksums(data[:-1])
    assert len(seen) == 1 + 8 * len(data) + 3
    assert len({reference.checksum(bytes(nbytes)) for nbytes in range(100)}) == 100


# ---- loading


def test_auto_takes_the_native_kernels_of_the_widest_instruction_set() -> None:
    assert kernels.load().name == f"native {native.isa_names()[-1]}"
    assert kernels.load().passed_over is None


def test_without_the_library_auto_says_why_it_took_numba(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiermem._native.library.cache_clear()
    monkeypatch.setattr(tiermem._native, "PATH", tmp_path / "libtiermem.so")
    try:
        loaded = kernels.load()
        assert loaded.name == "numba"
        assert loaded.passed_over is not None
        assert str(tmp_path / "libtiermem.so") in loaded.passed_over
        with pytest.raises(RuntimeError, match="does not exist"):
            kernels.load("native")
        (tmp_path / "libtiermem.so").write_text("no library")
        with pytest.raises(RuntimeError, match="cannot be loaded"):
            kernels.load("native")
    finally:
        tiermem._native.library.cache_clear()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="cuda"):
        kernels.load("cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x86-64-v9"):
        kernels.load("native", isa="x86-64-v9")


def test_numba_kernels_compile_where_their_cache_has_no_place() -> None:
    from tiermem.kernels import jit

    namespace: dict[str, Any] = {}
    exec("def double(x):\n    return x + x", namespace)  # numba finds no directory for code without a file
    assert jit._compiled(namespace["double"])(21) == 42


def test_a_missing_compiler_does_not_fail_the_build(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "build_ext", f"--build-lib={tmp_path}", f"--build-temp={tmp_path}/temp"]
    environment = {**os.environ, "CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert built.returncode == 0, built.stderr
    assert "numba kernels" in built.stdout + built.stderr
    assert not list(tmp_path.rglob("*.so"))


# ---- threads


def test_several_python_threads_may_call_at_once(implementation: kernels.Kernels) -> None:
    planes = random_planes(300_007, is_split=True, grad_dtype=BF16)
    expected = update_by_reference(planes, Scalars())
    results: list[Planes] = []

    def work() -> None:
        results.extend(update(implementation, planes, Scalars(), threads=3) for _ in range(5))

    callers = [threading.Thread(target=work) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 20
    for result in results:
        assert_same_planes(result, expected)


def test_threads_are_kept_from_call_to_call() -> None:
    loaded = kernels.load("native")
    master = np.zeros(1_000_003, np.float32)
    split(loaded, master, threads=4)
    before = len(os.listdir("/proc/self/task"))
    for _ in range(20):
        split(loaded, master, threads=4)
    assert len(os.listdir("/proc/self/task")) == before


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    """Runs it with the kernels importable, but without importing torch as the package does: that takes seconds."""
    prelude = f"""
        import sys, types
        package = types.ModuleType("tiermem")
        package.__path__ = [{str(ROOT / "tiermem")!r}]
        sys.modules["tiermem"] = package
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("choice", ["native", "numba"])
def test_a_forked_child_can_call_and_exits(choice: str) -> None:
    result = run_script(f"""
        import os, sys
        import numpy as np
        from tiermem import kernels

        loaded = kernels.load({choice!r})
        master = np.arange(1_000_003, dtype=np.float32)
        weight, residual = np.zeros((2, master.size), np.uint16)

        def split():
            weight[:] = 0
            loaded.split(master.ctypes.data, weight.ctypes.data, residual.ctypes.data, master.size, 4)
            return weight.tobytes()

        expected = split()
        child = os.fork()
        if child == 0:
            sys.exit(0 if split() == expected and split() == expected else 1)
        _, status = os.waitpid(child, 0)
        assert split() == expected
        sys.exit(os.waitstatus_to_exitcode(status))
    """)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("choice", ["native", "numba"])
def test_the_interpreter_exits_while_a_daemon_thread_is_inside_a_kernel(choice: str) -> None:
    result = run_script(f"""
        import threading
        import numpy as np
        from tiermem import kernels

        loaded = kernels.load({choice!r})
        master = np.zeros(1_000_003, dtype=np.float32)
        weight, residual = np.zeros((2, master.size), np.uint16)
        running = threading.Event()

        def split_for_ever():
            while True:
                loaded.split(master.ctypes.data, weight.ctypes.data, residual.ctypes.data, master.size, 4)
                running.set()

        threading.Thread(target=split_for_ever, daemon=True).start()
        running.wait()
        print("done")
    """)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n"


@pytest.mark.parametrize("choice", ["native", "numba"])
def test_exit_handlers_can_call(choice: str) -> None:
    result = run_script(f"""
        import atexit
        import numpy as np
        from tiermem import kernels

        loaded = kernels.load({choice!r})
        master = np.ones(1_000_003, dtype=np.float32)
        weight, residual = np.zeros((2, master.size), np.uint16)

        def split():
            loaded.split(master.ctypes.data, weight.ctypes.data, residual.ctypes.data, master.size, 4)
            print((weight == 0x3F80).all())

        atexit.register(split)
    """)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "True\n"


# ---- cores


def control_groups(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "250000 100000"}, 2),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/b/cpu.max": "max 1000",
                "sys/fs/cgroup/a/cpu.max": "3000 1000",
            },
            3,
        ),
        ({"proc/self/cgroup": "0::/on/the/host", "sys/fs/cgroup/cpu.max": "4000 1000"}, 4),
        (
            {
                "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/job\n1:name=systemd:/",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "600000",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            6,
        ),
    ],
)
def test_available_cores_respects_affinity_and_quotas(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert available_cores(control_groups(tmp_path, files)) == expected


def test_available_cores_of_this_machine() -> None:
    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))
