"""Accelerators played by the CPU: what runs against CUDA can be tested and measured on a machine without one.

``SimulatedDevice``  "device memory" is memory of its own; copies run late, in threads, into buffers that hold poison
                     until then. A missing wait is a NaN.
``TimedDevice``      takes the time that an accelerator would: its compute stream sleeps for as long as a block would
                     compute, its copies for as long as the link would, while CPU kernels, disk and Python run for real.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

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


class _Stream:
    """A thread that does its work in order."""

    def __init__(self, name: str) -> None:
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object], after: Event | None = None, seconds: float = 0.0) -> _StreamEvent:
        event = _StreamEvent()
        self._items.put(_Item(work, after, seconds, time.perf_counter(), event))
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
    """Does each piece of work after a random delay."""

    def __init__(self, name: str, seed: int, delay_max_s: float) -> None:
        self._random = random.Random(seed)
        self._delay_max_s = delay_max_s
        super().__init__(name)

    def _do(self, item: _Item) -> None:
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


class SimulatedDevice(_OwnMemory):
    """Copies run late. Compute is the calling thread, so ``mark`` is done at once and ``hold`` waits.

    seed, delay_max_s: of the random delay before each copy.
    """

    def __init__(self, *, seed: int = 0, delay_max_s: float = 0.002) -> None:
        super().__init__()
        self._in = _LateStream("tiermem-simulated-in", seed, delay_max_s)
        self._out = _LateStream("tiermem-simulated-out", seed + 1, delay_max_s)

    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, after: Event | None = None, span: Span | None = None
    ) -> Event:
        return self._copy(self._in, target, source, after, span)

    def copy_out(
        self, target: torch.Tensor, source: torch.Tensor, after: Event | None = None, span: Span | None = None
    ) -> Event:
        return self._copy(self._out, target, source, after, span)

    @staticmethod
    def _copy(
        stream: _Stream, target: torch.Tensor, source: torch.Tensor, after: Event | None, span: Span | None
    ) -> Event:
        if after is None or after is DONE:
            target.fill_(POISON_BYTE)
        return stream.put(lambda: run_timed(span, lambda: target.copy_(source)), after)

    def mark(self) -> Event:
        return DONE

    def hold(self, event: Event) -> None:
        event.synchronize()

    def close(self) -> None:
        self._in.close()
        self._out.close()


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
