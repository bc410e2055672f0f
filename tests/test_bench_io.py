from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

import tiermem.store as store_module
from tiermem import bench_io
from tiermem.bench_io import MODES, Bench, Measurement, Options, Setting, best_setting, measure, run
from tiermem.io import ThreadsEngine, depth_in_use, select
from tiermem.io.profile import Profile, device_key, load_profile, save_profile

MIB = 1 << 20
SMALL = Options(
    request_bytes=(65536, MIB),
    depths=(2, 4),
    file_bytes=8 * MIB,
    seconds=0.01,
    repeats=2,
    stream_bytes=16 * MIB,
    stream_rounds=2,
    compare_seconds=0.2,
    compare_rounds=2,
)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def test_a_bench_measures_everything_marks_the_best_and_leaves_nothing(tmp_path: Path) -> None:
    out = io.StringIO()
    json_path = tmp_path / "out.json"
    disk = tmp_path / "disk"
    disk.mkdir()
    (bench,) = run(Console(file=out, width=150), [disk], SMALL, json_path=json_path)
    assert list(disk.iterdir()) == []
    engines = {setting.engine for setting in bench.settings()}
    assert {"threads", "aiofiles"} <= engines
    assert engines | set(bench.passed_over) == {"io_uring", "threads", "aiofiles"}
    for measurement in bench.measurements:
        assert len(measurement.bytes_per_second) == 2
        assert min(measurement.bytes_per_second) > 0
        assert measurement.spread >= 0
    assert bench.best in bench.settings()
    *streams, alone = bench.streams
    assert {stream.setting.engine for stream in streams if stream.setting is not None} == engines
    assert alone.setting is None
    assert all(stream.moved_bytes == 16 * MIB and len(stream.cpu_seconds_per_gib) == 2 for stream in streams)
    for stream in bench.streams:
        assert len(stream.longest_stall_seconds) == len(stream.stalled_share) == 2
        assert all(0 <= share <= 1 for share in stream.stalled_share)
    text = out.getvalue()
    assert str(disk) in text
    assert text.count(" *") >= 1
    assert "longest stall" in text
    (values,) = json.loads(json_path.read_text())
    assert values["best"]["engine"] == bench.best.engine  # type: ignore[union-attr]
    assert len(values["measurements"]) == len(bench.measurements)
    profile = load_profile(disk)
    assert profile is not None
    assert (profile.engine, profile.piece_bytes) == (bench.best.engine, bench.best.request_bytes)  # type: ignore[union-attr]
    assert profile.read_bytes_per_second == pytest.approx(bench.of(bench.best, "read").median)  # type: ignore[arg-type]


def test_the_best_setting_keeps_most_of_each_speed_with_the_fewest_completions() -> None:
    speeds = {
        ("fast reader", MIB, 4): (10.0, 1.0, 5.0),
        ("balanced", MIB, 4): (9.0, 9.0, 9.0),
        ("dear", MIB, 4): (9.0, 9.0, 9.0),
        ("balanced", 4 * MIB, 4): (9.1, 9.1, 9.1),
        ("balanced", 4 * MIB, 16): (9.2, 9.2, 9.2),
        ("slow", 4096, 1): (1.0, 1.0, 1.0),
    }
    bench = Bench(Path("/"), "ext4", "disk", 1, True, {})
    for setting, values in speeds.items():
        bench.measurements += [
            Measurement(Setting(*setting), mode, [v * 0.5, v, v * 1.1], [1 / len(setting[0])])
            for mode, v in zip(MODES, values, strict=True)
        ]
    assert best_setting(bench, bench.settings()) == Setting("balanced", 4 * MIB, 4)
    assert bench.of(Setting("slow", 4096, 1), "read").spread == pytest.approx(0.5)


