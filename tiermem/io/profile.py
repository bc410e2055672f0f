"""What was measured about a disk: the best setting, and how fast it is with it.

`tiermem bench io` writes one small JSON file per device into the user's cache; `select` and planners read it.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from tiermem.cache import cache_directory
from tiermem.io.engine import DIRECT_ALIGNMENT
from tiermem.io.mounts import file_system

__all__ = ["DEPTH_MAX", "Profile", "device_key", "load_profile", "save_profile"]

DEPTH_MAX = 1024
"""Pieces in flight that make sense on any drive."""


@dataclass(frozen=True)
class Profile:
    """The best setting of a device, and bytes per second with it: reading, writing, and both at once."""

    engine: str
    piece_bytes: int
    depth: int
    read_bytes_per_second: float
    write_bytes_per_second: float
    mixed_bytes_per_second: float


def device_key(directory: Path) -> str:
    """A file name for the device under a directory: the same for every directory on it, and after a restart."""
    found = file_system(directory)
    number = os.stat(directory).st_dev
    disk = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    identity = ""
    for name in (
        "wwid",
        "device/wwid",
        "device/serial",
        "serial",
        "../wwid",
        "../device/wwid",
        "../device/serial",
        "size",
    ):
        try:
            identity = (disk.resolve() / name).read_text().strip()
        except OSError:
            continue
        if identity:
            break
    return re.sub(r"[^A-Za-z0-9]+", "-", f"{found.type} {found.device} {identity}").strip("-")


def save_profile(directory: Path, profile: Profile) -> Path:
    """Keep it for the device under a directory; returns the file."""
    path = _path(directory)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(asdict(profile), indent=2) + "\n")
    temporary.replace(path)
    return path


def load_profile(directory: Path) -> Profile | None:
    """What was kept for the device under a directory; None if there is nothing usable."""
    try:
        values = json.loads(_path(directory).read_text())
        profile = Profile(
            str(values["engine"]),
            int(values["piece_bytes"]),
            int(values["depth"]),
            float(values["read_bytes_per_second"]),
            float(values["write_bytes_per_second"]),
            float(values["mixed_bytes_per_second"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    usable = 1 <= profile.depth <= DEPTH_MAX and profile.piece_bytes >= DIRECT_ALIGNMENT
    return profile if usable and profile.piece_bytes % DIRECT_ALIGNMENT == 0 else None


def _path(directory: Path) -> Path:
    return cache_directory() / "io" / f"{device_key(directory)}.json"
