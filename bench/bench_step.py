"""A training step of a 218 M parameter llama: plain torch, and tiermem with everything on HOST and on DISK.

bf16, activation checkpointing, clipping, AdamW on fp32 masters. Each runs in a process of its own, one after the other,
in several rounds; figures are medians over all timed steps.

    python bench/bench_step.py [--disk DIR] [--rounds N] [--steps N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import console, print_machine, run_child, spread, table, verdict

SUBJECTS = ("plain", "host", "disk")
STEP_LIMIT = 1.1
"""On HOST a step may take this many times plain torch's."""

LR, CLIP = 1e-4, 1.0


def main() -> None:
    options = _arguments()
    if options.child:
        print(json.dumps(_child(options)))
        return
    print_machine()
    with tempfile.TemporaryDirectory(prefix="tiermem-bench-", dir=options.disk) as disk:
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in options.only}
        for number in range(options.rounds):
            for name in options.only:
                console.print(f"round {number + 1}/{options.rounds}: {name} ...")
                results[name].append(run_child(__file__, _child_arguments(options, name, disk)))
    _print(results, options)


def _print(results: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    seconds = {name: [s for run in runs for s in run["seconds"]] for name, runs in results.items()}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    peaks = {name: max(run["peak_bytes"] for run in runs) for name, runs in results.items()}
    above = {name: max(run["peak_bytes"] - run["baseline_bytes"] for run in runs) for name, runs in results.items()}

    def ratio(values: dict[str, float], name: str) -> str:
        return f"{values[name] / values['plain']:.2f}" if "plain" in values else ""

    rows = [
        [
            "plain torch" if name == "plain" else f"tiermem, all on {name.upper()}",
            spread(seconds[name]),
            ratio(medians, name),
            f"{peaks[name] / 1e9:.2f}",
            f"{above[name] / 1e9:.2f}",
            ratio(above, name),
            f"{results[name][-1]['losses'][-1]:.4f}",
        ]
        for name in results
    ]
    shown = f"llama {options.size}, bf16, batch {options.batch} x {options.length} tokens, "
    shown += f"{len(next(iter(seconds.values())))} steps each"
    columns = ["", "s per step", "ratio", "peak GB", "above imports", "ratio", "last loss"]
    table(shown, columns, rows)
    for name, runs in results.items():
        if runs[-1]["kernels"]:
            console.print(
                f"{name}: {runs[-1]['kernels']}, engine {runs[-1]['engine'] or 'none'}, "
                f"disk per step {runs[-1]['disk_bytes_per_step'] / 1e9:.2f} GB"
            )
    if {"plain", "host"} <= results.keys():
        verdict("step on HOST / plain torch", medians["host"] / medians["plain"], STEP_LIMIT)
        verdict("peak above imports on HOST / plain torch", above["host"] / above["plain"], 1.0)


def _child(options: argparse.Namespace) -> dict[str, Any]:
    import llama
    import torch
    from transformers import LlamaForCausalLM  # noqa: F401  counted in the baseline, not in the peak above it

    import tiermem
    from tiermem.process import peak_memory_bytes, return_freed_tensors

    return_freed_tensors()  # for all subjects alike: what is measured is what they hold, not holes in the heap
    device = torch.device("cpu")
    model = llama.build(options.size)
    baseline_bytes = peak_memory_bytes()
    if options.child == "plain":
        llama.materialise(model, device)
        llama.initialise(model, offloaded=False)
        optimizer: Any = llama.PlainAdamW(model, LR, CLIP)
    else:
        on_disk = options.child == "disk"
        memory = tiermem.Memory(
            device=options.device_memory,
            host=options.host_memory if on_disk else None,
            disk=options.disk if on_disk else None,
        )
        policy = tiermem.Policy(weights=tiermem.Tier(options.child), states=tiermem.Tier(options.child))
        model = tiermem.offload(model, memory=memory, policy=policy, device=device)
        llama.initialise(model, offloaded=True)
        optimizer = tiermem.AdamW(model.parameters(), lr=LR)
    seconds, losses = [], []
    steps = options.warmup + options.steps
    bytes_before = 0
    for index, tokens in enumerate(llama.batches(options.size, steps, (options.batch, options.length), device)):
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if options.child != "plain":
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if options.child != "plain":
            optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        if index == options.warmup - 1 and options.child != "plain":
            bytes_before = _disk_bytes(
                model
            )  # waits for the updates in flight: the first timed step has none to wait for
            seconds.clear()
        elif index == options.warmup - 1:
            seconds.clear()
    result = {"seconds": seconds, "losses": losses, "peak_bytes": peak_memory_bytes(), "baseline_bytes": baseline_bytes}
    if options.child == "plain":
        return {**result, "kernels": None, "engine": None, "disk_bytes_per_step": 0}
    start = time.perf_counter()
    tiermem.synchronize(model)
    # The last step's updates, which no next forward hides, are shared out over all steps.
    left = (time.perf_counter() - start) / len(seconds)
    report = tiermem.report(model)
    return {
        **result,
        "seconds": [value + left for value in seconds],
        "kernels": report.kernels,
        "engine": report.engine,
        "disk_bytes_per_step": (_disk_bytes(model) - bytes_before) / len(seconds),
    }


def _disk_bytes(model: Any) -> int:
    import tiermem

    report = tiermem.report(model)
    return report.bytes_read + report.bytes_written


def _child_arguments(options: argparse.Namespace, name: str, disk: str) -> list[str]:
    arguments = ["--child", name, "--disk", disk]
    for key in ("size", "batch", "length", "steps", "warmup", "host_memory", "device_memory"):
        arguments += [f"--{key.replace('_', '-')}", str(getattr(options, key))]
    return arguments


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", type=Path, default=Path.cwd(), help="directory for what rests on DISK")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="timed steps per round")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--size", default="218M")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--host-memory", default="512MiB", help="host budget when all is on DISK")
    parser.add_argument("--device-memory", default="512MiB", help="device budget; on a CPU this is process memory too")
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--child", choices=SUBJECTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.disk.is_dir():
        parser.error(f"{options.disk.absolute()} is not a directory")
    return options


if __name__ == "__main__":
    main()