def test_an_engine_that_cuts_calls_by_itself_keeps_few_bytes_in_flight() -> None:
    speeds = {
        ("threads", 8 * MIB, 4): 9.2,
        ("io_uring", 8 * MIB, 16): 9.2,
        ("io_uring", 4 * MIB, 4): 9.1,
        ("io_uring", 1 * MIB, 8): 9.1,
        ("io_uring", 1 * MIB, 4): 8.0,
    }
    bench = Bench(Path("/"), "ext4", "disk", 1, True, {})
    for setting, speed in speeds.items():
        bench.measurements += [Measurement(Setting(*setting), mode, [speed], [1.0]) for mode in MODES]
    assert best_setting(bench, bench.settings()) == Setting("io_uring", 1 * MIB, 8)


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_runs_with_the_same_setting_on_the_same_file(tmp_path: Path) -> None:
    out = io.StringIO()
    (bench,) = run(Console(file=out, width=150), [tmp_path], SMALL, against="fio", keep_profile=False)
    assert [comparison.mode for comparison in bench.comparisons] == list(MODES)
    for comparison in bench.comparisons:
        assert len(comparison.ours) == len(comparison.theirs) == 2
        assert comparison.ratio > 0
    assert "ratio" in out.getvalue()
    assert list(tmp_path.iterdir()) == []


def test_fio_that_is_missing_is_asked_for_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(bench_io, "measure", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(RuntimeError, match="fio is not on the PATH: install it"):
        run(Console(file=io.StringIO()), [tmp_path], SMALL, against="fio")


def test_a_plot_is_drawn_or_matplotlib_asked_for(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(RuntimeError, match=r"pip install 'tiermem\[plot\]'"):
            run(console, [tmp_path], SMALL, plot_path=tmp_path / "plot.png")
    else:
        run(console, [tmp_path], SMALL, plot_path=tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_free_space_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "free_bytes", lambda _: 1000)
    with pytest.raises(OSError, match="8388608 bytes needed, 1000 bytes free"):
        measure(tmp_path, SMALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"request_bytes": (1000,)}, "multiples of 4096"),
        ({"depths": (0,)}, "depth"),
        ({"file_bytes": 4096}, "too small"),
        ({"engines": ("fancy",)}, "'fancy'.*io_uring"),
        ({"repeats": 0}, "nothing to measure"),
        ({"stream_rounds": 0}, "stream_rounds"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**options)  # type: ignore[arg-type]


def test_the_file_is_removed_on_ctrl_c(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from rich.console import Console\n"
        "from tiermem.bench_io import Options, run\n"
        "run(Console(), [Path(sys.argv[1])], Options(file_bytes=16 << 20, seconds=0.3))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("tiermem-*/*.extents")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert list(tmp_path.glob("tiermem-*/*.extents"))
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.wait(30)
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []


PROFILE = Profile("threads", 2 * MIB, 24, 1e9, 2e9, 3e9)


def test_auto_begins_with_what_was_measured_best(tmp_path: Path) -> None:
    save_profile(tmp_path, PROFILE)
    (tmp_path / "below").mkdir()
    assert load_profile(tmp_path / "below") == PROFILE  # the same device
    engine = select(tmp_path)
    assert (engine.name, engine.piece_bytes, engine.depth) == ("threads", 2 * MIB, 24)
    assert engine.fallbacks == []
    engine.close()
    engine = select(tmp_path, "aiofiles")
    assert engine.name == "aiofiles"
    engine.close()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"engine": "threads"}', None])
def test_a_spoiled_profile_is_ignored(tmp_path: Path, text: str | None) -> None:
    path = save_profile(tmp_path, PROFILE)
    assert path.parent.stat().st_mode & 0o077 == 0
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"depth": 10**9}) if text is None else text)
    assert load_profile(tmp_path) is None
    select(tmp_path).close()


def test_devices_have_different_keys(tmp_path: Path) -> None:
    key = device_key(tmp_path)
    assert key == device_key(tmp_path)
    assert os.sep not in key
    assert key != device_key(Path("/proc"))


def test_the_depth_in_use_is_never_less_than_usual() -> None:
    """In bytes for an engine that cuts calls by itself, in pieces for others."""
    assert depth_in_use("io_uring", 4, 1 * MIB) == 16
    assert depth_in_use("io_uring", 4, 8 * MIB) == 4
    assert depth_in_use("io_uring", 1, 8 * MIB) == 2
    assert depth_in_use("threads", 4, 8 * MIB) == ThreadsEngine.usual_depth
