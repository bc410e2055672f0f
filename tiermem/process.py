"""What the kernel knows about this process."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

# malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_TRIM_THRESHOLD_BYTES = 128 * 1024

MMAP_THRESHOLD_MAX = 32 * 1024**2
"""glibc raises its own no further: larger blocks are mapped anew whenever no free memory in its heap holds them."""


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
    leave holes there: 100 to 300 MB of them, fine-tuning a model of 135 M parameters. Without glibc this does
    nothing.
    """
    _tell_heap(mmap_threshold=threshold_bytes, trim_threshold=_TRIM_THRESHOLD_BYTES)


def keep_freed_tensors(nbytes: int) -> None:
    """Have the C library serve blocks of less than ``nbytes`` (1 GiB at most) from its heap, and leave as much that is
    free at the heap's end.

    A gradient larger than `MMAP_THRESHOLD_MAX` then comes from there in every step, where it was mapped, page by page
    zeroed by the kernel, and unmapped again. Before glibc 2.35, and without it, this does nothing.
    """
    nbytes = min(nbytes, 1 << 30)  # an int to the library
    _tell_heap(mmap_threshold=nbytes, trim_threshold=nbytes)


def give_back_freed() -> None:
    """Have the C library return what is free in its heap to the system, now."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _tell_heap(*, mmap_threshold: int, trim_threshold: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and mallopt(_M_MMAP_THRESHOLD, mmap_threshold):  # 0: refused, before glibc 2.35
        mallopt(_M_TRIM_THRESHOLD, trim_threshold)


def _status_bytes(field: str) -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
