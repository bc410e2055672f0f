"""The io_uring engine: its thread, its queue, and what is registered with the ring."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from processes import settles
from transfers import PIECE, noise, write_then_read

from tiermem._native import NativeLibraryError
from tiermem.io import Engine, File, UringEngine, select
from tiermem.io.uring import _load
from tiermem.slab import Slab, SlabPool


@pytest.fixture(autouse=True)
def no_profile(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def uring(**options: int) -> UringEngine:
    try:
        return UringEngine(**options)
    except OSError as error:
        pytest.skip(f"no io_uring here: {error}")


def test_registered_memory_is_used_and_given_up(tmp_path: Path) -> None:
    engine = uring(depth=4, piece_bytes=PIECE)
    pool = SlabPool(5 * PIECE, 3, engine.pin)
    if not engine._buffers:
        pytest.skip(f"{engine.fallbacks}")

    async def main() -> None:
        file = engine.open(tmp_path / "file", create=True)
        async with pool.loan() as source, pool.loan() as target:
            assert engine._buffer_at(source.address, source.nbytes) >= 0
            assert engine._buffer_at(source.address - 1, 10) == -1
            assert engine._buffer_at(pool.address + pool.nbytes - 5, 6) == -1
            source.view[:] = noise(source.nbytes)
            await engine.write(file, 0, source.view)
            await engine.write(file, source.nbytes, memoryview(noise(1000)))  # not registered
            await engine.read(file, 0, target.view)
            assert target.view == source.view
        file.close()

    asyncio.run(main())
    pool.close()
    assert not engine._buffers
    again = SlabPool(PIECE, 1, engine.pin)
    assert engine._buffers
    engine.close()
    again.close()


def test_memory_that_cannot_be_registered_is_used_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = uring(depth=4, piece_bytes=PIECE)
    monkeypatch.setattr(engine._ring._library, "tm_uring_set_buffer", lambda *_: -errno.ENOMEM)
    SlabPool(4096, 1, engine.pin).close()
    assert engine.fallbacks == ["I/O engine io_uring: 4096 bytes of buffers not registered (memlock limit, ulimit -l)"]
    write_then_read(engine, tmp_path / "file", 1_000_003)
    engine.close()


def test_a_forbidden_io_uring_is_passed_over_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = uring()
    monkeypatch.setattr(engine._ring._library, "tm_uring_open", lambda *_: -errno.EPERM)
    engine.close()
    chosen = select(tmp_path)
    assert chosen.name == "threads"
    assert "io_uring passed over: [Errno 1] Operation not permitted: a container's seccomp" in chosen.fallbacks[0]
    chosen.close()
    with pytest.raises(RuntimeError, match="seccomp"):
        select(tmp_path, "io_uring")


def test_without_the_native_library_io_uring_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise NativeLibraryError("libtiermem.so does not exist")

    monkeypatch.setattr("tiermem.io.uring.library", missing)
    _load.cache_clear()
    chosen = select(tmp_path)
    _load.cache_clear()
    assert chosen.name == "threads"
    assert "it needs the native library: libtiermem.so does not exist" in chosen.fallbacks[0]
    chosen.close()


def test_registered_files_do_not_keep_space_after_they_are_closed(tmp_path: Path) -> None:
    engine = uring()
    for _ in range(3):
        files = [engine.open(tmp_path / f"file{i}", create=True) for i in range(40)]  # more than there are slots
        assert len(engine._slot_of_fd) == 64

        async def main(files: list[File] = files) -> None:
            for i, file in enumerate(files):
                await engine.write(file, 0, memoryview(bytes([i]) * 5000))
            for i, file in enumerate(files):
                target = bytearray(5000)
                await engine.read(file, 0, memoryview(target))
                assert set(target) == {i}

        asyncio.run(main())
        for file in files:
            file.close()
            file.path.unlink()
        assert not engine._slot_of_fd
    engine.close()


def test_a_ring_serves_one_loop_after_another_and_loops_live_on(tmp_path: Path) -> None:
    """A loop whose engine was closed can watch another descriptor with the same number."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)

    async def read(engine: Engine) -> bytes:
        file = engine.open(path)
        target = bytearray(100)
        await engine.read(file, 0, memoryview(target))
        file.close()
        return bytes(target)

    async def several() -> None:
        for _ in range(3):
            engine = uring()
            assert await read(engine) == b"x" * 100
            engine.close()

    engine = uring()
    for _ in range(3):
        assert asyncio.run(read(engine)) == b"x" * 100
    lasting = asyncio.new_event_loop()
    assert lasting.run_until_complete(read(engine)) == b"x" * 100
    assert asyncio.run(read(engine)) == b"x" * 100
    assert lasting.run_until_complete(read(engine)) == b"x" * 100
    lasting.run_until_complete(several())
    thread = threading.Thread(target=lasting.run_forever)
    thread.start()
    assert asyncio.run_coroutine_threadsafe(read(engine), lasting).result(10) == b"x" * 100
    engine.close()  # from another thread than the loop's
    other = uring()
    assert asyncio.run_coroutine_threadsafe(read(other), lasting).result(10) == b"x" * 100
    other.close()
    lasting.call_soon_threadsafe(lasting.stop)
    thread.join()
    lasting.close()


