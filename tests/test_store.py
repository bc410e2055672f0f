from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import os
import selectors
import signal
import subprocess
import sys
import time
import types
import warnings
import zlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

import tiermem.store as store_module
from tiermem.io import Engine, File, ThreadsEngine
from tiermem.io.faults import Call, Fault, FaultyEngine, corrupt, delay, fail, short, slower, truncate
from tiermem.slab import SlabPool
from tiermem.store import NoFreeExtentError, Record, Store, Version, find_owned, is_locked, remove_leftovers

SIZES = [1, 7, 199, 513, 4095, 4096, 4097, 1_000_003]
SHM = Path("/dev/shm")


class InlineEngine(Engine):
    """System calls made at once, on the event loop's own thread."""

    name = "inline"

    def __init__(self) -> None:
        super().__init__(depth=8, direct=False)

    async def _read_some(self, file: File, fd: int, offset_bytes: int, target: memoryview) -> int:
        await asyncio.sleep(0)
        return os.preadv(fd, [target], offset_bytes)

    async def _write_some(self, file: File, fd: int, offset_bytes: int, source: memoryview) -> int:
        await asyncio.sleep(0)
        return os.pwritev(fd, [source], offset_bytes)

    def close(self) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[ThreadsEngine]:
    engine = ThreadsEngine(depth=4)
    yield engine
    engine.close()


def noise(nbytes: int, seed: int = 0) -> bytearray:
    return bytearray(np.random.default_rng(seed).bytes(nbytes))


def crc32(address: int, nbytes: int) -> int:
    return zlib.crc32(ctypes.string_at(address, nbytes))


async def content(source: Record | Version) -> bytes:
    target = bytearray(source.nbytes)
    await source.swap_in(memoryview(target))
    return bytes(target)


