from __future__ import annotations

import asyncio
import errno
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transfers import PIECE, noise, write_then_read

import tiermem.io.engine as engine_module
from tiermem.io import ENGINES, AiofilesEngine, Engine, File, ThreadsEngine, probe, select
from tiermem.io.faults import Call, Fault, FaultyEngine, corrupt, delay, fail, short, slower, truncate
from tiermem.io.mounts import file_system

SIZES = [1, 7, 199, 513, 4095, 4096, 4097, 1_000_003]


@pytest.fixture(autouse=True)
def no_profile(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def working_engines() -> list[str]:
    names = []
    for name, make in ENGINES.items():
        try:
            make().close()
        except OSError:
            continue
        names.append(name)
    return names


@pytest.fixture(params=working_engines())
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = ENGINES[request.param](depth=4, piece_bytes=PIECE)
    yield engine
    engine.close()


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_written_is_read(engine: Engine, tmp_path: Path, nbytes: int) -> None:
    for offset, shift in ((0, 0), (8192, 0), (512, 0), (4096, 16), (3, 5)):
        write_then_read(engine, tmp_path / "file", nbytes, offset, shift)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(nbytes=st.integers(1, 300_000), offset=st.integers(0, 20_000), shift=st.integers(0, 5000), limit=st.data())
def test_any_range_survives_short_transfers(
    tmp_path: Path, nbytes: int, offset: int, shift: int, limit: st.DataObject
) -> None:
    inner = ThreadsEngine(depth=2, piece_bytes=PIECE)
    sizes = st.integers(5000, PIECE)
    engine = FaultyEngine(
        inner, Fault("both", short(limit.draw(sizes)), count=None), Fault("both", short(limit.draw(sizes)), nth=2)
    )
    try:
        write_then_read(engine, tmp_path / "file", nbytes, offset, shift)
    finally:
        engine.close()


def test_transfers_of_nothing_and_of_other_element_types(engine: Engine, tmp_path: Path) -> None:
    async def main() -> None:
        file = engine.open(tmp_path / "file", create=True)
        await engine.write(file, 0, memoryview(b""))
        values = np.arange(2000, dtype=np.float32).reshape(20, 100)
        await engine.write(file, 0, memoryview(values))
        target = np.zeros_like(values)
        await engine.read(file, 0, memoryview(target))
        assert (target == values).all()
        file.close()

    asyncio.run(main())
    assert engine.bytes_written == engine.bytes_read == 8000


def test_one_transfer_is_capped_and_continued(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "TRANSFER_BYTES_MAX", 12288)
    faulty = FaultyEngine(engine)
    seen: list[int] = []
    original = faulty._call

    async def record(call):  # type: ignore[no-untyped-def]
        seen.append(call.memory.nbytes)
        return await original(call)

    monkeypatch.setattr(faulty, "_call", record)
    write_then_read(faulty, tmp_path / "file", 100_000)
    assert max(seen) == 12288
    assert sum(seen) == 200_000


def test_large_transfers_run_as_pieces_at_the_same_time_within_the_depth(tmp_path: Path) -> None:
    inner = ThreadsEngine(depth=4, piece_bytes=PIECE)
    running = peak = 0

    async def watch(call):  # type: ignore[no-untyped-def]
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.002)
        moved = await call.proceed(call.memory)
        running -= 1
        return moved

    engine = FaultyEngine(inner, Fault("both", watch, count=None))
    write_then_read(engine, tmp_path / "file", 1_000_003)
    assert peak == 4
    engine.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EBADF])
@pytest.mark.parametrize("on", ["read", "write"])
def test_errors_name_errno_path_offset_and_size(engine: Engine, tmp_path: Path, on: str, code: int) -> None:
    faulty = FaultyEngine(engine, Fault(on, fail(code), nth=3))  # type: ignore[arg-type]
    path = tmp_path / "file"
    with pytest.raises(OSError, match=f"{PIECE} bytes at offset {2 * PIECE}") as caught:
        write_then_read(faulty, path, 5 * PIECE)
    assert caught.value.errno == code
    assert caught.value.filename == str(path)
    assert os.strerror(code) in str(caught.value)
    path.unlink()
    write_then_read(faulty, path, 5 * PIECE)  # and the engine lives


