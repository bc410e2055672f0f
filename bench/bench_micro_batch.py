"""Layer-major batches of a llama: memory and bytes moved by one batch in one piece, and by the same batch in slices.

bf16, recomputed layers, clipping, AdamW on fp32 masters, weights and states on HOST or on DISK; each row in a process
of its own. The loss is ``tiermem.losses.linear_cross_entropy``.

    python bench/bench_micro_batch.py [--size 10M] [--batch 32] [--micro-batch 4] [--length 512] [--home disk]

The bound of memory: what ``--micro-batch`` sequences in one piece need above a warm runtime between steps, and the
inputs of every layer, of the last norm and of the head for the whole batch. The bound of bytes: those of the whole
batch in one piece.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import console, print_machine, run_child, table, verdict

WARMUP = 1
BETWEEN_LAYERS = 2
"""Gradients of the whole batch between two layers, an incoming and an outgoing one."""


def main() -> None:
    options = _arguments()
    if options.child:
        print(json.dumps(_child(options)))
        return
    print_machine()
    rows = {
        f"batch {options.micro_batch} in one piece": (options.micro_batch, None, "recompute"),
        f"batch {options.batch} in one piece": (options.batch, None, "recompute"),
        f"batch {options.batch} in slices of {options.micro_batch}": (options.batch, options.micro_batch, "recompute"),
        "the same, inputs on disk": (options.batch, options.micro_batch, "disk"),
    }
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="tiermem-bench-", dir=options.disk) as disk:
        for name, (batch, micro_batch, activations) in rows.items():
            console.print(f"{name} ...")
            arguments = ["--child", activations, "--disk", disk, "--batch", str(batch)]
            for key in ("size", "length", "steps", "home"):
                arguments += [f"--{key}", str(getattr(options, key))]
            results[name] = run_child(__file__, [*arguments, "--micro-batch", str(micro_batch or 0)])
    _print(results, options)


def _print(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    shown = [
        [
            name,
            f"{statistics.median(result['seconds']):.2f}",
            f"{result['above_bytes'] / 1e6:.0f}",
            f"{result['inputs_bytes'] / 1e6:.0f}",
            f"{result['disk_read_bytes'] / 1e6:.0f}",
            f"{result['disk_written_bytes'] / 1e6:.0f}",
            f"{result['copied_bytes'] / 1e6:.0f}",
            f"{result['losses'][-1]:.4f}",
        ]
        for name, result in results.items()
    ]
    columns = ["", "s per step", "peak above rest, MB", "inputs, MB", "disk read", "written", "copied", "last loss"]
    title = f"llama {options.size}, bf16, {options.length} tokens per sequence, all on {options.home.upper()}; per step"
    table(title, columns, shown)
    small, whole, sliced, _ = results.values()
    between = BETWEEN_LAYERS * sliced["inputs_bytes"] / (sliced["layers"] + 2)
    bound = small["above_bytes"] - small["inputs_bytes"] + sliced["inputs_bytes"] + between + sliced["sums_bytes"]
    console.print(
        f"bound of memory, MB: {small['above_bytes'] / 1e6:.0f} for {options.micro_batch} sequences, "
        f"of it {small['inputs_bytes'] / 1e6:.0f} inputs; {sliced['inputs_bytes'] / 1e6:.0f} of the whole batch; "
        f"{between / 1e6:.0f} gradients between layers; {sliced['sums_bytes'] / 1e6:.0f} sums of one layer's gradients"
    )
    verdict("memory of slices / its bound", sliced["above_bytes"] / bound, 1.0)
    moved = {
        name: result["disk_read_bytes"] + result["disk_written_bytes"] + result["copied_bytes"]
        for name, result in (("whole", whole), ("sliced", sliced))
    }
    if moved["whole"]:
        verdict("bytes moved in slices / in one piece", moved["sliced"] / moved["whole"], 1.0)
    else:
        console.print("nothing is moved: the weights are where the device computes")


def _child(options: argparse.Namespace) -> dict[str, Any]:
    import llama
    import torch

    import tiermem
    from tiermem.micro_batch import sums_bytes
    from tiermem.process import peak_memory_bytes, resident_memory_bytes, return_freed_tensors

    return_freed_tensors()
    device = torch.device("cpu")
    model = llama.build(options.size)
    layers = model.model.layers
    gradients = sums_bytes(list(layers)) if options.micro_batch else 0
    memory = tiermem.Memory(device=options.device_memory, host=options.host_memory, disk=options.disk)
    policy = tiermem.Policy(
        weights=tiermem.Tier(options.home),
        states=tiermem.Tier(options.home),
        activations=options.child,
        micro_batch=options.micro_batch or None,
    )
    model = tiermem.offload(model, memory=memory, policy=policy, device=device)
    llama.initialise(model, offloaded=True)
    optimizer = tiermem.AdamW(model.parameters(), lr=1e-4)
    seconds, losses, above = [], [], []
    steps = options.steps + WARMUP
    for index, tokens in enumerate(llama.batches(options.size, steps, (options.batch, options.length), device)):
        if index == WARMUP:
            before = tiermem.report(model)
            seconds.clear()
            above.clear()
        resting_bytes = resident_memory_bytes()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        start = time.perf_counter()
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)  # a slice of hidden would be a copy of it
        loss = tiermem.losses.linear_cross_entropy(hidden, model.lm_head, labels)
        del hidden
        loss.backward()
        losses.append(loss.item())
        del loss
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tiermem.synchronize(model)  # memory and bytes are measured here, not overlap
        seconds.append(time.perf_counter() - start)
        above.append(peak_memory_bytes() - resting_bytes)
    after = tiermem.report(model)
    one_input = options.batch * options.length * model.config.hidden_size * 2

    def per_step(*names: str) -> float:
        return sum(getattr(after, name) - getattr(before, name) for name in names) / options.steps

    return {
        "seconds": seconds,
        "losses": losses,
        "above_bytes": max(above),
        "layers": len(layers),
        "inputs_bytes": (len(layers) + 2) * one_input,
        "sums_bytes": gradients,
        "disk_read_bytes": per_step("bytes_read"),
        "disk_written_bytes": per_step("bytes_written"),
        "copied_bytes": per_step("bytes_copied_in", "bytes_copied_out"),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", type=Path, default=Path.cwd(), help="directory for what rests on DISK")
    parser.add_argument("--home", choices=("host", "disk"), default="disk", help="of weights and states")
    parser.add_argument("--size", default="10M")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=2, help="timed steps")
    parser.add_argument("--host-memory", default="128MiB")
    parser.add_argument("--device-memory", default="128MiB", help="on a CPU this is process memory too")
    parser.add_argument("--child", choices=("recompute", "disk"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.disk.is_dir():
        parser.error(f"{options.disk.absolute()} is not a directory")
    return options


if __name__ == "__main__":
    main()
