"""Engines that move bytes between memory and files, and the choice among them."""

from __future__ import annotations

from tiermem.io.aio import AiofilesEngine
from tiermem.io.choice import ENGINES, depth_in_use, probe, select
from tiermem.io.engine import Engine, File
from tiermem.io.threads import ThreadsEngine
from tiermem.io.uring import UringEngine

__all__ = [
    "ENGINES",
    "AiofilesEngine",
    "Engine",
    "File",
    "ThreadsEngine",
    "UringEngine",
    "depth_in_use",
    "probe",
    "select",
]
