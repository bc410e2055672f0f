"""What happened when: recorded by one runtime while somebody traces it. ``tiermem.trace`` turns it on (trace.py).

row        one resource: the device's compute, its copies in and out, a disk's reads and writes, the CPU's update
           kernels, the main thread.
interval   one piece of work on a row, or one wait of the main thread: which block, what of it, from when to when.
moment     seconds of ``time.perf_counter``, or a function that will say them: a GPU tells only afterwards when it
           got somewhere.

Off, a place that would record costs one attribute check.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

T = TypeVar("T")

Moment: TypeAlias = float | Callable[[], float]

DEVICE = "device compute"
COPY_IN = "copy in"
COPY_OUT = "copy out"
DISK_READ = "disk read"
DISK_WRITE = "disk write"
CPU = "CPU update"
MAIN = "main thread"

INTERVALS_MAX = 1_000_000
"""About 150 MB as a file. What comes later is counted, not kept."""


class Clock(Protocol):
    """The device's sense of time."""

    def align(self) -> None:
        """A recording begins: compare the device's clock with ``time.perf_counter``."""

    def moment(self) -> Moment:
        """When the compute stream gets to the point up to which it has been given work."""


class Interval(NamedTuple):
    row: str
    disk: str  # the directory, in the rows of a disk
    name: str  # of the block
    what: str
    start: Moment
    end: Moment
    amount: int  # bytes; parameters in the row CPU; else 0


class Count(NamedTuple):
    name: str
    at: float
    value: int


class StepEnd(NamedTuple):
    number: int
    at: float


@dataclass
class Recording:
    """What one runtime did while it was traced. ``steps_max``: it ends after so many steps."""

    model: str
    disks: list[str]
    capacities: dict[str, int]
    steps_max: int | None = None
    began: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    intervals: list[Interval] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    step_ends: list[StepEnd] = field(default_factory=list)
    dropped: int = 0
    """Intervals beyond ``INTERVALS_MAX``."""

    def add(self, interval: Interval) -> None:
        if len(self.intervals) < INTERVALS_MAX:
            self.intervals.append(interval)
        else:
            self.dropped += 1


class Timeline:
    """Belongs to one runtime. Written to from any of its threads; turned on and off by one.

    model: the name of what is trained. disks: directories, as the user gave them.
    """

    def __init__(self, model: str, clock: Clock, disks: list[str]) -> None:
        self.on = False
        self.capacities: dict[str, int] = {}
        self._model = model
        self._clock = clock
        self._disks = disks
        self._recording: Recording | None = None
        self._units: list[tuple[str, str]] = []  # forwards that the device is in, innermost last; or one backward
        self._since: Moment | None = None  # the innermost has run from here on; None: it waits

    def start(self, *, steps_max: int | None = None) -> Recording:
        """Record, until ``stop`` or ``steps_max`` steps have ended."""
        if self._recording is not None:
            raise RuntimeError("this model is being traced already")
        self._clock.align()
        recording = Recording(self._model, self._disks, self.capacities, steps_max)
        self.clear()
        self._recording, self.on = recording, True
        return recording

    def stop(self, recording: Recording) -> None:
        if self._recording is recording:
            self.clear()
            recording.ended = time.perf_counter()
            self.on, self._recording = False, None

    # Work of which the host knows the times.

    def add(self, row: str, name: str, what: str, start: Moment, end: Moment, amount: int = 0, disk: str = "") -> None:
        recording = self._recording
        if recording is not None:
            recording.add(Interval(row, disk, name, what, start, end, amount))

    def call(self, name: str, what: str, amount: int, work: Callable[..., T], *args: object) -> T:
        """``work(*args)``, as an interval of the CPU's row."""
        if not self.on:
            return work(*args)
        start = time.perf_counter()
        try:
            return work(*args)
        finally:
            self.add(CPU, name, what, start, time.perf_counter(), amount)

    def counter(self, name: str, capacity: int) -> Callable[[int], None]:
        """What a pool calls with the number of its members that are in use, whenever it changes."""
        self.capacities[name] = capacity

        def count(value: int) -> None:
            recording = self._recording
            if recording is not None and len(recording.counts) < INTERVALS_MAX:
                recording.counts.append(Count(name, time.perf_counter(), value))

        return count

    def step_ended(self, number: int) -> None:
        """The optimizer's ``step()`` returns: what comes now belongs to the next one."""
        recording = self._recording
        if recording is None:
            return
        recording.step_ends.append(StepEnd(number, time.perf_counter()))
        if recording.steps_max is not None and len(recording.step_ends) >= recording.steps_max:
            self.stop(recording)

    def span(self, row: str, name: str, what: str, amount: int) -> Span | None:
        """An interval that whoever does the work will time; ``None`` while nothing is recorded."""
        return Span(self, row, name, what, amount) if self.on else None

    # The device's row. One unit is worked on at a time: a nested forward interrupts the one around it.

    def enter(self, name: str, what: str) -> None:
        """The device begins the unit ``name``."""
        self.pause()
        if self.on:
            self._units.append((name, what))
            self.resume()

    def leave(self) -> None:
        """The innermost unit has ended; the one around it goes on."""
        self.pause()
        if self._units:
            self._units.pop()
            self.resume()

    def replace(self, name: str, what: str) -> None:
        """The device begins ``name``, and all that was before has ended."""
        self.finish()
        self.enter(name, what)

    def pause(self) -> None:
        """The device has nothing to do until ``enter`` or ``resume``: the innermost unit must wait."""
        if self._since is not None:
            name, what = self._units[-1]
            self.add(DEVICE, name, what, self._since, self._clock.moment())
            self._since = None

    def resume(self) -> None:
        if self._units and self.on:
            self._since = self._clock.moment()

    def finish(self) -> None:
        """Whatever the device was in has ended."""
        self.pause()
        self._units.clear()

    def clear(self) -> None:
        """Whatever the device was in was abandoned."""
        self._since = None
        self._units.clear()


class Span:
    """One interval, timed by the stream that does the work."""

    __slots__ = ("_amount", "_name", "_row", "_start", "_timeline", "_what")

    def __init__(self, timeline: Timeline, row: str, name: str, what: str, amount: int) -> None:
        self._timeline = timeline
        self._row = row
        self._name = name
        self._what = what
        self._amount = amount
        self._start: Moment = 0.0

    def begin(self, at: Moment) -> None:
        self._start = at

    def end(self, at: Moment) -> None:
        self._timeline.add(self._row, self._name, self._what, self._start, at, self._amount)
