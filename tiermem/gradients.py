"""Gradients: where they go as they are produced, and their norms.

arrival    autograd has finished one parameter's gradient; it leaves ``p.grad`` for the runtime at once.
handle     what ``p.grad`` is afterwards; see handles.py.
narrow / wide  a gradient plane in the parameters' dtype, or in fp32 for sums over micro-batches.
direct     gradients of the block go straight to its HOST plane (unified device).
staged     gradients go to a gradient slot on the device; when the block's last one has come, the slot is *flushed* to
           HOST or DISK.

What ``p.grad`` is tells what the plane holds: a live handle, and the plane has that parameter's gradient; ``None``,
and the next arrival starts afresh. Sums of squares are taken in the pass that writes a gradient, piece by piece (see
layout.py), so norms cost no extra pass and do not depend on where gradients rest.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tiermem.device import Device, Event
from tiermem.handles import GradientHandle
from tiermem.interrupts import uninterrupted
from tiermem.kernels.abi import BF16, F32, AccumulateTask
from tiermem.layout import PAGE_BYTES, GradientPlane, round_up
from tiermem.planes import TRAINABLE_CODES, Block, ChunkHome, Held, held_of
from tiermem.policy import Tier
from tiermem.timeline import COPY_OUT
from tiermem.transfer import all_of, bytes_of

if TYPE_CHECKING:
    from tiermem.runtime import Runtime


class BlockGradients:
    """One block's gradient plane and what is on its way to it."""

    def __init__(self, block: Block, *, direct: bool) -> None:
        self.block = block
        self.direct = direct
        self.wide = all(section.itemsize == 4 for section in block.layout.sections if section.trainable)
        self.plane: torch.Tensor | None = None  # uint8, HOST
        self.layout: GradientPlane = block.layout.gradient_plane(wide=self.wide)
        self.narrow: GradientPlane = block.layout.gradient_plane(wide=False)
        """Of a gradient slot, whatever the plane is."""
        self.slot: GradientSlot | None = None
        self.flush: Future[None] | None = None
        self.expected = 0  # arrivals before backward is done with the block
        self.arrived = 0
        self._tasks: dict[Held, Any] = {}

    def task(self, held: Held) -> Any:
        """The accumulate task (array of one) that writes ``held``'s gradient into the plane; its source is the
        caller's."""
        tasks = self._tasks.get(held)
        if tasks is None:
            tasks = (AccumulateTask * 1)()
            task = tasks[0]
            place = self.block.layout.slices[held.index]
            assert self.plane is not None
            task.target = self.plane.data_ptr() + self.layout.offset(place.section, place.start)
            task.target_dtype = F32 if self.wide else TRAINABLE_CODES[held.dtype]
            task.previous_dtype = task.target_dtype
            task.numel = held.numel
            task.first_piece = place.pieces()[1]
            task.partials = held.partials.ctypes.data
            self._tasks[held] = tasks
        return tasks

    def relayout(self) -> None:
        """The block has one more trained section, and so far nothing rests for it."""
        self.narrow = self.layout = self.block.layout.gradient_plane(wide=False)
        self.wide = False

    def forget_tasks(self) -> None:
        self._tasks.clear()


class GradientSlot:
    """A device buffer for one block's narrow gradients until they are flushed."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = nbytes
        self.buffer = device.empty(nbytes)
        self.arrivals: dict[Held, float | None] = {}
        """Held parameters whose gradient is here, with the factor of what it is to be added to; ``None``: nothing."""


class GradientSlots:
    """The slots, of the sizes (bytes) that the placement chose. Taken by the main thread, given back by any."""

    def __init__(self, device: Device, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self._lock = threading.Lock()
        self._free = [GradientSlot(device, nbytes) for nbytes in sizes]

    def has(self, nbytes: int) -> bool:
        with self._lock:
            return any(slot.nbytes >= nbytes for slot in self._free)

    def take(self, nbytes: int) -> GradientSlot:
        """The smallest free slot that fits. There is one."""
        with self._lock:
            slot = min((slot for slot in self._free if slot.nbytes >= nbytes), key=lambda slot: slot.nbytes)
            self._free.remove(slot)
            return slot

    def give_back(self, slot: GradientSlot) -> None:
        with self._lock:
            self._free.append(slot)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """One segment's part in a flush. ``factor``: of what it is added to; ``None``: it replaces."""

    held: Held
    chunk_start: int
    numel: int
    piece: int
    first_piece: int
    new: bool
    factor: float | None