def test_an_error_is_raised_only_when_no_piece_is_in_flight(tmp_path: Path) -> None:
    inner = ThreadsEngine(depth=4, piece_bytes=PIECE)
    running = 0

    async def watch(call):  # type: ignore[no-untyped-def]
        nonlocal running
        running += 1
        await asyncio.sleep(0.01)
        moved = await call.proceed(call.memory)
        running -= 1
        return moved

    engine = FaultyEngine(inner, Fault("write", fail(errno.EIO)), Fault("both", watch, count=None))
    with pytest.raises(OSError, match="offset 0"):
        write_then_read(engine, tmp_path / "file", 5 * PIECE)
    assert running == 0
    engine.close()


def test_eagain_and_eintr_are_retried_but_not_for_ever(tmp_path: Path) -> None:
    engine = FaultyEngine(
        ThreadsEngine(depth=2, piece_bytes=PIECE),
        Fault("both", fail(errno.EINTR), nth=2, count=5),
        Fault("both", fail(errno.EAGAIN), nth=3, count=5),
    )
    write_then_read(engine, tmp_path / "file", 1_000_003)
    engine.faults = [Fault("write", fail(errno.EAGAIN), count=None)]
    with pytest.raises(BlockingIOError):
        write_then_read(engine, tmp_path / "other", 10)
    engine.close()


def test_a_truncated_file_is_an_error_not_old_bytes(engine: Engine, tmp_path: Path) -> None:
    async def main() -> None:
        file = engine.open(tmp_path / "file", create=True)
        await engine.write(file, 0, memoryview(noise(100_000)))
        faulty = FaultyEngine(engine, Fault("read", truncate()))
        with pytest.raises(OSError, match="the file ends at or before offset") as caught:
            await faulty.read(file, 0, memoryview(bytearray(100_000)))
        assert caught.value.errno == errno.EIO
        assert caught.value.filename == str(tmp_path / "file")
        file.close()

    asyncio.run(main())


def test_a_real_error_of_the_system_is_read(engine: Engine) -> None:
    """/dev/full fails every write."""

    async def main() -> None:
        file = engine.open("/dev/full")
        with pytest.raises(OSError, match=r"No space left on device, writing 100 bytes at offset 7") as caught:
            await engine.write(file, 7, memoryview(bytes(100)))
        assert caught.value.errno == errno.ENOSPC
        file.close()

    asyncio.run(main())


def test_refused_direct_io_becomes_buffered_with_a_reason(tmp_path: Path) -> None:
    async def refuse(call: Call) -> int:
        await asyncio.sleep(0.01)  # by then all four are in flight on the direct descriptor
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    engine = FaultyEngine(ThreadsEngine(depth=4, piece_bytes=PIECE), Fault("write", refuse, count=4))
    if not engine.open(tmp_path / "try", create=True).direct:
        pytest.skip("no direct I/O here")
    write_then_read(engine, tmp_path / "file", 10 * PIECE)
    assert len(engine.fallbacks) == 1
    assert "buffered, because a direct write of 65536 bytes was refused" in engine.fallbacks[0]
    assert str(tmp_path) in engine.fallbacks[0]
    engine.close()


def test_a_file_system_without_direct_io_is_served_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.open

    def without_direct(path, flags, *args, **kwargs):  # type: ignore[no-untyped-def]
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", without_direct)
    engine = select(tmp_path, "threads")
    assert engine.fallbacks == [f"{tmp_path}: buffered, because the file system refuses O_DIRECT (Invalid argument)"]
    write_then_read(engine, tmp_path / "file", 1_000_003)
    engine.close()


