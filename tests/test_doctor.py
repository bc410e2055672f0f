from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

import tiermem._native
from tiermem import doctor
from tiermem.doctor import Finding, Verdict, examine, run
from tiermem.io import ThreadsEngine
from tiermem.io.mounts import FileSystem
from tiermem.io.uring import _load
from tiermem.store import Store, find_owned

SHM = Path("/dev/shm")


@pytest.fixture(autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(doctor, "measure_quickly", lambda directory, engine, seconds: (2e9, 3e9))


@pytest.fixture
def without_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiermem._native, "PATH", tmp_path / "libtiermem.so")
    tiermem._native.library.cache_clear()
    _load.cache_clear()
    yield
    tiermem._native.library.cache_clear()
    _load.cache_clear()


def findings(directory: Path | None = None) -> dict[str, Finding]:
    found = list(examine([] if directory is None else [directory]))
    names = [finding.subject.removeprefix(f"{directory}: ") for finding in found]
    assert len(set(names)) == len(names)
    for finding in found:
        assert bool(finding.remedy) == (finding.verdict is not Verdict.OK), finding
    return dict(zip(names, found, strict=True))


def test_a_good_directory_is_ok_and_left_as_it_was(tmp_path: Path) -> None:
    found = findings(tmp_path)
    assert {"native kernels", "cores", "host memory", "memory lock limit", "accelerator"} <= set(found)
    for name in ("owners", "space", "engine"):
        assert found[name].verdict is Verdict.OK, found[name]
    assert found["speed"].what == "2.00 GB/s read, 3.00 GB/s written"
    assert list(tmp_path.iterdir()) == []


def test_the_disk_is_really_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    read, write = doctor.measure_quickly(tmp_path, "threads", 0.1)
    assert read > 1e6
    assert write > 1e6
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not SHM.is_dir(), reason="no tmpfs to try")
def test_tmpfs_is_named() -> None:
    found = findings(SHM)["file system"]
    assert found.verdict is Verdict.SLOW
    assert "tmpfs, which lies in memory" in found.what


@pytest.mark.parametrize(
    ("kind", "words"), [("nfs4", "over a network"), ("overlay", "layered"), ("ext4", "ext4 on /dev/x")]
)
def test_file_systems_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, words: str) -> None:
    monkeypatch.setattr(doctor, "file_system", lambda path: FileSystem(kind, "/", "/dev/x"))
    found = findings(tmp_path)["file system"]
    assert words in found.what
    assert (found.verdict is Verdict.OK) == (kind == "ext4")


def test_a_missing_or_read_only_directory_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = findings(tmp_path / "nowhere")[str(tmp_path / "nowhere")]
    assert missing == Finding(
        str(tmp_path / "nowhere"), Verdict.BROKEN, "the directory for the disk tier is missing", "create it"
    )
    original = os.open

    def read_only(path: object, flags: int, *rest: object, **more: object) -> int:
        if flags & os.O_CREAT and str(path).startswith(str(tmp_path)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return original(path, flags, *rest, **more)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "open", read_only)
    found = findings(tmp_path)[str(tmp_path)]
    assert found.verdict is Verdict.BROKEN
    assert "not writable (Read-only file system)" in found.what


def test_a_full_disk_is_broken_and_a_nearly_full_one_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, verdict in ((1000, Verdict.BROKEN), (1 << 30, Verdict.SLOW), (1 << 40, Verdict.OK)):
        monkeypatch.setattr(doctor, "free_bytes", lambda _, free=free: free)
        assert findings(tmp_path)["space"].verdict is verdict


def test_refused_direct_io_is_slow_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.open

    def without_direct(path, flags, *args, **kwargs):  # type: ignore[no-untyped-def]
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", without_direct)
    found = findings(tmp_path)["direct I/O"]
    assert found.verdict is Verdict.SLOW
    assert "refuses O_DIRECT (Invalid argument)" in found.what


def test_a_transfer_that_direct_io_refuses_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "pwritev", refuse)
    found = {finding.subject: finding for finding in doctor._directory(tmp_path)}
    assert "transfer of a page failed: Invalid argument" in found[f"{tmp_path}: direct I/O"].what


