"""A training step of a 218 M parameter llama: plain torch, tiermem in several placements, DeepSpeed, and their bounds.

bf16, activation checkpointing, clipping, AdamW on fp32 masters. Each runs in a process of its own, one after the other,
in several rounds; figures are medians over all timed steps. The bounds are measured in the same run: computing alone
(the plain loop without its optimizer), updating alone (all states in memory, nothing beside it), and the disk alone
(the bytes of a step at the speed of the disk when it reads and writes at the same time). "Side by side" is what the
machine can do: the same compute beside the same bytes, without updates and without a runtime between them.

    python bench/bench_step.py [--disk DIR] [--rounds N] [--steps N] [--length N] [--only NAME,...]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import subjects
import torch
from common import console, print_machine, run_child, spread, table, verdict

HOST_LIMIT = 0.8
"""On HOST a step may take this many times plain torch's."""
BOUND_LIMIT = 1.15
"""With anything on DISK, this many times the busiest resource's time."""
DEEPSPEED_SPEED, DEEPSPEED_MEMORY = 2.2, 0.6
"""On HOST: times its speed, at least, with this share of its peak memory, at most."""

Runs = dict[str, list[dict[str, Any]]]

TITLES = {
    "plain": "plain torch",
    "plain-kept": "  keeping freed memory, as tiermem does",
    "deepspeed": "DeepSpeed ZeRO-3, all in CPU memory",
    "host": "tiermem, all on HOST",
    "half": "tiermem, half of the states on DISK",
    "disk": "tiermem, all on DISK",
    "disk-eager": "  update_in_backward, no clipping",
    "disk-serial": "  one thing after another",
}


def main() -> None:
    options = _arguments()
    if options.child:
        print(json.dumps(subjects.run(options)))
        return
    print_machine()
    names = [*options.only, *(["stream"] if any(_on_disk(name) for name in options.only) else [])]
    with tempfile.TemporaryDirectory(prefix="tiermem-bench-", dir=options.disk) as disk:
        runs: Runs = {name: [] for name in names}
        bounded = [name for name in names if _on_disk(name) and name != "disk-serial"] if "plain" in names else []
        bare: Runs = {name: [] for name in bounded}
        for number in range(options.rounds):
            for name in names:
                console.print(f"round {number + 1}/{options.rounds}: {name} ...")
                runs[name].append(run_child(__file__, _child_arguments(options, name, disk)))
                if name in bare:
                    arguments = _child_arguments(options, "bare", disk) + _bytes_arguments(name, runs[name][-1])
                    bare[name].append(run_child(__file__, arguments))
    stream = runs.pop("stream", [])
    _print_steps(runs, options)
    if "plain" in runs:
        _print_host(runs)
        if stream:
            _print_bounds(runs, bare, statistics.median(run["bytes_per_second"] for run in stream))


def _on_disk(name: str) -> bool:
    return name in subjects.TIERED and name != "host"


def _median(runs: Runs, name: str, phase: str | None = None) -> float:
    """Seconds of a whole step, or of one phase."""
    return statistics.median(s for run in runs[name] for s in (run["phases"][phase] if phase else run["seconds"]))


def _update_alone(runs: Runs) -> float:
    return statistics.median(s for run in runs["host"] for s in run["update"]) if "host" in runs else 0.0


def _peak_bytes(runs: Runs, name: str) -> int:
    return max(run["peak_bytes"] for run in runs[name])


def _above_bytes(runs: Runs, name: str) -> int:
    return max(run["peak_bytes"] - run["baseline_bytes"] for run in runs[name])


def _print_steps(runs: Runs, options: argparse.Namespace) -> None:
    def of_plain(value: float, plain: float | None) -> str:
        return "" if plain is None else f"{value / plain:.2f}"

    plain = _median(runs, "plain") if "plain" in runs else None
    plain_above = _above_bytes(runs, "plain") if "plain" in runs else None
    rows = [
        [
            TITLES[name],
            spread([seconds for run in runs[name] for seconds in run["seconds"]]),
            of_plain(_median(runs, name), plain),
            f"{_peak_bytes(runs, name) / 1e9:.2f}",
            f"{_above_bytes(runs, name) / 1e9:.2f}",
            of_plain(_above_bytes(runs, name), plain_above),
            f"{runs[name][-1]['losses'][-1]:.4f}",
        ]
        for name in runs
    ]
    steps = sum(len(run["seconds"]) for run in next(iter(runs.values())))
    shown = f"llama {options.size}, bf16, batch {options.batch} x {options.length} tokens, {steps} steps each"
    table(shown, ["", "s per step", "ratio", "peak GB", "above imports", "ratio", "last loss"], rows)
    for name in (name for name in runs if name in subjects.TIERED):
        last = runs[name][-1]
        console.print(
            f"{name}: {last['kernels']}, engine {last['engine'] or 'none'}, disk per step "
            f"{last['disk_bytes'] / 1e9:.2f} GB, {last['states_in_host']:.0%} of the states in HOST"
        )