def run(main: Callable[[], Awaitable[Any]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(main(), 20)  # nothing hangs

    asyncio.run(limited())


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_swapped_out_is_swapped_in(tmp_path: Path, engine: ThreadsEngine, nbytes: int) -> None:
    async def main() -> None:
        store = Store([tmp_path], engine)
        store.reserve("state", nbytes, 2)
        records = [store.record("state", nbytes) for _ in range(2)]
        assert not records[0].valid
        for turn in range(3):
            for i, record in enumerate(records):
                await record.swap_out(memoryview(noise(nbytes, turn * 2 + i)))
                assert record.valid
            for i, record in enumerate(records):
                assert await content(record) == noise(nbytes, turn * 2 + i)
        store.close()
        assert list(tmp_path.iterdir()) == []

    run(main)


def test_slabs_are_moved_whole_in_pages(tmp_path: Path, engine: ThreadsEngine) -> None:
    async def main() -> None:
        store = Store([tmp_path], engine)
        store.reserve("state", 100_000, 1)
        record = store.record("state", 100_000)
        assert record.padded_bytes == 102_400
        async with SlabPool(100_000, 1).loan() as slab:
            slab.view[:] = noise(slab.nbytes)
            await record.swap_out(slab.view)
            slab.view[:] = bytes(slab.nbytes)
            await record.swap_in(slab.view)
            assert slab.view[:100_000] == noise(slab.nbytes)[:100_000]
        assert engine.bytes_read == engine.bytes_written == 102_400
        store.close()

    run(main)


def test_arrays_of_any_type_are_moved(tmp_path: Path, engine: ThreadsEngine) -> None:
    async def main() -> None:
        store = Store([tmp_path], engine)
        store.reserve("state", 4000, 1)
        record = store.record("state", 4000)
        source = np.arange(1000, dtype=np.float32).reshape(10, 100)
        target = np.zeros_like(source)
        await record.swap_out(memoryview(source))
        await record.swap_in(memoryview(target))
        assert (target == source).all()
        store.close()

    run(main)


def test_a_pinned_version_survives_later_ones(tmp_path: Path, engine: ThreadsEngine) -> None:
    async def main() -> None:
        store = Store([tmp_path], engine, spare=1)
        store.reserve("state", 4096, 1)
        record = store.record("state", 4096)
        await record.swap_out(memoryview(b"1" * 4096))
        version = record.pin()
        await record.swap_out(memoryview(b"2" * 4096))
        with pytest.raises(NoFreeExtentError, match="pinned"):
            await record.swap_out(memoryview(b"3" * 4096))
        assert await content(record) == b"2" * 4096
        assert await content(version) == version.path.read_bytes()[version.offset_bytes :][:4096] == b"1" * 4096
        version.unpin()
        await record.swap_out(memoryview(b"3" * 4096))
        assert await content(record) == b"3" * 4096
        with pytest.raises(AssertionError, match="unpinned more often"):
            version.unpin()
        store.close()

    run(main)


def test_swap_outs_beyond_the_spare_extents_wait_their_turn(tmp_path: Path, engine: ThreadsEngine) -> None:
    async def main() -> None:
        store = Store([tmp_path], FaultyEngine(engine, Fault("both", delay(0.002), count=None)), spare=2)
        store.reserve("state", 4096, 30)
        records = [store.record("state", 4096) for _ in range(30)]
        for turn in range(4):
            await asyncio.gather(*(r.swap_out(memoryview(noise(4096, i + turn))) for i, r in enumerate(records)))
        for i, record in enumerate(records):
            assert await content(record) == noise(4096, i + 3)
        assert store.allocated_bytes == 32 * 4096
        store.close()

    run(main)


def test_reads_in_flight_are_not_pins_that_last(tmp_path: Path, engine: ThreadsEngine) -> None:
    """With one spare extent and a slow read of the old version, the second swap out waits for the read."""

    async def main() -> None:
        faulty = FaultyEngine(engine, Fault("read", delay(0.05), count=None))
        store = Store([tmp_path], faulty, spare=1)
        store.reserve("state", 4096, 1)
        record = store.record("state", 4096)
        await record.swap_out(memoryview(b"1" * 4096))
        reading = asyncio.create_task(content(record))
        await asyncio.sleep(0)
        await record.swap_out(memoryview(b"2" * 4096))
        await record.swap_out(memoryview(b"3" * 4096))
        assert await reading == b"1" * 4096
        assert await content(record) == b"3" * 4096
        store.close()

    run(main)


def test_reading_what_was_never_written_is_a_bug(tmp_path: Path, engine: ThreadsEngine) -> None:
    async def main() -> None:
        store = Store([tmp_path], engine)
        store.reserve("state", 4096, 1)
        record = store.record("state", 10)
        with pytest.raises(AssertionError, match="before it was ever swapped out"):
            await content(record)
        await record.swap_out(memoryview(bytes(10)))
        record.drop()
        record.drop()
        with pytest.raises(AssertionError, match="after it was dropped"):
            await content(record)
        store.close()

    run(main)


def test_two_swap_outs_of_one_record_at_once_are_a_bug(tmp_path: Path, engine: ThreadsEngine) -> None:
    async def main() -> None:
        store = Store([tmp_path], engine)
        store.reserve("state", 4096, 1)
        record = store.record("state", 10)
        both = [record.swap_out(memoryview(bytes(10))) for _ in range(2)]
        first, second = await asyncio.gather(*both, return_exceptions=True)
        assert first is None
        assert isinstance(second, AssertionError)
        store.close()

    run(main)


def test_misuse_is_refused_with_the_numbers(tmp_path: Path, engine: ThreadsEngine) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="at least one directory"):
            Store([], engine)
        with pytest.raises(ValueError, match="spare"):
            Store([tmp_path], engine, spare=0)
        store = Store([tmp_path], engine)
        with pytest.raises(ValueError, match="nothing was reserved for kind 'state'"):
            store.record("state", 1)
        store.reserve("state", 5000, 1)
        store.reserve("state", 8192, 1)
        with pytest.raises(ValueError, match="8192 bytes, not 12288"):
            store.reserve("state", 8193, 1)
        with pytest.raises(ValueError, match="file name"):
            store.reserve("../state", 8193, 1)
        with pytest.raises(ValueError, match="1 to 8192 bytes, not 8193"):
            store.record("state", 8193)
        record = store.record("state", 100)
        store.record("state", 100)
        with pytest.raises(ValueError, match="reserved for 2 records"):
            store.record("state", 100)
        with pytest.raises(ValueError, match="100 bytes does not fit a buffer of 99"):
            await record.swap_out(memoryview(bytes(99)))
        store.close()
        with pytest.raises(RuntimeError, match="closed"):
            await record.swap_out(memoryview(bytes(100)))
        with pytest.raises(RuntimeError, match="closed"):
            store.reserve("more", 1, 1)

    run(main)


# --- failing disks ---


@pytest.mark.parametrize("effect", [fail(errno.EIO), fail(errno.ENOSPC)])
def test_a_failed_swap_out_leaves_the_old_version_and_loses_no_extent(
    tmp_path: Path, engine: ThreadsEngine, effect: Any
) -> None:
    async def main() -> None:
        faulty = FaultyEngine(engine)
        store = Store([tmp_path], faulty, spare=1)
        store.reserve("state", 100_000, 1)
        record = store.record("state", 100_000)
        await record.swap_out(memoryview(noise(100_000)))
        faulty.faults = [Fault("write", effect, count=None)]
        for _ in range(5):
            with pytest.raises(OSError, match=r"writing .* bytes at offset .*state\.extents") as caught:
                await record.swap_out(memoryview(bytes(100_000)))
            assert Path(str(caught.value.filename)).is_absolute()
            assert record.valid
            assert await content(record) == noise(100_000)
        faulty.faults = []
        await record.swap_out(memoryview(noise(100_000, 1)))
        assert await content(record) == noise(100_000, 1)
        store.close()
        assert list(tmp_path.iterdir()) == []

    run(main)


def test_a_failed_first_swap_out_leaves_nothing_to_read(tmp_path: Path, engine: ThreadsEngine) -> None:
    async def main() -> None:
        store = Store([tmp_path], FaultyEngine(engine, Fault("write", fail(errno.EIO))))
        store.reserve("state", 4096, 1)
        record = store.record("state", 4096)
        with pytest.raises(OSError, match="writing"):
            await record.swap_out(memoryview(bytes(4096)))
        assert not record.valid
        store.close()

    run(main)


def test_waiting_swap_outs_go_on_when_the_one_before_fails(tmp_path: Path, engine: ThreadsEngine) -> None:
    async def main() -> None:
        faulty = FaultyEngine(engine)
        store = Store([tmp_path], faulty, spare=1)
        store.reserve("state", 4096, 4)
        records = [store.record("state", 4096) for _ in range(4)]
        await asyncio.gather(*(record.swap_out(memoryview(bytes(4096))) for record in records))
        faulty.faults = [Fault("write", fail(errno.EIO), nth=2)]
        results = await asyncio.gather(
            *(record.swap_out(memoryview(b"x" * 4096)) for record in records), return_exceptions=True
        )
        assert [type(result) for result in results] == [type(None), OSError, type(None), type(None)]
        store.close()

    run(main)


def test_cancelled_swap_outs_lose_no_extent(tmp_path: Path, engine: ThreadsEngine) -> None:
    async def main() -> None:
        faulty = FaultyEngine(engine, Fault("both", delay(0.003), count=None))
        store = Store([tmp_path], faulty, spare=2)
        store.reserve("state", 4096, 6)
        records = [store.record("state", 4096) for _ in range(6)]
        for turn in range(10):
            tasks = [asyncio.create_task(record.swap_out(memoryview(bytes([turn]) * 4096))) for record in records]
            await asyncio.sleep(0.001 * (turn % 4))
            for task in tasks[turn % 3 :: 2]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(record.swap_out(memoryview(b"!" * 4096)) for record in records))
        assert sum(len(part.free) for part in store._kinds["state"].parts) == 2
        store.close()

    run(main)


