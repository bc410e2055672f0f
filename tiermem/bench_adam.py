"""``tiermem bench adam``: the optimizer pass beside the limit that memory sets, and beside others that do its work.

The work is a training step's: a bf16 gradient comes in, fp32 master and moments are updated, a bf16 weight goes out.
Others are given the passes that they need for it: fp32 optimizers a conversion of gradients and one of weights.
Subjects take turns, each round all of them; figures are medians.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
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

    numel: parameters; more than the caches hold.
    chunks: elements per call of the exact kernel, each its own row.
    threads: thread counts; empty: 1 and all cores.
    disk: where states rest for the figures on DISK; None: they are left out.
    """

    numel: int = 32 << 20
    chunks: Sequence[int] = (64 << 10, 1 << 20)
    threads: Sequence[int] = ()
    rounds: int = 9
    others: bool = True
    numba: bool = True
    disk: Path | None = None


@dataclass
class Subject:
    """One thing that is timed. ``run`` does the work once, for all parameters."""

    name: str
    run: Callable[[], None]
    bytes_per_parameter: float
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Planes:
    """Memory for every kernel and format, one after the other: the same bytes serve all of them."""

    def __init__(self, numel: int) -> None:
        random = np.random.default_rng(0)
        self.numel = numel
        self.weight = np.full(numel, 0x3C00, np.uint16)
        self.residual = np.zeros(numel, np.uint16)
        self.grad = np.resize(random.integers(0x3A00, 0x3A80, 1 << 16, np.uint16), numel)
        self.moments = np.zeros((2, numel), np.float32)
        self.scales = np.zeros((2, -(-numel // 128)), np.float32)

    def tasks(self, moments: str, chunk: int) -> list[ctypes.Array[UpdateTask]]:
        """One call per chunk."""
        return [self._call(moments, first, min(chunk, self.numel - first)) for first in range(0, self.numel, chunk)]

    def _call(self, moments: str, first: int, numel: int) -> ctypes.Array[UpdateTask]:
        tasks = (UpdateTask * 1)()
        task = tasks[0]
        task.weight = self.weight[first:].ctypes.data
        task.residual = self.residual[first:].ctypes.data
        task.grad = self.grad[first:].ctypes.data
        for index in range(2):
            task.moments[index] = self.moments[index].ctypes.data + MOMENT_FORMATS[moments].itemsize * first
            task.scales[index] = self.scales[index].ctypes.data + 4 * (first // 128)
        task.numel, task.weight_dtype, task.grad_dtype = numel, BF16, BF16
        task.moment_dtype, task.formula, task.noise, task.grad_scale = MOMENT_DTYPES[moments], ADAMW, first, 1.0
        task.decay, task.one_minus_beta1, task.beta2, task.one_minus_beta2 = 0.99999, 0.1, 0.999, 0.001
        task.step_size, task.bias_correction2_sqrt, task.eps = 1e-4, 0.5, 1e-8
        return tasks

    def clear(self) -> None:
        """Another format's bytes would be denormals or worse, which are slow on some processors."""
        self.moments[:] = 0
        self.scales[:] = 0


def run(options: Options, console: Console | None = None) -> dict[str, float]:
    """Measures and prints; returns the ratios that the limits are about."""
    console = console or Console(highlight=False)
    ratios: dict[str, float] = {}
    planes = Planes(options.numel)
    for threads in options.threads or sorted({1, available_cores()}):
        subjects = list(_kernels(options, planes, threads))
        if options.others:
            subjects += _others(options, threads)
        _take_turns(subjects, options.rounds, planes)
        _print(subjects, threads, options, console)
        ratios |= _ratios(subjects, threads)
        del subjects
        gc.collect()
    if options.disk is not None:
        ratios |= _on_disk(options, options.disk, console)
    for what, value in ratios.items():
        limit = next((limit for prefix, limit in _LIMITS.items() if what.startswith(prefix)), None)
        aim = "" if limit is None else f", at least {limit:g}: {'kept' if value >= limit else 'missed'}"
        console.print(f"{what}: {value:.2f}{aim}")
    return ratios


_LIMITS = {
    "exact / copy": EXACT_LIMIT,
    "exact / torch fused": OTHERS_LIMIT,
    "exact / DeepSpeedCPUAdam": OTHERS_LIMIT,
    "int8 / exact": INT8_LIMIT,
    "on disk, int8 / fp32": INT8_DISK_LIMIT,
    "numba / C++": NUMBA_LIMIT,
}


def _kernels(options: Options, planes: Planes, threads: int) -> Iterator[Subject]:
    def subject(name: str, call: Callable[..., None], moments: str, chunk: int) -> Subject:
        calls = planes.tasks(moments, chunk)

        def work() -> None:
            for tasks in calls:
                call(tasks, 1, threads)

        return Subject(name, work, _traffic_bytes(moments))

    names = isa_names()
    widest = NativeKernels()
    yield subject("copy loop", widest.traffic, "fp32", options.numel)
    for chunk in options.chunks:
        yield subject(f"copy loop, chunks of {chunk >> 10} Ki", widest.traffic, "fp32", chunk)
        yield subject(f"C++ fp32, chunks of {chunk >> 10} Ki", widest.update, "fp32", chunk)
    for isa in names[1:] or names:
        kernels = NativeKernels(isa)
        for moments in MOMENT_FORMATS:
            name = f"C++ {moments}" if isa == names[-1] else f"C++ {moments}, {isa}"
            yield subject(name, kernels.update, moments, options.numel)
    if options.numba:
        compiled: Kernels = load("numba")
        for moments in MOMENT_FORMATS:
            yield subject(f"numba {moments}", compiled.update, moments, options.numel)


def _traffic_bytes(moments: str) -> float:
    """Gradient 2, weight and residual 8, moments and scales twice."""
    form = MOMENT_FORMATS[moments]
    scales = 4 / form.block_numel if form.block_numel else 0
    return 10 + 4 * (form.itemsize + scales)


def _others(options: Options, threads: int) -> list[Subject]:
    """fp32 optimizers, with the passes from and to bf16 that a training step needs."""
    numel = options.numel
    gradient = torch.full((numel,), 1e-3, dtype=torch.bfloat16)
    weight = torch.zeros(numel, dtype=torch.bfloat16)
    found = []
    parameter = torch.nn.Parameter(torch.full((numel,), 0.01))
    parameter.grad = torch.zeros(numel)

    def subject(name: str, optimizer: Any, parameter: torch.nn.Parameter) -> Subject:
        def work() -> None:
            torch.set_num_threads(threads)
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)
            optimizer.step()
            with torch.no_grad():
                weight.copy_(parameter)

        # gradient 2 + 4 + 4, master 8, moments 16, weight from the master 4 + 2
        return Subject(name, work, 40)

    found.append(subject("torch fused", torch.optim.AdamW([parameter], lr=1e-4, fused=True), parameter))
    found.append(subject("torch loop", torch.optim.AdamW([parameter], lr=1e-4, foreach=False), parameter))
    if importlib.util.find_spec("deepspeed") is not None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

        found.append(subject("DeepSpeedCPUAdam", DeepSpeedCPUAdam([parameter], lr=1e-4), parameter))
    return found


def _take_turns(subjects: Sequence[Subject], rounds: int, planes: Planes) -> None:
    for number in range(rounds + 1):
        for subject in subjects:
            planes.clear()
            subject.run() if number == 0 else None  # compiles, touches memory, and fills the moments
            start = time.perf_counter()
            subject.run()
            if number > 0:
                subject.seconds.append(time.perf_counter() - start)


def _print(subjects: Sequence[Subject], threads: int, options: Options, console: Console) -> None:
    limit = subjects[0].median
    title = f"{options.numel >> 20} Mi parameters, {threads} thread{'s' if threads > 1 else ''}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("", no_wrap=True)
    for column in ("G params/s", "GB/s", "of the copy loop's params/s"):
        table.add_column(column, justify="right")
    for subject in subjects:
        rate = options.numel / subject.median / 1e9
        table.add_row(
            subject.name, f"{rate:.2f}", f"{rate * subject.bytes_per_parameter:.0f}", f"{limit / subject.median:.2f}"
        )
    console.print(table)


def _ratios(subjects: Sequence[Subject], threads: int) -> dict[str, float]:
    seconds = {subject.name: subject.median for subject in subjects}
    named = f"{threads} thread{'s' if threads > 1 else ''}"
    found = {f"exact / copy loop, {named}": seconds["copy loop"] / seconds["C++ fp32"]}
    for name, value in seconds.items():
        if name.startswith("C++ fp32, chunks"):
            found[f"exact / copy loop{name[8:]}, {named}"] = seconds["copy loop" + name[8:]] / value
        elif name.startswith("C++ fp32, "):
            found[f"exact / copy loop{name[8:]}, {named}"] = seconds["copy loop"] / value
    for name in ("torch fused", "DeepSpeedCPUAdam"):
        if name in seconds:
            found[f"exact / {name}, {named}"] = seconds[name] / seconds["C++ fp32"]
    found[f"int8 / exact, {named}"] = seconds["C++ fp32"] / seconds["C++ int8"]
    found[f"bf16 / exact, {named}"] = seconds["C++ fp32"] / seconds["C++ bf16"]
    for moments in MOMENT_FORMATS:
        if f"numba {moments}" in seconds:
            found[f"numba / C++ {moments}, {named}"] = seconds[f"C++ {moments}"] / seconds[f"numba {moments}"]
    return found


def _on_disk(options: Options, disk: Path, console: Console) -> dict[str, float]:
    """Updates per second of a model whose states rest on DISK and all else in HOST, from step() to the last write."""
    import tiermem

    width = 4096
    depth = max(2, options.numel // (width * width))
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
