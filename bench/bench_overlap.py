"""What overlaps: a training step on a timed accelerator, against the bounds of its resources.

A timed device sleeps for as long as an accelerator would compute and copy; CPU kernels, disk and Python run for real.
The model's blocks move their weights for real, touch a slice of them, and take the time of their arithmetic. Times
are in proportion to those of a machine with a 24 GB card, scaled so that this machine's measured update takes the share
that it would take there (FACTS: forward 2PT/F, backward 6PT/F with recompute, 2P over the link each way, update 26P/M):

    8 B on a card with 100 TFLOP/s in bf16, 25 GB/s links, 200 GB/s of host memory, at 4k, 16k and 64k tokens per step;
    30 B with optimizer states on disk, at 16k.

    python bench/bench_overlap.py [--blocks N] [--numel N] [--steps N] [--disk DIR]
        [--only NAME]
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import console, print_machine, table, verdict
from torch import nn

import tiermem
from tiermem.simulated import TimedDevice

FLOPS, LINK_BYTES_PER_S, MEMORY_BYTES_PER_S = 1e14, 25e9, 200e9
LIMIT = 1.1
TOUCHED_BYTES = 4096
BLOCKS_ON_DEVICE = 12
"""What the device budget holds: half of a 24 GB card if the model is one of 30 B in 60 layers."""


@dataclass(frozen=True)
class Case:
    name: str
    tokens: int
    states: str


CASES = [
    Case("8 B, 4k tokens", 4096, "host"),
    Case("8 B, 16k tokens", 16384, "host"),
    Case("8 B, 64k tokens", 65536, "host"),
    Case("30 B on disk, 16k tokens", 16384, "disk"),
]


@dataclass(frozen=True)
class Times:
    """Seconds per block."""

    forward: float
    backward: float
    link: float  # weights, one way
    update: float  # measured


class _Card(TimedDevice):
    """With gradients that are there already: making them is the accelerator's work, not the main thread's."""

    def __init__(self, options: argparse.Namespace, times: Times) -> None:
        link = 2 * options.numel / max(times.link, 1e-9)
        super().__init__(bytes_in_per_s=link, bytes_out_per_s=link)
        self.zeros = torch.zeros(options.numel, dtype=torch.bfloat16)


class _Compute(torch.autograd.Function):
    """Takes the time of a block's arithmetic and touches a slice of its weights."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, device: _Card, times: Times) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.device, ctx.times = device, times
        device.compute(times.forward, partial(ctypes.string_at, weight.data_ptr(), TOUCHED_BYTES))
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        ctx.device.compute(ctx.times.backward, partial(ctypes.string_at, weight.data_ptr(), TOUCHED_BYTES))
        return gradient, ctx.device.zeros[: weight.numel()], None, None


class Block(nn.Module):
    def __init__(self, numel: int, device: _Card, times: Times) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16))
        self._device, self._times = device, times

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _Compute.apply(hidden, self.weight, self._device, self._times)


def main() -> None:
    options = _arguments()
    torch.set_num_threads(1)
    print_machine()
    rows = []
    for case in [case for case in CASES if options.only in case.name]:
        update = _measured_update(options, case)
        times = _scaled(case, update)
        measured = {}
        for name, eager, serial in (("clipped", False, False), ("in backward", True, False), ("serial", False, True)):
            measured[name], overhead = _run(options, case, times, eager=eager, serial=serial)
            if name == "clipped":
                per_block = overhead
        # The machine's speed drifts: the bounds are those of the faster of two measurements, around the runs.
        bounds = _bounds(case, replace(times, update=min(update, _measured_update(options, case))), options.blocks)
        rows.append(
            [
                case.name,
                f"{bounds['clipped']:.3f}",
                f"{measured['clipped']:.3f} ({measured['clipped'] / bounds['clipped']:.2f})",
                f"{bounds['in backward']:.3f}",
                f"{measured['in backward']:.3f} ({measured['in backward'] / bounds['in backward']:.2f})",
                f"{measured['serial']:.3f}",
                f"{per_block * 1e3:.2f}",
            ]
        )
        verdict(
            f"{case.name}: step / (backward + max(forward, update))", measured["clipped"] / bounds["clipped"], LIMIT
        )
        verdict(
            f"{case.name}: in backward / max(forward + backward, update)",
            measured["in backward"] / bounds["in backward"],
            LIMIT,
        )
    columns = ["", "bound, clipped", "step (ratio)", "bound, in backward", "step (ratio)", "serial", "ms per block"]
    table(f"{options.blocks} blocks of {options.numel / 1e6:.0f} M parameters; seconds per step", columns, rows)
    console.print("ms per block: the main thread's own CPU time, forward + backward + step")


