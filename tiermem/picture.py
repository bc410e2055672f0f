"""A picture of one step: a row for each resource, what it worked on, and how busy it was. Needs matplotlib.

Where one piece of work follows another, each is a bar with its block's name. A disk has many in flight: its rows show
how fast bytes move, by what they are, and a line at the best that the disk can do.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tiermem.analysis import WAIT_NAMES, ModelTrace, Piece, StepReport, rate_text
from tiermem.timeline import COPY_IN, COPY_OUT, CPU, DEVICE, DISK_READ, DISK_WRITE, MAIN

_COLOURS = {
    "forward": "#8ecae6",
    "backward": "#3a86c8",
    "recompute": "#5fa8d3",
    "weights": "#74b87a",
    "states": "#f2b155",
    "gradients": "#b48ad6",
    "activations": "#e59fb8",
    "update": "#e07a5f",
    "waits": "#b5b5b5",
}
_KINDS = {
    "weight": "weights",
    "state": "states",
    "gradient": "gradients",
    "wide_gradient": "gradients",
    "activations": "activations",
    "update": "update",
}
_MEANINGS = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "forward again, in backward",
    "weights": "weights",
    "states": "optimizer states",
    "gradients": "gradients",
    "activations": "inputs kept for backward",
    "update": "optimizer update",
    "waits": "main thread stands still",
}
_DISKS = (DISK_READ, DISK_WRITE)
_POOLS = {"slabs": "host buffers", "slots": "device slots"}
_CHARACTER_SHARE = 0.0058
"""Of the width of a row, for one character of a label in a bar."""
_SLOTS_OF_TIME = 200
"""A disk's speed is drawn for so many equal parts of the step."""


class _Row(NamedTuple):
    title: str
    pieces: list[Piece]
    resource: str  # whose use is told beside it; "" for the main thread


def draw(model: ModelTrace, report: StepReport, path: Path) -> None:
    """Write a PNG of the step.

    Errors: ``RuntimeError`` without matplotlib.
    """
    rows = _rows(model, report)
    pools = [name for name in _POOLS if model.counts.get(name)]
    figure = _figure_class()(figsize=(14, 1.9 + 0.62 * len(rows) + 0.85 * len(pools)), layout="constrained")
    axes = figure.subplots(
        1 + len(pools),
        1,
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": [0.62 * len(rows)] + [0.55] * len(pools)},
    )[:, 0]
    _draw_rows(axes[0], model, report, rows)
    for axis, pool in zip(axes[1:], pools, strict=True):
        _draw_pool(axis, model, report, pool)
    axes[-1].set_xlabel("seconds since the step before ended")
    axes[-1].set_xlim(0, report.seconds)
    figure.suptitle(_title(model, report), x=0.01, ha="left", fontsize=13, fontweight="bold")
    _legend(figure, rows, report)
    figure.savefig(path, dpi=130, format="png")


def _figure_class() -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise RuntimeError("a picture needs matplotlib: pip install 'tiermem[plot]'") from None


def _title(model: ModelTrace, report: StepReport) -> str:
    binding = report.binding
    if binding is None:
        return f"{model.name}, step {report.step.number}: {report.seconds:.2f} s"
    who = {DEVICE: "compute", CPU: "the CPU's optimizer update", COPY_IN: "copying to the device"}
    name = who.get(binding.name, "copying from the device" if binding.name == COPY_OUT else binding.name)
    return (
        f"{model.name}, step {report.step.number}: {report.seconds:.2f} s, bound by {name}, "
        f"which is busy {report.efficiency:.0%} of it"
    )


