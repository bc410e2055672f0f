"""Accelerators played by the CPU: what runs against CUDA can be tested and measured on a machine without one.

``SimulatedDevice``  "device memory" is memory of its own; copies run late, in threads, into buffers that hold poison
                     until then. A missing wait is a NaN. An ``Observer`` is told of every operation, and may take a
                     wait away.
``TimedDevice``      takes the time that an accelerator would: its compute stream sleeps for as long as a block would
                     compute, its copies for as long as the link would, while CPU kernels, disk and Python run for real.
"""

from __future__ import annotations

import ctypes
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tiermem.device import DONE, Device, Event, run_timed
from tiermem.memory import Region, free_host_bytes
from tiermem.timeline import Moment, Span

POISON_BYTE = 0xFF
"""Every floating-point dtype reads this as NaN."""


class _StreamEvent:
    """A point of a simulated stream. ``at``: when a timed stream gets there, on its own clock."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._error: BaseException | None = None
        self.at = 0.0

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._reached.set()

    def synchronize(self) -> None:
        self._reached.wait()
        if self._error is not None:
            raise self._error


@dataclass(frozen=True, slots=True)
class _Item:
    work: Callable[[], object]
    after: Event | None
    seconds: float
    given: float
    event: _StreamEvent
    target: _Bytes | None


class _Stream:
    """A thread that does its work in order."""

    def __init__(self, name: str) -> None:
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(
        self,
        work: Callable[[], object],
        after: Event | None = None,
        seconds: float = 0.0,
        target: _Bytes | None = None,
    ) -> _StreamEvent:
        event = _StreamEvent()
        self._items.put(_Item(work, after, seconds, time.perf_counter(), event, target))
        return event

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            try:
                if item.after is not None:
                    item.after.synchronize()
                self._do(item)
            except BaseException as error:
                item.event.finish(error)
            else:
                item.event.finish()

    def _do(self, item: _Item) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._items.put(None)
        self._thread.join()


class _LateStream(_Stream):
    """Does each piece of work after a random delay. Work that fills a target poisons it before the delay."""

    def __init__(self, name: str, seed: int, delay_max_s: float) -> None:
        self._random = random.Random(seed)
        self._delay_max_s = delay_max_s
        super().__init__(name)

    def _do(self, item: _Item) -> None:
        if item.target is not None:
            item.target.poison()
        if self._delay_max_s:
            time.sleep(self._random.random() * self._delay_max_s)
        item.work()


class _TimedStream(_Stream):
    """Does its work at once and takes as long over it as told.

    It keeps a clock of its own: an item begins when the one before has ended and what it waits for has happened, so
    that a sleep which overslept does not add up.
    """

    def __init__(self, name: str) -> None:
        self._clock = 0.0
        super().__init__(name)

    def _do(self, item: _Item) -> None:
        waited = item.after.at if isinstance(item.after, _StreamEvent) else 0.0
        self._clock = max(self._clock, item.given, waited) + item.seconds
        item.work()
        remaining = self._clock - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)
        item.event.at = self._clock


class _OwnMemory(Device):
    """Device memory that is not where the planes rest."""

    unified = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def empty(self, nbytes: int) -> torch.Tensor:
        memory = Region(nbytes).carve(nbytes)
        memory.fill_(POISON_BYTE)
        return memory

    def free_bytes(self) -> int:
        return free_host_bytes()


class Observer:
    """Told of what a ``SimulatedDevice`` is asked for, in the order in which it is asked, from any thread. This one
    does not care."""

    def waits(self, kind: str) -> bool:
        """Whether to honour a wait of that kind: ``copy``, a copy after an event; ``hold``; ``synchronize``."""
        return True

    def allocated(self, memory: torch.Tensor) -> None: ...

    def pinned(self, address: int, nbytes: int) -> None: ...

    def unpinned(self, address: int, nbytes: int) -> None: ...

    def copied(self, direction: str, target: torch.Tensor, source: torch.Tensor, after: Event | None) -> int:
        """``direction``: ``in`` or ``out``. Returns what to call the event that marks the copy's end."""
        return 0

    def marked(self) -> int:
        """Returns what to call the event."""
        return 0

    def held(self, event: Event) -> None: ...

    def synchronized(self, event: Event) -> None: ...

    def entered_thread(self) -> None: ...

    def closed(self) -> None:
        """Nothing of what was asked for is still to be done."""


class SimulatedEvent:
    """A point of a simulated stream, under the name that the observer gave it."""

    def __init__(self, point: _StreamEvent, name: int, observer: Observer) -> None:
        self.point = point
        self.name = name
        self._observer = observer

    @property
    def synchronize(self) -> Callable[[], None]:
        """Asked for where the wait stands in the code, called perhaps by another thread."""
        return self._synchronize if self._observer.waits("synchronize") else _nothing

    def _synchronize(self) -> None:
        self.point.synchronize()
        self._observer.synchronized(self)


def _nothing() -> None:
    pass


