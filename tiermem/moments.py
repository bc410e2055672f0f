"""Optimizer moments in the chunks' extents: room for as many as an optimizer keeps, and fp32 values in and out.

The kernels keep moments in their format from step to step; here they are converted as a whole, for ``state_dict``: to
fp32 exactly, from fp32 by rounding to nearest, so that what was exported comes back bit for bit. csrc/moments.h
describes the formats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tiermem.layout import MOMENT_FORMATS, Chunk, Segment
from tiermem.placement import extent_class, slab_bytes_for
from tiermem.planes import Block, ChunkHome
from tiermem.policy import Tier
from tiermem.store import Record

if TYPE_CHECKING:
    from tiermem.runtime import Runtime

_LARGEST = 3.4028234663852886e38
_LARGEST_ROOT = 1.8446742974197924e19


def read(state: torch.Tensor, chunk: Chunk, segment: Segment, moment: int, *, non_negative: bool) -> torch.Tensor:
    """The moment of a segment, fp32 (numel,); a view where the format is fp32. ``state`` is the extent (uint8)."""
    values = _elements(state, chunk, segment, moment)
    if not chunk.format.block_numel:
        return values.float()
    scales = _scales(state, chunk, segment, moment).repeat_interleave(chunk.format.block_numel)[: segment.numel]
    if non_negative:
        root = (values.view(torch.uint8).float() + 1) * (scales / 256)
        return root * root
    return values.float() * (1 / 127) * scales


def write(
    state: torch.Tensor, chunk: Chunk, segment: Segment, moment: int, values: torch.Tensor, *, non_negative: bool
) -> None:
    """Set the moment of a segment to fp32 values (numel,)."""
    target = _elements(state, chunk, segment, moment)
    if not chunk.format.block_numel:
        target.copy_(values)
        return
    # torch's square root is not always the nearest number, on which the way back rests.
    with np.errstate(invalid="ignore"):
        roots = torch.from_numpy(np.sqrt(values.numpy())) if non_negative else values
    padding = -segment.numel % chunk.format.block_numel
    blocks = torch.nn.functional.pad(roots, (0, padding)).view(-1, chunk.format.block_numel)
    largest = _LARGEST_ROOT if non_negative else _LARGEST
    scales = blocks.abs().amax(1).clamp(max=largest)  # NaN stays NaN
    scales[scales < (2.0**-76 if non_negative else 2.0**-108)] = 0
    _scales(state, chunk, segment, moment).copy_(scales)
    digits = (256 if non_negative else 127) * 256
    finite = scales.nan_to_num(largest)
    to_digits = torch.where(finite > 0, digits / finite, torch.zeros(())).unsqueeze(1)
    parts = (blocks.nan_to_num(0, largest, -largest) * to_digits).round()
    if non_negative:
        parts = (parts - 256).clamp(min=0)
    codes = ((parts + 128) / 256).floor().view(-1)[: segment.numel]
    target.copy_(codes.to(torch.uint8).view(torch.int8) if non_negative else codes.to(torch.int8))


_DTYPES = {4: torch.float32, 2: torch.bfloat16, 1: torch.int8}


def _elements(state: torch.Tensor, chunk: Chunk, segment: Segment, moment: int) -> torch.Tensor:
    size = chunk.format.itemsize
    start = chunk.moment_offset(moment) + size * segment.chunk_start
    return state[start : start + size * segment.numel].view(_DTYPES[size])


def _scales(state: torch.Tensor, chunk: Chunk, segment: Segment, moment: int) -> torch.Tensor:
    block = chunk.format.block_numel
    start = chunk.scales_offset(moment) + 4 * (segment.chunk_start // block)
    return state[start : start + 4 * -(-segment.numel // block)].view(torch.float32)


def reserve(runtime: Runtime, count: int) -> None:
    """Make room for ``count`` moments per parameter. Until an optimizer comes, there is room for two.

    The first optimizer may want fewer: then its chunks are smaller from here on, in traffic and budget; files that were
    preallocated stay as large as they are. Wanting more (AMSGrad) takes new memory or files; the old files stay, and
    serve nothing. Optimizers that come later share what is there, or enlarge it. Values are kept.

    Errors: ``ValueError`` where the budget or ``Memory(disk_size=...)`` does not hold more; nothing has changed then.
    """
    if runtime.moments is not None and count <= runtime.moments:
        return
    changes = any(chunk.layout.moments != count for block in runtime.blocks for chunk in block.chunks)
    if changes:
        runtime.synchronize()
        _take_room(runtime, count)
        for block in runtime.blocks:
            _resize(runtime, block, count)
    runtime.moments = count


def _take_room(runtime: Runtime, count: int) -> None:
    host = disk = 0
    for block in runtime.blocks:
        for chunk, later in zip(block.layout.chunks, block.layout.with_moments(count).chunks, strict=True):
            if not chunk.trainable:
                continue
            if block.states_home is Tier.HOST:
                host += later.state_bytes - chunk.state_bytes
            elif extent_class(later.state_bytes) > extent_class(chunk.state_bytes):
                disk += extent_class(later.state_bytes)
    limit = runtime.memory.disk_size
    if disk and isinstance(limit, int) and runtime.store is not None and runtime.store.allocated_bytes + disk > limit:
        raise ValueError(
            f"{count} moments per parameter need {disk} bytes more on DISK: {runtime.store.allocated_bytes} are taken, "
            f"Memory(disk_size=...) grants {limit}: raise it, or Memory(host=...)"
        )
    what = f"{count} moments per parameter"
    runtime.enlarge_staging(slab_bytes_for(runtime.chunk_numel, MOMENT_FORMATS[runtime.policy.moments], count), what)
    if host > 0:
        runtime.host_budget.take(host, what)
    else:
        runtime.host_budget.give_back(-host)


def _resize(runtime: Runtime, block: Block, count: int) -> None:
    block.layout = block.layout.with_moments(count)
    kept = block.chunks[0].layout.moments < count if block.chunks else False
    trained = [(home, new) for home, new in zip(block.chunks, block.layout.chunks, strict=True) if new.trainable]
    in_memory = [(home, new) for home, new in trained if isinstance(home.state, torch.Tensor)]
    if in_memory and kept:
        _move_to_larger(runtime, in_memory)
    elif in_memory:
        for home, new in in_memory:
            assert isinstance(home.state, torch.Tensor)
            home.state = home.state[: new.state_bytes]
    for home, new in trained:
        if isinstance(home.state, Record):
            runtime.background.run(_move_record(runtime, block, home, new))
    for home, new in zip(block.chunks, block.layout.chunks, strict=True):
        home.layout = new


def _move_to_larger(runtime: Runtime, chunks: list[tuple[ChunkHome, Chunk]]) -> None:
    states = runtime.states_region(sum(new.state_bytes for _, new in chunks))
    old = []
    for home, new in chunks:
        assert isinstance(home.state, torch.Tensor)
        state = states.carve(new.state_bytes)
        state[: home.state.numel()].copy_(home.state)
        old.append(home.state.data_ptr())
        home.state = state
    runtime.drop_regions(old)


async def _move_record(runtime: Runtime, block: Block, home: ChunkHome, new: Chunk) -> None:
    old = home.state
    assert isinstance(old, Record)
    if not old.valid:
        old.drop()
        home.state = _record(runtime, block, home, new)
        return
    async with runtime.staging_pool().loan() as slab:
        slab.view[: new.state_bytes] = bytes(new.state_bytes)
        await old.swap_in(slab.view[: home.layout.state_bytes])
        old.drop()
        record = _record(runtime, block, home, new)
        await record.swap_out(slab.view[: new.state_bytes])
    home.state = record


def _record(runtime: Runtime, block: Block, home: ChunkHome, new: Chunk) -> Record:
    """Smaller ones go where the larger were: that space is there already."""
    return runtime.record("state", new.state_bytes, block, extent_bytes=max(home.layout.state_bytes, new.state_bytes))
