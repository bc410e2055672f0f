"""The optimizer's work, in the background: swap in, kernel, swap out, for one chunk after another.

``submit`` hands over a block; its future is done when the new weights and states are where they rest. The block
that the next forward needs first goes first, chunks of different blocks overlap, and their number at any time is
bounded by the staging slabs. New weights go to the slot that waits for them as well as to DISK. A block whose planes
are all in HOST is one kernel call.

Cost per parameter of a bf16 block: 26 bytes of memory traffic; on DISK 10 bytes read and written for states, 2 and 2
for weights, 2 read for gradients.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from tiermem.device import Event
from tiermem.kernels.abi import BF16, F32, INT8, NON_NEGATIVE, UpdateTask
from tiermem.layout import MOMENT_FORMATS, PAGE_BYTES, round_up
from tiermem.planes import TRAINABLE_CODES, Block, ChunkHome, Held
from tiermem.slab import Slab
from tiermem.store import Record
from tiermem.timeline import COPY_IN, COPY_OUT
from tiermem.transfer import all_of, swap_in_or_zero, tensor_of
from tiermem.turns import Turns

if TYPE_CHECKING:
    from tiermem.gradients import GradientSlot
    from tiermem.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Scalars of one parameter's update at one step, as the kernels take them (see kernels/abi.py)."""

    formula: int
    step: int  # 1 in the first
    grad_scale: float
    step_size: float
    decay: float = 1.0
    weight_decay: float = 0.0
    beta1: float = 0.0
    one_minus_beta1: float = 0.0
    beta2: float = 0.0
    one_minus_beta2: float = 0.0
    bias_correction2_sqrt: float = 1.0
    eps: float = 0.0
    initial_sum: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """Contiguous elements of one chunk that are updated with the same scalars.

    zeroed: their gradient counts as zero.
    noise: number of the first element for rounding by chance (see csrc/moments.h): of the parameter's name, the
        element's place in it and the step, so that it is the same wherever the parameter rests.
    """

    start: int  # elements, from the start of the chunk
    numel: int
    hyperparameters: Hyperparameters
    zeroed: bool
    noise: int


class Updater(Protocol):
    """An optimizer, as the runtime sees it."""

    def hyperparameters_of(self, held: Held, steps: int) -> Hyperparameters:
        """The scalars of the parameter's update number ``steps`` with an unscaled gradient, as the param groups say
        now."""


ParameterUpdates = dict[Held, tuple[Hyperparameters, bool]]
"""Parameters to update, with their scalars and whether their gradient counts as zero."""


EXACT = MOMENT_FORMATS["fp32"]
_MOMENT_CODES = {EXACT: F32, MOMENT_FORMATS["bf16"]: BF16, MOMENT_FORMATS["int8"]: INT8}