class Gradients:
    """All gradients of one runtime."""

    def __init__(self, runtime: Runtime, slots: Sequence[int]) -> None:
        self._runtime = runtime
        self._device = runtime.device
        self._slots = GradientSlots(self._device, slots)
        self._scalar: tuple[Any, int, float] | None = None

    # Arrival, on the thread that runs backward.

    def arrived(self, parameter: torch.Tensor) -> None:
        """Post-accumulate hook: take the gradient out of ``parameter.grad`` and leave a handle."""
        gradient = parameter.grad
        held = held_of(parameter)
        if held is None or gradient is None:
            return
        runtime = self._runtime
        runtime.enter_backward()
        if not isinstance(gradient, GradientHandle):  # else autograd has added it through the handle
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            self._take(held, gradient, None)
            held.handle = GradientHandle(held)
            parameter.grad = held.handle
        gradients = held.block.gradients
        if not gradients.expected:
            self.begin_backward(held.block)
        gradients.arrived += 1
        if gradients.arrived >= gradients.expected:
            gradients.expected = 0
            if gradients.slot is not None:
                self._start_flush(held.block)
            runtime.gathering.release_finished(held.block)

    def add(self, handle: GradientHandle, gradient: torch.Tensor) -> None:
        """Add a micro-batch's gradient to what is stored, in fp32."""
        handle = self.current(handle)
        self.take_back(handle)
        previous = None if handle.zeroed else handle.factor
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        self._take(handle.held, gradient, previous)
        handle.zeroed, handle.factor = False, 1.0

    def _take(self, held: Held, gradient: torch.Tensor, factor: float | None) -> None:
        block = held.block
        if not (block.touched or block.gathered):
            raise RuntimeError(
                f"a gradient arrived for {held.name}, but its block {block.name} was not gathered: the parameter was "
                "read outside "
                "its module's forward, where it is a placeholder full of NaN. Read it inside `with tiermem.gather(...)`"
            )
        gradients = block.gradients
        if block.applied:
            raise RuntimeError(
                f"a further gradient arrived for {held.name} after the update of block {block.name} had begun inside "
                "backward "
                "(Policy(update_in_backward=True)): the block is differentiated in several parts; set "
                "update_in_backward=False"
            )
        if not held.numel:
            return
        if gradient.dtype not in TRAINABLE_CODES:
            gradient = gradient.float()
        if gradient.stride() != held.stride:
            gradient = held.shaped(held.flat(gradient))
        if gradients.direct:
            if block.update is not None:
                block.wait_update()
            if not gradients.wide and (factor is not None or gradient.dtype.itemsize > held.dtype.itemsize):
                self.widen(block)
            tasks = gradients.task(held)
            task = tasks[0]
            task.source = gradient.data_ptr()
            task.source_dtype = TRAINABLE_CODES[gradient.dtype]
            task.previous = None if factor is None else task.target
            task.previous_scale = 1.0 if factor is None else factor
            self._runtime.kernels.accumulate(tasks, 1, self._runtime.threads_for(held.numel))
            return
        if gradient.dtype.itemsize > held.dtype.itemsize:
            raise ValueError(
                f"{held.name} has dtype {held.dtype} but gets gradients of {gradient.dtype}: leave its grad_dtype alone"
            )
        self._stage(held, held.flat(gradient), factor)

    def _stage(self, held: Held, flat: torch.Tensor, factor: float | None) -> None:
        block = held.block
        gradients = block.gradients
        if gradients.slot is not None and held in gradients.slot.arrivals:
            self._start_flush(block)
        if gradients.slot is None:
            self._settle(block)  # its plane and its old handles are then what they say
            self._wait_for_slot(gradients.narrow.nbytes)
            with uninterrupted():
                gradients.slot = self._slots.take(gradients.narrow.nbytes)
        slot = gradients.slot
        place = block.layout.slices[held.index]
        offset = gradients.narrow.offset(place.section, place.start)
        target = slot.buffer[offset : offset + held.numel * held.dtype.itemsize].view(held.dtype)
        if self._device.unified and factor is None:
            tasks = (AccumulateTask * 1)()
            task = tasks[0]
            task.source, task.source_dtype = flat.data_ptr(), TRAINABLE_CODES[flat.dtype]
            task.target, task.target_dtype = target.data_ptr(), TRAINABLE_CODES[held.dtype]
            task.numel, task.first_piece, task.partials = held.numel, place.pieces()[1], held.partials.ctypes.data
            self._runtime.kernels.accumulate(tasks, 1, self._runtime.threads_for(held.numel))
        else:
            self._device.copy_within(target, flat)
        slot.arrivals[held] = factor

    def _wait_for_slot(self, nbytes: int) -> None:
        """Return when a slot of that size is free: flush what is open, if nothing is on its way, and wait for the flush
        that ends first."""
        while not self._slots.has(nbytes):
            flushing = [block for block in self._runtime.blocks if block.gradients.flush is not None]
            if not flushing:
                block = next(block for block in self._runtime.blocks if block.gradients.slot is not None)
                self._start_flush(block)
                flushing = [block]
            futures = [block.gradients.flush for block in flushing if block.gradients.flush is not None]
            with self._runtime.counters.waiting("gradient", self._runtime.timeline, flushing[0].name):
                done, _ = wait(futures, return_when=FIRST_COMPLETED)
            for block in flushing:
                if block.gradients.flush in done:
                    self._settle(block)

    # Flush: gradient slot to HOST or DISK, on the background loop.

    def _start_flush(self, block: Block) -> None:
        if self._runtime.eager:
            self._start_update(block)
            return
        gradients = block.gradients
        slot = gradients.slot
        assert slot is not None
        plans = [(chunk, plan) for chunk in block.chunks if (plan := self._plan(block, chunk, slot))]
        adds = any(arrival.factor is not None for _, plan in plans for arrival in plan)
        if adds and block.gradients_home is Tier.HOST and not gradients.wide:
            self.widen(block)
        with uninterrupted():
            gradients.slot = None
            gradients.flush = self._runtime.background.submit(
                self._flush(block, slot, plans, self._device.mark(), block.update)
            )

    def _start_update(self, block: Block) -> None:
        """The block's gradient is complete and in its slot: update from there."""
        gradients, runtime = block.gradients, self._runtime
        slot = gradients.slot
        assert slot is not None
        updates = {held: (runtime.hyperparameters_now(held), False) for held in slot.arrivals}
        with uninterrupted():
            gradients.slot = None
            runtime.unstepped = block.applied = True
            for held, (scalars, _) in updates.items():
                held.steps += 1
                held.updated = True
                held.applied = scalars
            runtime.gathering.invalidate(block)
            block.update = gradients.flush = runtime.updates.submit(block, updates, slot)

    def give_back(self, slot: GradientSlot) -> None:
        """The slot's gradients have been used. From any thread."""
        slot.arrivals.clear()
        self._slots.give_back(slot)

    @staticmethod
    def _plan(block: Block, chunk: ChunkHome, slot: GradientSlot) -> list[_Arrival]:
        """What the flush does with each segment that has, or had, a gradient. Empty: nothing of the chunk arrived."""
        if not chunk.layout.trainable:
            return []
        plan = []
        for segment in chunk.layout.segments:
            held = block.held[segment.parameter]
            new = held in slot.arrivals
            live = held.handle is not None and held.parameter.grad is held.handle and not held.handle.zeroed
            if new or live:
                piece, first = segment.pieces(held.block.layout.slices[held.index])
                factor = slot.arrivals[held] if new else None
                plan.append(_Arrival(held, segment.chunk_start, segment.numel, piece, first, new, factor))
        return plan if any(arrival.new for arrival in plan) else []

    async def _flush(
        self,
        block: Block,
        slot: GradientSlot,
        plans: list[tuple[ChunkHome, list[_Arrival]]],
        ready: Event,
        update: Future[None] | None,
    ) -> None:
        if update is not None:
            await asyncio.wrap_future(update)
        flush = self._flush_to_host if block.gradients_home is Tier.HOST else self._flush_to_disk
        try:
            await all_of([flush(block, slot, chunk, plan, ready) for chunk, plan in plans])
        finally:
            self.give_back(slot)

    def _in_slot(self, block: Block, slot: GradientSlot, chunk: ChunkHome) -> torch.Tensor:
        layout = chunk.layout
        itemsize = block.layout.sections[layout.section].itemsize
        start = block.gradients.narrow.offset(layout.section, layout.start)
        return slot.buffer[start : start + round_up(layout.numel * itemsize, PAGE_BYTES)]

    async def _flush_to_host(
        self, block: Block, slot: GradientSlot, chunk: ChunkHome, plan: list[_Arrival], ready: Event
    ) -> None:
        """Device slot to the HOST plane: at once where the plane takes the bytes as they are, through a staging slab
        where they are summed."""
        gradients, layout = block.gradients, chunk.layout
        source = self._in_slot(block, slot, chunk)
        dtype = _dtype(block, chunk)
        assert gradients.plane is not None
        target = gradients.plane.data_ptr() + gradients.layout.offset(layout.section, layout.start)
        narrow = not gradients.wide or dtype is torch.float32
        self._runtime.counters.bytes_copied_out += source.numel()
        if narrow and all(arrival.new and arrival.factor is None for arrival in plan):
            offset = gradients.layout.offset(layout.section, layout.start)
            span = self._runtime.timeline.span(COPY_OUT, block.name, "gradient", source.numel())
            event = self._device.copy_out(gradients.plane[offset : offset + source.numel()], source, ready, span)
            await self._runtime.background.wait(event.synchronize)
            tasks = _tasks(plan, source=target, source_dtype=dtype, target=None, target_dtype=dtype)
            await self._accumulate(block, tasks)
            return
        async with self._runtime.staging_pool().loan() as slab:
            span = self._runtime.timeline.span(COPY_OUT, block.name, "gradient", source.numel())
            event = self._device.copy_out(_tensor(slab.view[: source.numel()]), source, ready, span)
            await self._runtime.background.wait(event.synchronize)
            stored = torch.float32 if gradients.wide else dtype
            tasks = _tasks(
                [arrival for arrival in plan if arrival.new],
                source=slab.address,
                source_dtype=dtype,
                target=target,
                target_dtype=stored,
                previous=target,
                previous_dtype=stored,
            )
            await self._accumulate(block, tasks)

    async def _flush_to_disk(
        self, block: Block, slot: GradientSlot, chunk: ChunkHome, plan: list[_Arrival], ready: Event
    ) -> None:
        layout = chunk.layout
        source = self._in_slot(block, slot, chunk)
        dtype = _dtype(block, chunk)
        fresh = all(arrival.new and arrival.factor is None for arrival in plan)
        assert chunk.gradient is not None
        if fresh and self._device.unified:
            chunk.gradient_is_wide = False
            await chunk.gradient.swap_out(bytes_of(source))
            return
        async with self._runtime.staging_pool().loan() as slab:
            # [source, narrow | what was stored | the result]
            room = round_up(4 * layout.numel, PAGE_BYTES)
            views = [slab.view[i * room : (i + 1) * room] for i in range(3)]
            addresses = [slab.address + i * room for i in range(3)]
            if self._device.unified:
                addresses[0] = source.data_ptr()
            else:
                span = self._runtime.timeline.span(COPY_OUT, block.name, "gradient", source.numel())
                event = self._device.copy_out(_tensor(views[0][: source.numel()]), source, ready, span)
                self._runtime.counters.bytes_copied_out += source.numel()
                await self._runtime.background.wait(event.synchronize)
            if fresh:
                chunk.gradient_is_wide = False
                await self._accumulate(
                    block,
                    _tasks(plan, source=addresses[0], source_dtype=dtype, target=None, target_dtype=dtype),
                )
                await chunk.gradient.swap_out(views[0][: source.numel()])
                return
            adds = any(arrival.factor is not None for arrival in plan)
            wide = chunk.gradient_is_wide or (adds and dtype is torch.bfloat16)
            old = torch.float32 if chunk.gradient_is_wide else dtype
            result = torch.float32 if wide else dtype
            old_record = chunk.wide_gradient if chunk.gradient_is_wide else chunk.gradient
            assert old_record is not None
            await old_record.swap_in(views[1][: round_up(layout.numel * old.itemsize, PAGE_BYTES)])
            new = [arrival for arrival in plan if arrival.new]
            kept = [arrival for arrival in plan if not arrival.new]
            await self._accumulate(
                block,
                _tasks(
                    new,
                    source=addresses[0],
                    source_dtype=dtype,
                    target=addresses[2],
                    target_dtype=result,
                    previous=addresses[1],
                    previous_dtype=old,
                ),
            )
            await self._accumulate(
                block, _tasks(kept, source=addresses[1], source_dtype=old, target=addresses[2], target_dtype=result)
            )
            if wide and chunk.wide_gradient is None:
                chunk.wide_gradient = self._runtime.record("wide_gradient", room, block)
            record = chunk.wide_gradient if wide else chunk.gradient
            assert record is not None
            await record.swap_out(views[2][: round_up(layout.numel * result.itemsize, PAGE_BYTES)])
            chunk.gradient_is_wide = wide

    async def _accumulate(self, block: Block, tasks: list[AccumulateTask]) -> None:
        if tasks:
            array = (AccumulateTask * len(tasks))(*tasks)
            timeline, runtime = self._runtime.timeline, self._runtime
            numel = sum(task.numel for task in tasks) if timeline.on else 0
            work = runtime.kernels.accumulate, array, len(tasks), runtime.threads
            await runtime.background.kernel(timeline.call, block.name, "gradient", numel, *work)

    def widen(self, block: Block) -> None:
        """Give the block an fp32 gradient plane in HOST, keeping the gradients it has. Once per block; afterwards the
        plane stays wide."""
        self._wait_flush(block)
        block.wait_update()
        gradients, wide = block.gradients, block.layout.gradient_plane(wide=True)
        if gradients.plane is None or gradients.plane.numel() < wide.nbytes:
            self.remake_plane(block, wide=True)
            return
        # In place, last chunk first: what is still narrow lies below what has become wide.
        address = gradients.plane.data_ptr()
        for chunk in reversed([chunk.layout for chunk in block.chunks if chunk.layout.trainable]):
            start = gradients.layout.offset(chunk.section, chunk.start)
            narrow = gradients.plane[start : start + chunk.weight_bytes].clone()
            task = (AccumulateTask * 1)()
            task[0].source, task[0].source_dtype = narrow.data_ptr(), BF16 if chunk.split else F32
            task[0].target, task[0].target_dtype = address + wide.offset(chunk.section, chunk.start), F32
            task[0].numel = task[0].first_piece = chunk.numel
            self._runtime.kernels.accumulate(task, 1, self._runtime.threads)
        gradients.layout, gradients.wide = wide, True
        gradients.forget_tasks()

    def remake_plane(self, block: Block, *, wide: bool) -> None:
        """A new HOST plane for the block's present layout. Live gradients move to it."""
        gradients = block.gradients
        old_plane, old_layout, old_wide = gradients.plane, gradients.layout, gradients.wide
        layout = block.layout.gradient_plane(wide=wide)
        plane = self._runtime.host_plane(
            layout.nbytes, f"the fp32 gradient sums of block {block.name}" if wide else f"gradients of {block.name}"
        )
        tasks: list[AccumulateTask] = []
        for held in block.held:
            place = block.layout.slices[held.index]
            if old_plane is None or held.handle is None or held.parameter.grad is not held.handle or not held.numel:
                continue
            task = AccumulateTask()
            task.source = old_plane.data_ptr() + old_layout.offset(place.section, place.start)
            task.source_dtype = F32 if old_wide else TRAINABLE_CODES[held.dtype]
            task.target = plane.data_ptr() + layout.offset(place.section, place.start)
            task.target_dtype = F32 if wide else TRAINABLE_CODES[held.dtype]
            task.numel, task.first_piece = held.numel, place.pieces()[1]
            tasks.append(task)
        if tasks:
            self._runtime.kernels.accumulate((AccumulateTask * len(tasks))(*tasks), len(tasks), self._runtime.threads)
        gradients.plane, gradients.layout, gradients.wide = plane, layout, wide
        gradients.forget_tasks()
        if old_plane is not None:
            self._runtime.give_back_host_plane(old_plane)

    # Reading, on the main thread.

    def settle(self) -> None:
        """Return when every gradient that has arrived is where it rests, with its sums of squares."""
        for block in self._runtime.blocks:
            if block.gradients.slot is not None:
                self._start_flush(block)
        for block in self._runtime.blocks:
            self._settle(block)

    def _settle(self, block: Block) -> None:
        if block.gradients.slot is not None:
            self._start_flush(block)
        self._wait_flush(block)

    def _wait_flush(self, block: Block) -> None:
        gradients = block.gradients
        if gradients.flush is not None:
            with self._runtime.counters.waiting("gradient", self._runtime.timeline, block.name):
                gradients.flush.result()
            gradients.flush = None

    def end_backward(self, block: Block) -> None:
        """Backward has ended. If some gradients of the block have not come, what has come goes home."""
        block.gradients.expected = 0
        if block.gradients.slot is not None:
            self._start_flush(block)

    def begin_backward(self, block: Block) -> None:
        """Backward has reached the block: count what is to come."""
        gradients = block.gradients
        gradients.arrived = 0
        gradients.expected = sum(1 for held in block.held if held.parameter.requires_grad)

    def current(self, handle: GradientHandle) -> GradientHandle:
        if handle.held.handle is not handle:
            raise RuntimeError(
                f"this gradient of {handle.held.name} has been replaced by a later backward: read p.grad again"
            )
        return handle

    def scalar(self, factor: Any) -> float:
        """A factor's value. One tensor scales every gradient of a model: it is read from the device once."""
        if not isinstance(factor, torch.Tensor):
            return float(factor)
        if self._scalar is None or self._scalar[0] is not factor or self._scalar[1] != factor._version:
            self._scalar = (factor, factor._version, float(factor))
        return self._scalar[2]

    def norm(self, handle: GradientHandle) -> float:
        """The 2-norm of the gradient, from the partial sums taken on its way."""
        handle = self.current(handle)
        if handle.zeroed or not handle.held.numel:
            return 0.0
        self.settle()
        return abs(handle.factor) * math.sqrt(float(handle.held.partials.sum()))

    def finite(self, handle: GradientHandle) -> bool:
        return handle.zeroed or math.isfinite(handle.factor * float(handle.held.partials.sum()))

    def fetch(self, handle: GradientHandle, *, summed: bool = False) -> torch.Tensor:
        """The real gradient, in the parameter's shape and on its device; in the parameter's dtype, or in fp32 as it
        is summed."""
        handle = self.current(handle)
        held = handle.held
        self._settle(held.block)
        flat = self._stored(held)
        flat = flat.float()
        if handle.zeroed:
            flat = torch.zeros_like(flat)
        elif handle.factor != 1.0:
            flat *= handle.factor
        dtype = torch.float32 if summed else held.dtype
        return held.shaped(flat.to(dtype)).to(handle.device)

    def _stored(self, held: Held) -> torch.Tensor:
        """A copy of the stored gradient (numel,), without its factor."""
        gradients = held.block.gradients
        if gradients.plane is None or not held.numel:
            return self._runtime.background.run(self._read(held))
        dtype = torch.float32 if gradients.wide else held.dtype
        place = held.block.layout.slices[held.index]
        offset = gradients.layout.offset(place.section, place.start)
        return gradients.plane[offset : offset + held.numel * dtype.itemsize].view(dtype).clone()

    async def _read(self, held: Held) -> torch.Tensor:
        """The stored gradient of a parameter whose gradients rest on DISK."""
        whole = torch.empty(held.numel, dtype=torch.float32)
        for chunk in held.block.chunks:
            for segment in chunk.layout.segments:
                if segment.parameter != held.index:
                    continue
                dtype = torch.float32 if chunk.gradient_is_wide else held.dtype
                record = chunk.wide_gradient if chunk.gradient_is_wide else chunk.gradient
                assert record is not None
                async with self._runtime.staging_pool().loan() as slab:
                    view = slab.view[: round_up(chunk.layout.numel * dtype.itemsize, PAGE_BYTES)]
                    await record.swap_in(view)
                    values = _tensor(view).view(dtype)[segment.chunk_start : segment.chunk_start + segment.numel]
                    whole[segment.slice_start : segment.slice_start + segment.numel] = values
        return whole

    def show(self, handle: GradientHandle) -> torch.Tensor:
        """The real gradient, kept: writes to it or to its views count, until the gradient is replaced."""
        if handle.shown is None:
            handle.shown = self.fetch(handle)
        return handle.shown

    def take_back(self, handle: GradientHandle) -> None:
        """Store what a view may have changed."""
        shown, handle.shown = handle.shown, None
        if shown is not None:
            self.store(handle, shown)

    def store(self, handle: GradientHandle, gradient: torch.Tensor) -> None:
        """Replace the stored gradient. ``gradient`` has the parameter's shape."""
        handle = self.current(handle)
        held = handle.held
        handle.zeroed, handle.factor = False, 1.0
        if not held.numel:
            return
        flat = held.flat(gradient).to("cpu", torch.float32).contiguous()
        block = held.block
        self._settle(block)
        block.wait_update()  # it may still read what is about to be replaced
        if block.gradients.direct or block.gradients.plane is not None:
            exact = bool((flat.to(held.dtype).float() == flat).all())
            if not block.gradients.wide and not exact:
                self.widen(block)
            tasks = (AccumulateTask * 1)()
            if not block.gradients.wide:
                flat = flat.to(held.dtype)
            place = block.layout.slices[held.index]
            assert block.gradients.plane is not None
            tasks[0].source, tasks[0].source_dtype = flat.data_ptr(), TRAINABLE_CODES[flat.dtype]
            tasks[0].target = block.gradients.plane.data_ptr() + block.gradients.layout.offset(
                place.section, place.start
            )
            tasks[0].target_dtype = F32 if block.gradients.wide else TRAINABLE_CODES[held.dtype]
            tasks[0].numel, tasks[0].first_piece, tasks[0].partials = (
                held.numel,
                place.pieces()[1],
                held.partials.ctypes.data,
            )
            self._runtime.kernels.accumulate(tasks, 1, self._runtime.threads)
            return
        self._runtime.background.run(self._rewrite(held, flat))

    async def _rewrite(self, held: Held, flat: torch.Tensor) -> None:
        """Write fp32 values (numel,) over one parameter's gradient on DISK."""
        for chunk in held.block.chunks:
            for segment in chunk.layout.segments:
                if segment.parameter != held.index:
                    continue
                layout, dtype = chunk.layout, _dtype(held.block, chunk)
                room = round_up(4 * layout.numel, PAGE_BYTES)
                async with self._runtime.staging_pool().loan() as slab:
                    old = torch.float32 if chunk.gradient_is_wide else dtype
                    record = chunk.wide_gradient if chunk.gradient_is_wide else chunk.gradient
                    assert record is not None
                    await record.swap_in(slab.view[: round_up(layout.numel * old.itemsize, PAGE_BYTES)])
                    stored = _tensor(slab.view[:room]).view(old)[: layout.numel]
                    values = _tensor(slab.view[room : 2 * room]).view(torch.float32)[: layout.numel]
                    values.copy_(stored)
                    new = flat[segment.slice_start : segment.slice_start + segment.numel]
                    values[segment.chunk_start : segment.chunk_start + segment.numel] = new
                    piece, first = segment.pieces(held.block.layout.slices[held.index])
                    measured = _Arrival(held, segment.chunk_start, segment.numel, piece, first, True, None)
                    start = values.data_ptr()
                    await self._accumulate(
                        held.block,
                        _tasks([measured], source=start, source_dtype=torch.float32, target=None, target_dtype=dtype),
                    )
                    if chunk.wide_gradient is None:
                        chunk.wide_gradient = self._runtime.record("wide_gradient", room, held.block)
                    await chunk.wide_gradient.swap_out(slab.view[room : 2 * room])
                    chunk.gradient_is_wide = True

    def live(self, held: Held) -> GradientHandle | None:
        """The handle in ``p.grad``, if the parameter has a gradient here."""
        handle = held.handle
        return handle if handle is not None and held.parameter.grad is handle else None

    def grow_slots(self, nbytes: int) -> None:
        """A slot for a block whose gradients became larger (a parameter was unfrozen)."""
        largest = max(self._slots.sizes, default=0)
        if nbytes <= largest:
            return
        self.settle()
        self._runtime.take_slot_bytes(nbytes - largest, "a gradient slot")
        sizes = sorted(self._slots.sizes, reverse=True)
        self._slots = GradientSlots(self._device, [nbytes, *sizes[1:]])