def test_without_the_native_library_what_serves_and_what_it_costs_is_said(
    tmp_path: Path, without_library: None
) -> None:
    found = findings(tmp_path)
    assert found["native kernels"].verdict is Verdict.SLOW
    assert "does not exist" in found["native kernels"].what
    assert "numba" in found["native kernels"].what
    assert "g++" in found["native kernels"].remedy
    assert "instruction set" not in found
    assert found["engine"].verdict is Verdict.OK
    assert "auto takes threads; I/O engine io_uring passed over" in found["engine"].what


def test_a_slow_disk_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "measure_quickly", lambda *_: (2e9, 1e8))
    found = findings(tmp_path)["speed"]
    assert found.verdict is Verdict.SLOW
    assert found.what == "2.00 GB/s read, 0.10 GB/s written"


def test_owners_and_leftovers_are_told_apart(tmp_path: Path) -> None:
    engine = ThreadsEngine(depth=1)
    store = Store([tmp_path], engine)
    assert findings(tmp_path)["owners"].what.startswith(f"in use by process {os.getpid()};")
    leftover = tmp_path / "tiermem-1-0123abcd"
    leftover.mkdir()
    (leftover / "lock").touch()
    (leftover / "state.extents").write_bytes(bytes(8192))
    dead = next(f for f in examine([tmp_path]) if f.subject.endswith("owners") and f.verdict is Verdict.SLOW)
    assert "1 leftovers of dead processes hold 8.0 KiB" in dead.what
    assert leftover in find_owned(tmp_path)  # looking removes nothing
    store.close()
    engine.close()


def test_limits_on_cores_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(doctor, "available_cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = findings()["cores"]
    assert found.verdict is Verdict.SLOW
    assert "4 of 16 available" in found.what
    assert "affinity allows 8" in found.what
    assert "control group grants the time of 4" in found.what
    assert "OMP_NUM_THREADS=1" in found.what
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(doctor, "available_cores", lambda: 16)
    assert findings()["cores"].verdict is Verdict.OK


def test_little_memory_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_host_bytes", lambda: 1 << 30)
    monkeypatch.setattr(doctor, "_memory_limit_bytes", lambda: 2 << 30)
    machine = namedtuple("machine", "total")(64 << 30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: machine)
    found = findings()["host memory"]
    assert found.verdict is Verdict.SLOW
    assert found.what == "1.0 GiB free of 2.0 GiB (a control group's limit; the machine has 64.0 GiB)"


@pytest.mark.skipif(shutil.which("setpriv") is None or os.geteuid() != 0, reason="needs setpriv and root")
def test_a_small_memory_lock_limit_is_found() -> None:
    script = (
        "from tiermem.doctor import _memory_lock\n"
        "for finding in _memory_lock(): print(finding.verdict.value, '|', finding.what, '|', finding.remedy)\n"
    )
    command = f'ulimit -l 64; exec setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock {sys.executable} -c "{script}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    if "nothing here needs it" in done.stdout:
        pytest.skip(done.stdout)
    assert done.stdout.startswith("slow | 64.0 KiB: io_uring cannot keep 64.0 MiB of buffers registered")
    assert "ulimit -l unlimited" in done.stdout


def test_one_look_that_fails_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("odd machine")

    monkeypatch.setattr(doctor, "available_cores", fails)
    monkeypatch.setattr(doctor, "measure_quickly", fails)
    found = findings(tmp_path)
    assert found["cores"].verdict is Verdict.BROKEN
    assert "odd machine" in found["cores"].what
    assert "odd machine" in found[str(tmp_path)].what
    assert "engine" in found


def test_the_screen_and_the_json_say_the_same_and_broken_is_false(tmp_path: Path) -> None:
    screen, data = io.StringIO(), io.StringIO()
    assert run(Console(file=screen, width=200), [tmp_path])
    assert not run(Console(file=data, width=20), [tmp_path / "[bold]no"], as_json=True)
    assert "OK" in screen.getvalue()
    values = json.loads(data.getvalue())
    assert values[-1]["verdict"] == "broken"
    assert values[-1]["subject"] == str(tmp_path / "[bold]no")
    assert not run(Console(file=screen, width=200), [tmp_path / "[bold]no"])
    assert "[bold]no" in screen.getvalue()
