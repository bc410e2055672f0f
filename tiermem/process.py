"""What the kernel knows about this process."""

from __future__ import annotations

import resource
from pathlib import Path


def peak_memory_bytes() -> int:
    """The most resident memory this process ever had, mapped file pages included (VmHWM)."""
    return _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_memory_bytes() -> int:
    """Resident memory now, mapped file pages included (VmRSS)."""
    return _status_bytes("VmRSS")


def anonymous_memory_bytes() -> int:
    """Resident memory now without file pages, which the kernel can drop at any time (RssAnon)."""
    return _status_bytes("RssAnon")


def _status_bytes(field: str) -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
