"""Everything that needs an accelerator, in one script: placements against plain torch, and a 1 B parameter llama.

    python bench/check_gpu.py [--disk DIR] [--steps N] [--size 1B] [--quick]

1. ``tiermem verify`` on the accelerator: every placement, fp32 and bf16.
2. A llama of 1 B parameters, bf16, clipped AdamW: plain torch with everything on the device; then tiermem with weights
   on DEVICE and states on HOST, with both on HOST, and with both on DISK. Losses are compared; seconds, device memory
   and process memory printed.
Exit status 1 when something differs; with no accelerator it says so, checks nothing, and exits with 2.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama
import torch
from common import console, print_machine, table

import tiermem
from tiermem import verify
from tiermem.process import peak_memory_bytes

LR, CLIP = 1e-4, 1.0
LOSS_TOLERANCE = 2e-2
"""Of a loss near 10, after a few steps in bf16: two plain torch optimizers that round differently part this much."""


@dataclass(frozen=True)
class Measured:
    name: str
    seconds: list[float]
    losses: list[float]
    device_bytes: int
    process_bytes: int  # the peak so far: it never falls
    note: str = ""


def main() -> None:
    options = _arguments()
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        console.print("There is no accelerator that torch can use here: nothing was checked.")
        sys.exit(2)
    print_machine()
    with tempfile.TemporaryDirectory(prefix="tiermem-check-", dir=options.disk) as disk:
        passed = verify.run(console, steps=options.steps, disk=Path(disk), device=str(accelerator))
        if not options.quick:
            passed &= _llama(options, Path(disk), torch.device(accelerator))
    console.print("[green]passed[/]" if passed else "[bold red]FAILED[/]")
    sys.exit(0 if passed else 1)


def _llama(options: argparse.Namespace, disk: Path, device: torch.device) -> bool:
    count = sum(parameter.numel() for parameter in llama.build(options.size).parameters())
    free_bytes = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0
    measured = []
    if 18 * count < free_bytes:
        measured.append(_plain(options, device))
    else:
        console.print(f"plain torch does not fit: {18 * count / 1e9:.0f} GB needed, {free_bytes / 1e9:.0f} GB free")
    device_tier, host, disk_tier = tiermem.Tier.DEVICE, tiermem.Tier.HOST, tiermem.Tier.DISK
    for weights, states in ((device_tier, host), (host, host), (disk_tier, disk_tier)):
        measured.append(_offloaded(options, disk, device, weights, states))
    reference = measured[0]
    rows, passed = [], True
    for one in measured:
        difference = max(abs(a - b) for a, b in zip(one.losses, reference.losses, strict=True))
        passed &= difference <= LOSS_TOLERANCE
        rows.append(
            [
                one.name,
                f"{statistics.median(one.seconds):.3f}",
                f"{one.device_bytes / 1e9:.2f}",
                f"{one.process_bytes / 1e9:.2f}",
                f"{one.losses[-1]:.4f}",
                f"{difference:.1e}",
                one.note,
            ]
        )
    # Peak memory of the process never falls, so only the first that needs more than those before it shows.
    title = f"llama {options.size}: {count / 1e6:.0f} M parameters, batch {options.batch} x {options.length} tokens; "
    title += "homes of weights, states"
    columns = ["", "s/step", "device GB", "peak GB", "last loss", "differs", "waited per step"]
    table(title, columns, rows)
    tiered = [one.losses for one in measured if one is not reference or "tiermem" in one.name]
    same = all(losses == tiered[0] for losses in tiered)
    console.print(f"losses of the placements: {'the same bits' if same else '[red]they differ[/]'}")
    return passed and same


def _plain(options: argparse.Namespace, device: torch.device) -> Measured:
    model = llama.build(options.size)
    llama.materialise(model, device)
    llama.initialise(model, offloaded=False)
    seconds, losses = _train(options, model, llama.PlainAdamW(model, LR, CLIP), device, plain=True)
    device_bytes = _device_peak(device)
    del model
    _forget(device)
    return Measured("plain torch", seconds, losses, device_bytes, peak_memory_bytes())


def _offloaded(
    options: argparse.Namespace, disk: Path, device: torch.device, weights: tiermem.Tier, states: tiermem.Tier
) -> Measured:
    memory = tiermem.Memory(device=options.device_memory, host=options.host_memory, disk=disk)
    policy = tiermem.Policy(weights=weights, states=states)
    model = tiermem.offload(llama.build(options.size), memory=memory, policy=policy, device=device)
    try:
        llama.initialise(model, offloaded=True)
        optimizer = tiermem.AdamW(model.parameters(), lr=LR)
        before = dict(tiermem.report(model).seconds_waited)
        seconds, losses = _train(options, model, optimizer, device, plain=False)
        tiermem.synchronize(model)
        waited = tiermem.report(model).seconds_waited
        parts = {name: (value - before.get(name, 0.0)) / len(losses) for name, value in waited.items()}
        note = ", ".join(f"{name} {value:.2f}" for name, value in parts.items() if value >= 0.005)
        name = f"tiermem {weights.name}, {states.name}"
        device_bytes = _device_peak(device)
    finally:
        tiermem.close(model)
    del model
    _forget(device)
    return Measured(name, seconds, losses, device_bytes, peak_memory_bytes(), note)


def _train(
    options: argparse.Namespace, model: Any, optimizer: Any, device: torch.device, *, plain: bool
) -> tuple[list[float], list[float]]:
    """Seconds of each step after the first two, and all losses."""
    seconds, losses = [], []
    for tokens in llama.batches(options.size, options.steps, (options.batch, options.length), device):
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if not plain:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if not plain:
            optimizer.zero_grad()
        losses.append(loss.item())
        torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds[2:] or seconds, losses


def _device_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", type=Path, default=Path.cwd(), help="directory for what rests on DISK")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--size", choices=list(llama.SIZES), default="1B")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--host-memory", default=None, help="host budget [default: what is free]")
    parser.add_argument("--device-memory", default=None, help="device budget [default: what is free]")
    parser.add_argument("--quick", action="store_true", help="only the placements, not the llama")
    return parser.parse_args()


if __name__ == "__main__":
    main()
