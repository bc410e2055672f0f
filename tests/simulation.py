"""The simulated accelerator under watch: whether everything is ordered, and what happens when one wait is missing.

watch      sees every operation of a run: the device's copies, marks and waits (`tiermem.simulated.Observer`), and what
           happens around them on the host: torch's operations, kernels, transfers from and to disk, futures.
oracle     torch's `EventHandler`, which is told of all of it. It knows for each access to memory what has happened
           before, by the waits alone and not by chance, and reports two accesses of which neither comes before the
           other. The device's three streams, the host's threads and, in an event loop, its tasks are streams to it;
           memory is told apart by the page.
site       a place in the runtime that waits, with the one that called it. Found as the runtime waits, so a new wait is
           a new site. A watch can ignore the waits of one site: the run then goes on without them, and so does the
           oracle.

Run as a script, it is the worker of `Worker`.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import ctypes
import functools
import itertools
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from models import Stack
from reference import Outcome, Placement, Plain, Tiered, assert_same_bits, train
from torch import nn
from torch.cuda import _sanitizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem import saved_inputs
from tiermem.background import Background
from tiermem.device import Event
from tiermem.gathering import Gathering
from tiermem.gradients import GradientSlot, GradientSlots
from tiermem.handles import GradientHandle
from tiermem.kernels.abi import BF16, F32, NON_NEGATIVE
from tiermem.layout import PAGE_BYTES
from tiermem.memory import Region
from tiermem.planes import Block
from tiermem.simulated import POISON_BYTE, Observer, SimulatedDevice, SimulatedEvent
from tiermem.slab import Slab, SlabPool
from tiermem.store import Record

# The oracle.

COMPUTE, COPY_IN, COPY_OUT = range(3)
HOST, DEVICE, PASSING, DISK = "host memory", "device memory", "passing memory", "disk"
"""Memory of the runtime on the host, and on the device; tensors of the model's own computation; records."""


class _NoAliases(dict[int, list[str]]):
    def __missing__(self, page: int) -> list[str]:
        return []


class Oracle:
    """`EventHandler`, told from many threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.errors: dict[str, None] = {}  # in order, each once
        self.launches = 0
        self.kinds: dict[int, str] = {}  # of pages that are watched
        self._handler = _sanitizer.EventHandler()
        self._streams = itertools.count(COPY_OUT + 1)
        self._threads: dict[int, int] = {}
        self._tasks: dict[asyncio.Task[Any], int] = {}
        self._ends: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._idle: list[int] = []
        self._events = itertools.count(1)

    @property
    def here(self) -> int:
        """The stream that is the calling thread, or task."""
        with self.lock:
            if self._tasks and asyncio._get_running_loop() is not None:
                task = asyncio.current_task()
                if task in self._tasks:
                    return self._tasks[task]
            ident = threading.get_ident()
            if ident not in self._threads:
                self._threads[ident] = next(self._streams)
            return self._threads[ident]

    def record(self, stream: int | None = None) -> int:
        """An event: what the stream (this thread) has done so far."""
        with self.lock:
            event = next(self._events)
            self._handler._handle_event_record(event, self.here if stream is None else stream)
            return event

    def wait(self, event: int, stream: int | None = None) -> None:
        """What the stream (this thread) does from now on comes after the event."""
        with self.lock:
            self._handler._handle_event_wait(event, self.here if stream is None else stream)

    def launch(self, what: str, reads: Iterable[int], writes: Iterable[int], stream: int | None = None) -> None:
        """Work on these pages. What a thread gives to a device's stream comes after what the thread has done."""
        with self.lock:
            stream = self.here if stream is None else stream
            if stream <= COPY_OUT:
                self.wait(self.record(), stream)
            written = set(writes)
            read = set(reads) - written
            if not written and not read:
                return
            self.launches += 1
            for error in self._handler._handle_kernel_launch(stream, read, written, set(), what, _NoAliases()):
                assert isinstance(error, _sanitizer.UnsynchronizedAccessError)
                now, before = error.current_access, error.previous_access
                where = self.kinds.get(error.data_ptr, "freed memory")
                access = f"{now.operator} ({now.type} {where})"
                self.errors[f"{access} is not ordered after {before.operator} ({before.type} it)"] = None

    @contextlib.contextmanager
    def transfer(self, what: str, reads: Iterable[int], writes: Iterable[int]) -> Iterator[None]:
        """Work by something that this thread starts and waits for."""
        with self.lock:
            stream = self._idle.pop() if self._idle else next(self._streams)
            self.wait(self.record(), stream)
            self.launch(what, reads, writes, stream)
        try:
            yield
        finally:
            with self.lock:
                self.wait(self.record(stream))
                self._idle.append(stream)

    def task(self, loop: asyncio.AbstractEventLoop, job: Coroutine[Any, Any, Any], **options: Any) -> Any:
        """A task factory: what a task does comes after what its maker had done."""
        given = self.record()

        async def run() -> Any:
            with self.lock:
                task = asyncio.current_task()
                assert task is not None
                self._tasks[task] = self._idle.pop() if self._idle else next(self._streams)
                self.wait(given)
            try:
                return await job
            finally:
                with self.lock:
                    self._ends[task] = self.record()
                    self._idle.append(self._tasks.pop(task))

        task = asyncio.Task(run(), loop=loop, **options)
        task.add_done_callback(lambda _: job.close())  # it may not have begun
        return task

    def ended(self, task: Any) -> None:
        """This task has waited for that one."""
        with self.lock:
            if task in self._ends:
                self.wait(self._ends[task])

    def allocated(self, pages: Iterable[int], kind: str) -> None:
        with self.lock:
            for page in pages:
                self._handler._handle_memory_deallocation(page)
                self.kinds[page] = kind

    def freed(self, pages: Iterable[int]) -> None:
        """This thread gives memory back, so nothing may be using it."""
        with self.lock:
            known = {page for page in pages if page in self.kinds}
            self.launch("giving memory back", (), known)
            for page in known:
                del self.kinds[page]

    def known(self, pages: Iterable[int], *kinds: str) -> set[int]:
        return {page for page in pages if self.kinds.get(page) in kinds}

    def pages(self, tensor: torch.Tensor) -> set[int]:
        """Those that are watched. Of the model's own tensors only pages that they share with no other."""
        place = extent(tensor)
        return self.known(pages_of(*place), HOST, DEVICE) | self.known(whole_pages_of(*place), PASSING)


