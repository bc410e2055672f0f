"""The `threads` engine: positional reads and writes in a few threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

from tiermem.io.engine import PIECE_BYTES, Engine, File, UnstoppableFuture

__all__ = ["ThreadsEngine"]

_Call: TypeAlias = Callable[[int, list[memoryview], int], int]
_Job: TypeAlias = tuple[asyncio.AbstractEventLoop, UnstoppableFuture[int], _Call, int, memoryview, int]


class ThreadsEngine(Engine):
    """`preadv` and `pwritev` in `depth` threads, with O_DIRECT where the file system takes it."""

    name = "threads"
    usual_depth = 16  # 8 are enough beside an idle interpreter: a busy one is late to begin the next

    def __init__(self, *, depth: int = usual_depth, piece_bytes: int = PIECE_BYTES, direct: bool = True) -> None:
        super().__init__(depth=depth, piece_bytes=piece_bytes, direct=direct)
        jobs: SimpleQueue[_Job | None] = SimpleQueue()  # bounded by the gate: never more than `depth` in it
        threads = [
            threading.Thread(target=_work, args=(jobs,), name=f"tiermem-io-{i}", daemon=True) for i in range(depth)
        ]
        for thread in threads:
            thread.start()
        self._jobs = jobs
        self._stop = weakref.finalize(self, _stop, jobs, threads, os.getpid())

    async def _read_some(self, file: File, fd: int, offset_bytes: int, target: memoryview) -> int:
        return await self._run(os.preadv, fd, target, offset_bytes)

    async def _write_some(self, file: File, fd: int, offset_bytes: int, source: memoryview) -> int:
        return await self._run(os.pwritev, fd, source, offset_bytes)

    async def _run(self, call: _Call, fd: int, memory: memoryview, offset_bytes: int) -> int:
        if not self._stop.alive:
            raise RuntimeError("the I/O engine is closed")
        loop = asyncio.get_running_loop()
        future: UnstoppableFuture[int] = UnstoppableFuture(loop=loop)
        self._jobs.put((loop, future, call, fd, memory, offset_bytes))
        return await future.outcome()

    def close(self) -> None:
        self._stop()


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        loop, future, call, fd, memory, offset_bytes = job
        result: int | BaseException
        try:
            result = call(fd, [memory], offset_bytes)
        except BaseException as error:  # whatever it is, the waiting task must get it
            result = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_settle, future, result)
        del job, loop, future, memory, result


def _settle(future: asyncio.Future[int], result: int | BaseException) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


def _stop(jobs: SimpleQueue[_Job | None], threads: list[threading.Thread], owner_pid: int) -> None:
    if os.getpid() != owner_pid:  # a forked child has the object but not the threads
        return
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # the last reference may die in one of them
            thread.join()