class _Bytes:
    """One end of a copy. Memory of torch's allocator is not kept alive, as a queue of an accelerator would not keep
    it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.nbytes = tensor.numel() * tensor.element_size()
        self._address = tensor.data_ptr()
        storage = tensor.untyped_storage()
        own = storage.resizable()  # else it only views memory, and may end before that does
        self._storage = StorageWeakRef(storage) if own else None
        self._tensor = None if own else tensor  # not its storage: slots count who holds that

    @property
    def address(self) -> int:
        """Errors: ``RuntimeError`` when the memory was given back."""
        if self._storage is not None and self._storage.expired():
            raise RuntimeError("the memory of a copy was given back before the copy ran")
        return self._address

    def poison(self) -> None:
        ctypes.memset(self.address, POISON_BYTE, self.nbytes)

    def fill(self, source: _Bytes) -> None:
        if source.nbytes != self.nbytes:
            raise RuntimeError(f"a copy of {source.nbytes} bytes to {self.nbytes}")
        ctypes.memmove(self.address, source.address, self.nbytes)


class SimulatedDevice(_OwnMemory):
    """Copies run late. What is computed is computed by the calling thread at once, but counts as done late: ``mark`` is
    reached after a delay, and ``hold`` waits.

    seed, delay_max_s: of the random delay before each copy and each mark.
    """

    def __init__(self, *, seed: int = 0, delay_max_s: float = 0.002, observer: Observer | None = None) -> None:
        super().__init__()
        self._observer = Observer() if observer is None else observer
        self._order = threading.Lock()  # the observer sees the order of the streams
        self._in = _LateStream("tiermem-simulated-in", seed, delay_max_s)
        self._out = _LateStream("tiermem-simulated-out", seed + 1, delay_max_s)
        self._compute = _LateStream("tiermem-simulated-compute", seed + 2, delay_max_s)

    def empty(self, nbytes: int) -> torch.Tensor:
        memory = super().empty(nbytes)
        self._observer.allocated(memory)
        return memory

    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, after: Event | None = None, span: Span | None = None
    ) -> Event:
        return self._copy("in", target, source, after, span)

    def copy_out(
        self, target: torch.Tensor, source: torch.Tensor, after: Event | None = None, span: Span | None = None
    ) -> Event:
        return self._copy("out", target, source, after, span)

    def _copy(
        self, direction: str, target: torch.Tensor, source: torch.Tensor, after: Event | None, span: Span | None
    ) -> Event:
        if not isinstance(after, SimulatedEvent) or not self._observer.waits("copy"):
            after = None
        stream = self._in if direction == "in" else self._out
        with self._order:
            name = self._observer.copied(direction, target, source, after)
            into, out_of = _Bytes(target), _Bytes(source)
            if after is None:
                into.poison()
            work = partial(run_timed, span, lambda: into.fill(out_of))
            event = stream.put(work, after and after.point, target=into)
        return SimulatedEvent(event, name, self._observer)

    def mark(self) -> Event:
        with self._order:
            return SimulatedEvent(self._compute.put(_nothing), self._observer.marked(), self._observer)

    def hold(self, event: Event) -> None:
        if isinstance(event, SimulatedEvent) and self._observer.waits("hold"):
            event.point.synchronize()
            self._observer.held(event)

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        self._observer.pinned(address, nbytes)
        return partial(self._observer.unpinned, address, nbytes)

    def enter_thread(self) -> None:
        self._observer.entered_thread()

    def close(self) -> None:
        for stream in (self._in, self._out, self._compute):
            stream.close()
        self._observer.closed()


class TimedDevice(_OwnMemory):
    """A model of an accelerator's time. Modules call ``compute`` for what they would compute.

    bytes_in_per_s, bytes_out_per_s: of the link, each way.
    """

    def __init__(self, *, bytes_in_per_s: float, bytes_out_per_s: float) -> None:
        super().__init__()
        self._bytes_in_per_s = bytes_in_per_s
        self._bytes_out_per_s = bytes_out_per_s
        self._compute = _TimedStream("tiermem-timed-compute")
        self._in = _TimedStream("tiermem-timed-in")
        self._out = _TimedStream("tiermem-timed-out")

    def compute(self, seconds: float, work: Callable[[], object] = lambda: None) -> None:
        """Give the compute stream ``work`` that an accelerator would take ``seconds`` over. Does not wait."""
        self._compute.put(work, None, seconds)

    def synchronize(self) -> None:
        """Return when the compute stream has done all that it was given."""
        self.mark().synchronize()

    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, after: Event | None = None, span: Span | None = None
    ) -> Event:
        seconds = source.numel() / self._bytes_in_per_s
        return self._in.put(lambda: run_timed(span, lambda: target.copy_(source)), after, seconds)

    def copy_out(
        self, target: torch.Tensor, source: torch.Tensor, after: Event | None = None, span: Span | None = None
    ) -> Event:
        seconds = source.numel() / self._bytes_out_per_s
        return self._out.put(lambda: run_timed(span, lambda: target.copy_(source)), after, seconds)

    def copy_within(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._compute.put(lambda: target.copy_(source))

    def mark(self) -> Event:
        return self._compute.put(lambda: None)

    def hold(self, event: Event) -> None:
        if event is not DONE:
            self._compute.put(lambda: None, event)

    def moment(self) -> Moment:
        event = self._compute.put(lambda: None)

        def reached() -> float:
            event.synchronize()
            return event.at

        return reached

    def close(self) -> None:
        for stream in (self._compute, self._in, self._out):
            stream.close()
