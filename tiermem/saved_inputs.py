"""Saved inputs: what a layer needs to be run again, resting in HOST or on DISK between forward and backward.

shelf      where saved inputs rest: HOST buffers, or records of the store.
call       one forward of one layer; its saved inputs come back together, and those of the call before it are fetched
           as soon as the first of them is asked for, beside this layer's backward.
recent     inputs of the latest calls: they leave the device late, so that the backward that follows a forward finds
           them where they are, and the copies of the others have been waited for by nobody.

Only inputs that need a gradient move: they are made by one layer for the next. Others (masks, positions) are shared
by all layers and made once.

A saved input is the bytes between the first and the last element of the tensor, so that it comes back with its
strides, and what is computed from it has the same bits.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from tiermem.device import DONE, Event
from tiermem.placement import extent_class
from tiermem.timeline import COPY_IN, COPY_OUT
from tiermem.transfer import all_of, tensor_of

if TYPE_CHECKING:
    from tiermem.runtime import Runtime
    from tiermem.store import Record

SMALL_BYTES = 16 << 10
"""A smaller tensor costs more to move than to keep."""
RECENT_CALLS = 2
FETCH_AHEAD_CALLS = 1

_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks


class SavedInput:
    """One tensor on a shelf. It leaves the shelf when nobody can ask for it any more."""

    def __init__(self, shelf: Shelf, call: Call, tensor: torch.Tensor) -> None:
        self.shelf = shelf
        self.call = call
        self.name = call.name
        self.source: torch.Tensor | None = tensor  # until it leaves the device
        self.version = tensor._version
        self.dtype, self.size, self.stride = tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())
        self.flat = _flat(tensor)
        self.nbytes = self.flat.numel()
        self.arriving: tuple[torch.Tensor, Any] | None = None  # the bytes on the device, and what says that they are
        self.buffer: torch.Tensor | None = None  # HOST
        self.written: Event = DONE  # HOST
        self.records: list[Record] = []  # DISK
        self.job: Future[None] | None = None  # DISK

    def check(self) -> None:
        """Errors: ``RuntimeError`` when the tensor was changed after it was saved."""
        if self.source is not None and self.source._version != self.version:
            raise RuntimeError(
                f"an input of {self.name} was changed in place after its forward began, but is needed to run it again: "
                "clone it first, or use Policy(activations='keep')"
            )

    def leave(self) -> None:
        """The device may have the memory back."""
        self.shelf.written(self)
        self.check()
        self.source = None
        self.flat = torch.empty(0)

    def is_of(self, tensor: torch.Tensor) -> bool:
        place = (self.flat.data_ptr(), self.dtype, self.size, self.stride)
        return place == (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

    def tensor(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self.dtype).as_strided(self.size, self.stride)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's end, or after close
            self.shelf.drop(self)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, from the first to the last element (nbytes,) uint8."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((span,), (1,)).view(torch.uint8)


class Call:
    """One forward of one layer."""

    def __init__(self, name: str, before: Call | None) -> None:
        self.name = name
        self.before = weakref.ref(before) if before is not None else None
        self.saved: list[weakref.ref[SavedInput]] = []

    def inputs(self) -> Iterator[SavedInput]:
        for reference in self.saved:
            saved = reference()
            if saved is not None:
                yield saved


class Shelf(ABC):
    """Where saved inputs rest. Used by the thread that runs forward, and by the one that runs backward."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._recent: deque[Call] = deque()
        self._last: Call | None = None

    @contextlib.contextmanager
    def saving(self, name: str, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """What autograd saves of ``tensors`` inside goes to the shelf. Composes with hooks around it: what they take
        is theirs."""
        movable = {t.data_ptr() for t in tensors if t.requires_grad and self._takes(t)}
        if not movable:
            yield
            return
        outer_pack, outer_unpack = _top_hooks(True) or (None, None)
        call = Call(name, self._last)

        def pack(tensor: torch.Tensor) -> Any:
            packed = tensor if outer_pack is None else outer_pack(tensor)
            if isinstance(packed, torch.Tensor) and packed.data_ptr() in movable and self._takes(packed):
                return self._put(call, packed)
            return packed

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, SavedInput):
                return self._get(packed)
            return packed if outer_unpack is None else outer_unpack(packed)  # type: ignore[no-any-return]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _takes(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided or tensor.device != self._runtime.device.torch_device:
            return False
        nbytes = tensor.numel() * tensor.element_size()
        return nbytes >= SMALL_BYTES and _flat(tensor).numel() <= 2 * nbytes

    def _put(self, call: Call, tensor: torch.Tensor) -> SavedInput:
        for saved in call.inputs():  # saved twice by one call
            if saved.source is not None and saved.is_of(tensor):
                return saved
        saved = SavedInput(self, call, tensor.detach())
        self.start_out(saved)
        call.saved.append(weakref.ref(saved))
        if self._last is not call:
            self._last = call
            self._recent.append(call)
            while len(self._recent) > RECENT_CALLS:
                for one in self._recent.popleft().inputs():
                    one.leave()
        return saved

    def _get(self, saved: SavedInput) -> torch.Tensor:
        self._runtime.check()
        saved.check()
        if saved.source is not None:
            tensor = saved.source
        else:
            if saved.arriving is None:
                self._fetch(saved)
            assert saved.arriving is not None
            flat, arrival = saved.arriving
            saved.arriving = None
            self.arrive(saved, arrival)
            tensor = saved.tensor(flat)
        before = saved.call.before() if saved.call.before is not None else None
        for _ in range(FETCH_AHEAD_CALLS):
            if before is None:
                break
            for one in before.inputs():
                if one.source is None and one.arriving is None:
                    self._fetch(one)
            before = before.before() if before.before is not None else None
        return tensor

    def _fetch(self, saved: SavedInput) -> None:
        flat = torch.empty(saved.nbytes, dtype=torch.uint8, device=self._runtime.device.torch_device)
        saved.arriving = flat, self.start_in(saved, flat)

    @abstractmethod
    def start_out(self, saved: SavedInput) -> None:
        """Start to move it from the device to the shelf."""

    @abstractmethod
    def written(self, saved: SavedInput) -> None:
        """Return when the device's copy is not read any more."""

    @abstractmethod
    def start_in(self, saved: SavedInput, target: torch.Tensor) -> Any:
        """Start to move it to ``target`` (nbytes,) uint8 on the device."""

    @abstractmethod
    def arrive(self, saved: SavedInput, arrival: Any) -> None:
        """Let compute that follows see what ``start_in`` moved. Raises what went wrong on the way."""

    @abstractmethod
    def drop(self, saved: SavedInput) -> None:
        """Nobody will ask for it again. May be called by any thread."""


