"""What a trace says about each step: how busy every resource was, what was waited for, and which resource binds.

step       from the end of one ``optimizer.step()`` to the end of the next: a forward, a backward, and what is left of
           the updates before.
busy       at least one piece of work is on the resource. A disk is one resource, whichever way the bytes go.
binds      the resource that is busy longest: the step cannot take less.
overlap efficiency  the longest busy time over the time of the step; 100 %: nothing waited that need not.
waited for  time in which the main thread stood still for want of this resource: each stretch of a wait is charged to
           the resource that did, or was next to do, something for the block that was waited for.

Pure Python: reads the JSON that ``tiermem.trace`` writes, on any machine.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tiermem.timeline import COPY_IN, COPY_OUT, CPU, DEVICE, DISK_READ, DISK_WRITE, MAIN

WINDOW_SECONDS = 0.05
"""The best rate seen is that of the best window of this length."""

OTHER = "other"
"""What a wait is charged to while nothing was done for its block."""

_EPSILON_SECONDS = 1e-6


class Piece(NamedTuple):
    """One piece of work, or one wait of the main thread. Seconds since the trace began."""

    row: str
    disk: str
    block: str
    what: str
    start: float
    end: float
    amount: int  # bytes, or parameters in the row CPU


class Step(NamedTuple):
    number: int
    start: float
    end: float


@dataclass
class ModelTrace:
    """One model's part of a trace. ``disks``: what ``tiermem bench io`` measured on each, bytes per second."""

    name: str
    disks: dict[str, dict[str, float] | None]
    capacities: dict[str, int]
    dropped: int = 0
    pieces: list[Piece] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    counts: dict[str, list[tuple[float, int]]] = field(default_factory=dict)

    def of(self, *rows: str, disk: str | None = None) -> list[Piece]:
        return [piece for piece in self.pieces if piece.row in rows and disk in (None, piece.disk)]


@dataclass(frozen=True)
class Use:
    """What one resource did in a step.

    amount: bytes moved, or parameters updated (row CPU). best: the rate that the resource can reach, of
    ``best_source``: "bench io" or "seen in this trace". parts: reads and writes of a disk, which are not resources of
    their own.
    """

    name: str
    busy_seconds: float
    waited_seconds: float
    amount: float
    best: float | None
    best_source: str
    is_part: bool = False

    @property
    def rate(self) -> float | None:
        """Amount per busy second."""
        return self.amount / self.busy_seconds if self.amount and self.busy_seconds else None


@dataclass(frozen=True)
class StepReport:
    step: Step
    uses: list[Use]
    waits: dict[str, float]
    """Seconds of the main thread by what it waited for."""
    waited_other: float
    """Of them, those that are charged to no resource."""

    @property
    def seconds(self) -> float:
        return self.step.end - self.step.start

    @property
    def binding(self) -> Use | None:
        """The resource that was busy longest."""
        return max((use for use in self.uses if not use.is_part), key=lambda use: use.busy_seconds, default=None)

    @property
    def efficiency(self) -> float:
        """Longest busy time over the step's time."""
        return self.binding.busy_seconds / self.seconds if self.binding and self.seconds else 0.0


# Reading.


def load(path: Path) -> list[ModelTrace]:
    """The models of a trace file. Errors: ``ValueError`` for a file that ``tiermem.trace`` did not write."""
    try:
        content = json.loads(path.read_text())
        about = content["otherData"]["tiermem"]["models"]
        models = [ModelTrace(a["name"], a["disks"], a["capacities"], a["dropped"]) for a in about]
        for event in content["traceEvents"]:
            _take(models[event["pid"] - 1], event)
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"{path} is not a trace written by tiermem.trace or tiermem train --trace ({error!r})"
        ) from None
    return models


def _take(model: ModelTrace, event: dict[str, Any]) -> None:
    kind = event["ph"]
    if kind == "M":
        return
    start, arguments = event["ts"] / 1e6, event["args"]
    if kind == "C":
        for name, value in arguments.items():
            model.counts.setdefault(name, []).append((start, value))
        return
    end = start + event["dur"] / 1e6
    if event["cat"] == "step":
        model.steps.append(Step(arguments["step"], start, end))
        return
    amount = arguments.get("bytes", arguments.get("parameters", 0))
    model.pieces.append(
        Piece(event["cat"], arguments.get("disk", ""), arguments["block"], arguments["what"], start, end, amount)
    )


# Computing.


def analyse(model: ModelTrace) -> list[StepReport]:
    """Every whole step of the trace."""
    resources = _resources(model)
    best = {resource.name: _best(model, resource) for resource in resources}
    blames = _blames(model, resources)
    return [_report(model, step, resources, best, blames) for step in model.steps]