def test_cancelled_transfers_end_only_when_the_memory_is_no_longer_used(engine: Engine, tmp_path: Path) -> None:
    """The read is held back in the system call's place; the reader's cancellation must wait for it."""
    released = threading.Event()
    call = os.preadv

    def held(fd, buffers, offset):  # type: ignore[no-untyped-def]
        released.wait(5)
        return call(fd, buffers, offset)

    async def main() -> None:
        file = engine.open(tmp_path / "file", create=True)
        await engine.write(file, 0, memoryview(b"x" * 3 * PIECE))
        faulty = FaultyEngine(ThreadsEngine(depth=1, piece_bytes=PIECE))
        inner = faulty.inner
        assert isinstance(inner, ThreadsEngine)
        original = inner._run
        inner._run = lambda _, *rest: original(held, *rest)  # type: ignore[method-assign]
        for nbytes in (100, 3 * PIECE):
            released.clear()
            target = bytearray(nbytes)
            task = asyncio.create_task(faulty.read(file, 0, memoryview(target)))
            await asyncio.sleep(0.01)
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0.005)
            assert not task.done()
            file.close()  # must not pull the descriptor away either
            released.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert target[:100] == b"x" * 100
            if nbytes > PIECE:
                assert target[PIECE:] == bytes(2 * PIECE)  # what had not begun never did
            else:
                file = File(tmp_path / "file")
        faulty.close()

    asyncio.run(main())