class HostShelf(Shelf):
    """Page-locked buffers of the HOST budget, kept for the next input of that size."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._free: dict[int, list[torch.Tensor]] = {}
        self._last_in: Event = DONE  # of the copies back to the device; those before it have ended when it has

    def start_out(self, saved: SavedInput) -> None:
        device = self._runtime.device
        saved.buffer = self._take(saved)
        self._runtime.counters.bytes_copied_out += saved.nbytes
        span = self._runtime.timeline.span(COPY_OUT, saved.name, "activations", saved.nbytes)
        saved.written = device.copy_out(saved.buffer[: saved.nbytes], saved.flat, device.mark(), span)

    def _take(self, saved: SavedInput) -> torch.Tensor:
        size = extent_class(saved.nbytes)
        free = self._free.get(size)
        if free:
            return free.pop()
        if size > self._runtime.host_budget.free_bytes:
            self._last_in.synchronize()  # compute may still be waiting for what an idle buffer holds
            for idle in self._free.values():
                while idle:
                    self._runtime.give_back_host_plane(idle.pop())
        return self._runtime.host_plane(size, f"an input of {saved.name} (Policy(activations='host'))")

    def written(self, saved: SavedInput) -> None:
        if saved.written is not DONE:
            saved.written.synchronize()
            saved.written = DONE

    def start_in(self, saved: SavedInput, target: torch.Tensor) -> Event:
        device = self._runtime.device
        assert saved.buffer is not None
        self.written(saved)
        self._runtime.counters.bytes_copied_in += saved.nbytes
        span = self._runtime.timeline.span(COPY_IN, saved.name, "activations", saved.nbytes)
        # After what the compute stream has been given: the allocator may have taken the target's memory from it.
        self._last_in = device.copy_in(target, saved.buffer[: saved.nbytes], device.mark(), span)
        return self._last_in

    def arrive(self, saved: SavedInput, arrival: Event) -> None:
        self._runtime.device.hold(arrival)

    def drop(self, saved: SavedInput) -> None:
        if saved.arriving is not None:
            saved.arriving[1].synchronize()
        self.written(saved)
        if saved.buffer is not None:
            self._free.setdefault(saved.buffer.numel(), []).append(saved.buffer)


class DiskShelf(Shelf):
    """Records of the store, each of a slab's size, moved by way of the staging slabs."""

    def start_out(self, saved: SavedInput) -> None:
        saved.job = self._runtime.background.submit(self._swap_out(saved.records, saved.name, saved.flat, self._mark()))

    def _mark(self) -> Event:
        return self._runtime.device.mark()

    async def _swap_out(self, records: list[Record], name: str, flat: torch.Tensor, ready: Event) -> None:
        size = self._runtime.staging_pool().slab_bytes
        pieces = flat.split(size)
        for piece in pieces:
            records.append(self._record(name, piece.numel()))
        await all_of(
            [
                asyncio.ensure_future(self._swap_out_piece(record, name, piece, ready))
                for record, piece in zip(records, pieces, strict=True)
            ]
        )

    def _record(self, name: str, nbytes: int) -> Record:
        store, limit = self._runtime.store, self._runtime.memory.disk_size
        assert store is not None
        size = extent_class(nbytes)
        kind, label = f"activation-{size}", (name, "activations")
        try:
            return store.record(kind, nbytes, label)
        except ValueError:  # none of that size is idle
            if isinstance(limit, int) and store.allocated_bytes + size > limit:
                raise ValueError(
                    f"an input of {name} needs {size} bytes more on DISK, where {store.allocated_bytes} of the "
                    f"{limit} that Memory(disk_size=...) grants are taken: raise it, or use "
                    "Policy(activations='recompute')"
                ) from None
            store.reserve(kind, size, 1)
            return store.record(kind, nbytes, label)

    async def _swap_out_piece(self, record: Record, name: str, piece: torch.Tensor, ready: Event) -> None:
        async with self._runtime.staging_pool().loan() as slab:
            nbytes = piece.numel()
            await self._copy(tensor_of(slab.view[:nbytes]), piece, ready, name, out=True)
            await record.swap_out(slab.view[: record.padded_bytes])

    async def _copy(self, target: torch.Tensor, source: torch.Tensor, after: Event, name: str, *, out: bool) -> None:
        runtime, device = self._runtime, self._runtime.device
        if device.unified:
            await runtime.background.wait(target.copy_, source)
            return
        span = runtime.timeline.span(COPY_OUT if out else COPY_IN, name, "activations", source.numel())
        if out:
            event = device.copy_out(target, source, after, span)
            runtime.counters.bytes_copied_out += source.numel()
        else:
            event = device.copy_in(target, source, after, span)
            runtime.counters.bytes_copied_in += source.numel()
        await runtime.background.wait(event.synchronize)

    def written(self, saved: SavedInput) -> None:
        """Its error is raised by ``arrive``."""
        if saved.job is not None and not saved.job.done():
            with self._runtime.counters.waiting("disk", self._runtime.timeline, saved.name):
                saved.job.exception()

    def start_in(self, saved: SavedInput, target: torch.Tensor) -> Future[None]:
        assert saved.job is not None
        return self._runtime.background.submit(
            self._swap_in(saved.records, saved.name, saved.job, target, self._mark())
        )

    async def _swap_in(
        self, records: list[Record], name: str, job: Future[None], target: torch.Tensor, after: Event
    ) -> None:
        await asyncio.wrap_future(job)
        pieces = target.split(self._runtime.staging_pool().slab_bytes)
        await all_of(
            [
                asyncio.ensure_future(self._swap_in_piece(record, name, piece, after))
                for record, piece in zip(records, pieces, strict=True)
            ]
        )

    async def _swap_in_piece(self, record: Record, name: str, piece: torch.Tensor, after: Event) -> None:
        async with self._runtime.staging_pool().loan() as slab:
            await record.swap_in(slab.view[: record.padded_bytes])
            await self._copy(piece, tensor_of(slab.view[: piece.numel()]), after, name, out=False)

    def arrive(self, saved: SavedInput, arrival: Future[None]) -> None:
        if arrival.done():
            arrival.result()
            return
        with self._runtime.counters.waiting("disk", self._runtime.timeline, saved.name):
            arrival.result()

    def drop(self, saved: SavedInput) -> None:
        jobs = [job for job in (saved.job, saved.arriving[1] if saved.arriving else None) if job is not None]
        if saved.job is not None and not self._runtime.background.closed:
            self._runtime.background.submit(_forget(saved.records, jobs))


async def _forget(records: list[Record], jobs: Sequence[Future[None]]) -> None:
    """Give the extents back when nothing reads or writes them any more."""
    await asyncio.gather(*(asyncio.wrap_future(job) for job in jobs), return_exceptions=True)
    for record in records:
        record.drop()
