"""Which file system a path lies on."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FileSystem", "file_system"]


@dataclass(frozen=True)
class FileSystem:
    """type: as in /proc/mounts (`ext4`, `tmpfs`, `nfs4`, `overlay`, ...), or `unknown`."""

    type: str
    mount_point: str
    device: str


def file_system(path: Path) -> FileSystem:
    """The file system of an existing path."""
    path = path.resolve()
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return FileSystem("unknown", "", "")
    status = os.stat(path)
    number = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    best: tuple[bool, int, int] | None = None
    found = FileSystem("unknown", "", "")
    for order, line in enumerate(lines):
        left, _, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if len(fields) < 5 or len(rest) < 2:
            continue
        point = _unescape(fields[4])
        if not path.is_relative_to(point):
            continue
        # btrfs and overlay show other device numbers than stat does, so the number only breaks ties of nested mounts.
        rank = (fields[2] == number, len(point), order)
        if best is None or rank > best:
            best = rank
            found = FileSystem(rest[0], point, _unescape(rest[1]))
    return found


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