def pages_of(address: int, nbytes: int) -> range:
    return range(address // PAGE_BYTES, -(-(address + nbytes) // PAGE_BYTES)) if nbytes else range(0)


def whole_pages_of(address: int, nbytes: int) -> range:
    """Those that belong to nobody else."""
    return range(-(-address // PAGE_BYTES), (address + nbytes) // PAGE_BYTES)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes from the first to the last element."""
    if not tensor.numel():
        return 0, 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), span * tensor.element_size()


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    if type(value) in (torch.Tensor, nn.Parameter):
        if value.layout is torch.strided and value.device.type == "cpu":
            yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from plain_tensors(one)


# The watch.


def _in_runtime(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_globals.get("__name__", "").startswith("tiermem.")


def site_of(kind: str) -> str:
    """The innermost place in the runtime, and its caller if that is in the runtime too."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (not _in_runtime(frame) or frame.f_globals["__name__"] == "tiermem.simulated"):
        frame = frame.f_back
    places = []
    while _in_runtime(frame) and len(places) < 2:
        assert frame is not None
        name = frame.f_globals["__name__"].removeprefix("tiermem.")
        places.append(f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
        while frame is not None and frame.f_globals is globals():
            frame = frame.f_back
    return f"{kind}: {' < '.join(places)}" if places else f"{kind}: outside"


class Watch(Observer):
    """ignored: a site whose waits are taken away. delay_max_s: of kernels and disk, random by `seed`."""

    def __init__(self, *, ignored: str | None = None, seed: int = 0, delay_max_s: float = 0.0) -> None:
        self.oracle = Oracle()
        self.sites: collections.Counter[str] = collections.Counter()
        self._ignored = ignored
        self._random = random.Random(seed)
        self._delay_max_s = delay_max_s
        self._lent: dict[Any, set[int]] = {}  # by reference to a tensor that was copied
        self._free: dict[int, int] = {}  # events, by page

    def delay_s(self) -> float:
        return self._random.random() * self._delay_max_s

    # What the device says.

    def waits(self, kind: str) -> bool:
        if kind == "copy" and threading.current_thread() is not threading.main_thread():
            time.sleep(self.delay_s())  # before it is started: the main thread may be quicker, or slower
        site = site_of(kind)
        self.sites[site] += 1
        return site != self._ignored

    def allocated(self, memory: torch.Tensor) -> None:
        self.oracle.allocated(pages_of(*extent(memory)), DEVICE)

    def pinned(self, address: int, nbytes: int) -> None:
        self.oracle.allocated(pages_of(address, nbytes), HOST)

    def unpinned(self, address: int, nbytes: int) -> None:
        self.oracle.freed(pages_of(address, nbytes))

    def copied(self, direction: str, target: torch.Tensor, source: torch.Tensor, after: Event | None) -> int:
        oracle = self.oracle
        stream = COPY_IN if direction == "in" else COPY_OUT
        with oracle.lock:
            if isinstance(after, SimulatedEvent):
                oracle.wait(after.name, stream)
            oracle.launch(site_of(f"copy {direction}"), oracle.pages(source), oracle.pages(target), stream)
            for tensor in (source, target):
                if passing := oracle.known(oracle.pages(tensor), PASSING):
                    self._lent[weakref.ref(tensor, self._returned)] = passing
            return oracle.record(stream)

    def _returned(self, reference: Any) -> None:
        """This thread gives memory back to torch's allocator, and whoever gets it next comes after that."""
        with self.oracle.lock:
            event = self.oracle.record()
            for page in self._lent.pop(reference, ()):
                self._free[page] = event

    def marked(self) -> int:
        with self.oracle.lock:
            self.oracle.launch("mark", (), (), COMPUTE)
            return self.oracle.record(COMPUTE)

    def held(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        self.oracle.wait(event.name, COMPUTE)

    def synchronized(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        self.oracle.wait(event.name)

    def entered_thread(self) -> None:
        Launches(self).__enter__()  # until the thread ends

    def settled(self) -> None:
        """Nothing of the runtime's is in flight, it says."""
        host = {page for page, kind in self.oracle.kinds.items() if kind is HOST}
        self.oracle.launch("use after tiermem.synchronize()", (), host)

    def closed(self) -> None:
        for stream in (COMPUTE, COPY_IN, COPY_OUT):
            self.oracle.wait(self.oracle.record(stream))

    # What happens on the host.

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """An operation of torch: on the compute stream, or on this thread if it touches the runtime's host memory."""
        oracle = self.oracle
        roles = _roles(func)
        reads: set[int] = set()
        writes: set[int] = set()
        for position, writing in roles.positional:
            if position < len(args):
                _add_pages(oracle, args[position], writes if writing else reads)
        for name, writing in roles.named:
            if name in kwargs:
                _add_pages(oracle, kwargs[name], writes if writing else reads)
        if roles.fresh:
            for tensor in plain_tensors(outputs):
                if tensor.untyped_storage().nbytes() < PAGE_BYTES:
                    continue
                for page in whole_pages_of(*extent(tensor)):
                    if oracle.kinds.setdefault(page, PASSING) is PASSING:
                        writes.add(page)
                        if page in self._free:
                            oracle.wait(self._free.pop(page))
        if not reads and not writes:
            return
        what = str(func)
        on_host = oracle.known(reads | writes, HOST)
        on_device = oracle.known(reads | writes, DEVICE)
        with oracle.lock:
            if not on_host:
                oracle.launch(what, reads, writes, COMPUTE)
            elif on_device:  # torch's own copy between the two, for which the host waits
                oracle.launch(what, reads, writes, COMPUTE)
                oracle.wait(oracle.record(COMPUTE))
            else:
                oracle.launch(what, reads & on_host, writes & on_host)

    def kernel(self, what: str, reads: list[tuple[int, int]], writes: list[tuple[int, int]]) -> None:
        """A CPU kernel begins on this thread. reads, writes: addresses and bytes."""
        oracle = self.oracle
        read, written = ({page for one in extents for page in pages_of(*one)} for extents in (reads, writes))
        if oracle.known(read | written, DEVICE):
            oracle.errors[f"{what} is given device memory"] = None
        oracle.launch(what, oracle.known(read, HOST), oracle.known(written, HOST))
        time.sleep(self.delay_s() * (4 if what == "update" else 1))

    def joined(self, future: WatchedFuture) -> None:
        future.known_to.add(self.oracle.here)
        if future.end:
            self.oracle.wait(future.end[0])

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Watch what this process does inside."""
        with contextlib.ExitStack() as stack:
            for target, replacement in _replacements(self).items():
                stack.enter_context(mock.patch(target, replacement))
            # It formats a stack for each access, which nobody reads.
            stack.enter_context(mock.patch.object(_sanitizer, "traceback", _NoTraceback))
            stack.enter_context(Launches(self))
            yield


class _NoTraceback:
    class StackSummary:
        @staticmethod
        def extract(*_: Any, **__: Any) -> list[Any]:
            return []

    @staticmethod
    def walk_stack(frame: Any) -> None:
        return None


@dataclass(frozen=True)
class _Roles:
    """An operation's arguments whose values it reads or (True) writes, and whether the result is new memory."""

    positional: list[tuple[int, bool]]
    named: list[tuple[str, bool]]
    fresh: bool


@functools.cache
def _roles(func: Any) -> _Roles:
    schema = func._schema
    factory = bool(_sanitizer.FACTORY_FUNCTION_REGEX.match(schema.name.removeprefix("aten::")))
    roles = _Roles([], [], all(one.alias_info is None for one in schema.returns))
    if schema.name == "aten::set_":  # of a tensor, not of its values
        return roles
    for position, argument in enumerate(schema.arguments):
        if "Tensor" not in str(argument.type):
            continue
        writing = argument.alias_info is not None and argument.alias_info.is_write
        if writing or (argument.alias_info is None and not factory):
            if argument.kwarg_only:
                roles.named.append((argument.name, writing))
            else:
                roles.positional.append((position, writing))
    return roles


def _add_pages(oracle: Oracle, value: Any, pages: set[int]) -> None:
    for tensor in plain_tensors(value):
        address, nbytes = extent(tensor)
        if address % PAGE_BYTES + nbytes > PAGE_BYTES:
            pages |= oracle.pages(tensor)
        elif nbytes and oracle.kinds.get(address // PAGE_BYTES) in (HOST, DEVICE):
            pages.add(address // PAGE_BYTES)


class Launches(TorchDispatchMode):
    """Tells the watch of each operation of torch on this thread."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(one, GradientHandle) for one in types):
            with self:  # what the handle does is seen too
                return GradientHandle.__torch_dispatch__(func, types, args, kwargs)
        outputs = func(*args, **kwargs)
        self._watch.ran(func, args, kwargs, outputs)
        return outputs


class WatchedFuture(concurrent.futures.Future[Any]):
    """A job of the background: who waits for it comes after it."""

    watch: Watch
    end: list[int]  # the event of its end, once it has ended
    known_to: set[int]
    """Threads and tasks that have seen its end: they wait for it no more."""

    def _ends(self, wait: Callable[..., Any], timeout: float | None) -> Any:
        if not _in_runtime(sys._getframe(2)) or self.watch.oracle.here in self.known_to:
            return wait(timeout)
        if not self.watch.waits("result"):
            return None
        try:
            return wait(timeout)
        finally:
            self.watch.joined(self)

    def result(self, timeout: float | None = None) -> Any:
        return self._ends(super().result, timeout)

    def exception(self, timeout: float | None = None) -> Any:
        return self._ends(super().exception, timeout)

    def done(self) -> bool:
        done = super().done()
        if done and _in_runtime(sys._getframe(1)):
            self.watch.joined(self)
        return done


class WatchedBackground(Background):
    def __init__(self, watch: Watch, name: str, *, on_thread_start: Callable[[], None] | None = None) -> None:
        self._watch = watch
        super().__init__(name, on_thread_start=on_thread_start)
        self.loop.set_task_factory(watch.oracle.task)

    def submit(self, job: Coroutine[Any, Any, Any]) -> Any:
        if self.closed:
            return super().submit(job)
        oracle, end = self._watch.oracle, []
        given = oracle.record()

        async def run() -> Any:
            oracle.wait(given)
            try:
                return await job
            finally:
                end.append(oracle.record())

        return self._watched(super().submit(run()), end)

    def start_kernel(self, work: Callable[..., Any], *args: Any) -> Any:
        watched, end = self._between(work)
        return self._watched(super().start_kernel(watched, *args), end)

    async def kernel(self, work: Callable[..., Any], *args: Any) -> Any:
        watched, end = self._between(work)
        try:
            return await super().kernel(watched, *args)
        finally:
            self._watch.oracle.wait(end[0])

    async def wait(self, work: Callable[..., Any], *args: Any) -> Any:
        watched, end = self._between(work)
        try:
            return await super().wait(watched, *args)
        finally:
            self._watch.oracle.wait(end[0])

    def _between(self, work: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
        """`work` for another thread, after what this one has done; and where the event of its end will be."""
        oracle, end = self._watch.oracle, []
        given = oracle.record()

        def run(*args: Any) -> Any:
            oracle.wait(given)
            try:
                return work(*args)
            finally:
                end.append(oracle.record())

        return run, end

    def _watched(self, future: Any, end: list[int]) -> WatchedFuture:
        future.watch, future.end, future.known_to = self._watch, end, set()
        future.__class__ = WatchedFuture
        return future  # type: ignore[no-any-return]


class WatchedKernels:
    """Kernels that say what they read and write."""

    def __init__(self, watch: Watch, kernels: Any) -> None:
        self._watch = watch
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def update(self, tasks: Any, count: int, threads: int) -> None:
        reads, writes = [], []
        for task in tasks[:count]:
            numel, size = task.numel, {BF16: 2, F32: 4}
            reads.append((task.grad, numel * size[task.grad_dtype]))
            writes.append((task.weight, numel * size[task.weight_dtype]))
            if task.residual:
                writes.append((task.residual, numel * 2))
            for moment in range(len(NON_NEGATIVE[task.formula])):
                writes.append((task.moments[moment], numel * size.get(task.moment_dtype, 1)))
        self._watch.kernel("update", reads, writes)
        self._kernels.update(tasks, count, threads)

    def accumulate(self, tasks: Any, count: int, threads: int) -> None:
        reads, writes = [], []
        for task in tasks[:count]:
            numel, size = task.numel, {BF16: 2, F32: 4}
            reads.append((task.source, numel * size[task.source_dtype]))
            if task.previous:
                reads.append((task.previous, numel * size[task.previous_dtype]))
            if task.target:
                writes.append((task.target, numel * size[task.target_dtype]))
        self._watch.kernel("accumulate", reads, writes)
        self._kernels.accumulate(tasks, count, threads)

    def split(self, master: int, weight: int, residual: int, numel: int, threads: int) -> None:
        self._watch.kernel("split", [(master, 4 * numel)], [(weight, 2 * numel), (residual, 2 * numel)])
        self._kernels.split(master, weight, residual, numel, threads)

    def join(self, weight: int, residual: int, master: int, numel: int, threads: int) -> None:
        self._watch.kernel("join", [(weight, 2 * numel), (residual, 2 * numel)], [(master, 4 * numel)])
        self._kernels.join(weight, residual, master, numel, threads)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _replacements(watch: Watch) -> dict[str, Any]:
    swap_in, swap_out, drop, wrap_future = Record.swap_in, Record.swap_out, Record.drop, asyncio.wrap_future
    load, gather = tiermem.kernels.load, asyncio.gather
    acquire, take_back = SlabPool.acquire, SlabPool._take_back
    wait_update, load_block = Block.wait_update, Gathering._load

    oracle = watch.oracle
    numbers = itertools.count(1)
    records: dict[Record, int] = {}

    def page_of(record: Record) -> int:
        if record not in records:
            records[record] = -next(numbers)
            oracle.kinds[records[record]] = DISK
        return records[record]

    def watched_drop(record: Record) -> None:
        oracle.launch("drop", (), [page_of(record)])
        drop(record)

    async def watched_swap_in(record: Record, target: memoryview) -> None:
        address = _address(target)
        pages = oracle.known(pages_of(address, target.nbytes), HOST)
        with oracle.transfer("swap in", [page_of(record)], pages):
            ctypes.memset(address, POISON_BYTE, target.nbytes)
            await asyncio.sleep(watch.delay_s())
            await swap_in(record, target)

    async def watched_swap_out(record: Record, source: memoryview) -> None:
        pages = oracle.known(pages_of(_address(source), source.nbytes), HOST)
        with oracle.transfer("swap out", pages, [page_of(record)]):
            await asyncio.sleep(watch.delay_s())
            await swap_out(record, source)

    def watched_wrap_future(future: Any, **kwargs: Any) -> Any:
        if not isinstance(future, WatchedFuture):
            return wrap_future(future, **kwargs)
        if not watch.waits("await"):
            return asyncio.sleep(0)

        async def late() -> Any:
            try:
                return await wrap_future(future, **kwargs)
            finally:
                watch.joined(future)
                await asyncio.sleep(watch.delay_s())

        return late()

    async def watched_gather(*work: Any, return_exceptions: bool = False) -> list[Any]:
        tasks = [asyncio.ensure_future(one) for one in work]
        try:
            return await gather(*tasks, return_exceptions=return_exceptions)
        finally:
            for task in tasks:
                oracle.ended(task)

    given: dict[Slab, int] = {}
    returned: dict[GradientSlot, int] = {}
    known_updated: dict[Block, int] = {}

    async def watched_acquire(pool: SlabPool) -> Slab:
        slab = await acquire(pool)
        if slab in given:
            oracle.wait(given[slab])
        return slab

    def watched_take_back(pool: SlabPool, slab: Slab) -> None:
        given[slab] = oracle.record()
        take_back(pool, slab)

    def watched_wait_update(block: Block) -> None:
        wait_update(block)
        known_updated[block] = oracle.record()

    async def watched_load(gathering: Gathering, block: Block, *args: Any) -> None:
        if block.update is None and block in known_updated:  # somebody has waited for it and says so by this None
            oracle.wait(known_updated[block])
        await load_block(gathering, block, *args)

    class WatchedSlots(GradientSlots):
        """Who takes a slot comes after whoever has given it back."""

        def take(self, nbytes: int) -> GradientSlot:
            slot = super().take(nbytes)
            if slot in returned:
                oracle.wait(returned[slot])
            return slot

        def give_back(self, slot: GradientSlot) -> None:
            returned[slot] = oracle.record()
            super().give_back(slot)

    class WatchedRegion(Region):
        def __init__(self, nbytes: int, pin: Any = None) -> None:
            super().__init__(nbytes, pin)
            oracle.allocated(pages_of(self.address, self.nbytes), HOST)

        def close(self) -> None:
            oracle.freed(pages_of(self.address, self.nbytes))
            super().close()

    return {
        "tiermem.runtime.Background": functools.partial(WatchedBackground, watch),
        "tiermem.runtime.Region": WatchedRegion,
        "tiermem.runtime.kernel_library.load": lambda *args, **kwargs: WatchedKernels(watch, load(*args, **kwargs)),
        "tiermem.gathering.Gathering._load": watched_load,
        "tiermem.gradients.GradientSlots": WatchedSlots,
        "tiermem.planes.Block.wait_update": watched_wait_update,
        "tiermem.store.Record.drop": watched_drop,
        "tiermem.store.Record.swap_in": watched_swap_in,
        "tiermem.store.Record.swap_out": watched_swap_out,
        "tiermem.slab.SlabPool.acquire": watched_acquire,
        "tiermem.slab.SlabPool._take_back": watched_take_back,
        "asyncio.gather": watched_gather,
        "asyncio.wrap_future": watched_wrap_future,
    }


# The cases.


class Simulated(Tiered):
    """tiermem on a simulated accelerator."""

    seed = 0
    delay_max_s = 0.003
    observer: Observer | None = None

    def offload(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        while True:
            device = SimulatedDevice(seed=self.seed, delay_max_s=self.delay_max_s, observer=self.observer)
            try:
                self.tiermem.offload(module, memory=self.memory(), policy=self.policy(), device=device)
                break
            except ValueError as error:
                device.close()
                if not self._tight or "device memory" not in str(error):
                    raise
                self._memory["device"] += 4096
        self.models.append(module)
        return module


class Recomputed(Stack):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.inlet(inputs)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return self.head(hidden)


class Long(Stack):
    """With inputs of layers that are worth moving."""

    def inputs(self, lib: Plain | Tiered) -> tuple[torch.Tensor, ...]:
        return (lib.randn(80, 7),)


def clipped(lib: Plain | Tiered) -> None:
    model = lib.offload(Stack())
    train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), clip=0.3, steps=2)


def accumulated(lib: Plain | Tiered) -> None:
    model = lib.offload(Stack().bfloat16())
    train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), clip=0.3, micro_batches=3, steps=2)


def recomputed(lib: Plain | Tiered) -> None:
    model = lib.offload(Recomputed().bfloat16())
    train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), micro_batches=2, steps=2)


def evaluated(lib: Plain | Tiered) -> None:
    model = lib.offload(Stack())
    optimizer = lib.AdamW(model.parameters(), lr=3e-3)
    for _ in range(2):
        train(lib, model, optimizer, steps=1)
        with torch.no_grad():
            lib.note("evaluated", model(*model.inputs(lib)).square().mean())


def shelved(lib: Plain | Tiered) -> None:
    model = lib.offload(Long(depth=4))
    train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), micro_batches=2, steps=2)


def shrinking(lib: Plain | Tiered) -> None:
    """The second micro-batch needs smaller buffers for inputs, and HOST has no more room."""
    model = lib.offload(Stack(depth=5))
    optimizer = lib.AdamW(model.parameters(), lr=3e-3)
    for rows in (160, 80):
        model(lib.randn(rows, 7)).square().mean().backward()
        if not lib.is_reference:
            budget = model.head.weight._tiermem_held.runtime.host_budget
            budget.limit_bytes = budget.used_bytes
    optimizer.step()
    optimizer.zero_grad()


def ended(lib: Plain | Tiered) -> None:
    """Closed while everything is in flight."""
    model = lib.offload(Stack())
    optimizer = lib.AdamW(model.parameters(), lr=3e-3)
    train(lib, model, optimizer, steps=1)
    model(*model.inputs(lib)).square().mean().backward()
    optimizer.step()
    lib.close()
    for name, parameter in model.named_parameters():
        lib.note(name, parameter)
        lib.note(name, parameter.grad)
    lib.models.clear()
    lib.optimizers.clear()


def touched(lib: Plain | Tiered) -> None:
    """The user reads and writes weights and gradients in between."""
    model = lib.offload(Stack().bfloat16())
    optimizer = lib.AdamW(model.parameters(), lr=3e-3)
    weight = model.blocks[1].up.weight
    for _ in range(2):
        lib.note("loss", model(*model.inputs(lib)).float().square().mean())
        with lib.gather(weight, write=True), torch.no_grad():
            weight.mul_(0.5)
        loss = model(*model.inputs(lib)).float().square().mean()
        loss.backward()
        lib.note("gradient", model.blocks[2].up.bias.grad.float())
        model.head.bias.grad = torch.ones_like(model.head.bias.grad.float()).to(model.head.bias.dtype)
        with torch.no_grad():
            lib.note("before the step", model(*model.inputs(lib)).float())
        optimizer.step()
        optimizer.step()
        with lib.gather(model):
            lib.note("weight", model.blocks[0].down.weight)
        optimizer.zero_grad()


def rewritten(lib: Plain | Tiered) -> None:
    """A gradient is set by hand just before it is used."""
    model = lib.offload(Stack(105, depth=1).bfloat16())
    optimizer = lib.AdamW(model.parameters(), lr=3e-3)
    weight = model.blocks[0].up.weight
    for _ in range(2):
        model(*model.inputs(lib)).float().square().mean().backward()
        weight.grad = weight.grad * 2
        optimizer.step()
        optimizer.zero_grad()


def loaded(lib: Plain | Tiered) -> None:
    """Values and states are read and loaded while updates are in flight."""
    model = lib.offload(Stack())
    optimizer = lib.AdamW(model.parameters(), lr=3e-3)
    train(lib, model, optimizer, steps=2)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    train(lib, model, optimizer, steps=1)
    model.load_state_dict(values)
    states = optimizer.state_dict()
    train(lib, model, optimizer, steps=1)
    optimizer.load_state_dict(states)
    train(lib, model, optimizer, steps=1)


PLACEMENTS = [
    Placement("device", "host", 4096, "threads", "auto", 1),
    Placement("host", "host", 4096, "threads", "auto", 1),
    Placement("host", "disk", 4096, "threads", "auto", 1),
    Placement("disk", "disk", 4096, "threads", "auto", 1),
]


@dataclass(frozen=True)
class Case:
    """One script in one placement."""

    script: Callable[[Plain | Tiered], None]
    placement: Placement
    policy: dict[str, Any] = field(default_factory=dict, hash=False)
    host: str = "256MiB"

    def __str__(self) -> str:
        policy = "".join(f" {name}={value}" for name, value in self.policy.items())
        policy += "" if self.host == "256MiB" else f" host={self.host}"
        return f"{self.script.__name__} {self.placement.weights}-{self.placement.states}{policy}"


SCRIPTS = [ended, touched, evaluated, clipped, loaded, recomputed, accumulated]
CASES = [
    *(Case(script, placement) for script in SCRIPTS for placement in PLACEMENTS),
    *(Case(evaluated, placement, {"update_in_backward": True}) for placement in PLACEMENTS),
    *(Case(script, PLACEMENTS[1], {"activations": "host"}) for script in (shelved, shrinking)),
    Case(shelved, PLACEMENTS[3], {"activations": "disk"}),
    Case(accumulated, PLACEMENTS[3], host="112KiB"),  # no room for gradients
    Case(rewritten, PLACEMENTS[3], host="330KiB"),
]


def reference_of(case: Case, directory: Path) -> Outcome:
    """What the case leaves behind on the CPU."""
    torch.manual_seed(7)
    lib = Tiered(PLACEMENTS[1], directory)
    try:
        case.script(lib)
        return lib.outcome()
    finally:
        lib.close()


SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A disk tier in memory: what a disk takes is not what is tested. ``None``: wherever temporary files are."""

DELAY_MAX_S = 0.0005
"""Of kernels and disk; of copies, up to three times as much."""

_least: dict[Case, int] = {}
"""Device memory that each case needs, found by trying."""


def run_simulated(case: Case, directory: Path, seed: int, watch: Watch | None = None) -> Outcome:
    """Even seeds have room for every block, odd ones for as few as can be; of four, two end without a wait."""
    torch.manual_seed(7)
    lib = Simulated(case.placement, directory, memory={"host": case.host}, policy=case.policy)
    if seed % 2:
        lib._tight, lib._memory["device"] = True, _least.get(case, 4096)
    lib.seed, lib.delay_max_s, lib.observer = seed, DELAY_MAX_S * (1 + seed // 12 % 3), watch
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(saved_inputs, "SMALL_BYTES", 4096))
        if watch is not None:
            stack.enter_context(watch.installed())
        try:
            case.script(lib)
            _least[case] = lib._memory["device"] if seed % 2 else _least.get(case, 4096)
            if seed % 4 < 2:
                for model in lib.models:
                    lib.synchronize(model)
                if watch is not None:
                    watch.settled()
            outcome = lib.outcome()
        except BaseException:
            with contextlib.suppress(Exception):
                lib.close()
            raise
        lib.close()
    return outcome


def faults_of(case: Case, directory: Path, seed: int, reference: Outcome, watch: Watch) -> list[str]:
    """What is wrong with one run: an error, other bits, accesses out of order."""
    faults = []
    try:
        outcome = run_simulated(case, directory, seed, watch)
    except Exception as error:
        faults.append(f"error: {type(error).__name__}: {error}")
    else:
        try:
            assert_same_bits(outcome, reference)
        except AssertionError as error:
            faults.append(f"bits: {error}")
    return faults + [f"oracle: {error}" for error in watch.oracle.errors]


# Runs in a process of their own.


class Worker:
    """Runs cases in another process: without a wait a run may hang, or crash."""

    def __init__(self, timeout_s: float = 60) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, case: Case, seed: int, ignored: str | None = None) -> tuple[list[str], dict[str, int]]:
        """The faults of one run, and how often it waited at each site."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps([CASES.index(case), seed, ignored]) + "\n")
            process.stdin.flush()
        if not select.select([process.stdout], [], [], self._timeout_s)[0]:
            self._end()
            return ["hang: no answer"], {}
        answer = process.stdout.readline()
        if not answer:
            return [f"crash: exit status {self._end()}"], {}
        faults, sites = json.loads(answer)
        return faults, sites

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def _end(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()
        process.communicate()
        return process.returncode


def work() -> None:
    """Answer each line "number of the case, seed, site to ignore" with the run's faults and sites."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    references: dict[Case, Outcome] = {}
    with tempfile.TemporaryDirectory(dir=SCRATCH) as root:
        for number, line in enumerate(sys.stdin):
            index, seed, ignored = json.loads(line)
            case = CASES[index]
            if case not in references:
                references[case] = reference_of(case, Path(root) / f"reference {index}")
            watch = Watch(ignored=ignored, seed=seed, delay_max_s=DELAY_MAX_S)
            faults = faults_of(case, Path(root) / str(number), seed, references[case], watch)
            print(json.dumps([faults, watch.sites]), file=answers, flush=True)


if __name__ == "__main__":
    work()