def test_a_truncated_file_is_an_error(tmp_path: Path, engine: ThreadsEngine) -> None:
    async def main() -> None:
        store = Store([tmp_path], FaultyEngine(engine, Fault("read", truncate())))
        store.reserve("state", 10_000, 1)
        record = store.record("state", 10_000)
        await record.swap_out(memoryview(noise(10_000)))
        with pytest.raises(OSError, match="the file ends at or before offset"):
            await content(record)
        store.close()

    run(main)


@pytest.mark.parametrize("on", ["read", "write"])
@pytest.mark.parametrize("nbytes", [1, 4097, 100_000])
def test_corrupted_bytes_are_found_when_verifying(tmp_path: Path, engine: ThreadsEngine, on: Any, nbytes: int) -> None:
    async def main() -> None:
        faulty = FaultyEngine(engine)
        store = Store([tmp_path], faulty, checksum=crc32)
        store.reserve("state", 100_000, 1)
        record = store.record("state", nbytes)
        pool = SlabPool(100_000, 1)
        async with pool.loan() as slab:
            slab.view[:] = noise(slab.nbytes)
            await record.swap_out(slab.view)
            assert await content(record) == slab.view[:nbytes]  # another buffer length, the same checksum
            faulty.faults = [Fault(on, corrupt())]
            await record.swap_out(slab.view[:nbytes])
            with pytest.raises(OSError, match=r"checksum mismatch, reading .* offset .*state\.extents") as caught:
                await record.swap_in(slab.view[:nbytes])
            assert caught.value.errno == errno.EIO
        store.close()

    run(main)


