"""Streams, events and copies: the only place that knows an accelerator.

A device has one compute stream (torch's current one), one stream for copies in and one for copies out. An event marks
a point of a stream; a copy may be told to start after one, the compute stream may be held until one, and the host may
wait for one.

``CpuDevice``        device memory is host memory: copies happen at once, events are always done.
``CudaDevice``       CUDA streams and events; host memory is page-locked with cudaHostRegister.
simulated.py has two more that run on a CPU, to test for missing waits and to measure schedules.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from tiermem.memory import Region, free_host_bytes
from tiermem.timeline import Moment, Span


class Event(Protocol):
    def synchronize(self) -> None:
        """Return when the marked point has been reached. Raises what the work before it raised."""


class _Done:
    def synchronize(self) -> None:
        pass


DONE: Event = _Done()


class Device(ABC):
    """What the runtime asks of an accelerator."""

    torch_device: torch.device
    unified: bool
    """Device memory is host memory: a plane in HOST can be computed on where it lies."""

    @abstractmethod
    def empty(self, nbytes: int) -> torch.Tensor:
        """Device memory as a uint8 tensor (nbytes,) with a storage of its own, page-aligned where it is host memory."""

    @abstractmethod
    def free_bytes(self) -> int: ...

    @abstractmethod
    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, after: Event | None = None, span: Span | None = None
    ) -> Event:
        """Start a copy host to device, not before ``after``. Both must stay alive and unchanged until the event is
        done. ``span`` is told when the copy runs."""

    @abstractmethod
    def copy_out(
        self, target: torch.Tensor, source: torch.Tensor, after: Event | None = None, span: Span | None = None
    ) -> Event:
        """Start a copy device to host, not before ``after``."""

    def copy_within(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Device to device, on the compute stream."""
        target.copy_(source)

    @abstractmethod
    def mark(self) -> Event:
        """The point which the compute stream has been given work up to."""

    @abstractmethod
    def hold(self, event: Event) -> None:
        """The compute stream starts nothing new before ``event``."""

    def align(self) -> None:
        """Compare the device's clock with ``time.perf_counter``; called before ``moment``."""
        return

    def moment(self) -> Moment:
        """When the compute stream gets to the point up to which it has been given work."""
        return time.perf_counter()

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        """Page-lock host memory; returns what undoes it."""
        return _nothing

    def enter_thread(self) -> None:
        """Called first in every background thread."""
        return

    def close(self) -> None:
        """Return when every copy has ended, and end what the device owns."""
        return


def _nothing() -> None:
    pass


def run_timed(span: Span | None, work: Callable[[], object]) -> None:
    if span is not None:
        span.begin(time.perf_counter())
    work()
    if span is not None:
        span.end(time.perf_counter())


class CpuDevice(Device):
    unified = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def empty(self, nbytes: int) -> torch.Tensor:
        return Region(nbytes).carve(nbytes)

    def free_bytes(self) -> int:
        return free_host_bytes()

    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, after: Event | None = None, span: Span | None = None
    ) -> Event:
        run_timed(span, lambda: target.copy_(source))
        return DONE

    copy_out = copy_in

    def mark(self) -> Event:
        return DONE

    def hold(self, event: Event) -> None:
        event.synchronize()


class CudaDevice(Device):
    unified = False

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", index)
        self._in = torch.cuda.Stream(self.torch_device)
        self._out = torch.cuda.Stream(self.torch_device)
        self._epoch: tuple[torch.cuda.Event, float] | None = None

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        reserved = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return int(free) + int(reserved)

    def _copy(
        self,
        stream: torch.cuda.Stream,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Event | None,
        span: Span | None,
    ) -> Event:
        with torch.cuda.stream(stream):
            if after is not None and after is not DONE:
                stream.wait_event(after)  # type: ignore[arg-type]
            # The buffers are the runtime's own and outlive the copy: no record_stream, no caching-allocator reuse to
            # fear.
            if span is not None:
                span.begin(self._moment(stream))
            target.copy_(source, non_blocking=True)
            if span is not None:
                span.end(self._moment(stream))
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, after: Event | None = None, span: Span | None = None
    ) -> Event:
        return self._copy(self._in, target, source, after, span)

    def copy_out(
        self, target: torch.Tensor, source: torch.Tensor, after: Event | None = None, span: Span | None = None
    ) -> Event:
        return self._copy(self._out, target, source, after, span)

    def align(self) -> None:
        # Anew for each recording: elapsed_time is a float32 and loses microseconds after some minutes.
        torch.cuda.synchronize(self.torch_device)
        epoch = torch.cuda.Event(enable_timing=True)
        epoch.record(torch.cuda.current_stream(self.torch_device))
        epoch.synchronize()
        self._epoch = epoch, time.perf_counter()

    def moment(self) -> Moment:
        return self._moment(torch.cuda.current_stream(self.torch_device))

    def _moment(self, stream: torch.cuda.Stream) -> Moment:
        if self._epoch is None:
            raise AssertionError("a moment before align()")
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return partial(_seconds, *self._epoch, event)

    def mark(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def hold(self, event: Event) -> None:
        if event is not DONE:
            torch.cuda.current_stream(self.torch_device).wait_event(event)  # type: ignore[arg-type]

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        runtime = torch.cuda.cudart()
        # Portable (1): valid in every CUDA context of the process.
        status = int(runtime.cudaHostRegister(address, nbytes, 1))
        if status != 0:
            raise RuntimeError(
                f"cudaHostRegister of {nbytes} bytes failed with CUDA error {status}: lower Memory(host=...) or "
                "raise the memlock limit"
            )

        def unpin() -> None:
            runtime.cudaHostUnregister(address)

        return unpin

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is whoever waits for the copy that has to know; now none runs
            self._in.synchronize()
            self._out.synchronize()


def _seconds(epoch: torch.cuda.Event, epoch_seconds: float, event: torch.cuda.Event) -> float:
    event.synchronize()
    return epoch_seconds + float(epoch.elapsed_time(event)) / 1e3


def select_device(device: torch.device | str | Device | None) -> Device:
    """The device to compute on: as named, else the current accelerator, else the CPU.

    Errors: ``ValueError`` for a kind of device that tiermem does not drive.
    """
    if isinstance(device, Device):
        return device
    if device is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = accelerator or torch.device("cpu")
    device = torch.device(device)
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"offload(device={str(device)!r}): torch sees no CUDA device; use device='cpu'")
        return CudaDevice(device)
    raise ValueError(f"offload(device={str(device)!r}): tiermem computes on 'cuda' or 'cpu'")