def _rows(model: ModelTrace, report: StepReport) -> list[_Row]:
    start, end = report.step.start, report.step.end
    inside = [piece for piece in model.pieces if piece.end > start and piece.start < end]

    def of(row: str, disk: str | None = None) -> list[Piece]:
        return [piece for piece in inside if piece.row == row and disk in (None, piece.disk)]

    rows = [_Row("compute", of(DEVICE), DEVICE), _Row("main thread waits", of(MAIN), "")]
    rows += [_Row("copy to the device", of(COPY_IN), COPY_IN), _Row("copy from the device", of(COPY_OUT), COPY_OUT)]
    for disk in sorted({piece.disk for piece in inside if piece.disk}):
        for row, verb in ((DISK_READ, "read"), (DISK_WRITE, "written")):
            rows.append(_Row(f"disk, {verb}\n{_shortened(disk)}", of(row, disk), f"{row} {disk}"))
    rows.append(_Row("CPU kernels", of(CPU), CPU))
    return [row for row in rows if row.pieces]


def _shortened(text: str, characters: int = 24) -> str:
    return text if len(text) <= characters else "…" + text[1 - characters :]


def _draw_rows(axis: Any, model: ModelTrace, report: StepReport, rows: Sequence[_Row]) -> None:
    names = _short_names(piece.block for row in rows for piece in row.pieces)
    for position, row in enumerate(rows):
        if row.resource.startswith(_DISKS):
            _draw_speed(axis, report, row, position)
        else:
            lanes = _lanes(row.pieces)
            height = 0.8 / len(lanes)
            for index, lane in enumerate(lanes):
                _draw_lane(axis, report, lane, position - 0.4 + index * height, height, names)
        axis.text(1.005, position, _beside(row, report), transform=axis.get_yaxis_transform(), va="center", fontsize=9)
    axis.set_yticks(range(len(rows)), [row.title for row in rows], fontsize=10)
    for row, label in zip(rows, axis.get_yticklabels(), strict=True):
        if report.binding is not None and _binds(row, report.binding.name):
            label.set_fontweight("bold")
    axis.set_ylim(len(rows) - 0.45, -0.55)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelbottom=False, length=0)
    axis.grid(axis="x", color="#e4e4e4", linewidth=0.6)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _binds(row: _Row, binding: str) -> bool:
    return row.resource == binding or (row.resource.startswith(_DISKS) and row.resource.endswith(binding[4:]))


def _draw_lane(
    axis: Any, report: StepReport, lane: Sequence[Piece], bottom: float, height: float, names: dict[str, str]
) -> None:
    start, end = report.step.start, report.step.end
    for piece in lane:
        begin, stop = max(piece.start, start) - start, min(piece.end, end) - start
        share = (stop - begin) / report.seconds
        axis.broken_barh(
            [(begin, max(stop - begin, 5e-4 * report.seconds))],
            (bottom, height * 0.94),
            facecolors=_COLOURS[_kind(piece)],
            edgecolors="white",
            linewidth=0.5 if share > 3e-3 else 0,
        )
        label = next((t for t in _labels(piece, names) if share > _CHARACTER_SHARE * (len(t) + 1)), "")
        if label and height >= 0.25:
            axis.text(
                (begin + stop) / 2, bottom + height / 2, label, ha="center", va="center", fontsize=7.5, clip_on=True
            )


def _labels(piece: Piece, names: dict[str, str]) -> list[str]:
    """What a bar may say, longest first."""
    name = names.get(piece.block, piece.block)
    short = [name, name.rsplit(".", 1)[-1]]
    return [f"{name}: {WAIT_NAMES.get(piece.what, piece.what)}", *short] if piece.row == MAIN else short


