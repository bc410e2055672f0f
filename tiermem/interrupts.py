"""Ctrl-C between two steps that belong together would leave the runtime neither here nor there; it is held back that
long.

Only bookkeeping stands inside ``uninterrupted``: nothing that waits, so that Ctrl-C still ends a wait at once. Cost:
about 2 us.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, SIGINT is noted; afterwards it does what it always does. Other threads than the main one are never
    interrupted."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    noted: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: noted.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if noted:
            previous(*noted[-1])
