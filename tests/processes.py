"""What a process uses, and scripts in processes of their own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path


def status_bytes(field: str) -> int:
    """A size of ``/proc/self/status``: ``VmRSS``, ``VmHWM`` (the largest VmRSS so far)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise ValueError(f"no {field} in /proc/self/status")


def forget_peak() -> None:
    """VmHWM starts again from what the process uses now."""
    Path("/proc/self/clear_refs").write_text("5")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def thread_count() -> int:
    """All of them, also those that Python does not know."""
    return len(os.listdir("/proc/self/task"))


def settles(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether `condition` becomes true: threads end a moment after they were joined, for the kernel."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        gc.collect()
        time.sleep(0.01)
    return True


def python_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def script(body: str, **values: object) -> list[str]:
    """The command that runs `body` in a new interpreter, with `values` as its globals and this one's path."""
    head = f"import sys\nsys.path[:0] = {sys.path!r}\nimport torch\ntorch.set_num_threads(1)\n"
    head += "".join(f"{name} = {value!r}\n" for name, value in values.items())
    return [sys.executable, "-c", head + textwrap.dedent(body)]


def run(body: str, *, timeout: float = 100, **values: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(script(body, **values), capture_output=True, text=True, timeout=timeout, check=False)