def typical(reports: Sequence[StepReport]) -> StepReport:
    """The step of median time, the first left out where there are others: it finds no order of use recorded."""
    later = sorted(reports[1:] or reports, key=lambda report: report.seconds)
    return later[(len(later) - 1) // 2]


class _Resource(NamedTuple):
    name: str
    pieces: list[Piece]
    disk: str
    rows: tuple[str, ...]
    is_part: bool


def _resources(model: ModelTrace) -> list[_Resource]:
    found = [_Resource(row, model.of(row), "", (row,), False) for row in (DEVICE, COPY_IN, COPY_OUT, CPU)]
    disks = sorted({piece.disk for piece in model.pieces if piece.disk})
    for disk in disks:
        rows = (DISK_READ, DISK_WRITE)
        found.append(_Resource(f"disk {disk}", model.of(*rows, disk=disk), disk, rows, False))
        for row in rows:
            found.append(_Resource(f"{row} {disk}", model.of(row, disk=disk), disk, (row,), True))
    return [resource for resource in found if resource.pieces]


def _best(model: ModelTrace, resource: _Resource) -> tuple[float | None, str]:
    """The rate that the resource can reach, and who says so."""
    profile = model.disks.get(resource.disk) if resource.disk else None
    if profile is not None:
        directions = {piece.row for piece in resource.pieces}
        mode = "mixed" if len(directions) > 1 else "read" if DISK_READ in directions else "write"
        return float(profile[f"{mode}_bytes_per_second"]), "bench io"
    moved = _moved(resource.pieces)
    rates = [best_rate(moved)]
    for step in model.steps:
        inside = _clipped(moved, step.start, step.end)
        if inside:
            busy = union_seconds((start, end) for start, end, _ in inside)
            rates.append(sum(amount for _, _, amount in inside) / busy)
    return max((rate for rate in rates if rate), default=None), "seen in this trace"


def _moved(pieces: Iterable[Piece]) -> list[Piece]:
    """Those that count for a rate: of the CPU's kernels only the updates."""
    return [piece for piece in pieces if piece.amount and (piece.row != CPU or piece.what == "update")]


def best_rate(pieces: Sequence[Piece], window: float = WINDOW_SECONDS) -> float | None:
    """Amount per second in the best stretch of ``window`` busy seconds, each piece spread evenly over its time."""
    axis = _BusyAxis((piece.start, piece.end) for piece in pieces)
    if not axis.seconds:
        return None
    count = max(1, int(axis.seconds / window))
    window = axis.seconds / count
    amounts = [0.0] * count
    for piece in pieces:
        start, end = axis.place(piece.start), axis.place(piece.end)
        for index in range(min(int(start / window), count - 1), min(int(end / window), count - 1) + 1):
            overlap = min(end, (index + 1) * window) - max(start, index * window)
            amounts[index] += piece.amount * max(0.0, overlap) / max(end - start, _EPSILON_SECONDS)
    return max(amounts) / window


class _BusyAxis:
    """Time without the stretches in which nothing runs."""

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        self.seconds = 0.0
        self._starts: list[float] = []
        self._before: list[float] = []  # busy seconds before each start
        reached = float("-inf")
        for start, end in sorted(intervals):
            if start > reached:
                self._starts.append(start)
                self._before.append(self.seconds)
                reached = start
            self.seconds += max(0.0, end - reached)
            reached = max(reached, end)

    def place(self, at: float) -> float:
        """Busy seconds until ``at``, which lies in an interval."""
        index = bisect_right(self._starts, at) - 1
        return self._before[index] + at - self._starts[index]


def union_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one interval runs."""
    return _BusyAxis(intervals).seconds


def _clipped(pieces: Iterable[Piece], start: float, end: float) -> list[tuple[float, float, float]]:
    """(start, end, amount) of what lies inside, the amount in proportion."""
    inside = []
    for piece in pieces:
        begin, stop = max(piece.start, start), min(piece.end, end)
        if begin < stop:
            inside.append((begin, stop, piece.amount * (stop - begin) / (piece.end - piece.start)))
    return inside


class _Blame(NamedTuple):
    """A stretch of a wait, and the resource it is charged to."""

    resource: str
    row: str
    start: float
    end: float


def _blames(model: ModelTrace, resources: Sequence[_Resource]) -> list[_Blame]:
    by_block: dict[str, list[tuple[float, str, str]]] = {}
    for resource in resources:
        if resource.is_part or resource.name == DEVICE:
            continue
        for piece in resource.pieces:
            by_block.setdefault(piece.block, []).append((piece.end, resource.name, piece.row))
    for ends in by_block.values():
        ends.sort()
    blames = []
    for wait in model.of(MAIN):
        blames += blame(wait, by_block.get(wait.block, []))
    return blames


def blame(wait: Piece, ends: Sequence[tuple[float, str, str]]) -> list[_Blame]:
    """Whom each stretch of a wait is charged to. ``ends``: (end, resource, row) of the work for the wait's block, in
    order."""
    stretches: list[_Blame] = []
    at = wait.start
    first = bisect_right(ends, wait.start, key=lambda entry: entry[0])
    # The wait ends a moment after the work that it was for.
    last = bisect_left(ends, wait.end + _EPSILON_SECONDS, key=lambda entry: entry[0])
    for end, resource, row in ends[first:last]:
        stretches.append(_Blame(resource, row, at, min(end, wait.end)))
        at = min(end, wait.end)
    if at < wait.end:
        tail = stretches[-1] if stretches else _Blame(OTHER, OTHER, at, at)
        stretches.append(tail._replace(start=at, end=wait.end))
    return stretches


def _report(
    model: ModelTrace,
    step: Step,
    resources: Sequence[_Resource],
    best: dict[str, tuple[float | None, str]],
    blames: Sequence[_Blame],
) -> StepReport:
    uses = []
    inside = [(one, seconds) for one in blames if (seconds := min(one.end, step.end) - max(one.start, step.start)) > 0]
    for resource in resources:
        clipped = _clipped(resource.pieces, step.start, step.end)
        moved = _clipped(_moved(resource.pieces), step.start, step.end)
        waited = sum(
            seconds
            for one, seconds in inside
            if (one.resource == f"disk {resource.disk}" and one.row in resource.rows)
            or (not resource.disk and one.resource == resource.name)
        )
        uses.append(
            Use(
                resource.name,
                union_seconds((begin, end) for begin, end, _ in clipped),
                waited,
                sum(amount for _, _, amount in moved),
                *best[resource.name],
                resource.is_part,
            )
        )
    waits: dict[str, float] = {}
    for wait in model.of(MAIN):
        seconds = min(wait.end, step.end) - max(wait.start, step.start)
        if seconds > 0:
            waits[wait.what] = waits.get(wait.what, 0.0) + seconds
    return StepReport(step, uses, waits, sum(seconds for one, seconds in inside if one.resource == OTHER))


# As text.


def describe(model: ModelTrace, reports: Sequence[StepReport]) -> str:
    """Tables of these steps, and a line on the typical one."""
    lines = [f"{model.name}: {len(reports)} step{'s' * (len(reports) > 1)}"]
    if model.dropped:
        lines.append(f"the trace was full: {model.dropped} later pieces of work are not in it")
    for report in reports:
        lines += ["", *_table(model, report)]
    if len(reports) > 1:
        lines += ["", *_summary(reports)]
    sources = {use.best_source for report in reports for use in report.uses if use.best}
    lines.append("")
    if "bench io" in sources:
        lines.append("bench io: what `tiermem bench io` measured on that disk and kept")
    if "seen in this trace" in sources:
        lines.append(
            f"seen: the best {WINDOW_SECONDS * 1e3:.0f} busy ms or step of this trace; nothing was measured beforehand"
        )
    return "\n".join(lines)


def _table(model: ModelTrace, report: StepReport) -> list[str]:
    width = max([len(use.name) for use in report.uses] + [14])
    lines = [
        headline(report),
        f"{'':<{width}}  {'busy':>9} {'of step':>8} {'waited for':>11} {'moved':>11} {'achieved':>13} {'best':>13}",
    ]
    for use in report.uses:
        lines.append(
            f"{use.name:<{width}}  {use.busy_seconds:>7.3f} s {use.busy_seconds / report.seconds:>7.0%} "
            f"{use.waited_seconds:>9.3f} s {_amount(use):>11} {rate_text(use, use.rate):>13} "
            f"{rate_text(use, use.best):>13} {_share(use)}".rstrip()
        )
    total = sum(report.waits.values())
    waits = ", ".join(f"{WAIT_NAMES.get(what, what)} {seconds:.3f} s" for what, seconds in report.waits.items())
    other = f"; for no resource here: {report.waited_other:.3f} s" if report.waited_other > 5e-4 else ""
    lines.append(f"{'main thread':<{width}}  waited {total:.3f} s{f': {waits}' if waits else ''}{other}")
    return lines


WAIT_NAMES = {"gather": "for weights", "gradient": "for gradients", "update": "for updates", "disk": "for the disk"}


def headline(report: StepReport) -> str:
    binding = report.binding
    bound = f"{binding.name} binds" if binding else "nothing was recorded"
    return f"step {report.step.number}: {report.seconds:.3f} s; {bound}, overlap efficiency {report.efficiency:.0%}"


def _summary(reports: Sequence[StepReport]) -> list[str]:
    kept = reports[1:] if len(reports) > 2 else reports
    names = {report.binding.name for report in kept if report.binding}
    return [
        f"median of {len(kept)} steps{' (the first left out)' if len(kept) < len(reports) else ''}: "
        f"{median(report.seconds for report in kept):.3f} s; bound by {', '.join(sorted(names))}; "
        f"overlap efficiency {median(report.efficiency for report in kept):.0%}"
    ]


def _share(use: Use) -> str:
    if not use.rate or not use.best:
        return ""
    return f"{use.rate / use.best:>5.0%} of {'bench io' if use.best_source == 'bench io' else 'seen'}"


def _amount(use: Use) -> str:
    if not use.amount:
        return "-"
    return f"{use.amount / 1e6:,.1f} M" if use.name == CPU else f"{use.amount / 1e6:,.0f} MB"


def rate_text(use: Use, rate: float | None) -> str:
    if not rate:
        return "-"
    return f"{rate / 1e6:,.0f} M/s" if use.name == CPU else f"{rate / 1e9:.2f} GB/s"
