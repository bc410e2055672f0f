"""What the scripts here share: the machine in words, children that report JSON, tables of limits and ratios."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from rich import box
from rich.console import Console
from rich.table import Table

console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def print_machine() -> None:
    """One line that says on what the figures below were measured."""
    import torch

    memory_gb = psutil.virtual_memory().total / 1e9
    parts = [
        _processor(),
        f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}",
        f"{memory_gb:.0f} GB memory",
        f"torch {torch.__version__}",
        f"Python {platform.python_version()}",
    ]
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        parts.append(f"{properties.name}, {properties.total_memory / 1e9:.0f} GB")
    console.print("machine: " + "; ".join(parts))


def run_child(script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run ``script`` in a process of its own; its last line is a JSON object. Its other output goes to stderr."""
    done = subprocess.run(
        [sys.executable, script, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        sys.exit(f"{Path(script).name} {' '.join(arguments)} failed with status {done.returncode}\n{done.stdout}")
    for line in lines[:-1]:
        print(line, file=sys.stderr)
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for index, column in enumerate(columns):
        shown.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    console.print(shown)


def verdict(what: str, value: float, limit: float, unit: str = "") -> bool:
    """Print a measured value beside its limit (at most); True when it is kept."""
    kept = value <= limit
    mark = "[green]kept[/]" if kept else "[red]missed[/]"
    console.print(f"{what}: {value:.2f}{unit}, at most {limit:g}{unit}: {mark}")
    return kept


def spread(values: Sequence[float]) -> str:
    """Median, and the quartiles around it."""
    if len(values) < 4:
        return f"{statistics.median(values):.3g}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
