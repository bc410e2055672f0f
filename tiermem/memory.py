"""Budgets and host memory: who owns which bytes.

``Memory`` is what the user grants; a ``Budget`` is one tier's share of it while a runtime lives; a ``Region`` is host
memory taken from a budget once, in one mapping, and carved into planes.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from tiermem.layout import PAGE_BYTES, round_up
from tiermem.policy import Tier
from tiermem.slab import Pin, use_huge_pages

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def parse_bytes(value: int | str) -> int:
    """Bytes of ``123`` or of ``"20GiB"``, ``"1.5 TB"``, ``"512M"`` (K, M, G, T, P and KiB ... are powers of 1024, KB
    ... of 1000)."""
    if isinstance(value, int) and not isinstance(value, bool):
        number, unit = float(value), ""
        exact = value
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", value) if isinstance(value, str) else None
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f"{value!r} is not a size: expected bytes or a string like '20GiB'")
        number, unit = float(match[1]), match[2].lower()
        exact = int(number * _UNITS[unit])
    if number < 0:
        raise ValueError(f"{value!r} is not a size: it is negative")
    return exact


def format_bytes(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"


@dataclass(frozen=True)
class Memory:
    """What the runtime may use of each tier.

    device: bytes of accelerator memory, or a string like ``"20GiB"``; ``None``: what is free.
    host: bytes of CPU memory (page-locked when there is an accelerator); ``None``: what is free, cgroup limits counted.
    disk: one directory, or several on different mounts; ``None``: no DISK tier.
    disk_size: bytes of files over all directories; ``None``: what is free there.
    disk_endurance: bytes that the drives are rated to be written in their life, as ``"600TB"``; the report then says
    what
        share of it training uses, and how many steps it lasts.

    Errors: ``ValueError`` for what is not a size; a directory is checked when the model is offloaded.
    """

    device: int | str | None = None
    host: int | str | None = None
    disk: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    disk_size: int | str | None = None
    disk_endurance: int | str | None = None

    def __post_init__(self) -> None:
        for field in ("device", "host", "disk_size", "disk_endurance"):
            value = getattr(self, field)
            if value is not None:
                try:
                    object.__setattr__(self, field, parse_bytes(value))
                except ValueError as error:
                    raise ValueError(f"Memory({field}=...): {error}") from None

    @property
    def directories(self) -> tuple[Path, ...]:
        if self.disk is None:
            return ()
        disks = [self.disk] if isinstance(self.disk, (str, os.PathLike)) else list(self.disk)
        return tuple(Path(disk).absolute() for disk in disks)

    def host_bytes(self) -> int:
        return free_host_bytes() if self.host is None else parse_bytes(self.host)

    def device_bytes(self, free: Callable[[], int]) -> int:
        return free() if self.device is None else parse_bytes(self.device)


def free_host_bytes() -> int:
    """Memory this process may still take: the machine's available memory, or less under a cgroup limit."""
    free = int(psutil.virtual_memory().available)
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = Path(limit_file).read_text().strip(), Path(used_file).read_text().strip()
        except OSError:
            continue
        if limit != "max":
            free = min(free, max(0, int(limit) - int(used)))
    return free


class Budget:
    """One tier's bytes. A promise: what is taken never exceeds the limit."""

    def __init__(self, tier: Tier, limit_bytes: int, remedy: str) -> None:
        self.tier = tier
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._remedy = remedy

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.used_bytes

    def take(self, nbytes: int, what: str) -> None:
        """Errors: ``ValueError`` naming what for, the bytes needed and present, and the remedy."""
        if nbytes > self.free_bytes:
            raise ValueError(
                f"{what} needs {format_bytes(nbytes)} of {self.tier.value} memory, but "
                f"{format_bytes(self.free_bytes)} of the "
                f"budget of {format_bytes(self.limit_bytes)} are free ({nbytes} and {self.free_bytes} bytes): "
                f"{self._remedy}"
            )
        self.used_bytes += nbytes

    def give_back(self, nbytes: int) -> None:
        if nbytes > self.used_bytes:
            raise AssertionError(f"{self.tier.value} budget: {nbytes} bytes given back, {self.used_bytes} taken")
        self.used_bytes -= nbytes


class Region:
    """Zeroed host memory in one mapping, carved from the front. Pages, huge ones where the system has them, are only
    backed once they are touched.

    Dropping the region and every tensor carved from it returns the memory; a live tensor keeps its bytes valid.
    """

    def __init__(self, nbytes: int, pin: Pin | None = None) -> None:
        self.nbytes = round_up(max(nbytes, 1), PAGE_BYTES)
        self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        use_huge_pages(self._map)
        self._end = 0
        self.address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._unpin = pin(self.address, self.nbytes) if pin is not None else None

    def carve(self, nbytes: int) -> torch.Tensor:
        """The next ``nbytes``, page-aligned, as a uint8 tensor (nbytes,) with a storage of its own."""
        start, self._end = self._end, self._end + round_up(nbytes, PAGE_BYTES)
        if self._end > self.nbytes:
            raise AssertionError(f"region of {self.nbytes} bytes carved up to {self._end}")
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=start, count=nbytes)

    def close(self) -> None:
        """Unlock the pages. The mapping itself goes with the last tensor carved from it."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
