"""Where this package keeps what it can make again: converted models, measured profiles, files of a run."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """This package's directory in the user's cache, made private to the user."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(root) / "tiermem"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory
