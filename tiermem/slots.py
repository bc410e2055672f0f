"""Weight slots: the fixed device buffers that gathered blocks stand in.

A slot holds one block's weight plane, or is loading it, or is free. Not all are as large as the largest block: an
embedding can be many times a layer, and no two slots need to hold it. A slot whose block has been released keeps its
bytes: the block can be gathered again at no cost until the slot is taken for another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from tiermem.device import DONE, Device, Event
from tiermem.planes import Block
from tiermem.transfer import bytes_of

_use_count = torch._C._storage_Use_Count


@dataclass(frozen=True, slots=True)
class Target:
    """A chunk's place in a slot: on the device, and as bytes where that is host memory."""

    tensor: torch.Tensor
    view: memoryview | None


class Slot:
    """One buffer on the device."""

    def __init__(self, device: Device, nbytes: int, index: int) -> None:
        self.index = index
        self.nbytes = nbytes
        self.buffer = device.empty(nbytes)
        self.block: Block | None = None
        self.load: Future[None] | None = None
        """Copies into the slot; done when the device event in ``loaded`` has been recorded."""
        self.loaded: Event = DONE
        self.free_after: Event = DONE
        """The compute that last read the slot."""
        self.missing: dict[int, Target] | None = None
        """By index, the chunks that a load which waits for its block's update has not got from there; on the loop."""
        self.ahead = False  # loaded, or loading, for a gather to come
        self.taken = 0  # when the slot was last taken or used, in gathers
        self._storage = self.buffer.untyped_storage()
        self._views: dict[Block, list[torch.Tensor]] = {}
        self._targets: dict[Block, list[Target]] = {}
        self._wholes: dict[int, torch.Tensor] = {}
        self._own_references = _use_count(self._storage._cdata)
        """Of the storage, by the runtime itself. Counted, not measured: other threads use these tensors at any time."""

    @property
    def address(self) -> int:
        return self._storage.data_ptr()

    def views(self, block: Block) -> list[torch.Tensor]:
        """The block's parameters as views of this slot; made once, kept."""
        views = self._views.get(block)
        if views is None:
            views = self._views[block] = block.views(self.buffer)
            self._own_references += len(views)
        return views

    def whole(self, block: Block) -> torch.Tensor:
        """As much of the slot as the block's plane takes; made once for each size, kept: copies hold it while they
        wait."""
        nbytes = block.layout.weight_bytes
        if nbytes not in self._wholes:
            self._wholes[nbytes] = self.buffer[:nbytes]
            self._own_references += 1
        return self._wholes[nbytes]

    def targets(self, block: Block, *, readable: bool) -> list[Target]:
        """Where the block's chunks are loaded to, in this slot; made once, kept. ``readable``: as host memory too."""
        targets = self._targets.get(block)
        if targets is None:
            targets = self._targets[block] = []
            for chunk in block.layout.chunks:
                part = self.buffer[chunk.weight_offset : chunk.weight_offset + chunk.weight_bytes]
                targets.append(Target(part, bytes_of(part) if readable else None))
                self._own_references += 2 if readable else 1
        return targets

    @property
    def viewed(self) -> bool:
        """Somebody outside the runtime still views the bytes, so they must not be replaced."""
        pointing = sum(not h.gathers for h in self.block.held) if self.block is not None and self.block.gathered else 0
        return _use_count(self._storage._cdata) > self._own_references + pointing


class SlotPool:
    """A fixed number of slots, of the sizes (bytes) that the placement chose. ``nbytes`` below is what must fit."""

    def __init__(self, device: Device, sizes: Sequence[int]) -> None:
        self.slots = [Slot(device, nbytes, index) for index, nbytes in enumerate(sizes)]
        self.by_address = {slot.address: slot for slot in self.slots if slot.nbytes}
        self.watch: Callable[[int], None] | None = None
        """Told how many slots are in use: gathered, or on their way to be."""

    def count(self) -> None:
        """Called when the use of a slot has changed."""
        if self.watch is not None:
            self.watch(sum(s.block is not None and (s.block.gathered or s.ahead) for s in self.slots))

    def idle(self, nbytes: int) -> Slot | None:
        """A slot that holds no block, if there is one; the smallest."""
        fitting = [slot for slot in self.slots if slot.block is None and slot.nbytes >= nbytes]
        return min(fitting, key=lambda slot: slot.nbytes, default=None)

    def released(self, nbytes: int) -> list[Slot]:
        """Slots whose block is not gathered and not loading, nor viewed by anybody."""
        return [
            slot
            for slot in self.slots
            if slot.block is not None
            and slot.nbytes >= nbytes
            and not slot.block.gathered
            and (slot.load is None or slot.load.done())
            and not slot.viewed
        ]

    def unheld(self, nbytes: int) -> list[Slot]:
        """Slots whose block is gathered, but which no forward holds; least recently used first."""
        slots = [s for s in self.slots if s.block is not None and s.block.evictable and not s.viewed]
        return sorted((slot for slot in slots if slot.nbytes >= nbytes), key=lambda slot: slot.taken)

    def loading(self, nbytes: int) -> list[Slot]:
        return [s for s in self.slots if s.load is not None and not s.load.done() and s.nbytes >= nbytes]

    def exhausted(self, wanted: str) -> RuntimeError:
        held = [s.block.name for s in self.slots if s.block is not None and s.block.holds]
        viewed = [s.block.name for s in self.slots if s.block is not None and not s.block.holds and s.viewed]
        reasons = []
        if held:
            reasons.append(f"{', '.join(held)} {'is' if len(held) == 1 else 'are'} in use by running forwards")
        if viewed:
            reasons.append(
                f"a view of a parameter of {', '.join(viewed)} outlives its block's forward (clone it, or read it "
                "under tiermem.gather)"
            )
        return RuntimeError(
            f"no weight slot is free for block {wanted}: {'; '.join(reasons) or 'all are taken'}. "
            f"There are {len(self.slots)}; raise Memory(device=...) or cut smaller blocks with Policy(blocks=...)"
        )