def _dtype(block: Block, chunk: ChunkHome) -> torch.dtype:
    return torch.bfloat16 if block.layout.sections[chunk.layout.section].split else torch.float32


def _tensor(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8)


def _tasks(
    arrivals: Sequence[_Arrival],
    *,
    source: int,
    source_dtype: torch.dtype,
    target: int | None,
    target_dtype: torch.dtype,
    previous: int = 0,
    previous_dtype: torch.dtype = torch.float32,
) -> list[AccumulateTask]:
    """Tasks for segments of one chunk; the addresses are of the chunk's first element."""
    tasks = []
    for arrival in arrivals:
        task = AccumulateTask()
        start = arrival.chunk_start
        task.source = source + start * source_dtype.itemsize
        task.source_dtype = TRAINABLE_CODES[source_dtype]
        if target is not None:
            task.target = target + start * target_dtype.itemsize
        task.target_dtype = TRAINABLE_CODES[target_dtype]
        if arrival.factor is not None:
            task.previous = previous + start * previous_dtype.itemsize
            task.previous_dtype = TRAINABLE_CODES[previous_dtype]
            task.previous_scale = arrival.factor
        task.numel = arrival.numel
        task.first_piece = arrival.first_piece
        task.partials = arrival.held.partials.ctypes.data + 8 * arrival.piece
        tasks.append(task)
    return tasks