def test_everything_survives_a_bad_day(tmp_path: Path, engine: ThreadsEngine) -> None:
    """Short transfers, late and reordered completions, interruptions, a slow disk: the bytes are the same."""

    async def main() -> None:
        faulty = FaultyEngine(
            engine,
            Fault("both", fail(errno.EINTR), nth=3, count=2),
            Fault("read", fail(errno.EAGAIN), nth=5, count=3),
            Fault("both", slower(20), nth=9, count=5),
            Fault("write", short(4096), nth=11, count=20),
            Fault("read", short(513), nth=11, count=20),
            Fault("both", delay(0.003), count=None),
        )
        store = Store([tmp_path], faulty, spare=2, checksum=crc32)
        store.reserve("state", 50_000, 12)
        records = [store.record("state", 50_000 - i) for i in range(12)]
        for turn in range(3):
            await asyncio.gather(*(r.swap_out(memoryview(noise(r.nbytes, turn))) for r in records))
            for record, got in zip(records, await asyncio.gather(*map(content, records)), strict=True):
                assert got == noise(record.nbytes, turn)
        store.close()

    run(main)


# --- space ---


def test_too_little_space_is_an_error_with_bytes_needed_and_present(tmp_path: Path, engine: ThreadsEngine) -> None:
    store = Store([tmp_path], engine)
    present = store_module.free_bytes(tmp_path)
    with pytest.raises(OSError, match=r"(\d+) bytes needed, (\d+) bytes free; free some") as caught:
        store.reserve("state", 1 << 30, present // (1 << 30) + 1)
    assert caught.value.errno == errno.ENOSPC
    assert str(store.directories[0]) in str(caught.value)
    store.reserve("state", 4096, 1)  # and nothing of the attempt is left in the way
    assert store.allocated_bytes == 5 * 4096
    store.close()


def test_space_that_runs_out_while_allocating_is_the_same_error(
    tmp_path: Path, engine: ThreadsEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store([tmp_path], engine)
    store.reserve("state", 4096, 1)

    def full(*args: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_fallocate", full)
        with pytest.raises(OSError, match=r"No space left on device: 8192 bytes needed"):
            store.reserve("state", 4096, 2)
    assert store.allocated_bytes == 5 * 4096 == (store.directories[0] / "state.extents").stat().st_size
    store.reserve("state", 4096, 2)
    store.close()


def test_file_systems_that_cannot_preallocate_are_served(
    tmp_path: Path, engine: ThreadsEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*args: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(store_module, "_fallocate", unsupported)

    async def main() -> None:
        store = Store([tmp_path], engine)
        store.reserve("state", 5000, 3)
        record = store.record("state", 5000)
        await record.swap_out(memoryview(noise(5000)))
        assert await content(record) == noise(5000)
        store.close()

    run(main)


def test_preallocated_files_own_their_space(tmp_path: Path, engine: ThreadsEngine) -> None:
    store = Store([tmp_path], engine, spare=2)
    store.reserve("state", 100_000, 5)
    status = (store.directories[0] / "state.extents").stat()
    assert status.st_size == store.allocated_bytes == 7 * 102_400
    assert status.st_blocks * 512 >= 7 * 102_400
    store.close()


# --- several mounts ---


def two_directories(tmp_path: Path) -> list[Path]:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    return directories


def pace(seconds_per_mib: dict[str, float]) -> Fault:
    """Mounts of given speeds: each directory moves one transfer at a time."""
    locks: dict[str, asyncio.Lock] = {}

    async def effect(call: Call) -> int:
        name = next(name for name in seconds_per_mib if f"/{name}/" in str(call.file.path))
        async with locks.setdefault(name, asyncio.Lock()):
            await asyncio.sleep(call.memory.nbytes / (1 << 20) * seconds_per_mib[name])
            return await call.proceed(call.memory)

    return Fault("both", effect, count=None)


async def one_step(records: list[Record], seed: int) -> None:
    """Each record is read and written, a few at a time."""
    gate = asyncio.Semaphore(6)

    async def update(record: Record) -> None:
        async with gate:
            target = bytearray(record.nbytes)
            await record.swap_in(memoryview(target))
            await record.swap_out(memoryview(bytes([seed]) * record.nbytes))

    await asyncio.gather(*map(update, records))


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop that jumps to the next timer instead of sleeping: the same on any machine, however busy."""

    def __init__(self) -> None:
        self.now = 0.0
        loop = self

        class Selector(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> Any:
                loop.now += timeout or 0.0
                return super().select(0)

        super().__init__(Selector())

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        future = self.create_future()
        future.set_result(function(*arguments))
        return future


def test_traffic_settles_in_proportion_to_speed_also_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = VirtualTimeLoop()
    clock = types.SimpleNamespace(perf_counter=loop.time, monotonic=loop.time, time=time.time)
    monkeypatch.setattr(store_module, "time", clock)
    monkeypatch.setattr(store_module, "_SPEED_WINDOW_BYTES", 1 << 20)

    async def main() -> None:
        engine = FaultyEngine(InlineEngine())
        store = Store(two_directories(tmp_path), engine, spare=4)
        store.reserve("state", 65536, 100)
        records = [store.record("state", 65536) for _ in range(100)]
        allocated = store.allocated_bytes
        for record in records:
            await record.swap_out(memoryview(bytes(65536)))

        async def share_of_a(steps: int) -> float:
            before = store.traffic()
            for step in range(steps):
                await one_step(records, step)
            moved = [
                now.bytes_read + now.bytes_written - then.bytes_read - then.bytes_written
                for now, then in zip(store.traffic(), before, strict=True)
            ]
            return moved[0] / sum(moved)

        for seconds_per_mib, share in (((1.0, 1.0), 0.5), ((1.0, 4.0), 0.8), ((3.0, 1.0), 0.25), ((1.0, 1.0), 0.5)):
            engine.faults = [pace(dict(zip("ab", seconds_per_mib, strict=True)))]
            await share_of_a(8)
            assert await share_of_a(3) == pytest.approx(share, abs=0.06)
        assert store.allocated_bytes == allocated
        used = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*.extents"))
        assert used <= allocated + 65536
        for record in records:
            assert set(await content(record)) == {2}
        store.close()

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def test_extents_reserved_one_by_one_are_spread_too(tmp_path: Path, engine: ThreadsEngine) -> None:
    store = Store(two_directories(tmp_path), engine, spare=1)
    for _ in range(20):
        store.reserve("state", 4096, 1)
    assert [part.extent_count for part in store._kinds["state"].parts] == [11, 11]
    store.close()


def test_a_full_mount_leaves_its_share_to_the_others(
    tmp_path: Path, engine: ThreadsEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = two_directories(tmp_path)
    original = store_module.free_bytes
    monkeypatch.setattr(store_module, "free_bytes", lambda d: 5 * 4096 if a in d.parents else original(d))
    store = Store([a, b], engine, spare=2)
    store.reserve("state", 4096, 20)
    assert [part.extent_count for part in store._kinds["state"].parts] == [5, 19]
    store.close()


def test_the_failing_mount_is_named(tmp_path: Path, engine: ThreadsEngine) -> None:
    async def main() -> None:
        a, b = two_directories(tmp_path)
        store = Store([a, b], FaultyEngine(engine, Fault("write", fail(errno.EIO), where="/b/", count=None)))
        store.reserve("state", 4096, 10)
        results = await asyncio.gather(
            *(store.record("state", 4096).swap_out(memoryview(bytes(4096))) for _ in range(10)), return_exceptions=True
        )
        failed = [result for result in results if result is not None]
        assert 0 < len(failed) < 10
        assert all(isinstance(error, OSError) and str(b) in str(error.filename) for error in failed)
        store.close()

    run(main)


# --- directories ---


def test_files_are_private(tmp_path: Path, engine: ThreadsEngine) -> None:
    old = os.umask(0)
    try:
        store = Store([tmp_path], engine)
        store.reserve("state", 4096, 1)
    finally:
        os.umask(old)
    (directory,) = store.directories
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()} == {
        "lock": 0o600,
        "state.extents": 0o600,
    }
    store.close()


def test_bad_directories_are_named(tmp_path: Path, engine: ThreadsEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing; create it.*nowhere"):
        Store([tmp_path, tmp_path / "nowhere"], engine)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="needs a directory"):
        Store([tmp_path / "file"], engine)
    with pytest.raises(OSError, match=r"not writable .*/proc/self"):
        Store(["/proc/self/task"], engine)
    monkeypatch.chdir(tmp_path)
    store = Store(["."], engine)
    assert store.directories[0].is_absolute()
    store.close()


@pytest.mark.skipif(not SHM.is_dir(), reason="no tmpfs to try")
def test_a_directory_in_memory_is_warned_about(engine: ThreadsEngine) -> None:
    async def main() -> None:
        with pytest.warns(UserWarning, match=r"/dev/shm is on tmpfs, which lies in memory"):
            store = Store([SHM], engine)
        try:
            store.reserve("state", 5000, 1)
            record = store.record("state", 5000)
            await record.swap_out(memoryview(noise(5000)))
            assert await content(record) == noise(5000)
        finally:
            store.close()

    run(main)


def test_an_ordinary_directory_is_not_warned_about(tmp_path: Path, engine: ThreadsEngine) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Store([tmp_path], engine).close()


def test_scratch_files_are_private_and_go(tmp_path: Path, engine: ThreadsEngine) -> None:
    store = Store([tmp_path], engine)
    with store.scratch_file() as path:
        path.write_bytes(b"values")
        assert path.parent == store.directories[0]
        with store.scratch_file() as other:
            assert other != path
    assert not path.exists()
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_two_stores_share_a_directory(tmp_path: Path, engine: ThreadsEngine) -> None:
    first = Store([tmp_path], engine)
    second = Store([tmp_path], engine)
    assert len(find_owned(tmp_path)) == 2
    assert all(map(is_locked, find_owned(tmp_path)))
    assert remove_leftovers(tmp_path) == []
    first.close()
    assert find_owned(tmp_path) == second.directories
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_a_forgotten_store_removes_its_files(tmp_path: Path, engine: ThreadsEngine) -> None:
    store = Store([tmp_path], engine)
    store.reserve("state", 4096, 1)
    del store
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_descriptors_stay_flat(tmp_path: Path, engine: ThreadsEngine) -> None:
    async def main() -> None:
        counts = []
        for _ in range(4):
            store = Store([tmp_path], engine)
            store.reserve("state", 4096, 1)
            await store.record("state", 4096).swap_out(memoryview(bytes(4096)))
            store.close()
            counts.append(len(os.listdir("/proc/self/fd")))
        assert counts == [counts[0]] * 4

    run(main)


def test_closing_in_the_middle_of_transfers_harms_nothing(tmp_path: Path, engine: ThreadsEngine) -> None:
    async def main() -> None:
        store = Store([tmp_path], FaultyEngine(engine, Fault("both", delay(0.02), count=None)), spare=1)
        store.reserve("state", 4096, 4)
        records = [store.record("state", 4096) for _ in range(4)]
        tasks = [asyncio.create_task(record.swap_out(memoryview(bytes(4096)))) for record in records]
        for _ in range(3):
            await asyncio.sleep(0)
        store.close()
        assert list(tmp_path.iterdir()) == []
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, RuntimeError) for result in results)
        store.close()

    run(main)


SCRIPT = """
import asyncio, os, sys, time, types
package = sys.modules["tiermem"] = types.ModuleType("tiermem")  # without its __init__, which imports torch
package.__path__ = [sys.argv[2]]
from tiermem.io import ThreadsEngine
from tiermem.store import Store
store = Store([sys.argv[1]], ThreadsEngine(depth=2))
store.reserve("state", 4096, 3)
record = store.record("state", 4096)
asyncio.run(record.swap_out(memoryview(bytes(4096))))
print("ready", flush=True)
{rest}
"""


def start(tmp_path: Path, rest: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(rest=rest), str(tmp_path), str(Path(store_module.__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()
    return process


@pytest.mark.parametrize("rest", ["", "raise SystemExit(3)", "1 / 0", "time.sleep(60)"])
def test_nothing_is_left_after_any_ordinary_end(tmp_path: Path, rest: str) -> None:
    process = start(tmp_path, f"sys.stderr.close()\n{rest}")
    if "sleep" in rest:
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    process.wait(20)
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_process_are_removed_by_the_next_store(tmp_path: Path, engine: ThreadsEngine) -> None:
    process = start(tmp_path, "time.sleep(60)")
    (directory,) = find_owned(tmp_path)
    assert is_locked(directory)
    assert remove_leftovers(tmp_path) == []  # it lives
    process.kill()
    process.wait(20)
    assert not is_locked(directory)
    store = Store([tmp_path], engine)
    assert find_owned(tmp_path) == store.directories != [directory]
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_leaves_its_parents_files_alone(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        "if (pid := os.fork()) == 0: sys.exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "assert (store.directories[0] / 'state.extents').exists()\n"
        "asyncio.run(record.swap_in(memoryview(bytearray(4096))))\n",
    )
    assert process.wait(20) == 0
    assert list(tmp_path.iterdir()) == []


def test_only_what_a_store_made_is_removed(tmp_path: Path) -> None:
    abandoned = tmp_path / "tiermem-1-0123abcd"
    abandoned.mkdir()
    (abandoned / "lock").touch()
    (abandoned / "state.extents").touch()
    (abandoned / "thesis.tex").write_text("years of work")
    young = tmp_path / "tiermem-1-00000000"
    young.mkdir()  # as if between the directory and its lock
    old = tmp_path / "tiermem-1-11111111"
    old.mkdir()
    os.utime(old, (0, 0))
    other = tmp_path / "tiermem-models"
    other.mkdir()
    (other / "lock").touch()
    (tmp_path / "tiermem-1-22222222").symlink_to(other)
    remove_leftovers(tmp_path)
    assert (abandoned / "thesis.tex").read_text() == "years of work"
    assert not (abandoned / "state.extents").exists()
    assert young.exists()
    assert not old.exists()
    assert (other / "lock").exists()


# --- the extent allocator, against a model ---


class ExtentsMachine(RuleBasedStateMachine):
    """Random histories: every record and every pinned version keeps its bytes, and no extent is lost or used twice."""

    records = Bundle("records")
    pins = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = Path(os.environ["TIERMEM_TEST_DIRECTORY"])
        directories = [self.directory / name for name in ("a", "b")]
        for directory in directories:
            directory.mkdir(exist_ok=True)
        self.engine = FaultyEngine(InlineEngine())
        self.store = Store(directories, self.engine, spare=1)
        self.store.reserve("state", 8192, 3)
        self.kind = self.store._kinds["state"]
        self.expected: dict[Record, bytes | None] = {}
        self.pinned: dict[int, tuple[Version, bytes]] = {}
        self.seed = 0

    def swap_outs(self, records: list[Record]) -> None:
        sources = {}
        for record in records:
            self.seed += 1
            sources[record] = bytes(noise(record.nbytes, self.seed))

        async def together() -> list[Any]:
            tasks = [record.swap_out(memoryview(source)) for record, source in sources.items()]
            return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)

        for record, result in zip(records, self.loop.run_until_complete(together()), strict=True):
            if result is None:
                self.expected[record] = sources[record]
            else:
                assert isinstance(result, (OSError, NoFreeExtentError))
                assert isinstance(result, OSError) or self.pinned

    @precondition(lambda self: self.kind.record_count < self.kind.record_count_max)
    @rule(target=records, nbytes=st.integers(1, 8192))
    def make(self, nbytes: int) -> Record:
        record = self.store.record("state", nbytes)
        self.expected[record] = None
        return record

    @rule(record=records)
    def swap_out(self, record: Record) -> None:
        self.swap_outs([record])

    @precondition(lambda self: self.expected)
    @rule()
    def swap_out_all(self) -> None:
        self.swap_outs(list(self.expected))

    @rule(record=records)
    def fail_to_swap_out(self, record: Record) -> None:
        self.engine.faults = [Fault("write", fail(errno.EIO), count=None)]
        self.swap_outs([record])
        self.engine.faults = []

    @rule(target=pins, record=records)
    def pin(self, record: Record) -> int:
        self.seed += 1
        expected = self.expected[record]
        if expected is None:
            with pytest.raises(AssertionError):
                record.pin()
        else:
            self.pinned[self.seed] = (record.pin(), expected)
        return self.seed

    @rule(pin=consumes(pins))
    def unpin(self, pin: int) -> None:
        if pin in self.pinned:
            self.pinned.pop(pin)[0].unpin()

    @rule(record=consumes(records))
    def drop(self, record: Record) -> None:
        record.drop()
        del self.expected[record]

    @rule(count=st.integers(0, 2))
    def reserve(self, count: int) -> None:
        self.store.reserve("state", 8192, count)

    @rule(part=st.integers(0, 1))
    def want_space_on(self, part: int) -> None:
        self.kind.parts[part].missed = 10

    @invariant()
    def no_extent_is_lost_or_used_twice(self) -> None:
        versions = {record._current for record in self.expected} | {version for version, _ in self.pinned.values()}
        held = [(v._place.part, v._place.index) for v in versions if v is not None]
        free = [(part, index) for part in self.kind.parts for index in (*part.free, *part.holes)]
        every = [(part, index) for part in self.kind.parts for index in range(part.extent_count)]
        assert sorted(held + free, key=lambda p: (id(p[0]), p[1])) == sorted(every, key=lambda p: (id(p[0]), p[1]))

    @invariant()
    def bytes_are_kept(self) -> None:
        for record, expected in self.expected.items():
            assert record.valid == (expected is not None)
            if expected is not None:
                assert self.loop.run_until_complete(content(record)) == expected
        for version, expected in self.pinned.values():
            assert self.loop.run_until_complete(content(version)) == expected

    def teardown(self) -> None:
        self.store.close()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        assert not any(path.is_file() for path in self.directory.rglob("*"))


def test_extents_against_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERMEM_TEST_DIRECTORY", str(tmp_path))
    ExtentsMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
    ExtentsMachine.TestCase().runTest()
