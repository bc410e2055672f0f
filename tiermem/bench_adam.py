"""``tiermem bench adam``: the optimizer pass beside the limit that memory sets, and beside others that do its work.

The limit is a loop with the same reads and writes on the same memory, compiled for the same instruction set, and next
to no arithmetic. The work is a training step's: a bf16 gradient comes in, fp32 master and moments are updated, a bf16
weight goes out. Others are given the passes that they need for it: fp32 optimizers a conversion of gradients and one of
weights.

Subjects take turns, each round all of them, those that are compared one after the other. Rates are medians; a ratio is
the median of the rounds' ratios, which a machine that other work slows down now and then disturbs less.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from tiermem.kernels import Kernels, load
from tiermem.kernels.abi import ADAMW, BF16, F32, INT8, UpdateTask
from tiermem.kernels.cores import available_cores
from tiermem.kernels.native import NativeKernels, isa_names
from tiermem.layout import MOMENT_FORMATS

MOMENT_DTYPES = {"fp32": F32, "bf16": BF16, "int8": INT8}
EXACT_LIMIT = 0.95  # of the copy loop
OTHERS_LIMIT = 1.25  # times torch's fused AdamW and DeepSpeedCPUAdam
INT8_LIMIT = 0.9  # of the exact kernel, in memory
INT8_DISK_LIMIT = 1.6  # times the exact format's updates, with states on disk
NUMBA_LIMIT = 0.7  # of C++


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured.

    numel: parameters; more than the caches hold. Fewer are taken where memory does not suffice.
    chunks: elements per call of the exact kernel; all parameters at once are a chunk too.
    threads: thread counts; empty: 1 and all cores.
    everything: each instruction set with all chunks, layouts and formats, not only the widest.
    disk: where states rest for the figures on DISK; None: they are left out.
    """

    numel: int = 64 << 20
    chunks: Sequence[int] = (64 << 10, 1 << 20)
    threads: Sequence[int] = ()
    rounds: int = 9
    everything: bool = False
    others: bool = True
    numba: bool = True
    disk: Path | None = None


@dataclass(eq=False)
class Subject:
    """One thing that is timed. ``run`` does the work once, for all parameters, on moments of that format."""

    name: str
    run: Callable[[], None]
    bytes_per_parameter: float
    moments: str = "fp32"
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True, eq=False)
class Comparison:
    """How many times the updates per second of ``beside`` the subject makes, and how many are asked for."""

    subject: Subject
    beside: Subject
    least: float | None = None

    @property
    def name(self) -> str:
        return f"{self.subject.name} / {self.beside.name}"

    @property
    def ratio(self) -> float:
        turns = zip(self.beside.seconds, self.subject.seconds, strict=True)
        return statistics.median(beside / subject for beside, subject in turns)