# --- the thread and its queue ---


def threads_of_rings() -> list[Path]:
    tasks = Path("/proc/self/task").iterdir()
    return [task for task in tasks if (task / "comm").read_text() == "tiermem-uring\n"]


@pytest.fixture
def memory() -> Iterator[memoryview]:
    """Two megabytes of zeros, page-aligned."""
    pool = SlabPool(32 * PIECE, 1)
    slab = asyncio.run(pool.acquire())
    yield slab.view
    slab.give_back()
    pool.close()


@pytest.mark.parametrize("registered", [False, True], ids=["plain memory", "registered memory"])
def test_many_transfers_of_any_size_share_a_small_ring(tmp_path: Path, registered: bool) -> None:
    """More of them, and some of them larger, than the depth; with ends that direct I/O does not take."""
    engine = uring(depth=3, piece_bytes=8192)
    sizes = [1, 7, 199, 513, 4095, 4096, 4097, 8191, 8192, 8193, 24576, 24577, 100_003, 81920] * 8
    pool = SlabPool(sum(-(-size // 4096) * 4096 for size in sizes), 2, engine.pin if registered else None)
    if registered and not engine._buffers:
        pytest.skip(f"{engine.fallbacks}")

    def places(slab: Slab) -> list[tuple[int, memoryview]]:
        found, start = [], 0
        for size in sizes:
            found.append((start, slab.view[start : start + size]))
            start += -(-size // 4096) * 4096
        return found

    async def main() -> None:
        file = engine.open(tmp_path / "file", create=True)
        async with pool.loan() as source, pool.loan() as target:
            source.view[:] = noise(source.nbytes)
            os.ftruncate(file.fd, source.nbytes)
            await asyncio.gather(*(engine.write(file, at, view) for at, view in places(source)))
            await asyncio.gather(*(engine.read(file, at, view) for at, view in places(target)))
            for (_, written), (_, read) in zip(places(source), places(target), strict=True):
                assert written == read
        file.close()

    asyncio.run(main())
    assert engine.bytes_written == engine.bytes_read == sum(sizes)
    pool.close()
    engine.close()


def test_reads_and_writes_of_several_files_at_once(tmp_path: Path) -> None:
    engine = uring(depth=2, piece_bytes=4096)
    rng = np.random.default_rng(0)

    async def one(number: int) -> None:
        file = engine.open(tmp_path / f"file{number}", create=True)
        content = noise(200_000, number)
        await engine.write(file, 0, memoryview(content))
        for _ in range(5):
            start, stop = sorted(int(at) for at in rng.integers(0, len(content), 2))
            target = bytearray(stop - start + 1)
            part = noise(stop - start, start)
            await asyncio.gather(
                engine.write(file, len(content), memoryview(part)),
                engine.read(file, start, memoryview(target)[: stop - start]),
            )
            assert target[:-1] == content[start:stop]
            assert target[-1] == 0
        file.close()

    async def main() -> None:
        await asyncio.gather(*(one(number) for number in range(12)))

    asyncio.run(main())
    engine.close()


def test_the_thread_moves_a_transfer_of_many_pieces_without_the_interpreter(tmp_path: Path, memory: memoryview) -> None:
    """The event loop stands still, in a call that keeps the GIL, until the last byte is there."""
    engine = uring(depth=2, piece_bytes=4096)
    sleep = ctypes.PyDLL(None).usleep

    async def main() -> None:
        file = engine.open(tmp_path / "file", create=True)
        os.pwrite(file.fd, b"x" * memory.nbytes, 0)
        read = asyncio.ensure_future(engine.read(file, 0, memory))
        for _ in range(5):  # turns of the loop until it has begun
            await asyncio.sleep(0)
        deadline = time.monotonic() + 30
        while (memory[0], memory[-1]) != (ord("x"), ord("x")) and time.monotonic() < deadline:
            sleep(10_000)
        assert memory[-1] == ord("x")
        assert not read.done()  # nobody has looked yet
        await read
        assert memory == b"x" * memory.nbytes
        file.close()

    asyncio.run(main())
    engine.close()


def test_transfers_beside_a_thread_that_keeps_the_gil(tmp_path: Path) -> None:
    engine = uring(depth=4, piece_bytes=PIECE)
    stop = threading.Event()

    def keep() -> None:
        sleep = ctypes.PyDLL(None).usleep
        while not stop.is_set():
            sleep(20_000)

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        for nbytes in (513, 1_000_003):
            write_then_read(engine, tmp_path / "file", nbytes)
    finally:
        stop.set()
        thread.join()
        engine.close()


def test_a_read_past_the_end_fails_where_the_file_ends(tmp_path: Path, memory: memoryview) -> None:
    engine = uring(depth=4, piece_bytes=PIECE)
    content = noise(5 * PIECE + 100)

    async def main() -> None:
        file = engine.open(tmp_path / "file", create=True)
        await engine.write(file, 0, memoryview(content))
        for view in (memory, memory[1:]):  # direct, buffered
            with pytest.raises(OSError, match=f"the file ends at or before offset {len(content)}") as caught:
                await engine.read(file, 0, view)
            assert caught.value.errno == errno.EIO
            assert view[: len(content)] == content
            assert set(view[len(content) :]) <= {0}
            view[:] = bytes(view.nbytes)
        file.close()

    asyncio.run(main())
    assert engine.bytes_read == 2 * len(content)
    engine.close()


def test_an_error_in_the_middle_names_its_place_and_what_lies_before_it_has_moved(tmp_path: Path) -> None:
    """A page of the target cannot be written to."""
    engine = uring(depth=2, piece_bytes=PIECE)
    mapping = mmap.mmap(-1, 16 * PIECE)
    target = memoryview(mapping)
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    async def main() -> None:
        file = engine.open(tmp_path / "file", create=True)
        content = noise(target.nbytes)
        await engine.write(file, 0, memoryview(content))
        assert mprotect(start + 9 * PIECE, 4096, 0) == 0
        with pytest.raises(OSError, match=f"at offset {9 * PIECE}") as caught:
            await engine.read(file, 0, target)
        assert caught.value.errno == errno.EFAULT
        assert mprotect(start + 9 * PIECE, 4096, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        assert target[: 9 * PIECE] == content[: 9 * PIECE]
        await engine.read(file, 0, target)  # and the engine lives
        assert target == content
        file.close()

    asyncio.run(main())
    engine.close()


def test_short_pieces_are_continued(tmp_path: Path) -> None:
    """A pipe gives what it has; one piece at a time, so that they come in order."""
    engine = uring(depth=1, piece_bytes=4096)
    content = noise(50_000)
    reading, writing = os.pipe()

    def dribble() -> None:
        for at in range(0, len(content), 199):
            os.write(writing, content[at : at + 199])
        os.close(writing)

    async def main() -> None:
        file = engine.open(tmp_path / "file", create=True)
        target = memoryview(bytearray(60_000))
        assert await engine._read_some(file, reading, 0, target) == len(content)
        assert target[: len(content)] == content
        assert await engine._read_some(file, reading, 0, target) == 0
        file.close()

    thread = threading.Thread(target=dribble)
    thread.start()
    asyncio.run(main())
    thread.join()
    os.close(reading)
    engine.close()


def test_a_cancelled_transfer_that_has_not_begun_never_does(tmp_path: Path, memory: memoryview) -> None:
    engine = uring(depth=2, piece_bytes=4096)

    async def main() -> None:
        file = engine.open(tmp_path / "file", create=True)
        os.pwrite(file.fd, b"x" * memory.nbytes, 0)
        task = asyncio.create_task(engine.read(file, 0, memory))
        await asyncio.sleep(0)  # it has been queued, and the thread is woken in the loop's next turn
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert set(memory) == {0}
        await engine.read(file, 0, memory[:10_000])
        assert set(memory[:10_000]) == {ord("x")}
        assert set(memory[10_000:]) == {0}
        file.close()

    asyncio.run(main())
    engine.close()


def test_cancelled_transfers_among_others_end_when_their_memory_is_free(tmp_path: Path) -> None:
    engine = uring(depth=2, piece_bytes=4096)
    pool = SlabPool(20 * 4096, 16)

    async def one(file: File, number: int) -> None:
        async with pool.loan() as slab:  # given back at the end, whatever it is, and lent to another
            await engine.read(file, number * 4096, slab.view)
            assert slab.view == b"".join(bytes([number + i]) * 4096 for i in range(20))

    async def main() -> None:
        file = engine.open(tmp_path / "file", create=True)
        await engine.write(file, 0, memoryview(b"".join(bytes([i]) * 4096 for i in range(120))))
        tasks = [asyncio.create_task(one(file, number)) for number in range(100)]
        for turn in range(300):
            await asyncio.sleep(0.0005)
            tasks[turn % 100].cancel() if turn % 3 == 0 else None
            if all(task.done() for task in tasks):
                break
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
        assert pool.available == 16
        file.close()

    asyncio.run(main())
    pool.close()
    engine.close()


def test_files_and_memory_are_registered_while_transfers_run(tmp_path: Path) -> None:
    engine = uring(depth=2, piece_bytes=4096)
    stop = threading.Event()
    rounds = 0

    def register() -> None:
        nonlocal rounds
        while not stop.is_set() or rounds < 10:
            pool = SlabPool(PIECE, 1, engine.pin)
            engine.open(tmp_path / "other").close()
            pool.close()
            rounds += 1

    (tmp_path / "other").write_bytes(b"")
    thread = threading.Thread(target=register)
    thread.start()
    try:
        for nbytes in (513, 1_000_003, 4097):
            write_then_read(engine, tmp_path / "file", nbytes)
    finally:
        stop.set()
        thread.join()
        engine.close()
    assert rounds >= 10


def test_what_is_still_to_begin_does_without_the_slots_that_are_emptied(tmp_path: Path) -> None:
    """The memory is no longer registered, and the direct descriptor is given up, with most of a transfer queued."""
    engine = uring(depth=1, piece_bytes=4096)
    pool = SlabPool(64 * PIECE, 1, engine.pin)
    content = noise(pool.slab_bytes)

    async def main() -> None:
        file = engine.open(tmp_path / "file", create=True)
        os.pwrite(file.fd, content, 0)
        os.fsync(file.fd)
        async with pool.loan() as slab:
            read = asyncio.ensure_future(engine.read(file, 0, slab.view))
            for _ in range(3):
                await asyncio.sleep(0)
            pool.close()
            file.refuse_direct("by this test")
            await read
            assert slab.view == content
        assert not engine._buffers
        file.close()

    asyncio.run(main())
    engine.close()


def test_closing_waits_for_a_queue_that_is_longer_than_the_ring(tmp_path: Path, memory: memoryview) -> None:
    engine = uring(depth=2, piece_bytes=4096)
    loop = asyncio.new_event_loop()
    file = engine.open(tmp_path / "file", create=True)
    os.pwrite(file.fd, b"x" * memory.nbytes, 0)
    parts = [memory[at : at + PIECE] for at in range(0, memory.nbytes, PIECE)]
    tasks = [loop.create_task(engine.read(file, i * PIECE, part)) for i, part in enumerate(parts)]
    loop.call_soon(loop.stop)
    loop.run_forever()
    engine.close()
    assert memory == b"x" * memory.nbytes
    loop.run_until_complete(asyncio.wait_for(asyncio.gather(*tasks), 5))
    loop.close()
    file.close()


def test_a_loop_that_was_closed_too_early_does_not_keep_the_next_one_waiting(tmp_path: Path) -> None:
    engine = uring(depth=2, piece_bytes=4096)
    (tmp_path / "file").write_bytes(b"x" * 100)
    file = engine.open(tmp_path / "file")
    loop = asyncio.new_event_loop()
    lost = loop.create_task(engine.read(file, 0, memoryview(bytearray(100))))
    loop.call_soon(loop.stop)
    loop.run_forever()  # the transfer is queued, and the thread would be woken in the next turn
    loop.close()
    target = bytearray(100)
    asyncio.run(asyncio.wait_for(engine.read(file, 0, memoryview(target)), 10))
    assert target == b"x" * 100
    engine.close()
    assert not lost.done()
    lost._log_destroy_pending = False  # type: ignore[attr-defined]


def test_the_thread_has_a_name_takes_no_signals_and_ends_with_its_engine(tmp_path: Path) -> None:
    before = set(threads_of_rings())  # of what other tests left behind
    engine = uring()
    (task,) = set(threads_of_rings()) - before
    status = (task / "status").read_text()
    blocked = int(status[status.index("SigBlk:") :].split()[1], 16)
    assert blocked & 0x7FFFFFFF == 0x7FFFFFFF & ~(1 << 8) & ~(1 << 18)  # all but SIGKILL and SIGSTOP
    engine.close()
    assert settles(lambda: not set(threads_of_rings()) - before)
    engine = uring()
    write_then_read(engine, tmp_path / "file", 1000)
    del engine  # never closed
    gc.collect()
    assert settles(lambda: not set(threads_of_rings()) - before)


def test_a_forked_child_leaves_the_ring_alone(tmp_path: Path) -> None:
    engine = uring(depth=1, piece_bytes=4096)
    pool = SlabPool(32 * PIECE, 1, engine.pin)

    def child(file: File) -> int:
        try:
            asyncio.new_event_loop().run_until_complete(engine.read(file, 0, memoryview(bytearray(10))))
        except RuntimeError as error:
            refused = "forked child" in str(error)
        file.close()
        engine.close()
        other = uring()  # one of its own works
        write_then_read(other, tmp_path / "child", 100_000)
        other.close()
        return 0 if refused else 1

    async def main() -> None:
        file = engine.open(tmp_path / "file", create=True)
        os.pwrite(file.fd, b"x" * pool.slab_bytes, 0)
        async with pool.loan() as slab:
            read = asyncio.ensure_future(engine.read(file, 0, slab.view))
            for _ in range(3):
                await asyncio.sleep(0)
            pid = os.fork()
            if pid == 0:
                code = 2
                try:
                    asyncio.events._set_running_loop(None)
                    code = child(file)
                finally:
                    os._exit(code)
            await read
            assert slab.view == b"x" * slab.nbytes
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            await engine.read(file, 1, slab.view[:100])  # its slots are as they were
        file.close()

    asyncio.run(main())
    pool.close()
    engine.close()


def test_the_interpreter_ends_with_an_engine_that_was_never_closed(tmp_path: Path) -> None:
    uring().close()
    script = (
        "import asyncio, os, sys\n"
        "from tiermem.io import UringEngine\n"
        "engine = UringEngine(depth=1, piece_bytes=4096)\n"
        "file = engine.open(sys.argv[1], create=True)\n"
        "os.ftruncate(file.fd, 8 << 20)\n"
        "target = bytearray(8 << 20)\n"
        "loop = asyncio.new_event_loop()\n"
        "task = loop.create_task(engine.read(file, 0, memoryview(target)))\n"
        "task._log_destroy_pending = False\n"
        "for _ in range(3):\n"
        "    loop.call_soon(loop.stop)\n"
        "    loop.run_forever()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "file")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert done.stderr == ""
