"""``tiermem.trace``: record what the runtimes of this process do, and write it as a Chrome trace.

The file opens in https://ui.perfetto.dev and chrome://tracing: one process per model, one row per resource (as many as
it needs where several pieces of work are in flight), counters for the pools. ``tiermem report`` reads it too; what it
needs beyond the events is in ``args``: bytes or parameters, and under ``otherData`` what ``tiermem bench io`` measured.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from tiermem.io.profile import load_profile
from tiermem.timeline import (
    COPY_IN,
    COPY_OUT,
    CPU,
    DEVICE,
    DISK_READ,
    DISK_WRITE,
    MAIN,
    Interval,
    Moment,
    Recording,
    Timeline,
)

ROWS = (DEVICE, MAIN, COPY_IN, COPY_OUT, CPU, DISK_READ, DISK_WRITE)
"""In the order in which they are shown."""

WAITS = {
    "gather": "waits for weights",
    "gradient": "waits for gradients",
    "update": "waits for an update",
    "disk": "waits for the disk",
}

_alive: weakref.WeakSet[Timeline] = weakref.WeakSet()
"""Timelines of the runtimes in this process: a trace is of all of them. Nothing is kept alive by it."""
_traces: list[_Trace] = []
"""The trace that is being recorded, if one is; a runtime made meanwhile joins it."""


def register(timeline: Timeline) -> None:
    """A runtime was made."""
    _alive.add(timeline)
    for running in _traces:
        running.join(timeline)


class _Trace:
    def __init__(self, steps_max: int | None) -> None:
        self._steps_max = steps_max
        self._joined: list[tuple[Timeline, Recording]] = []

    def join(self, timeline: Timeline) -> None:
        self._joined.append((timeline, timeline.start(steps_max=self._steps_max)))

    def end(self) -> list[Recording]:
        """Of the models that did anything."""
        for timeline, recording in self._joined:
            timeline.stop(recording)
        return [recording for _, recording in self._joined if recording.intervals or recording.step_ends]


@contextmanager
def trace(path: str | os.PathLike[str], *, steps: int | None = None) -> Iterator[None]:
    """Record what every offloaded model does inside, and write it to ``path`` as a Chrome trace (JSON).

    path: open it in https://ui.perfetto.dev, or give it to ``tiermem report``, which says what bound each step.
    steps: stop recording after so many optimizer steps. Default: record everything, up to a million pieces of work.

    The file is written at the end, also after an exception. Recording costs some microseconds per piece of work and
    150 bytes of memory; it changes no result.

    Errors: ``FileNotFoundError`` for a directory that does not exist; ``RuntimeError`` inside another trace.
    """
    target = Path(path).absolute()
    if not target.parent.is_dir():
        raise FileNotFoundError(f"tiermem.trace({str(path)!r}): the directory {target.parent} does not exist")
    if steps is not None and steps < 1:
        raise ValueError(f"tiermem.trace(steps={steps}): expected at least 1")
    if _traces:
        raise RuntimeError("a trace is being recorded already: end it before the next one")
    running = _Trace(steps)
    _traces.append(running)
    try:
        for timeline in list(_alive):
            running.join(timeline)
        yield
    finally:
        _traces.remove(running)
        write(target, running.end())


def write(path: Path, recordings: Sequence[Recording]) -> None:
    """Write the recordings; ``path`` is replaced when all is written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w") as file:
            _write(file, recordings)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write(file: TextIO, recordings: Sequence[Recording]) -> None:
    origin = min((recording.began for recording in recordings), default=0.0)
    file.write('{"displayTimeUnit": "ms",\n"otherData": ')
    json.dump({"tiermem": {"models": [_about(recording) for recording in recordings]}}, file)
    file.write(',\n"traceEvents": [\n')
    separator = ""
    for process, recording in enumerate(recordings, 1):
        for event in _events(process, recording, origin):
            file.write(separator)
            json.dump(event, file)
            separator = ",\n"
    file.write("\n]}\n")


def _about(recording: Recording) -> dict[str, Any]:
    disks: dict[str, Any] = {}
    for directory in recording.disks:
        try:
            profile = load_profile(Path(directory))
        except OSError:
            profile = None
        disks[directory] = None if profile is None else asdict(profile)
    return {
        "name": recording.model,
        "disks": disks,
        "capacities": recording.capacities,
        "dropped": recording.dropped,
    }


def _events(process: int, recording: Recording, origin: float) -> Iterator[dict[str, Any]]:
    """The recording as Chrome trace events; times in microseconds since ``origin``."""

    def microseconds(at: float) -> float:
        return round((at - origin) * 1e6, 3)

    yield _named("process_name", process, 0, f"tiermem: {recording.model}")
    yield _named("thread_name", process, 1, "steps")
    start = recording.began
    for number, end in recording.step_ends:
        yield {
            "name": f"step {number}",
            "cat": "step",
            "ph": "X",
            "pid": process,
            "tid": 1,
            "ts": microseconds(start),
            "dur": microseconds(end) - microseconds(start),
            "args": {"step": number},
        }
        start = end
    row_ids = 2
    for row, disk, lanes in _rows(recording):
        for lane in lanes:
            name = f"{row} {disk}".strip()
            yield _named("thread_name", process, row_ids, name)
            yield {**_named("thread_sort_index", process, row_ids, ""), "args": {"sort_index": row_ids}}
            for interval, started, ended in lane:
                yield {
                    "name": _title(interval),
                    "cat": row,
                    "ph": "X",
                    "pid": process,
                    "tid": row_ids,
                    "ts": microseconds(started),
                    "dur": round((ended - started) * 1e6, 3),
                    "args": _arguments(interval),
                }
            row_ids += 1
    for name, at, value in recording.counts:
        yield {
            "name": f"{name} in use",
            "cat": "pool",
            "ph": "C",
            "pid": process,
            "ts": microseconds(at),
            "args": {name: value},
        }


def _named(kind: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}


def _title(interval: Interval) -> str:
    what = WAITS.get(interval.what, interval.what) if interval.row == MAIN else interval.what
    return f"{interval.name} {what}".strip()


def _arguments(interval: Interval) -> dict[str, Any]:
    arguments: dict[str, Any] = {"block": interval.name, "what": interval.what}
    if interval.disk:
        arguments["disk"] = interval.disk
    if interval.amount:
        arguments["parameters" if interval.row == CPU else "bytes"] = interval.amount
    return arguments


Timed: TypeAlias = tuple[Interval, float, float]


def _rows(recording: Recording) -> Iterator[tuple[str, str, list[list[Timed]]]]:
    """Rows that have intervals, with these in as many lanes as keep those of one lane apart."""
    timed: dict[tuple[str, str], list[Timed]] = {}
    for interval in recording.intervals:
        one = interval, _seconds(interval.start), _seconds(interval.end)
        timed.setdefault((interval.row, interval.disk), []).append(one)
    for row, disk in sorted(timed, key=lambda key: (ROWS.index(key[0]), key[1])):
        yield row, disk, _lanes(timed[row, disk])


def _lanes(intervals: Iterable[Timed]) -> list[list[Timed]]:
    lanes: list[list[Timed]] = []
    for one in sorted(intervals, key=lambda item: item[1]):
        for lane in lanes:
            if lane[-1][2] <= one[1]:
                lane.append(one)
                break
        else:
            lanes.append([one])
    return lanes


def _seconds(moment: Moment) -> float:
    return moment if isinstance(moment, float) else moment()