def _print_host(runs: Runs) -> None:
    if "host" not in runs:
        return
    verdict("step on HOST / plain torch", _median(runs, "host") / _median(runs, "plain"), HOST_LIMIT)
    verdict("peak above imports on HOST / plain torch", _above_bytes(runs, "host") / _above_bytes(runs, "plain"), 1.0)
    # On a CPU both need all cores: one beside the other takes as long as one after the other.
    floor = _median(runs, "plain", "forward") + _median(runs, "plain", "backward") + _update_alone(runs)
    step = _median(runs, "host")
    console.print(f"compute alone + update alone: {floor:.3f} s; step on HOST / their sum: {step / floor:.2f}")
    if "deepspeed" in runs:
        ratio = _median(runs, "host") / _median(runs, "deepspeed")
        verdict(f"step on HOST / DeepSpeed (its speed x {1 / ratio:.2f})", ratio, 1 / DEEPSPEED_SPEED)
        memory = _peak_bytes(runs, "host") / _peak_bytes(runs, "deepspeed")
        verdict("peak memory on HOST / DeepSpeed", memory, DEEPSPEED_MEMORY)


def _print_bounds(runs: Runs, bare: Runs, disk_speed: float) -> None:
    forward, backward = (_median(runs, "plain", phase) for phase in ("forward", "backward"))
    update = _update_alone(runs)
    rows, verdicts = [], []
    for name in (name for name in runs if _on_disk(name)):
        moved = statistics.median(run["disk_bytes"] for run in runs[name])
        in_backward = statistics.median(run["disk_bytes_in_backward"] for run in runs[name])
        disk = moved / disk_speed
        largest = max(forward + backward, update, disk)
        # With clipping no update may begin before backward has ended.
        clipped = max(backward, in_backward / disk_speed)
        clipped += max(forward, update, (moved - in_backward) / disk_speed)
        step = _median(runs, name)
        bound = largest if name == "disk-eager" else clipped
        side_by_side = _median(bare, name) if name in bare else None
        rows.append(
            [
                name,
                f"{forward + backward:.3f}",
                f"{update:.3f}",
                f"{moved / 1e9:.2f} GB, {disk:.3f}",
                f"{step:.3f}",
                f"{step / largest:.2f}",
                f"{step / bound:.2f}",
                f"{side_by_side:.3f}" if side_by_side else "",
                f"{step / side_by_side:.2f}" if side_by_side else "",
            ]
        )
        if side_by_side:
            verdicts.append((f"{name}: step / largest of what each takes alone", step / largest))
            if bound is clipped:
                verdicts.append((f"{name}: step / (backward + largest of the rest, alone)", step / clipped))
            verdicts.append((f"{name}: step / the same compute and bytes side by side", step / side_by_side))
    columns = ["seconds", "compute", "update", "disk", "step", "/ largest", "/ own bound", "side by side", "/ it"]
    table(f"bounds, each alone; the disk reads and writes {disk_speed / 1e9:.2f} GB/s at the same time", columns, rows)
    for what, value in verdicts:
        verdict(what, value, BOUND_LIMIT)
    if {"host", "half", "disk"} <= runs.keys():
        seconds = [_median(runs, name) for name in ("host", "half", "disk")]
        console.print("half lies between HOST and DISK: " + ("yes" if seconds == sorted(seconds) else "[red]no[/]"))


def _bytes_arguments(name: str, run: dict[str, Any]) -> list[str]:
    """For `bare`: as much as this run moved, and when it could be moved at the earliest."""
    arguments = ["--bytes", str(round(run["disk_bytes"]))]
    if name != "disk-eager":
        arguments += ["--bytes-in-backward", str(round(run["disk_bytes_in_backward"]))]
    return arguments


def _child_arguments(options: argparse.Namespace, name: str, disk: str) -> list[str]:
    arguments = ["--child", name, "--disk", disk]
    for key in ("size", "batch", "length", "steps", "warmup", "host_memory", "device_memory", "threads"):
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
    parser.add_argument("--host-memory", default="1GiB", help="host budget when all is on DISK")
    parser.add_argument("--device-memory", default="1GiB", help="device budget; on a CPU this is process memory too")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch and of the updates")
    parser.add_argument("--only", type=lambda names: names.split(","), help=f"of {'; '.join(subjects.SUBJECTS)}")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--bytes-in-backward", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is None:
        options.only = [n for n in subjects.SUBJECTS if n != "deepspeed" or importlib.util.find_spec("deepspeed")]
    if not options.disk.is_dir():
        parser.error(f"{options.disk.absolute()} is not a directory")
    return options


if __name__ == "__main__":
    main()