def _draw_speed(axis: Any, report: StepReport, row: _Row, position: int) -> None:
    """Bytes per second over the step, stacked by what the bytes are; the dashed line is the best that was measured."""
    use = next(use for use in report.uses if use.name == row.resource)
    width = report.seconds / _SLOTS_OF_TIME
    kinds = [kind for kind in _COLOURS if any(_kind(piece) == kind for piece in row.pieces)]
    speeds = {kind: [0.0] * _SLOTS_OF_TIME for kind in kinds}
    for piece in row.pieces:
        begin, stop = piece.start - report.step.start, piece.end - report.step.start
        rate = piece.amount / max(stop - begin, 1e-6)
        for index in range(max(0, int(begin / width)), min(_SLOTS_OF_TIME - 1, int(stop / width)) + 1):
            overlap = min(stop, (index + 1) * width) - max(begin, index * width)
            speeds[_kind(piece)][index] += rate * max(0.0, overlap) / width
    top = max([use.best or 0.0, *(sum(column) for column in zip(*speeds.values(), strict=True))])
    times = [index * width for index in range(_SLOTS_OF_TIME + 1)]
    bottom = [0.0] * (_SLOTS_OF_TIME + 1)
    for kind in kinds:
        upper = [low + speed for low, speed in zip(bottom, [*speeds[kind], 0.0], strict=True)]
        scaled = [[position + 0.4 - 0.8 * value / top for value in values] for values in (bottom, upper)]
        axis.fill_between(times, *scaled, step="post", color=_COLOURS[kind], linewidth=0)
        bottom = upper
    axis.axhline(position + 0.4, color="#909090", linewidth=0.6)
    if use.best:
        axis.axhline(position + 0.4 - 0.8 * use.best / top, color="#606060", linewidth=0.8, linestyle=(0, (4, 3)))


def _kind(piece: Piece) -> str:
    if piece.row == MAIN:
        return "waits"
    if piece.row == DEVICE:
        return piece.what if piece.what in _COLOURS else "forward"
    return _KINDS.get(piece.what, "weights")


def _beside(row: _Row, report: StepReport) -> str:
    if not row.resource:
        return f"{sum(report.waits.values()) / report.seconds:.0%} of the step"
    use = next(use for use in report.uses if use.name == row.resource)
    text = f"busy {use.busy_seconds / report.seconds:.0%}"
    if not use.rate:
        return text
    best = "best measured" if use.best_source == "bench io" else "best seen"
    return f"{text}: {rate_text(use, use.rate)}\n({best} {rate_text(use, use.best)})"


def _draw_pool(axis: Any, model: ModelTrace, report: StepReport, pool: str) -> None:
    start, end = report.step.start, report.step.end
    counts = model.counts[pool]
    before = [value for at, value in counts if at <= start]
    inside = [(at - start, value) for at, value in counts if start < at < end]
    times = [0.0, *(at for at, _ in inside), end - start]
    values = [before[-1] if before else 0, *(value for _, value in inside)]
    values.append(values[-1])
    capacity = model.capacities.get(pool, max(values))
    axis.fill_between(times, values, step="post", color="#d8d8d8")
    axis.step(times, values, where="post", color="#707070", linewidth=0.8)
    axis.set_ylim(0, capacity * 1.12 or 1)
    axis.set_yticks([0, capacity])
    axis.set_ylabel(f"{_POOLS[pool]}\nin use", rotation=0, ha="right", va="center", fontsize=9)
    axis.text(1.005, 0.5, f"of {capacity}", transform=axis.transAxes, va="center", fontsize=9)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _legend(figure: Any, rows: Sequence[_Row], report: StepReport) -> None:
    patch = importlib.import_module("matplotlib.patches").Patch
    present = {_kind(piece) for row in rows for piece in row.pieces}
    handles = [patch(facecolor=colour, label=_MEANINGS[kind]) for kind, colour in _COLOURS.items() if kind in present]
    if any(row.resource.startswith(_DISKS) for row in rows):
        line = importlib.import_module("matplotlib.lines").Line2D
        handles.append(line([], [], color="#606060", linewidth=0.8, linestyle=(0, (4, 3)), label="best of the disk"))
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), fontsize=9, frameon=False)


def _lanes(pieces: Iterable[Piece]) -> list[list[Piece]]:
    lanes: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        lane = next((lane for lane in lanes if lane[-1].end <= piece.start), None)
        if lane is None:
            lanes.append([piece])
        else:
            lane.append(piece)
    return lanes


def _short_names(names: Iterable[str]) -> dict[str, str]:
    """Block names without the path that many of them share: ``model.layers.3`` is ``layers.3``."""
    return {
        name: ".".join(name.split(".")[-2:]) if name.split(".")[-1].isdigit() else name.split(".")[-1] for name in names
    }
