"""The timeline: what a trace of a run holds, that recording changes nothing, and what is concluded from a trace."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from small_llama import write_model, write_text
from torch import nn
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import tiermem
from tiermem import analysis, timeline
from tiermem.analysis import ModelTrace, Piece, Step, analyse, best_rate, blame, load, typical, union_seconds
from tiermem.cli import app
from tiermem.device import Device
from tiermem.io.profile import Profile
from tiermem.offload import _runtime_of
from tiermem.simulated import SimulatedDevice
from tiermem.timeline import COPY_IN, COPY_OUT, CPU, DEVICE, DISK_READ, DISK_WRITE, MAIN, Timeline

WIDTH = 33


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 199)
        self.down = nn.Linear(199, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


class Model(nn.Module):
    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.recompute = recompute

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.recompute else layer(hidden)
        return hidden


def offload(directory: Path, *, device: Device | None = None, recompute: bool = False, home: str = "disk") -> Model:
    states = "host" if home == "device" else home
    return tiermem.offload(
        Model(recompute=recompute),
        memory=tiermem.Memory(device="8MiB", host="64MiB", disk=directory),
        policy=tiermem.Policy(weights=home, states=states, blocks=[Layer], chunk_numel=4096),  # type: ignore[arg-type]
        device=device or "cpu",
    )


def train(model: nn.Module, steps: int) -> None:
    optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(7, WIDTH)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def events(path: Path, kind: str = "X") -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == kind]


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[tuple[nn.Module, Path]]:
    model = offload(tmp_path, recompute=True)
    path = tmp_path / "trace.json"
    with tiermem.trace(path):
        train(model, 3)
        tiermem.synchronize(model)
    yield model, path
    tiermem.close(model)


# What a trace holds.


def test_trace_has_a_row_for_each_resource_and_names_blocks(traced: tuple[nn.Module, Path], tmp_path: Path) -> None:
    _, path = traced
    names = {event["args"]["name"] for event in events(path, "M") if event["name"] == "thread_name"}
    assert names >= {
        "steps", "device compute", "CPU update", "main thread", f"disk read {tmp_path}", f"disk write {tmp_path}",
    }  # fmt: skip
    layers = {f"layers.{index}" for index in range(4)}
    for row in (DEVICE, CPU, DISK_READ, DISK_WRITE):
        assert {event["args"]["block"] for event in events(path) if event["cat"] == row} >= layers


def test_trace_accounts_for_every_byte_of_the_disk(tmp_path: Path) -> None:
    model = offload(tmp_path)
    before = tiermem.report(model)
    with tiermem.trace(tmp_path / "t.json"):
        train(model, 2)
        tiermem.synchronize(model)
    after = tiermem.report(model)
    moved = {
        row: sum(event["args"]["bytes"] for event in events(tmp_path / "t.json") if event["cat"] == row)
        for row in (DISK_READ, DISK_WRITE)
    }
    assert moved[DISK_READ] == after.bytes_read - before.bytes_read
    assert moved[DISK_WRITE] == after.bytes_written - before.bytes_written
    updated = sum(e["args"]["parameters"] for e in events(tmp_path / "t.json") if e["args"].get("what") == "update")
    assert updated == pytest.approx(2 * sum(p.numel() for p in model.parameters()), rel=0.01)  # padding between them
    tiermem.close(model)


def test_copies_are_timed_where_they_happen(tmp_path: Path) -> None:
    model = offload(tmp_path, device=SimulatedDevice(delay_max_s=0.001))
    before = tiermem.report(model)
    with tiermem.trace(tmp_path / "t.json"):
        train(model, 2)
        tiermem.synchronize(model)
    after = tiermem.report(model)
    copies = {row: [e for e in events(tmp_path / "t.json") if e["cat"] == row] for row in (COPY_IN, COPY_OUT)}
    copied_in, copied_out = (sum(event["args"]["bytes"] for event in copies[row]) for row in (COPY_IN, COPY_OUT))
    assert copied_in == after.bytes_copied_in - before.bytes_copied_in
    assert copied_out == after.bytes_copied_out - before.bytes_copied_out
    assert all(event["args"]["block"].startswith("layers.") for row in copies.values() for event in row)
    tiermem.close(model)


def test_events_of_one_row_of_the_file_do_not_overlap(traced: tuple[nn.Module, Path]) -> None:
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events(traced[1]):
        rows.setdefault((event["pid"], event["tid"]), []).append(event)
    for row in rows.values():
        row.sort(key=lambda event: event["ts"])
        for earlier, later in pairwise(row):
            assert earlier["ts"] + earlier["dur"] <= later["ts"] + 0.002  # microseconds, rounded


def test_device_row_is_one_piece_after_another(traced: tuple[nn.Module, Path]) -> None:
    pieces = sorted(load(traced[1])[0].of(DEVICE), key=lambda piece: piece.start)
    assert all(a.end <= b.start + 1e-8 for a, b in pairwise(pieces))
    waits = load(traced[1])[0].of(MAIN)
    both = union_seconds((p.start, p.end) for p in pieces + waits)
    alone = sum(union_seconds((p.start, p.end) for p in part) for part in (pieces, waits))
    assert both == pytest.approx(alone, abs=1e-6)  # a wait is not compute
    assert {piece.what for piece in pieces} >= {"forward", "backward"}


def test_pools_are_counted_within_their_capacity(traced: tuple[nn.Module, Path]) -> None:
    model = load(traced[1])[0]
    assert set(model.counts) == {"slabs", "slots"} == set(model.capacities)
    for name, counts in model.counts.items():
        values = [value for _, value in counts]
        assert 0 <= min(values) < max(values) <= model.capacities[name]
    assert model.counts["slabs"][-1][1] == 0


def test_steps_follow_one_another(traced: tuple[nn.Module, Path]) -> None:
    steps = load(traced[1])[0].steps
    assert [step.number for step in steps] == [1, 2, 3]
    assert all(a.end == pytest.approx(b.start, abs=1e-6) for a, b in pairwise(steps))


@pytest.mark.parametrize("home", ["host", "device"])
def test_every_placement_can_be_traced(tmp_path: Path, home: str) -> None:
    for device in (None, SimulatedDevice(delay_max_s=0.0)):
        model = offload(tmp_path, home=home, device=device)
        with tiermem.trace(tmp_path / "t.json"):
            train(model, 2)
        assert len(analyse(load(tmp_path / "t.json")[0])) == 2
        tiermem.close(model)


# Recording.


def test_recording_changes_no_bit(tmp_path: Path) -> None:
    results = []
    for path in (None, tmp_path / "t.json"):
        model = offload(tmp_path)
        if path is None:
            train(model, 3)
        else:
            with tiermem.trace(path):
                train(model, 3)
        tiermem.close(model)
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_nothing_is_recorded_outside_the_block(traced: tuple[nn.Module, Path]) -> None:
    model, path = traced
    line = _runtime_of(model).timeline
    size = path.stat().st_size
    train(model, 1)
    assert not line.on and line._recording is None and not line._units
    assert path.stat().st_size == size


def test_models_made_and_closed_inside_are_in_the_trace(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    before = offload(tmp_path / "a")
    with tiermem.trace(tmp_path / "t.json"):
        inside = offload(tmp_path / "b")
        train(inside, 1)
        tiermem.close(inside)
        train(before, 1)
    first, second = load(tmp_path / "t.json")
    assert {piece.disk for piece in first.pieces} - {""} == {str(tmp_path / "a")}
    assert {piece.disk for piece in second.pieces} - {""} == {str(tmp_path / "b")}
    tiermem.close(before)


def test_an_exception_leaves_a_trace_of_what_came_before(tmp_path: Path) -> None:
    model = offload(tmp_path)
    with pytest.raises(KeyError), tiermem.trace(tmp_path / "t.json"):
        train(model, 2)
        raise KeyError("stop")
    assert len(load(tmp_path / "t.json")[0].steps) == 2
    train(model, 1)
    tiermem.close(model)


def test_a_failed_forward_leaves_the_device_row_sound(tmp_path: Path) -> None:
    model = offload(tmp_path)
    with tiermem.trace(tmp_path / "t.json"):
        with pytest.raises(RuntimeError):
            model(torch.randn(7, WIDTH + 1))
        train(model, 1)
    pieces = sorted(load(tmp_path / "t.json")[0].of(DEVICE), key=lambda piece: piece.start)
    assert all(a.end <= b.start + 1e-8 for a, b in pairwise(pieces))
    tiermem.close(model)


def test_recording_ends_after_the_steps_asked_for(tmp_path: Path) -> None:
    model = offload(tmp_path)
    with tiermem.trace(tmp_path / "t.json", steps=2):
        train(model, 4)
    trace = load(tmp_path / "t.json")[0]
    assert [step.number for step in trace.steps] == [1, 2]
    tiermem.close(model)


def test_a_full_trace_counts_what_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "INTERVALS_MAX", 10)
    model = offload(tmp_path)
    with tiermem.trace(tmp_path / "t.json"):
        train(model, 1)
    trace = load(tmp_path / "t.json")[0]
    assert len(trace.pieces) == 10 and trace.dropped > 10
    assert "full" in analysis.describe(trace, analyse(trace))
    tiermem.close(model)


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"), tiermem.trace(tmp_path / "missing" / "t.json"):
        pass
    with pytest.raises(ValueError, match="steps=0"), tiermem.trace(tmp_path / "t.json", steps=0):
        pass
    first, second = tiermem.trace(tmp_path / "t.json"), tiermem.trace(tmp_path / "u.json")
    with first, pytest.raises(RuntimeError, match="already"), second:
        pass
    with tiermem.trace(tmp_path / "t.json"):
        pass
    assert load(tmp_path / "t.json") == []


class Ticks:
    """A clock that says how often it was asked."""

    def __init__(self) -> None:
        self.now = 0.0

    def align(self) -> None:
        pass

    def moment(self) -> float:
        self.now += 1
        return self.now


def test_a_nested_forward_interrupts_the_one_around_it() -> None:
    line = Timeline("model", Ticks(), [])
    recording = line.start()
    line.enter("outer", "forward")
    line.enter("inner", "forward")
    line.leave()
    line.leave()
    line.stop(recording)
    line.enter("unheard", "forward")
    assert [(one.name, one.start, one.end) for one in recording.intervals] == [
        ("outer", 1, 2), ("inner", 3, 4), ("outer", 5, 6),
    ]  # fmt: skip


# Conclusions, from traces made by hand.


def piece(row: str, start: float, end: float, block: str = "", what: str = "", amount: int = 0) -> Piece:
    disk = "/disk" if row in (DISK_READ, DISK_WRITE) else ""
    return Piece(row, disk, block, what, start, end, amount)


def made(*pieces: Piece, steps: tuple[Step, ...] = (Step(1, 0.0, 10.0),), profile: Any = None) -> ModelTrace:
    return ModelTrace("model", {"/disk": profile}, {}, pieces=list(pieces), steps=list(steps))


def test_busy_is_the_union_and_the_longest_binds() -> None:
    trace = made(
        piece(DEVICE, 0, 5),
        piece(DISK_READ, 0, 4, amount=100), piece(DISK_READ, 2, 6, amount=100), piece(DISK_WRITE, 5, 9, amount=40),
        piece(CPU, 6, 7, what="update", amount=30), piece(CPU, 7, 8, what="gradient", amount=30),
    )  # fmt: skip
    (report,) = analyse(trace)
    uses = {use.name: use for use in report.uses}
    assert {name: use.busy_seconds for name, use in uses.items()} == {
        DEVICE: 5, CPU: 2, "disk /disk": 9, "disk read /disk": 6, "disk write /disk": 4,
    }  # fmt: skip
    assert report.binding is uses["disk /disk"]
    assert report.efficiency == pytest.approx(0.9)
    assert uses["disk /disk"].rate == pytest.approx(240 / 9)
    assert uses[CPU].amount == 30


def test_work_that_crosses_a_step_counts_in_both_in_proportion() -> None:
    trace = made(piece(DISK_READ, 8, 12, amount=400), steps=(Step(1, 0.0, 10.0), Step(2, 10.0, 20.0)))
    amounts = [report.uses[0].amount for report in analyse(trace)]
    assert amounts == pytest.approx([200, 200])


def test_the_profile_of_bench_io_is_the_measure_where_there_is_one() -> None:
    profile = {"read_bytes_per_second": 50.0, "write_bytes_per_second": 70.0, "mixed_bytes_per_second": 60.0}
    pieces = piece(DISK_READ, 0, 4, amount=100), piece(DISK_WRITE, 4, 9, amount=100)
    (report,) = analyse(made(*pieces, profile=profile))
    assert [(use.best, use.best_source) for use in report.uses] == [
        (60.0, "bench io"), (50.0, "bench io"), (70.0, "bench io"),
    ]  # fmt: skip
    (report,) = analyse(made(*pieces))
    assert {use.best_source for use in report.uses} == {"seen in this trace"}
    assert report.uses[1].best == pytest.approx(25)


def test_the_best_rate_is_that_of_the_best_busy_stretch() -> None:
    slow, fast = piece(DISK_READ, 0, 1, amount=100), piece(DISK_READ, 5, 6, amount=300)
    assert best_rate([slow, fast], 1.0) == pytest.approx(300)
    assert best_rate([slow, fast], 100.0) == pytest.approx(200)
    assert best_rate([piece(DISK_READ, 0, 2, amount=100), piece(DISK_READ, 1, 3, amount=100)], 1.0) == pytest.approx(
        100
    )
    assert best_rate([]) is None


def test_a_wait_is_charged_to_what_its_block_was_next_to_get() -> None:
    wait = piece(MAIN, 10, 20, "layers.3", "gather")
    ends = [(9.0, "early", ""), (12.0, "disk", DISK_READ), (13.0, CPU, CPU), (19.9, "disk", DISK_WRITE), (25.0, "", "")]
    stretches = blame(wait, ends)
    assert [(one.resource, one.end - one.start) for one in stretches] == [
        ("disk", 2), (CPU, 1), ("disk", pytest.approx(6.9)), ("disk", pytest.approx(0.1)),
    ]  # fmt: skip
    assert [one.resource for one in blame(wait, [])] == [analysis.OTHER]


def test_waiting_is_told_by_resource_and_by_reason() -> None:
    trace = made(
        piece(MAIN, 1, 5, "a", "gather"), piece(MAIN, 6, 7, "b", "gradient"),
        piece(DISK_READ, 0, 4, "a"), piece(CPU, 4, 5, "a", "update"), piece(CPU, 0, 9, "c", "update"),
    )  # fmt: skip
    (report,) = analyse(trace)
    waited = {use.name: use.waited_seconds for use in report.uses}
    assert waited == {"CPU update": 1, "disk /disk": 3, "disk read /disk": 3}
    assert report.waits == {"gather": 4, "gradient": 1}
    assert report.waited_other == 1


def test_the_typical_step_is_not_the_first() -> None:
    steps = (Step(1, 0, 2), Step(2, 2, 9), Step(3, 9, 12), Step(4, 12, 16))
    reports = analyse(made(piece(DEVICE, 0, 16), steps=steps))
    assert typical(reports).step.number == 4
    assert typical(reports[:1]).step.number == 1


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"traceEvents": []}', "\x00\xff"])
def test_files_that_are_no_traces_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match="is not a trace"):
        load(tmp_path / "t.json")


# The command.


def test_report_prints_tables_and_draws(traced: tuple[nn.Module, Path]) -> None:
    pytest.importorskip("matplotlib")
    result = CliRunner().invoke(app, ["report", str(traced[1])])
    assert result.exit_code == 0, result.output
    assert "step 2:" in result.output and "binds, overlap efficiency" in result.output
    assert traced[1].with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_report_without_matplotlib_still_prints(
    traced: tuple[nn.Module, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec, import_module = importlib.util.find_spec, importlib.import_module

    def not_found(name: str, package: str | None = None) -> Any:
        return None if name.startswith("matplotlib") else find_spec(name, package)

    def missing(name: str, package: str | None = None) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return import_module(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", not_found)
    monkeypatch.setattr(importlib, "import_module", missing)
    result = CliRunner().invoke(app, ["report", str(traced[1])])
    assert "step 3:" in result.output and "pip install 'tiermem[plot]'" in result.output
    assert result.exit_code == 0
    result = CliRunner().invoke(app, ["report", str(traced[1]), "--png", str(traced[1].with_name("x.png"))])
    assert result.exit_code == 1 and "pip install 'tiermem[plot]'" in result.output


def test_report_of_a_step_that_is_not_there_says_so(traced: tuple[nn.Module, Path]) -> None:
    result = CliRunner().invoke(app, ["report", str(traced[1]), "--step", "9"])
    assert result.exit_code == 1 and "no step 9" in result.output


def test_what_bench_io_measured_goes_into_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Profile("threads", 1 << 20, 4, 1e9, 2e9, 1.5e9)
    monkeypatch.setattr(importlib.import_module("tiermem.trace"), "load_profile", lambda directory: measured)
    model = offload(tmp_path)
    with tiermem.trace(tmp_path / "t.json"):
        train(model, 2)
    tiermem.close(model)
    reports = analyse(load(tmp_path / "t.json")[0])
    (disk,) = [use for use in reports[-1].uses if use.name == f"disk {tmp_path}"]
    assert (disk.best, disk.best_source) == (1.5e9, "bench io")


def test_train_writes_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, text = write_model(tmp_path / "model"), write_text(tmp_path / "text")
    arguments = ["train", "--model", model, "--data", text, "--steps", 3, "--seq-len", 32, "--eval-batches", 1]
    arguments += ["--disk", tmp_path, "--trace", tmp_path / "t.json", "--trace-steps", 2]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    assert "tiermem report" in result.output
    assert len(load(tmp_path / "t.json")[0].steps) == 2
