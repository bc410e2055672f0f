"""What the kernel knows about this process."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

# malloc.h
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3

MMAP_THRESHOLD_MAX = 32 * 1024**2
"""glibc never keeps to a larger one: blocks from here on are mapped anew whenever no free memory in its heap holds
them."""


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
    _tell_heap({_M_MMAP_THRESHOLD: threshold_bytes})


def keep_freed_tensors(nbytes: int) -> None:
    """Have the C library's heap end in up to ``nbytes`` that are free, for blocks of any size; 1 GiB at most.

    A gradient larger than `MMAP_THRESHOLD_MAX` then comes from there in every step, where it was mapped, page by page
    zeroed by the kernel, and unmapped again. Elsewhere this does nothing.
    """
    nbytes = min(nbytes, 1 << 30)  # an int to the library, also twice
    _tell_heap({_M_MMAP_THRESHOLD: MMAP_THRESHOLD_MAX, _M_TOP_PAD: nbytes, _M_TRIM_THRESHOLD: 2 * nbytes - 1})


def _tell_heap(options: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in options.items():
            mallopt(option, value)


def _status_bytes(field: str) -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
