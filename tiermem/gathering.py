"""Gather and release: when a block's weights are usable on the device.

A block in place (home DEVICE, or HOST on a unified device) is gathered by pointing its parameters at the plane. Any
other is loaded into a slot: by a copy from its HOST plane, or by swap-ins from DISK. Loads start early, in the order
that the schedule expects, into slots that nobody needs sooner. A load waits for its own block's update, and for no
other; what that update has just computed in a slab goes straight into the slot.
"""

from __future__ import annotations

import asyncio
import ctypes
from concurrent.futures import Future

import torch

from tiermem.background import Background
from tiermem.device import DONE, Device
from tiermem.interrupts import uninterrupted
from tiermem.io.engine import address_of
from tiermem.layout import Chunk
from tiermem.planes import Block, ChunkHome
from tiermem.report import Counters
from tiermem.schedule import Schedule
from tiermem.slab import SlabPool
from tiermem.slots import Slot, SlotPool, Target
from tiermem.timeline import COPY_IN, Timeline
from tiermem.transfer import all_of, swap_in_or_zero, tensor_of


class Gathering:
    """Moves blocks between their homes and the device's slots."""

    def __init__(
        self,
        device: Device,
        background: Background,
        blocks: list[Block],
        slots: SlotPool,
        staging: SlabPool | None,
        counters: Counters,
        timeline: Timeline,
    ) -> None:
        self._device = device
        self._background = background
        self._blocks = blocks
        self.slots = slots
        self.staging = staging
        self._counters = counters
        self._timeline = timeline
        self._clock = 0
        self.training = Schedule()
        self.inference = Schedule()
        self._schedule = self.training
        self._soft: list[Block] = []  # gathered without a hold, to be released at the end of forward or backward

    def begin(self, *, training: bool) -> None:
        """An outermost forward, or a backward, begins. A forward without gradients is a round of its own, with its
        own schedule."""
        self._schedule = self.training if training else self.inference

    def gather(self, block: Block, *, hold: bool) -> None:
        """Make the block's weights usable. With ``hold`` they stay so until ``release``; without, until their slot is
        wanted."""
        if not block.gathered:
            if block.applied:
                raise RuntimeError(
                    f"block {block.name} is needed after its update has begun inside backward "
                    "(Policy(update_in_backward=True)): "
                    "call step() first, or set update_in_backward=False"
                )
            self._schedule.note(block.index)
            if block.device_plane is not None:
                self._gather_in_place(block)
            else:
                self._gather_in_slot(block)
                self.prefetch()
            if not hold and not block.resident:
                self._soft.append(block)
        if hold:
            block.holds += 1

    def release(self, block: Block, *, keep: bool) -> None:
        """End one hold; after the last the parameters are placeholders, unless ``keep``: backward goes on needing
        them."""
        if block.holds <= 0:
            raise AssertionError(f"block {block.name} released without a hold")
        block.holds -= 1
        if block.holds:
            return
        if keep:
            self._soft.append(block)
        elif not block.resident:
            self._unpoint(block)

    def release_soft(self) -> None:
        """Forward or backward has ended: nothing is gathered but what is held or at rest on the device."""
        for block in self._soft:
            if block.gathered and not block.holds and not block.resident:
                self._unpoint(block)
        self._soft.clear()
        if self._schedule is self.inference:
            self.inference.end_round()

    def release_finished(self, block: Block) -> None:
        """Backward has all it needs from ``block``."""
        if block.gathered and not block.holds and not block.resident:
            self._unpoint(block)

    def invalidate(self, block: Block) -> None:
        """The block's weights are about to change: no copy still reads the old ones, and no slot goes on showing
        them."""
        if block.gathered:
            self._unpoint(block)
        self.wait_copies(block)
        if block.slot is not None:
            self._empty(block.slot)

    def wait_copies(self, block: Block) -> None:
        """Return when no copy reads the block's HOST plane any more. Compute may be waiting for one in a slot that has
        been taken for another block since."""
        if block.slot is not None:
            self._settle_load(block.slot)
        block.last_copy.synchronize()

    def settle(self, block: Block) -> None:
        """Return when the block's update and load have ended."""
        block.wait_update()
        if block.slot is not None and block.slot.load is not None:
            self._timed_wait(block.slot.load, block)

    def plane_for_unpack(self, block: Block) -> torch.Tensor:
        """The gathered block's weight plane on the device (uint8)."""
        if block.device_plane is not None:
            return block.device_plane
        if block.slot is None:
            raise AssertionError(f"block {block.name} is not gathered")
        return block.slot.buffer

    def _unpoint(self, block: Block) -> None:
        block.unpoint()
        if block.slot is not None:
            block.slot.free_after = self._device.mark()
            if self._timeline.on:
                self.slots.count()

    def _gather_in_place(self, block: Block) -> None:
        if block.update is not None:
            self._timed_wait(block.update, block)
            block.update = None
        if block.uploaded is not None:
            self._device.hold(block.uploaded)
            block.uploaded = None
        block.point(block.resting_views())

    def _gather_in_slot(self, block: Block) -> None:
        slot = block.slot
        if slot is None:
            slot = self._choose(block)
            with uninterrupted():
                self._empty(slot)
                self._start_load(block, slot)
        self._clock += 1
        slot.taken = self._clock
        if slot.load is not None:
            try:
                self._timed_wait(slot.load, block)
            except BaseException:
                if slot.load.done():  # it has failed; else the wait was interrupted, and the slot is still being filled
                    self._empty(slot)
                raise
            slot.load = None
            block.update = None  # the load waited for it
        self._device.hold(slot.loaded)
        block.point(slot.views(block))
        slot.ahead = False
        if self._timeline.on:
            self.slots.count()

    def _timed_wait(self, future: Future[None], block: Block) -> None:
        if future.done():
            future.result()
            return
        with self._counters.waiting("gather", self._timeline, block.name):
            future.result()

    def _choose(self, block: Block) -> Slot:
        """The slot whose loss costs least, ready to be taken."""
        pool, nbytes = self.slots, block.layout.weight_bytes
        slot = pool.idle(nbytes)
        if slot is None:
            slot = self._farthest(pool.released(nbytes))
        if slot is None and (unheld := pool.unheld(nbytes)):
            slot = unheld[0]
            assert slot.block is not None
            self._unpoint(slot.block)
        if slot is None and (loading := pool.loading(nbytes)):
            slot = loading[-1]
            self._settle_load(slot)
        if slot is None:
            raise pool.exhausted(block.name)
        return slot

    def _farthest(self, slots: list[Slot]) -> Slot | None:
        schedule = self._schedule
        return max(slots, key=lambda slot: schedule.distance(slot.block.index) if slot.block else -1, default=None)

    def _settle_load(self, slot: Slot) -> None:
        """Wait out a load that nobody will use; its error will come again when somebody does."""
        if slot.load is not None:
            slot.load.exception()
            slot.load = None

    def _empty(self, slot: Slot) -> None:
        if slot.block is not None:
            slot.block.slot = None
        slot.block = None
        slot.load = None

    def prefetch(self) -> None:
        """Start loads of what is needed next, into slots that hold nothing or something needed later."""
        schedule = self._schedule
        for index in schedule.upcoming():
            block = self._blocks[index]
            if block.device_plane is not None or block.slot is not None:
                continue
            nbytes = block.layout.weight_bytes
            slot = self.slots.idle(nbytes)
            if slot is None:
                slot = self._farthest(self.slots.released(nbytes))
                if (
                    slot is None
                    or slot.block is None
                    or schedule.distance(slot.block.index) <= schedule.distance(index)
                ):
                    return
            with uninterrupted():
                self._empty(slot)
                self._clock += 1
                slot.taken = self._clock
                self._start_load(block, slot)

    def _start_load(self, block: Block, slot: Slot) -> None:
        slot.block, block.slot = block, slot
        slot.ahead = True
        if self._timeline.on:
            self.slots.count()
        if block.plane is not None and (block.update is None or block.update.done()):
            block.wait_update()
            slot.load = None
            self._copy_in(block, slot)
        else:
            targets = [] if block.plane is not None else slot.targets(block, readable=self._device.unified)
            slot.load = self._background.submit(self._load(block, slot, targets))

    def _copy_in(self, block: Block, slot: Slot) -> None:
        assert block.plane is not None
        nbytes = block.layout.weight_bytes
        span = self._timeline.span(COPY_IN, block.name, "weight", nbytes)
        slot.loaded = self._device.copy_in(slot.whole(block), block.plane, slot.free_after, span)
        block.last_copy = slot.loaded
        self._counters.bytes_copied_in += nbytes

    async def _load(self, block: Block, slot: Slot, targets: list[Target]) -> None:
        missing = dict(enumerate(targets))
        if block.update is not None:
            slot.missing = missing
            try:
                await asyncio.wrap_future(block.update)
            finally:
                slot.missing = None
        if block.plane is not None:
            self._copy_in(block, slot)
            return
        await all_of([self._swap_in(block, slot, block.chunks[index], target) for index, target in missing.items()])
        slot.loaded = DONE

    async def _swap_in(self, block: Block, slot: Slot, chunk: ChunkHome, target: Target) -> None:
        record, nbytes = chunk.weight, chunk.layout.weight_bytes
        assert record is not None
        if target.view is not None:
            await swap_in_or_zero(record, target.view)
            return
        assert self.staging is not None
        async with self.staging.loan() as slab:
            source = slab.view[:nbytes]
            await swap_in_or_zero(record, source)
            await self._into_slot(block, slot, source, target)

    async def deliver(self, block: Block, chunk: Chunk, weights: memoryview) -> None:
        """On the background loop, from the block's update: new weights of one chunk, in host memory until this returns.
        A load that waits for the update takes them from here and not from DISK."""
        slot = block.slot
        target = slot.missing.pop(chunk.index, None) if slot is not None and slot.missing is not None else None
        if target is not None:
            assert slot is not None
            await self._into_slot(block, slot, weights, target)

    async def _into_slot(self, block: Block, slot: Slot, source: memoryview, target: Target) -> None:
        if target.view is not None:
            await self._background.wait(ctypes.memmove, target.tensor.data_ptr(), address_of(source), source.nbytes)
            return
        span = self._timeline.span(COPY_IN, block.name, "weight", source.nbytes)
        event = self._device.copy_in(target.tensor, tensor_of(source), slot.free_after, span)
        self._counters.bytes_copied_in += source.nbytes
        await self._background.wait(event.synchronize)
