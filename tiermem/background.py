"""The one background thread: an asyncio event loop in which the pipelines run.

What runs there must not block: I/O is awaited, kernels and waits for device events go to ``call``, a small thread
pool in which they run without the GIL. Every job has its own future; whoever waits on it gets its exception. Nothing
is drained.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from tiermem.device import Event

T = TypeVar("T")


def _without_team() -> None:
    """Have torch work in the calling thread alone.

    It would give this thread a team of workers of its own, and OpenMP, which then counts more threads than processors,
    would have the main thread's team sleep at every barrier instead of spin: compute beside a disk took 1.6 times as
    long on two cores, for the sake of one ``zero_()``.
    """
    torch.get_num_threads()  # at its first use in a thread torch sets the number itself
    limit = _limit_of_team()
    if limit is not None:
        limit(1)


@functools.cache
def _limit_of_team() -> Callable[[int], Any] | None:
    """OpenMP's ``omp_set_num_threads`` of the library that torch uses; None where it has another."""
    with contextlib.suppress(OSError, AttributeError):
        limit: Callable[[int], Any] = ctypes.CDLL(torch._C.__file__).omp_set_num_threads
        return limit
    return None


class Background:
    """Owns four kinds of threads: the loop's, the kernels', two that wait for events of copies, and one that waits for
    marks of the compute stream. ``close()`` ends all; it is safe to call twice."""

    def __init__(self, name: str, *, on_thread_start: Callable[[], None] | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self._started = on_thread_start
        self._kernel = ThreadPoolExecutor(1, f"{name}-kernel", initializer=self._start_thread)
        self._waits = ThreadPoolExecutor(2, f"{name}-wait", initializer=self._start_thread)
        self._marks = ThreadPoolExecutor(1, f"{name}-mark", initializer=self._start_thread)
        self._thread = threading.Thread(target=self._run, name=f"{name}-loop", daemon=True)
        self._thread.start()
        self.closed = False

    def _start_thread(self) -> None:
        _without_team()
        if self._started is not None:
            self._started()

    def _run(self) -> None:
        self._start_thread()
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit(self, job: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``job`` on the loop, from any other thread."""
        if self.closed:
            job.close()
            raise RuntimeError("this model's runtime was closed")
        return asyncio.run_coroutine_threadsafe(job, self.loop)

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Run ``job`` on the loop and wait for it, from any other thread."""
        if threading.current_thread() is self._thread:
            raise AssertionError("run() would wait for its own thread")
        return self.submit(job).result()

    async def kernel(self, work: Callable[..., T], *args: Any) -> T:
        """Await ``work`` in the kernel thread: one at a time, as each uses all the threads it is given."""
        return await self.loop.run_in_executor(self._kernel, work, *args)

    def start_kernel(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Start ``work`` in the kernel thread, from any thread, behind what is queued there."""
        return self._kernel.submit(work, *args)

    async def wait(self, work: Callable[..., T], *args: Any) -> T:
        """Await something that blocks without computing (a device event)."""
        return await self.loop.run_in_executor(self._waits, work, *args)

    async def reached(self, mark: Event) -> None:
        """Await a mark of the compute stream. They are reached in the order in which they were made, so that one thread
        waits for all, and for nothing else: one of them may be a whole backward away."""
        await self.loop.run_in_executor(self._marks, mark.synchronize)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        asyncio.run_coroutine_threadsafe(_cancel_all(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self._kernel.shutdown(wait=True)
        self._waits.shutdown(wait=True)
        self._marks.shutdown(wait=True)
        self.loop.close()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
