"""What bench_step measures: one training loop as plain torch, tiermem in several placements, and DeepSpeed run it.

Each function runs in a process of its own and returns what can be written as JSON: per step the seconds of forward,
backward and optimizer, the losses, and the process's memory before the model has values and at its peak.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import time
from collections.abc import Callable
from typing import Any

LR, CLIP = 1e-4, 1.0

TIERED: dict[str, dict[str, Any]] = {
    "host": {"weights": "host", "states": "host"},
    "half": {"weights": "host", "states": "auto"},
    "disk": {"weights": "disk", "states": "disk"},
    "disk-eager": {"weights": "disk", "states": "disk", "update_in_backward": True},
    "disk-serial": {"weights": "disk", "states": "disk"},
}
"""Policies. ``half`` gets a host budget that holds half of the states; what is on DISK gets ``--host-memory``. In
backward nothing is clipped. ``serial`` is the same work with one buffer of each kind and a wait after each phase."""

SUBJECTS = ("plain", "plain-kept", "deepspeed", *TIERED)

Step = Callable[[Any], tuple[float, list[float]]]
"""One training step on these tokens: its loss, and the clock after forward, backward and optimizer."""


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The subject named by ``options.child``; ``stream`` measures the disk, ``bare`` the disk beside compute."""
    if options.child == "stream":
        return _stream(options)
    import torch
    from transformers import LlamaForCausalLM  # noqa: F401  counted in the baseline, not in the peak above it

    torch.set_num_threads(options.threads)
    if options.child == "plain":
        return _plain(options)
    if options.child == "plain-kept":
        from tiermem.process import keep_freed_tensors

        keep_freed_tensors(1 << 30)
        return _plain(options)
    if options.child == "bare":
        return _bare(options)
    if options.child == "deepspeed":
        return _deepspeed(options)
    return _tiered(options)


def _timed(options: argparse.Namespace, step: Step, warmed_up: Callable[[], Any] = lambda: None) -> dict[str, Any]:
    import llama
    import torch

    phases: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
    losses = []
    steps = options.warmup + options.steps
    for index, tokens in enumerate(llama.batches(options.size, steps, (options.batch, options.length), _cpu())):
        if index == options.warmup:
            warmed_up()
        start = time.perf_counter()
        loss, clock = step(tokens)
        losses.append(loss)
        if index >= options.warmup:
            for values, begin, end in zip(phases.values(), [start, *clock], clock, strict=False):
                values.append(end - begin)
    assert torch.isfinite(torch.tensor(losses)).all()
    return {
        "phases": phases,
        "losses": losses,
        "seconds": [sum(values) for values in zip(*phases.values(), strict=True)],
    }


def _cpu() -> Any:
    import torch

    return torch.device("cpu")


def _memory(baseline_bytes: int) -> dict[str, int]:
    from tiermem.process import peak_memory_bytes

    return {"baseline_bytes": baseline_bytes, "peak_bytes": peak_memory_bytes()}


def _bare(options: argparse.Namespace) -> dict[str, Any]:
    """A step's compute and a step's bytes, which nothing connects: what the machine can do of both at once.

    The plain loop without its optimizer; beside backward ``options.bytes_in_backward`` are read and written in halves,
    beside forward the rest of ``options.bytes``; all of them beside both if the first is None.
    """
    import llama

    from tiermem.background import Background

    model = llama.build(options.size)
    llama.materialise(model, _cpu())
    llama.initialise(model, offloaded=False)
    both, beside_backward = options.bytes, options.bytes_in_backward
    background = Background("bare")
    disk = _BareDisk(options.disk)
    background.run(disk.fill())

    def step(tokens: Any) -> tuple[float, list[float]]:
        moving = background.submit(disk.move(both - (beside_backward or 0)))
        loss = model(input_ids=tokens, labels=tokens).loss
        if beside_backward is not None:
            moving.result()
            moving = background.submit(disk.move(beside_backward))
        clock = [time.perf_counter()]
        loss.backward()
        moving.result()
        clock.append(time.perf_counter())
        model.zero_grad()
        return loss.item(), [*clock, time.perf_counter()]

    try:
        return _timed(options, step)
    finally:
        background.close()
        disk.close()