def _noise(name: str, step: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{name} {step}".encode(), digest_size=4).digest(), "little")


def plan_chunk(block: Block, chunk: ChunkHome, updates: ParameterUpdates) -> list[Run]:
    """The chunk's runs. Neighbouring segments with equal scalars are one run, across the padding between them; but not
    where moments are rounded by chance, which is each parameter's own."""
    exact = chunk.layout.format is EXACT
    runs: list[Run] = []
    extends = False  # the last segment belongs to the last run
    for segment in chunk.layout.segments:
        planned = updates.get(block.held[segment.parameter])
        if planned is None:
            extends = False
            continue
        hyperparameters, zeroed = planned
        if exact and extends and not zeroed and not runs[-1].zeroed and runs[-1].hyperparameters is hyperparameters:
            start = runs[-1].start
            runs[-1] = Run(start, segment.chunk_start + segment.numel - start, hyperparameters, zeroed, 0)
        else:
            held = block.held[segment.parameter]
            noise = 0 if exact else (_noise(held.name, hyperparameters.step) + segment.slice_start) % 2**32
            runs.append(Run(segment.chunk_start, segment.numel, hyperparameters, zeroed, noise))
        extends = True
    return runs


@dataclass(slots=True)
class _Extents:
    """Addresses of one chunk's first elements while it is updated."""

    weight: int
    state: int
    grad: int
    grad_code: int


class Updates:
    """The pipeline of one runtime."""

    def __init__(self, runtime: Runtime, *, slab_count: int) -> None:
        self._runtime = runtime
        self._turns = Turns()  # blocks take their slabs one after the other
        # Chunks that swap in together would compute together and swap out together. With half of the slabs at most
        # reading, the disk reads and writes at the same time, which moves more.
        self._reading = asyncio.Semaphore(max(1, slab_count // 2))

    def submit(self, block: Block, updates: ParameterUpdates, slot: GradientSlot | None = None) -> Future[None]:
        """Start updating ``block``, whose weights are shown in no slot, with its settled gradients or with those in
        ``slot``.

        A gradient slot is given back when the update has ended.
        """
        plans = [(chunk, runs) for chunk in block.chunks if (runs := plan_chunk(block, chunk, updates))]
        tasks: list[UpdateTask] = []
        for chunk, runs in plans:
            extents = self._in_memory(block, chunk, slot)
            if extents is None:
                rank = self._runtime.rank(block)
                mark = self._runtime.device.mark()
                return self._runtime.background.submit(self._update(block, plans, slot, mark, rank))
            tasks += _tasks(chunk, runs, extents)
        # Nothing to move: one call in the kernel thread, without the event loop between.
        return self._runtime.background.start_kernel(
            self._update_in_memory, block, tasks, slot, self._runtime.device.mark()
        )

    def _update_in_memory(self, block: Block, tasks: list[UpdateTask], slot: GradientSlot | None, read: Event) -> None:
        self._run_kernel(block, tasks)
        if slot is not None:
            self._runtime.gradients.give_back(slot)
        self._upload(block, read)

    async def _update(
        self,
        block: Block,
        plans: Sequence[tuple[ChunkHome, list[Run]]],
        gradients: GradientSlot | None,
        read: Event,
        rank: int,
    ) -> None:
        if gradients is not None and not self._runtime.device.unified:
            # Backward is submitted ahead of the device: without its gradient, an update that is more urgent would keep
            # the turn, and slabs, from those that could begin.
            await self._runtime.settle_or_fail([self._runtime.background.reached(read)])
        work = []
        async with self._turns.turn(rank):
            for chunk, runs in plans:
                extents = self._in_memory(block, chunk, gradients)
                if extents is not None:
                    work.append(asyncio.ensure_future(self._kernel(block, _tasks(chunk, runs, extents))))
                    continue
                slab = await self._runtime.staging_pool().acquire()
                work.append(asyncio.ensure_future(self._update_staged(block, chunk, runs, slab, gradients, read)))
        await self._runtime.settle_or_fail(work)
        if gradients is not None:
            self._runtime.gradients.give_back(gradients)
        self._upload(block, read)

    def _upload(self, block: Block, read: Event) -> None:
        """The new weights must reach their home on the device, once the compute that reads the old ones (``read``) is
        done."""
        if block.resident and block.device_plane is not block.plane:
            assert block.device_plane is not None
            assert block.plane is not None
            span = self._runtime.timeline.span(COPY_IN, block.name, "weight", block.plane.numel())
            block.uploaded = self._runtime.device.copy_in(block.device_plane, block.plane, read, span)
            block.last_copy = block.uploaded
            self._runtime.counters.bytes_copied_in += block.plane.numel()

    def _run_kernel(self, block: Block, tasks: list[UpdateTask]) -> None:
        """In the kernel thread."""
        runtime = self._runtime
        array = (UpdateTask * len(tasks))(*tasks)
        numel = sum(task.numel for task in tasks) if runtime.timeline.on else 0
        runtime.timeline.call(block.name, "update", numel, runtime.kernels.update, array, len(tasks), runtime.threads)

    async def _kernel(self, block: Block, tasks: list[UpdateTask]) -> None:
        await self._runtime.background.kernel(self._run_kernel, block, tasks)

    def _in_memory(self, block: Block, chunk: ChunkHome, slot: GradientSlot | None) -> _Extents | None:
        """Where the chunk's planes are, if all of them are in HOST."""
        if block.plane is None or not isinstance(chunk.state, torch.Tensor):
            return None
        gradient = self._gradient_in_memory(block, chunk, slot)
        if gradient is None:
            return None
        return _Extents(block.plane.data_ptr() + chunk.layout.weight_offset, chunk.state.data_ptr(), *gradient)

    def _gradient_in_memory(self, block: Block, chunk: ChunkHome, slot: GradientSlot | None) -> tuple[int, int] | None:
        """Address and dtype code of the chunk's gradient, if it is in HOST."""
        gradients, layout = block.gradients, chunk.layout
        if slot is not None:
            if not self._runtime.device.unified:
                return None
            return slot.buffer.data_ptr() + gradients.narrow.offset(layout.section, layout.start), _code(chunk)
        if gradients.plane is None:
            return None
        address = gradients.plane.data_ptr() + gradients.layout.offset(layout.section, layout.start)
        return address, F32 if gradients.wide else _code(chunk)

    async def _update_staged(
        self, block: Block, chunk: ChunkHome, runs: list[Run], slab: Slab, slot: GradientSlot | None, read: Event
    ) -> None:
        """Bring what rests on DISK into the slab, update, write back what changed, and give the slab back."""
        layout = chunk.layout
        try:
            state = slab.view[: layout.state_bytes]
            weight = slab.view[layout.state_bytes : layout.state_bytes + layout.weight_bytes]
            grad_start = layout.state_bytes + layout.weight_bytes
            reads = []
            if isinstance(chunk.state, Record):
                reads.append(swap_in_or_zero(chunk.state, state))
            if chunk.weight is not None:
                reads.append(swap_in_or_zero(chunk.weight, weight))
            gradient = self._gradient_in_memory(block, chunk, slot)
            if gradient is None:
                reads.append(self._fetch_gradient(block, chunk, slot, slab.view[grad_start:], read))
                wide = slot is None and chunk.gradient_is_wide
                gradient = slab.address + grad_start, F32 if wide else _code(chunk)
            async with self._reading:
                await all_of(reads)
            state_address = chunk.state.data_ptr() if isinstance(chunk.state, torch.Tensor) else slab.address
            weight_address = slab.address + layout.state_bytes
            if block.plane is not None:
                weight_address = block.plane.data_ptr() + layout.weight_offset
            await self._kernel(block, _tasks(chunk, runs, _Extents(weight_address, state_address, *gradient)))
            writes = []
            if isinstance(chunk.state, Record):
                writes.append(chunk.state.swap_out(state))
            if chunk.weight is not None:
                writes.append(chunk.weight.swap_out(weight))
                writes.append(self._runtime.gathering.deliver(block, layout, weight))
            await all_of(writes)
        finally:
            slab.give_back()

    async def _fetch_gradient(
        self, block: Block, chunk: ChunkHome, slot: GradientSlot | None, target: memoryview, ready: Event
    ) -> None:
        """The chunk's gradient into host memory: from its record, or from a slot on the device."""
        layout = chunk.layout
        if slot is None:
            record, itemsize = _gradient_record(chunk)
            await swap_in_or_zero(record, target[: round_up(layout.numel * itemsize, PAGE_BYTES)])
            return
        start = block.gradients.narrow.offset(layout.section, layout.start)
        device = self._runtime.device
        nbytes = layout.weight_bytes
        span = self._runtime.timeline.span(COPY_OUT, block.name, "gradient", nbytes)
        event = device.copy_out(tensor_of(target[:nbytes]), slot.buffer[start : start + nbytes], ready, span)
        self._runtime.counters.bytes_copied_out += layout.weight_bytes
        await self._runtime.background.wait(event.synchronize)


def _code(chunk: ChunkHome) -> int:
    return TRAINABLE_CODES[torch.bfloat16 if chunk.layout.split else torch.float32]


def _gradient_record(chunk: ChunkHome) -> tuple[Record, int]:
    record = chunk.wide_gradient if chunk.gradient_is_wide else chunk.gradient
    if record is None:
        raise AssertionError("a chunk is updated that has no gradient")
    return record, 4 if chunk.gradient_is_wide or not chunk.layout.split else 2


def _tasks(chunk: ChunkHome, runs: list[Run], extents: _Extents) -> list[UpdateTask]:
    layout = chunk.layout
    code = _code(chunk)
    weight_size = 2 if layout.split else 4
    grad_size = 4 if extents.grad_code == F32 else 2
    tasks = []
    for run in runs:
        scalars = run.hyperparameters
        task = UpdateTask()
        task.weight = extents.weight + run.start * weight_size
        task.residual = extents.state + run.start * 2 if layout.split else None
        for moment in range(len(NON_NEGATIVE[scalars.formula])):
            first = extents.state + layout.moment_offset(moment)
            task.moments[moment] = first + run.start * layout.format.itemsize
            if layout.format.block_numel:
                scale = run.start // layout.format.block_numel
                task.scales[moment] = extents.state + layout.scales_offset(moment) + 4 * scale
        task.grad = extents.grad + run.start * grad_size
        task.numel = run.numel
        task.weight_dtype, task.grad_dtype = code, extents.grad_code
        task.moment_dtype, task.formula, task.noise = _MOMENT_CODES[layout.format], scalars.formula, run.noise
        task.grad_scale, task.decay, task.weight_decay = scalars.grad_scale, scalars.decay, scalars.weight_decay
        task.beta1, task.one_minus_beta1 = scalars.beta1, scalars.one_minus_beta1
        task.beta2, task.one_minus_beta2 = scalars.beta2, scalars.one_minus_beta2
        task.step_size, task.bias_correction2_sqrt = scalars.step_size, scalars.bias_correction2_sqrt
        task.eps, task.initial_sum = scalars.eps, scalars.initial_sum
        if run.zeroed:
            ctypes.memset(task.grad, 0, run.numel * grad_size)
        tasks.append(task)
    return tasks