def _aligned(numel: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Zeros from the start of a page on, as chunks lie."""
    nbytes = numel * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    memory[::4096] = 0  # the system gives a page when it is written
    return memory[start : start + nbytes].view(dtype)


class Planes:
    """Memory for every kernel and format, one after the other: the same bytes serve all of them."""

    BYTES = 2 + 2 + 2 + 8 + 8  # of a parameter

    def __init__(self, numel: int) -> None:
        random = np.random.default_rng(0)
        self.numel = numel
        self.weight = _aligned(numel, np.uint16)
        self.weight[:] = 0x3C00
        self.residual = _aligned(numel, np.uint16)
        self.grad = _aligned(numel, np.uint16)
        self.grad[:] = np.resize(random.integers(0x3A00, 0x3A80, 1 << 16, np.uint16), numel)
        self.master = _aligned(numel, np.float32)
        self.master[:] = 0.01
        self.grad_fp32 = _aligned(numel, np.float32)
        self.grad_fp32[:] = 1e-3
        self.moments = [_aligned(numel, np.float32) for _ in range(2)]
        self.scales = [_aligned(-(-numel // 128), np.float32) for _ in range(2)]
        self._moments = "fp32"

    def tasks(self, moments: str, chunk: int, *, is_split: bool) -> list[ctypes.Array[UpdateTask]]:
        """One call per chunk."""
        firsts = range(0, self.numel, chunk)
        return [self._call(moments, first, min(chunk, self.numel - first), is_split) for first in firsts]

    def _call(self, moments: str, first: int, numel: int, is_split: bool) -> ctypes.Array[UpdateTask]:
        tasks = (UpdateTask * 1)()
        task = tasks[0]
        task.weight = (self.weight if is_split else self.master)[first:].ctypes.data
        task.residual = self.residual[first:].ctypes.data if is_split else None
        task.grad = (self.grad if is_split else self.grad_fp32)[first:].ctypes.data
        for index in range(2):
            task.moments[index] = self.moments[index].ctypes.data + MOMENT_FORMATS[moments].itemsize * first
            task.scales[index] = self.scales[index].ctypes.data + 4 * (first // 128)
        task.numel = numel
        task.weight_dtype = task.grad_dtype = BF16 if is_split else F32
        task.moment_dtype, task.formula, task.noise, task.grad_scale = MOMENT_DTYPES[moments], ADAMW, first, 1.0
        task.decay, task.one_minus_beta1, task.beta2, task.one_minus_beta2 = 0.99999, 0.1, 0.999, 0.001
        task.step_size, task.bias_correction2_sqrt, task.eps = 1e-4, 0.5, 1e-8
        return tasks

    def hold(self, moments: str) -> None:
        """Another format's bytes would be denormals or worse, which are slow on some processors."""
        if moments != self._moments:
            for plane in (*self.moments, *self.scales):
                plane[:] = 0
        self._moments = moments


def run(options: Options, console: Console | None = None) -> dict[str, float]:
    """Measures and prints; returns the ratios that the limits are about."""
    console = console or Console(highlight=False)
    ratios: dict[str, float] = {}
    planes = Planes(_numel_that_fits(options))
    for threads in options.threads or sorted({1, available_cores()}):
        subjects, comparisons = _kernels(options, planes, threads)
        if options.others:
            exact = next(comparison.beside for comparison in comparisons if comparison.subject.moments == "int8")
            for subject, least in _others(planes.numel, threads, console):
                subjects.append(subject)
                comparisons.append(Comparison(exact, subject, least))
        _take_turns(subjects, options.rounds, planes)
        named = f"{threads} thread{'s' if threads > 1 else ''}"
        _print_rates(subjects, f"{planes.numel / (1 << 20):g} Mi parameters, {named}", planes.numel, console)
        for comparison in comparisons:
            ratios[f"{comparison.name}, {named}"] = _print_ratio(
                f"{comparison.name}, {named}", comparison.ratio, comparison.least, console
            )
        del subjects, comparisons
        gc.collect()
    if options.disk is not None:
        for name, ratio in _on_disk(planes.numel, options.disk, console).items():
            ratios[name] = _print_ratio(name, ratio, INT8_DISK_LIMIT if "int8" in name else None, console)
    return ratios


def _print_ratio(name: str, ratio: float, least: float | None, console: Console) -> float:
    verdict = "" if least is None else f", at least {least:g}: {'kept' if ratio >= least else 'MISSED'}"
    console.print(f"{name}: {ratio:.3f}{verdict}")
    return ratio


def _numel_that_fits(options: Options) -> int:
    """Half of the memory that is free may be taken."""
    bytes_each = Planes.BYTES + (4 + 3 * 16 if options.others else 0)
    fitting = int(psutil.virtual_memory().available) // 2 // bytes_each
    return min(options.numel, max(1 << 20, fitting >> 20 << 20))


def _kernels(options: Options, planes: Planes, threads: int) -> tuple[list[Subject], list[Comparison]]:
    subjects: list[Subject] = []
    comparisons: list[Comparison] = []

    def add(
        name: str, call: Callable[..., None], moments: str = "fp32", chunk: int = planes.numel, *, is_split: bool = True
    ) -> Subject:
        calls = planes.tasks(moments, chunk, is_split=is_split)

        def work() -> None:
            for tasks in calls:
                call(tasks, 1, threads)

        subjects.append(Subject(name, work, _traffic_bytes(moments, is_split=is_split), moments))
        return subjects[-1]

    def compare(subject: Subject, beside: Subject, least: float | None) -> None:
        comparisons.append(Comparison(subject, beside, least))

    *narrower, widest = isa_names()
    chunks = [*(chunk for chunk in options.chunks if chunk < planes.numel), planes.numel]
    for isa in (*narrower, widest):
        kernels = NativeKernels(isa)
        whole = options.everything or isa == widest
        for chunk in chunks if whole else chunks[-1:]:
            of = f"{isa}, chunks of {_in_words(chunk)}"
            copy = add(f"copy loop {of}", kernels.traffic, chunk=chunk)
            compare(add(f"exact {of}", kernels.update, chunk=chunk), copy, EXACT_LIMIT)
        if whole:
            copy = add(f"copy loop {isa}, fp32 masters", kernels.traffic, is_split=False)
            exact = add(f"exact {isa}, fp32 masters", kernels.update, is_split=False)
            compare(exact, copy, EXACT_LIMIT)
        if not whole:
            continue
        of_format = {moments: add(f"C++ {moments} {isa}", kernels.update, moments) for moments in MOMENT_FORMATS}
        compare(of_format["bf16"], of_format["fp32"], None)
        compare(of_format["int8"], of_format["fp32"], INT8_LIMIT if isa == widest else None)
    if options.numba:
        compiled: Kernels = load("numba")
        for moments, of_cpp in of_format.items():
            compare(add(f"numba {moments}", compiled.update, moments), of_cpp, NUMBA_LIMIT)
    return subjects, comparisons


def _in_words(numel: int) -> str:
    return f"{numel >> 20} Mi" if numel >= 1 << 20 else f"{numel >> 10} Ki"


def _traffic_bytes(moments: str, *, is_split: bool = True) -> float:
    """Gradient 2 or 4, master 8, moments and scales twice."""
    form = MOMENT_FORMATS[moments]
    scales = 4 / form.block_numel if form.block_numel else 0
    return (10 if is_split else 12) + 4 * (form.itemsize + scales)


def _others(numel: int, threads: int, console: Console) -> Iterator[tuple[Subject, float | None]]:
    """fp32 optimizers, with the passes from and to bf16 that a training step needs; and how often the exact kernel's
    updates are asked to be theirs."""
    gradient = torch.full((numel,), 1e-3, dtype=torch.bfloat16)
    weight = torch.zeros(numel, dtype=torch.bfloat16)
    parameter = torch.nn.Parameter(torch.full((numel,), 0.01))
    parameter.grad = torch.zeros(numel)

    def subject(name: str, optimizer: Any) -> Subject:
        def work() -> None:
            torch.set_num_threads(threads)
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)
            optimizer.step()
            with torch.no_grad():
                weight.copy_(parameter)

        # gradient 2 + 4 + 4, master 8, moments 16, weight from the master 4 + 2
        return Subject(name, work, 40)

    yield subject("torch fused", torch.optim.AdamW([parameter], lr=1e-4, fused=True)), OTHERS_LIMIT
    yield subject("torch loop", torch.optim.AdamW([parameter], lr=1e-4, foreach=False)), None
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

        optimizer = DeepSpeedCPUAdam([parameter], lr=1e-4)  # compiles itself, with ninja
    except (ImportError, OSError, RuntimeError) as error:
        console.print(f"DeepSpeedCPUAdam is left out: {error}")
        return
    yield subject("DeepSpeedCPUAdam", optimizer), OTHERS_LIMIT