class _BareDisk:
    """One file that is read and written at the same time, in pieces as large as chunks and half of it apart."""

    PIECE_BYTES, PIECES, BUFFERS = 8 << 20, 256, 8

    def __init__(self, directory: str) -> None:
        from pathlib import Path

        from tiermem.io import select
        from tiermem.slab import SlabPool

        self._engine = select([directory], "auto")
        self._slabs = SlabPool(self.PIECE_BYTES, self.BUFFERS, self._engine.pin)
        self._file = self._engine.open(Path(directory) / "bare", create=True)
        self._position = 0

    async def fill(self) -> None:
        async with self._slabs.loan() as slab:
            for piece in range(self.PIECES):
                await self._engine.write(self._file, piece * self.PIECE_BYTES, slab.view)

    async def move(self, nbytes: int) -> None:
        count = round(nbytes / self.PIECE_BYTES)
        await asyncio.gather(*(self._piece(self._position + number) for number in range(count)))
        self._position += count

    async def _piece(self, number: int) -> None:
        move = self._engine.write if number % 2 else self._engine.read
        place = (number // 2 + number % 2 * self.PIECES // 2) % self.PIECES
        async with self._slabs.loan() as slab:
            await move(self._file, place * self.PIECE_BYTES, slab.view)

    def close(self) -> None:
        self._file.close()
        self._file.path.unlink()
        self._slabs.close()
        self._engine.close()


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    import llama

    from tiermem.process import peak_memory_bytes

    model = llama.build(options.size)
    baseline_bytes = peak_memory_bytes()
    llama.materialise(model, _cpu())
    llama.initialise(model, offloaded=False)
    optimizer = llama.PlainAdamW(model, LR, CLIP)

    def step(tokens: Any) -> tuple[float, list[float]]:
        loss = model(input_ids=tokens, labels=tokens).loss
        clock = [time.perf_counter()]
        loss.backward()
        clock.append(time.perf_counter())
        optimizer.step()
        return loss.item(), [*clock, time.perf_counter()]

    return {**_timed(options, step), **_memory(baseline_bytes)}


def _deepspeed(options: argparse.Namespace) -> dict[str, Any]:
    """ZeRO-3 with parameters and optimizer states in CPU memory, on its CPU accelerator."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import deepspeed
    import llama

    from tiermem.process import peak_memory_bytes

    model = llama.build(options.size)
    baseline_bytes = peak_memory_bytes()
    llama.materialise(model, _cpu())
    llama.initialise(model, offloaded=False)
    offload = {"device": "cpu", "pin_memory": False}
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": options.batch,
            "bf16": {"enabled": True},
            "gradient_clipping": CLIP,
            "optimizer": {"type": "AdamW", "params": {"lr": LR}},
            "zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": offload},
        },
    )

    def step(tokens: Any) -> tuple[float, list[float]]:
        loss = engine(input_ids=tokens, labels=tokens).loss
        clock = [time.perf_counter()]
        engine.backward(loss)
        clock.append(time.perf_counter())
        engine.step()
        return loss.item(), [*clock, time.perf_counter()]

    return {**_timed(options, step), **_memory(baseline_bytes)}


def _tiered(options: argparse.Namespace) -> dict[str, Any]:
    import llama
    import torch

    import tiermem
    from tiermem.process import peak_memory_bytes

    serial, eager = options.child == "disk-serial", options.child == "disk-eager"
    if serial:
        _one_of_each()
    model = llama.build(options.size)
    baseline_bytes = peak_memory_bytes()
    numel = sum(parameter.numel() for parameter in model.parameters())
    uses_disk = options.child != "host"
    host = options.host_memory if options.child.startswith("disk") else None
    if options.child == "half":
        host = (2 + 4 + 10 // 2) * numel + (96 << 20)  # weights, gradients, half of the states; staging and padding
    model = tiermem.offload(
        model,
        memory=tiermem.Memory(device=options.device_memory, host=host, disk=options.disk) if uses_disk else None,
        policy=tiermem.Policy(**TIERED[options.child], threads=options.threads),
        device="cpu",
    )
    llama.initialise(model, offloaded=True)
    optimizer = tiermem.AdamW(model.parameters(), lr=LR)
    moved: list[int] = []

    def pause() -> None:
        if serial:
            tiermem.synchronize(model)

    def step(tokens: Any) -> tuple[float, list[float]]:
        loss = model(input_ids=tokens, labels=tokens).loss
        pause()
        clock = [time.perf_counter()]
        before = _disk_bytes(model)
        loss.backward()
        pause()
        moved.append(_disk_bytes(model) - before)
        clock.append(time.perf_counter())
        if not eager:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        pause()
        return loss.item(), [*clock, time.perf_counter()]

    start_bytes = 0

    def warmed_up() -> None:
        nonlocal start_bytes
        start_bytes = _disk_bytes(model)
        moved.clear()

    # Nothing waits between steps: each ends the updates of the one before, the first those of the last to warm up.
    result = _timed(options, step, warmed_up)
    end_bytes = _disk_bytes(model)
    tiermem.synchronize(model)
    report = tiermem.report(model)
    result |= {
        "kernels": report.kernels,
        "engine": report.engine,
        "disk_bytes": (end_bytes - start_bytes) / options.steps,
        "disk_bytes_in_backward": sum(moved) / options.steps,
        "states_in_host": sum(b.states_in_host * b.numel for b in report.blocks) / sum(b.numel for b in report.blocks),
        **_memory(baseline_bytes),
    }
    if options.child == "host":
        result["update"] = [_update_alone(options, model, optimizer) for _ in range(3)]
    tiermem.close(model)
    return result


def _one_of_each() -> None:
    """One slab, weight slot and gradient slot: nothing can overlap."""
    from tiermem import placement

    placement.STAGING_SLABS = placement.SLOTS_DEFAULT_MAX = placement.GRADIENT_SLOTS = 1


def _update_alone(options: argparse.Namespace, model: Any, optimizer: Any) -> float:
    """Seconds of all updates with nothing beside them."""
    import llama

    import tiermem

    (tokens,) = llama.batches(options.size, 1, (options.batch, options.length), _cpu())
    model(input_ids=tokens, labels=tokens).loss.backward()
    tiermem.synchronize(model)
    start = time.perf_counter()
    optimizer.step()
    tiermem.synchronize(model)
    seconds = time.perf_counter() - start
    optimizer.zero_grad()
    return seconds


def _disk_bytes(model: Any) -> int:
    import tiermem

    report = tiermem.report(model, wait=False)
    return report.bytes_read + report.bytes_written


def _stream(options: argparse.Namespace) -> dict[str, Any]:
    """What the disk can do: bytes per second of reading and writing at the same time, at the best of a few settings."""
    from tiermem.bench_io import Options, measure
    from tiermem.io import select

    engine = select([options.disk], "auto")
    name = engine.name
    engine.close()
    bench = measure(
        options.disk,
        Options((name,), (4 << 20, 8 << 20), (8, 16), file_bytes=2 << 30, repeats=2, stream_bytes=0),
    )
    assert bench.best is not None
    return {"engine": name, "bytes_per_second": max(m.median for m in bench.measurements if m.mode == "mixed")}
