"""What the runtime costs the main thread: forward, backward and step of 48 tiny blocks with 9 parameters each.

The blocks do next to no arithmetic, so a step is Python and bookkeeping. Everything is on HOST. Plain torch with its
fused and its foreach AdamW and tiermem take turns in one process; figures are medians over the turns.

    python bench/bench_overhead.py [--rounds N] [--iterations N] [--clip]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from common import console, print_machine, spread, table, verdict
from torch import nn

import tiermem

BLOCKS = 48
LIMIT_MS = 0.5
"""Per block; a layer of an 8 B model takes about 5 ms on a GPU."""


class Block(nn.Module):
    """Nine parameters, as a transformer layer with its projections and norm has."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.attention_in = nn.Linear(width, width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_in = nn.Linear(width, width)
        self.mlp_out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention_out(self.attention_in(self.norm(x)))
        return x + self.mlp_out(torch.relu(self.mlp_in(x)))


def main() -> None:
    options = _arguments()
    print_machine()
    subjects = {
        "plain torch, fused AdamW": _plain(options, fused=True),
        "plain torch, foreach AdamW": _plain(options, foreach=True),
        "tiermem, all on HOST": _offloaded(options),
    }
    for iterate in subjects.values():
        for _ in range(3):
            iterate()
    ms: dict[str, list[float]] = {name: [] for name in subjects}
    thread_ms: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(options.rounds):
        for name, iterate in subjects.items():
            start = time.thread_time()
            ms[name].append(iterate() / options.iterations)
            thread_ms[name].append((time.thread_time() - start) * 1e3 / options.iterations)
    medians = {name: statistics.median(values) for name, values in ms.items()}
    rows = [
        [name, spread(values), f"{medians[name] / BLOCKS:.3f}", f"{statistics.median(thread_ms[name]) / BLOCKS:.3f}"]
        for name, values in ms.items()
    ]
    title = f"{BLOCKS} blocks of 9 parameters, {options.dtype}{', clipped' if options.clip else ''}: "
    title += "forward + backward + step"
    table(title, ["", "ms per step", "ms per block", "of it main thread's CPU"], rows)
    *plain, tiered = medians.values()
    for name, median in zip(medians, plain, strict=False):
        verdict(f"added per block over {name}", (tiered - median) / BLOCKS, LIMIT_MS, " ms")
    console.print(f"{options.rounds} rounds of {options.iterations} steps each, taking turns")


def _model(options: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS))).to(getattr(torch, options.dtype))


def _plain(options: argparse.Namespace, **choice: bool) -> Callable[[], float]:
    model = _model(options)
    return _loop(options, model, torch.optim.AdamW(model.parameters(), lr=1e-3, **choice), lambda: None)


def _offloaded(options: argparse.Namespace) -> Callable[[], float]:
    policy = tiermem.Policy(weights=tiermem.Tier.HOST, states=tiermem.Tier.HOST)
    memory = tiermem.Memory(device="256MiB", host="1GiB")
    model = tiermem.offload(_model(options), memory=memory, policy=policy, device="cpu")
    optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
    return _loop(options, model, optimizer, lambda: tiermem.synchronize(model))


def _loop(
    options: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, finish: Callable[[], None]
) -> Callable[[], float]:
    """Some steps with everything they started, in milliseconds."""
    inputs = torch.randn(4, 16, dtype=getattr(torch, options.dtype))

    def iterate() -> float:
        start = time.perf_counter()
        for _ in range(options.iterations):
            model(inputs).square().mean().backward()
            if options.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        finish()
        return (time.perf_counter() - start) * 1e3

    return iterate


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--iterations", type=int, default=10, help="steps per turn")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--clip", action="store_true", help="clip the gradient norm in every step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
