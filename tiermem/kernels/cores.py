"""How many threads can run at once: processor affinity and the CPU quotas of control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def available_cores(root: Path = Path("/")) -> int:
    """The number of threads that this process can keep running: at least 1.

    It is the number of processors that the process may use, or less where a control group (v1 or v2) grants less
    processor time. A quota is rounded down: threads beyond it would all be stopped together for the rest of a period.
    Files are read below `root`.
    """
    cores = len(os.sched_getaffinity(0))
    for quota in _quotas(root):
        cores = min(cores, int(quota))
    return max(cores, 1)


def _quotas(root: Path) -> Iterator[float]:
    """Processors granted to each control group that this process is in, from its own up to the root of the mount."""
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            quota_of, hierarchies = _quota_v2, [mounts, mounts / "unified"]
        elif "cpu" in controllers.split(","):
            quota_of, hierarchies = _quota_v1, [mounts / controllers, mounts / "cpu"]
        else:
            continue
        for hierarchy in hierarchies:
            group = hierarchy / path.lstrip("/")
            # Without a namespace of its own a container sees its path on the host, which is not below its mount.
            for directory in (group, *group.parents):
                quota = quota_of(directory)
                if quota is not None:
                    yield quota
                if directory == hierarchy:
                    break


def _quota_v2(group: Path) -> float | None:
    limit, _, period = _read(group / "cpu.max").partition(" ")
    return int(limit) / int(period) if limit.isdigit() and period else None


def _quota_v1(group: Path) -> float | None:
    limit, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    return int(limit) / int(period) if limit.isdigit() and period.isdigit() and int(period) > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