def _take_turns(subjects: Sequence[Subject], rounds: int, planes: Planes) -> None:
    for number in range(rounds + 1):
        for subject in subjects:
            planes.hold(subject.moments)
            start = time.perf_counter()
            subject.run()
            if number > 0:  # the first compiles, and touches memory
                subject.seconds.append(time.perf_counter() - start)


def _print_rates(subjects: Sequence[Subject], title: str, numel: int, console: Console) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("", no_wrap=True)
    for column in ("G params/s", "best", "GB/s"):
        table.add_column(column, justify="right")
    for subject in subjects:
        rate, best = (numel / seconds / 1e9 for seconds in (subject.median, min(subject.seconds)))
        table.add_row(subject.name, f"{rate:.2f}", f"{best:.2f}", f"{rate * subject.bytes_per_parameter:.0f}")
    console.print(table)


def _on_disk(numel: int, disk: Path, console: Console) -> dict[str, float]:
    """Updates per second of a model whose states rest on DISK and all else in HOST, from step() to the last write."""
    import tiermem

    width = 4096
    depth = max(2, numel // (width * width))
    seconds: dict[str, list[float]] = {moments: [] for moments in MOMENT_FORMATS}
    for _ in range(3):
        for moments, found in seconds.items():
            with torch.device("meta"):
                layers = [torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(depth)]
            with tempfile.TemporaryDirectory(dir=disk) as directory:
                model = tiermem.offload(
                    torch.nn.Sequential(*layers),
                    memory=tiermem.Memory(device="4GiB", host="8GiB", disk=directory),
                    policy=tiermem.Policy(weights="host", states="disk", moments=moments),  # type: ignore[arg-type]
                    device="cpu",
                )
                found += _timed_updates(model, width)
                tiermem.close(model)
    medians = {moments: statistics.median(found) for moments, found in seconds.items()}
    numel = depth * width * width
    for moments, median in medians.items():
        console.print(f"states on DISK, {moments}: {numel / median / 1e9:.3f} G params/s")
    return {f"on disk, {moments} / fp32": medians["fp32"] / medians[moments] for moments in ("bf16", "int8")}


def _timed_updates(model: torch.nn.Module, width: int) -> list[float]:
    import tiermem

    optimizer = tiermem.AdamW(model.parameters(), lr=1e-4)
    seconds = []
    for _ in range(4):
        model(torch.ones(1, width, dtype=torch.bfloat16)).float().mean().backward()
        tiermem.synchronize(model)
        start = time.perf_counter()
        optimizer.step()
        tiermem.synchronize(model)
        seconds.append(time.perf_counter() - start)
        optimizer.zero_grad()
    return seconds[1:]  # the first writes states that were never read
