"""What the kernel knows about this process."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

_M_MMAP_THRESHOLD = -3  # malloc.h


def peak_memory_bytes() -> int:
    """The most resident memory this process ever had, mapped file pages included (VmHWM)."""
    return _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_memory_bytes() -> int:
    """Resident memory now, mapped file pages included (VmRSS)."""
    return _status_bytes("VmRSS")


def anonymous_memory_bytes() -> int:
    """Resident memory now without file pages, which the kernel can drop at any time (RssAnon)."""
    return _status_bytes("RssAnon")


def return_freed_tensors(threshold_bytes: int = 4 * 1024**2) -> None:
    """Have the C library give freed blocks of ``threshold_bytes`` and more back to the system at once.

    By default glibc keeps blocks of up to 32 MiB in its heap once one has been freed. Activations of many sizes then
    leave holes there: 100 to 300 MB of them, fine-tuning a model of 135 M parameters. Elsewhere this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, threshold_bytes)


def _status_bytes(field: str) -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