def test_a_loop_shut_down_in_the_middle_waits_for_the_memory(engine: Engine, tmp_path: Path) -> None:
    target = bytearray(50 * PIECE)

    async def main() -> None:
        file = engine.open(tmp_path / "file", create=True)
        os.ftruncate(file.fd, len(target))
        task = asyncio.create_task(engine.read(file, 0, memoryview(target)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        del task

    asyncio.run(main())
    del main
    gc.collect()
    target.append(1)  # BufferError while a view of it is in use


def test_an_operation_costs_little(tmp_path: Path) -> None:
    engine = ThreadsEngine(depth=4)

    async def main() -> float:
        file = engine.open(tmp_path / "file", create=True)
        view = memoryview(bytearray(b"x" * 512))
        await engine.write(file, 0, view)
        best = float("inf")
        for _ in range(5):
            begun = time.perf_counter()
            for _ in range(200):
                await engine.read(file, 0, view)
            best = min(best, (time.perf_counter() - begun) / 200)
        file.close()
        return best

    assert asyncio.run(main()) < 500e-6  # 60 us on an idle machine; tests share theirs
    engine.close()


def test_engines_leave_no_threads_and_no_descriptors(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    select(tmp_path).close()
    gc.collect()  # what other tests left in cycles is not counted
    threads, fds = threading.active_count(), descriptors()
    for name in working_engines():
        for _ in range(3):
            engine = ENGINES[name]()
            write_then_read(engine, tmp_path / "file", 100_000)
            engine.close()
        engine = ENGINES[name]()
        write_then_read(engine, tmp_path / "file", 100_000)
        del engine  # never closed: its threads are told, but nobody waits for them
        gc.collect()
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == threads
    assert descriptors() == fds


def test_closing_an_engine_waits_for_what_is_in_flight_and_delivers_it(engine: Engine, tmp_path: Path) -> None:
    target = bytearray(4 * PIECE)
    loop = asyncio.new_event_loop()
    file = engine.open(tmp_path / "file", create=True)
    os.pwrite(file.fd, b"x" * len(target), 0)
    task = loop.create_task(engine.read(file, 0, memoryview(target)))
    for _ in range(2 + isinstance(engine, AiofilesEngine)):  # turns of the loop until all pieces have begun
        loop.call_soon(loop.stop)
        loop.run_forever()
    engine.close()
    assert set(target) == {ord("x")}
    loop.run_until_complete(asyncio.wait_for(task, 5))
    loop.close()
    file.close()


def test_closed_files_and_engines_refuse(engine: Engine, tmp_path: Path) -> None:
    async def main() -> None:
        file = engine.open(tmp_path / "file", create=True)
        await engine.write(file, 0, memoryview(b"abc"))
        file.close()
        file.close()
        with pytest.raises(ValueError, match="is closed"):
            await engine.read(file, 0, memoryview(bytearray(3)))
        file = engine.open(tmp_path / "file")
        engine.close()
        with pytest.raises(RuntimeError):
            await engine.read(file, 0, memoryview(bytearray(3)))
        file.close()

    asyncio.run(main())


def test_symbolic_links_are_not_followed_and_files_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"precious")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="link"):
        File(tmp_path / "link")
    with pytest.raises(FileExistsError):
        File(tmp_path / "real", create=True)
    assert File(tmp_path / "new", create=True).path.stat().st_mode & 0o777 == 0o600


def test_select_probes_and_says_what_it_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden() -> Engine:
        raise PermissionError(errno.EPERM, "Operation not permitted, io_uring_setup")

    def lying() -> Engine:
        return FaultyEngine(ThreadsEngine(depth=1), Fault("read", corrupt()))

    candidates: dict[str, Callable[[], Engine]] = {"first": forbidden, "second": lying, "third": AiofilesEngine}
    monkeypatch.setattr("tiermem.io.choice.ENGINES", candidates)
    engine = select([tmp_path], "auto")
    assert engine.name == "aiofiles"
    assert len(engine.fallbacks) == 2
    assert "first passed over: [Errno 1] Operation not permitted, io_uring_setup" in engine.fallbacks[0]
    assert "second passed over" in engine.fallbacks[1]
    assert "what was read is not what was written" in engine.fallbacks[1]
    engine.close()
    with pytest.raises(RuntimeError, match=r"no I/O engine works in .*first passed over"):
        select([tmp_path], "first")
    assert list(tmp_path.iterdir()) == []


def test_select_takes_an_engine_as_it_is_and_refuses_unknown_names(tmp_path: Path) -> None:
    engine = FaultyEngine(ThreadsEngine(depth=1))
    assert select(tmp_path, engine) is engine
    engine.close()
    with pytest.raises(ValueError, match=r"'fancy'.*'auto'.*'threads'"):
        select(tmp_path, "fancy")


@pytest.mark.parametrize("name", working_engines())
def test_every_drive_has_as_much_in_flight_as_one_alone(tmp_path: Path, name: str) -> None:
    one = select([tmp_path], name)
    same = select([tmp_path, tmp_path], name)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        assert os.stat(other).st_dev != tmp_path.stat().st_dev
        two = select([tmp_path, other], name)
    assert (same.depth, two.depth) == (one.depth, 2 * one.depth)
    for engine in (one, same, two):
        engine.close()


def test_select_works_inside_a_running_loop(tmp_path: Path) -> None:
    async def main() -> Engine:
        return select(tmp_path)

    asyncio.run(main()).close()


def test_select_raises_what_no_engine_would_be_spared(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        select(tmp_path / "missing")


def test_probe_leaves_nothing(engine: Engine, tmp_path: Path) -> None:
    probe(tmp_path, engine)
    assert list(tmp_path.iterdir()) == []


def test_faults_hit_the_calls_they_name(tmp_path: Path) -> None:
    engine = FaultyEngine(ThreadsEngine(depth=1), Fault("write", fail(errno.EIO), nth=2, count=2, where="victim"))

    async def main() -> list[bool]:
        victim, other = engine.open(tmp_path / "victim", create=True), engine.open(tmp_path / "other", create=True)
        failed = []
        for file in (victim, other, other, victim, other, victim, victim):
            try:
                await engine.write(file, 0, memoryview(b"x"))
                failed.append(False)
            except OSError:
                failed.append(True)
        return failed

    assert asyncio.run(main()) == [False, False, False, True, False, True, False]
    engine.close()


def test_late_and_reordered_completions_change_nothing(tmp_path: Path) -> None:
    engine = FaultyEngine(
        ThreadsEngine(depth=8, piece_bytes=PIECE),
        Fault("read", slower(3), nth=5, count=3),
        Fault("both", delay(0.004), count=None),
    )
    write_then_read(engine, tmp_path / "file", 1_000_003)
    engine.close()


def test_the_file_system_is_named() -> None:
    assert file_system(Path("/proc")).type == "proc"
    assert file_system(Path(__file__)).type not in ("", "unknown")
