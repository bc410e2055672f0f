"""Reading and writing the values of held parameters, wherever they rest: weights, masters and moments, chunk by chunk.

Everything here runs while nothing else is in flight for the block, and needs one staging slab for what rests on DISK.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from tiermem import moments
from tiermem.layout import Segment
from tiermem.planes import Block, ChunkHome, Held
from tiermem.store import Record
from tiermem.transfer import all_of, swap_in_or_zero, tensor_of

if TYPE_CHECKING:
    from tiermem.runtime import Runtime


class Values:
    """Values of one runtime's parameters. Tensors that go in and out have the parameter's shape and are on the CPU."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    # What the parameter shows.

    def read(self, held: Held, target: torch.Tensor | None = None) -> torch.Tensor:
        """A copy of the weights, in the dtype they are computed with; into ``target`` if given."""
        flat = torch.empty(held.numel, dtype=held.dtype) if target is None else held.flat(target)

        def copy(segment: Segment, weight: torch.Tensor, state: torch.Tensor | None) -> None:
            _part(flat, segment).copy_(_weights(weight, held, segment))

        self._visit(held, copy, weight=True, state=False, write=False)
        return held.shaped(flat)

    def alias(self, held: Held) -> torch.Tensor | None:
        """A view of the HOST plane, if the weights rest there."""
        return held.view(held.block.plane) if held.block.plane is not None else None

    def write(self, held: Held, weights: torch.Tensor, *, upload: bool = True) -> None:
        """Set the weights. A master whose weight does not change keeps its residual; otherwise the new weight is the
        master."""
        flat = held.flat(weights.detach().to("cpu", held.dtype))
        untouched = not self._has_residual(held)

        def copy(segment: Segment, weight: torch.Tensor, state: torch.Tensor | None) -> None:
            target, source = _weights(weight, held, segment), _part(flat, segment)
            if state is not None:
                changed = target.view(torch.int16) != source.view(torch.int16)
                _residuals(state, segment).masked_fill_(changed, 0)
            target.copy_(source)

        self._visit(held, copy, weight=True, state=held.split and not untouched, write=True)
        if upload:
            self.upload(held.block)

    # Masters and moments.

    def read_master(self, held: Held, target: torch.Tensor | None = None) -> torch.Tensor:
        """A copy of the fp32 master."""
        if not (held.split and self._has_residual(held)):
            master = self.read(held).float()
            return master if target is None else target.copy_(master)
        flat = torch.empty(held.numel, dtype=torch.float32) if target is None else held.flat(target)

        def join(segment: Segment, weight: torch.Tensor, state: torch.Tensor | None) -> None:
            assert state is not None
            weights, residuals, out = _weights(weight, held, segment), _residuals(state, segment), _part(flat, segment)
            self._runtime.kernels.join(
                weights.data_ptr(), residuals.data_ptr(), out.data_ptr(), segment.numel, self._runtime.threads
            )

        self._visit(held, join, weight=True, state=True, write=False)
        return held.shaped(flat)

    def write_master(self, held: Held, master: torch.Tensor, *, upload: bool = True) -> None:
        """Set the master, and with it the weights."""
        if not held.split or not self._trainable(held):
            self.write(held, master, upload=upload)
            return
        flat = held.flat(master.detach().to("cpu", torch.float32))
        exact = bool((flat.bfloat16().float().view(torch.int32) == flat.view(torch.int32)).all())
        if exact and not self._has_residual(held):
            self.write(held, master, upload=upload)
            return

        def split(segment: Segment, weight: torch.Tensor, state: torch.Tensor | None) -> None:
            assert state is not None
            weights, residuals, source = (
                _weights(weight, held, segment),
                _residuals(state, segment),
                _part(flat, segment),
            )
            self._runtime.kernels.split(
                source.data_ptr(), weights.data_ptr(), residuals.data_ptr(), segment.numel, self._runtime.threads
            )

        self._visit(held, split, weight=True, state=True, write=True)
        if upload:
            self.upload(held.block)

    def read_moment(
        self, held: Held, moment: int, target: torch.Tensor | None = None, *, non_negative: bool
    ) -> torch.Tensor:
        """A copy of a moment, fp32. ``non_negative``: it is a sum of squares."""
        flat = torch.empty(held.numel, dtype=torch.float32) if target is None else held.flat(target)

        def copy(segment: Segment, weight: torch.Tensor | None, state: torch.Tensor | None, chunk: ChunkHome) -> None:
            assert state is not None
            _part(flat, segment).copy_(moments.read(state, chunk.layout, segment, moment, non_negative=non_negative))

        self._visit_chunks(held, copy, weight=False, state=True, write=False)
        return held.shaped(flat)

    def write_moments(self, held: Held, values: Sequence[torch.Tensor | None], non_negative: Sequence[bool]) -> None:
        """Set all moments; None is zero."""
        flats = [None if one is None else held.flat(one.detach().to("cpu", torch.float32)) for one in values]

        def copy(segment: Segment, weight: torch.Tensor | None, state: torch.Tensor | None, chunk: ChunkHome) -> None:
            assert state is not None
            for moment in range(chunk.layout.moments):
                flat = flats[moment] if moment < len(flats) else None
                part = torch.zeros(segment.numel) if flat is None else _part(flat, segment)
                is_sum = flat is not None and non_negative[moment]
                moments.write(state, chunk.layout, segment, moment, part, non_negative=is_sum)

        self._visit_chunks(held, copy, weight=False, state=True, write=True)

    # Chunks.

    def _trainable(self, held: Held) -> bool:
        return held.block.layout.sections[held.block.layout.slices[held.index].section].trainable

    def _has_residual(self, held: Held) -> bool:
        """Some residual of the parameter may differ from zero: its states have been written."""
        return any(
            isinstance(chunk.state, torch.Tensor) or (isinstance(chunk.state, Record) and chunk.state.valid)
            for chunk, _ in _segments(held)
        )

    def _visit(
        self,
        held: Held,
        visit: Callable[[Segment, torch.Tensor, torch.Tensor | None], None],
        *,
        weight: bool,
        state: bool,
        write: bool,
    ) -> None:
        def forward(
            segment: Segment, weights: torch.Tensor | None, states: torch.Tensor | None, chunk: ChunkHome
        ) -> None:
            assert weights is not None
            visit(segment, weights, states)

        self._visit_chunks(held, forward, weight=weight, state=state, write=write)

    def _visit_chunks(
        self,
        held: Held,
        visit: Callable[[Segment, torch.Tensor | None, torch.Tensor | None, ChunkHome], None],
        *,
        weight: bool,
        state: bool,
        write: bool,
    ) -> None:
        async def run() -> None:
            for chunk, segment in _segments(held):
                async with self._in_memory(held.block, chunk, weight=weight, state=state, write=write) as (
                    weights,
                    states,
                ):
                    visit(segment, weights, states, chunk)

        block = held.block
        block.wait_update()
        if weight and write:
            if block.gathered:
                self._runtime.gathering.wait_copies(block)
            else:
                self._runtime.gathering.invalidate(block)
        if all(self._rests_in_memory(block, chunk, weight=weight, state=state) for chunk, _ in _segments(held)):
            for chunk, segment in _segments(held):
                visit(segment, self._plane_of(block, chunk) if weight else None, chunk.state if state else None, chunk)  # type: ignore[arg-type]
        else:
            self._runtime.background.run(run())

    @staticmethod
    def _rests_in_memory(block: Block, chunk: ChunkHome, *, weight: bool, state: bool) -> bool:
        return (not weight or block.plane is not None) and (not state or isinstance(chunk.state, torch.Tensor))

    @staticmethod
    def _plane_of(block: Block, chunk: ChunkHome) -> torch.Tensor | None:
        layout = chunk.layout
        return (
            None
            if block.plane is None
            else block.plane[layout.weight_offset : layout.weight_offset + layout.weight_bytes]
        )

    @contextlib.asynccontextmanager
    async def _in_memory(
        self, block: Block, chunk: ChunkHome, *, weight: bool, state: bool, write: bool
    ) -> AsyncIterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """The chunk's weight and state bytes (uint8), swapped in where they rest on DISK and out again if ``write``."""
        layout = chunk.layout
        async with self._runtime.staging_pool().loan() as slab:
            state_view = slab.view[: layout.state_bytes]
            weight_view = slab.view[layout.state_bytes : layout.state_bytes + layout.weight_bytes]
            records: list[tuple[Record, memoryview]] = []
            weights = self._plane_of(block, chunk) if weight else None
            if weight and weights is None:
                assert chunk.weight is not None
                weights = tensor_of(weight_view)
                records.append((chunk.weight, weight_view))
            states = chunk.state if state else None
            if isinstance(states, Record):
                records.append((states, state_view))
                states = tensor_of(state_view)
            await all_of([swap_in_or_zero(record, view) for record, view in records])
            yield weights, states
            if write:
                await all_of([record.swap_out(view) for record, view in records])

    def upload(self, block: Block) -> None:
        """Weights changed in HOST must reach their copies on the device."""
        if block.device_plane is not None and block.plane is not None and block.device_plane is not block.plane:
            device = self._runtime.device
            device.copy_in(block.device_plane, block.plane, device.mark()).synchronize()
        if block.slot is not None:
            if block.gathered:
                for held, view in zip(block.held, block.slot.views(block), strict=True):
                    view.copy_(self.read(held))
            else:
                self._runtime.gathering.invalidate(block)


def _segments(held: Held) -> Iterator[tuple[ChunkHome, Segment]]:
    for chunk in held.block.chunks:
        for segment in chunk.layout.segments:
            if segment.parameter == held.index:
                yield chunk, segment


def _part(flat: torch.Tensor, segment: Segment) -> torch.Tensor:
    return flat[segment.slice_start : segment.slice_start + segment.numel]


def _weights(plane: torch.Tensor, held: Held, segment: Segment) -> torch.Tensor:
    size = held.dtype.itemsize
    return plane[segment.chunk_start * size : (segment.chunk_start + segment.numel) * size].view(held.dtype)


def _residuals(state: torch.Tensor, segment: Segment) -> torch.Tensor:
    return state[2 * segment.chunk_start : 2 * (segment.chunk_start + segment.numel)].view(torch.int16)