def _bounds(case: Case, times: Times, blocks: int) -> dict[str, float]:
    forward = max(times.forward, times.link) * blocks
    backward = max(times.backward, times.link) * blocks
    update = times.update * blocks
    return {"clipped": backward + max(forward, update), "in backward": max(forward + backward, update)}


def _scaled(case: Case, update: float) -> Times:
    """The arithmetic and the link, in proportion to the update of the same parameters there."""
    there = 26 / MEMORY_BYTES_PER_S  # seconds per parameter
    if case.states == "disk":
        there = 10 / 5e9  # a drive that reads and writes 5 GB/s at the same time
    scale = update / there
    return Times(
        forward=2 * case.tokens / FLOPS * scale,
        backward=6 * case.tokens / FLOPS * scale,
        link=2 / LINK_BYTES_PER_S * scale,
        update=update,
    )


def _model(options: argparse.Namespace, device: _Card, times: Times) -> nn.Sequential:
    return nn.Sequential(*(Block(options.numel, device, times) for _ in range(options.blocks)))


def _offloaded(
    options: argparse.Namespace, case: Case, times: Times, directory: Path, *, eager: bool
) -> tuple[nn.Module, torch.optim.Optimizer, _Card]:
    device = _Card(options, times)
    model = tiermem.offload(
        _model(options, device, times),
        memory=tiermem.Memory(
            device=BLOCKS_ON_DEVICE * 2 * options.numel, disk=directory if case.states == "disk" else None
        ),
        policy=tiermem.Policy(weights="host", states=case.states, update_in_backward=eager, threads=options.threads),
        device=device,
    )
    return model, tiermem.AdamW(model.parameters(), lr=1e-6), device


def _measured_update(options: argparse.Namespace, case: Case) -> float:
    """Seconds per block of updates with nothing else going on."""
    with tempfile.TemporaryDirectory(prefix="tiermem-bench-", dir=options.disk) as directory:
        model, optimizer, _ = _offloaded(options, case, Times(0, 0, 0, 0), Path(directory), eager=False)
        seconds = []
        for _ in range(4):
            model(torch.ones(1, requires_grad=True)).sum().backward()
            tiermem.synchronize(model)
            start = time.perf_counter()
            optimizer.step()
            tiermem.synchronize(model)
            seconds.append(time.perf_counter() - start)
            optimizer.zero_grad()
        tiermem.close(model)
    return statistics.median(seconds[1:]) / options.blocks


def _run(options: argparse.Namespace, case: Case, times: Times, *, eager: bool, serial: bool) -> tuple[float, float]:
    """Median seconds per step, and the main thread's CPU seconds per block."""
    with tempfile.TemporaryDirectory(prefix="tiermem-bench-", dir=options.disk) as directory:
        model, optimizer, device = _offloaded(options, case, times, Path(directory), eager=eager)
        seconds, cpu = [], []
        for _ in range(options.steps + 2):
            start, busy = time.perf_counter(), time.thread_time()
            output = model(torch.ones(1, requires_grad=True))
            if serial:
                device.synchronize()
            output.sum().backward()
            device.synchronize()
            if not eager:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if serial:
                tiermem.synchronize(model)
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)
            cpu.append((time.thread_time() - busy) / options.blocks)
        tiermem.synchronize(model)
        tiermem.close(model)
    return statistics.median(seconds[2:]), statistics.median(cpu[2:])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=32, help="an 8 B llama has 32 layers")
    parser.add_argument("--numel", type=int, default=8 << 20)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of the update; the other core plays the accelerator")
    parser.add_argument("--disk", type=Path, default=Path.cwd())
    parser.add_argument("--only", default="", help="cases whose name has this")
    return parser.parse_args()


if __name__ == "__main__":
    main()
