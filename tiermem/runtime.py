"""One model's runtime: it owns the planes, the budgets, the background thread, and the state of the training step.

The parts do the work (gathering.py, gradients.py, update.py, values.py); this joins them and keeps what concerns all
of them: what has failed, which phase runs, and what must be given back.
"""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tiermem import kernels as kernel_library
from tiermem.background import Background
from tiermem.blocks import SMALL_BYTES, BlockSpec, find_blocks, modules_by_use
from tiermem.device import Device
from tiermem.gathering import Gathering
from tiermem.gradients import BlockGradients, Gradients
from tiermem.handles import GradientHandle
from tiermem.interrupts import uninterrupted
from tiermem.io import select
from tiermem.io.engine import Engine
from tiermem.kernels.cores import available_cores
from tiermem.layout import PAGE_BYTES, Chunk, round_up
from tiermem.memory import Budget, Memory, Region, parse_bytes
from tiermem.micro_batch import sums_bytes
from tiermem.placement import BlockPlan, Placement, extent_class, place
from tiermem.planes import TRAINABLE_CODES, Block, ChunkHome, Held, attach, detach, held_of, refuse_copy, specs_of
from tiermem.policy import Policy, Tier
from tiermem.report import BlockReport, Counters, Report
from tiermem.slab import SlabPool
from tiermem.slots import SlotPool
from tiermem.store import Record, Store, check_directory
from tiermem.timeline import Timeline
from tiermem.transfer import all_of
from tiermem.update import Hyperparameters, ParameterUpdates, Updates
from tiermem.values import Values

_INLINE_NUMEL = 1 << 16
"""Below this a kernel call is shorter than waking another thread."""
_BLOCK_BYTES_MAX = 512 << 20
_VERIFY_CORES = 8
"""From here on checksums of disk extents cost under 3 % of a step (see Policy.verify_disk)."""


class Runtime:
    """Everything that ``tiermem.offload`` set up for one model. ``close()`` gives it all back."""

    def __init__(self, module: nn.Module, memory: Memory, policy: Policy, device: Device) -> None:
        self.device = device
        self.policy = policy
        self.memory = memory
        self.counters = Counters()
        self.timeline = Timeline(type(module).__name__, device, [str(path) for path in memory.directories])
        self.closed = False
        self.error: BaseException | None = None
        self.moments: int | None = None
        """That the optimizers keep per parameter, once there is one (see moments.py)."""
        self.eager = policy.update_in_backward
        self.unstepped = False
        """Updates have begun inside a backward that no ``step()`` has followed yet."""
        self.in_backward = False
        self.forward_depth = 0
        self._warned_nonfinite = False
        self._finalizer: weakref.finalize[..., Any] | None = None
        self.device_budget = Budget(
            Tier.DEVICE,
            memory.device_bytes(device.free_bytes),
            "raise Memory(device=...) or cut smaller blocks with Policy(blocks=...)",
        )
        for directory in memory.directories:
            check_directory(directory)
        disk_remedy = (
            "raise Memory(host=...), or let more rest on disk: Memory(disk=...) with "
            "Policy(weights='auto', states='auto')"
        )
        self.host_budget = Budget(Tier.HOST, memory.host_bytes(), disk_remedy)
        self.kernels = kernel_library.load(policy.kernels)
        self.threads = policy.threads or available_cores()

        specs = self._cut(module)
        dtypes = [[self._compute_dtype(name, parameter) for name, parameter in spec.parameters] for spec in specs]
        self.uses = modules_by_use(module, specs)
        self.layers = [(spec.root, spec.name) for spec in specs if spec.layer]
        if policy.micro_batch is not None:
            self.device_budget.take(
                sums_bytes([root for root, _ in self.layers]), "one layer's sums of gradients over micro-batches"
            )
        placement = place(
            [spec.name for spec in specs],
            [specs_of([p for _, p in spec.parameters], kinds) for spec, kinds in zip(specs, dtypes, strict=True)],
            [spec.resident for spec in specs],
            _nesting(module, self.uses, [spec.resident for spec in specs]),
            policy=policy,
            unified=device.unified,
            has_disk=bool(memory.directories),
            device=self.device_budget,
            host=self.host_budget,
        )
        self.chunk_numel = placement.chunk_numel
        self.store: Store | None = None
        self.engine: Any = None
        self._staging: SlabPool | None = None
        self._regions: list[Region] = []
        self.blocks: list[Block] = []
        self.background = Background("tiermem", on_thread_start=device.enter_thread)
        try:
            self._allocate(placement)
            self._take_over(specs, dtypes, placement)
        except BaseException:
            self._abandon()
            raise
        own_engine = self.engine if self.engine is not policy.io else None
        self._finalizer = weakref.finalize(module, _close_leftovers, self.background, self.store, own_engine, device)

    # Construction.

    def _cut(self, module: nn.Module) -> list[BlockSpec]:
        limit = self.device_budget.limit_bytes
        specs = find_blocks(
            module,
            self.policy.blocks,
            block_bytes=min(_BLOCK_BYTES_MAX, max(limit // 8, SMALL_BYTES)),
            resident_bytes=min(64 << 20, limit // 8),
        )
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and not parameter.is_floating_point():
                raise ValueError(
                    f"{name} is trainable and has dtype {parameter.dtype}: tiermem trains torch.bfloat16 and "
                    "torch.float32"
                )
        for spec in specs:
            for name, parameter in spec.parameters:
                if held_of(parameter) is not None:
                    raise ValueError(f"{name} is already held by another runtime: tiermem.close() that model first")
                if parameter.requires_grad and parameter.dtype not in TRAINABLE_CODES:
                    raise ValueError(
                        f"{name} is trainable and has dtype {parameter.dtype}: tiermem trains torch.bfloat16 and "
                        "torch.float32; "
                        "convert the model before tiermem.offload, or freeze the parameter with requires_grad_(False)"
                    )
                if parameter.is_sparse:
                    raise ValueError(f"{name} is a sparse tensor: tiermem holds dense parameters only")
        return specs

    def _compute_dtype(self, name: str, parameter: nn.Parameter) -> torch.dtype:
        wanted = self.policy.compute_dtype
        if wanted is None or parameter.dtype is not torch.float32:
            return parameter.dtype
        if wanted not in TRAINABLE_CODES:
            raise ValueError(f"Policy(compute_dtype={wanted}): expected torch.bfloat16 or torch.float32")
        return wanted

    def _allocate(self, placement: Placement) -> None:
        uses_disk = any(Tier.DISK in (p.home, p.states_home, p.gradients_home) for p in placement.blocks)
        if self.memory.directories and (uses_disk or placement.slab_count):
            self.engine = select(self.memory.directories, self.policy.io)
            verify = self.policy.verify_disk
            if verify is None:
                verify = available_cores() >= _VERIFY_CORES
            self.store = Store(
                self.memory.directories,
                self.engine,
                spare=max(2, placement.slab_count),
                checksum=self.kernels.checksum if verify else None,
                timeline=self.timeline,
            )
        pin = None if self.device.unified else self.device.pin
        if placement.slab_count:
            pins = [one for one in (pin, self.engine.pin if self.engine is not None else None) if one is not None]
            self._staging = SlabPool(placement.slab_bytes, placement.slab_count, pins)
            self._staging.watch = self.timeline.counter("slabs", placement.slab_count)
        self._slots = SlotPool(self.device, placement.slots)
        if placement.slots:
            self._slots.watch = self.timeline.counter("slots", len(placement.slots))
        self.gathering = Gathering(
            self.device, self.background, self.blocks, self._slots, self._staging, self.counters, self.timeline
        )
        self.gradients = Gradients(self, placement.gradient_slots)
        self.updates = Updates(self, slab_count=placement.slab_count)
        self.values = Values(self)

    def _take_over(
        self, specs: Sequence[BlockSpec], dtypes: Sequence[Sequence[torch.dtype]], placement: Placement
    ) -> None:
        self._reserve_disk(placement.blocks)
        for index, (spec, kinds, plan) in enumerate(zip(specs, dtypes, placement.blocks, strict=True)):
            held = [
                Held(parameter, name, position, dtype)
                for position, ((name, parameter), dtype) in enumerate(zip(spec.parameters, kinds, strict=True))
            ]
            block = Block(
                index, spec.name, held, plan.layout, plan.home, plan.states_home, plan.host_states, plan.gradients_home
            )
            block.make_placeholders(self.device.torch_device)
            for one in held:
                one.runtime = self
            self._make_planes(block, plan.gradient_plane_bytes)
            self.blocks.append(block)
            self._fill(block)

    def _reserve_disk(self, plans: Sequence[BlockPlan]) -> None:
        """Preallocate every file before a value moves, so that a full disk is an error at once."""
        counts: dict[tuple[str, int], int] = {}
        for plan in plans:
            for chunk in plan.layout.chunks:
                for kind, nbytes in self._disk_extents(plan, chunk):
                    counts[kind, nbytes] = counts.get((kind, nbytes), 0) + 1
        if not counts:
            return
        assert self.store is not None
        needed = sum(nbytes * count for (_, nbytes), count in counts.items())
        limit = self.memory.disk_size
        if isinstance(limit, int) and needed > limit:
            raise ValueError(
                f"the planes on DISK need {needed} bytes, Memory(disk_size=...) grants {limit}: raise it, or "
                "Memory(host=...)"
            )
        for (kind, nbytes), count in counts.items():
            self.store.reserve(f"{kind}-{nbytes}", nbytes, count)

    def _disk_extents(self, plan: BlockPlan | Block, chunk: Chunk) -> list[tuple[str, int]]:
        extents = []
        if plan.home is Tier.DISK:
            extents.append(("weight", extent_class(chunk.weight_bytes)))
        if chunk.trainable and chunk.index not in plan.host_states:
            extents.append(("state", extent_class(chunk.state_bytes)))
        if chunk.trainable and plan.gradients_home is Tier.DISK:
            extents.append(("gradient", extent_class(chunk.weight_bytes)))
        return extents

    def record(self, kind: str, nbytes: int, block: Block, *, extent_bytes: int | None = None) -> Record:
        """A record for one more extent of ``block`` (of another one's size if given). Reserves space for it if the plan
        did not."""
        assert self.store is not None
        size = extent_class(nbytes if extent_bytes is None else extent_bytes)
        name = f"{kind}-{size}"
        try:
            return self.store.record(name, nbytes, (block.name, kind))
        except ValueError:
            self.store.reserve(name, size, 1)
            return self.store.record(name, nbytes, (block.name, kind))

    def _make_planes(self, block: Block, gradient_bytes: int) -> None:
        """Memory and records for a new block. The budgets were charged by the placement."""
        layout = block.layout
        pin = None if self.device.unified else self.device.pin
        if block.home is not Tier.DISK:
            block.plane = self._region(layout.weight_bytes, pin).carve(layout.weight_bytes)
            if self.device.unified:
                block.device_plane = block.plane
            elif block.resident:
                block.device_plane = self.device.empty(layout.weight_bytes)
        direct = self.device.unified and block.gradients_home is Tier.HOST
        block.gradients = BlockGradients(block, direct=direct)
        if block.gradients_home is Tier.HOST:
            block.gradients.plane = self._region(gradient_bytes, pin).carve(gradient_bytes)
        in_host = sum(chunk.layout.state_bytes for chunk in block.chunks if chunk.layout.index in block.host_states)
        states = self._region(in_host) if in_host else None
        for chunk in block.chunks:
            self._make_chunk(block, chunk, states)

    def _make_chunk(self, block: Block, chunk: ChunkHome, states: Region | None) -> None:
        layout = chunk.layout
        if block.home is Tier.DISK and chunk.weight is None:
            chunk.weight = self.record("weight", layout.weight_bytes, block)
        if layout.trainable and chunk.state is None:
            if layout.index not in block.host_states:
                chunk.state = self.record("state", layout.state_bytes, block)
            else:
                assert states is not None
                chunk.state = states.carve(layout.state_bytes)
        if layout.trainable and block.gradients_home is Tier.DISK and chunk.gradient is None:
            chunk.gradient = self.record("gradient", layout.weight_bytes, block)

    def _region(self, nbytes: int, pin: Any = None) -> Region:
        region = Region(nbytes, pin)
        self._regions.append(region)
        return region

    def _fill(self, block: Block) -> None:
        """Move the parameters' values into the block's planes, and let go of their own storage."""
        for held in block.held:
            parameter = held.parameter
            if parameter.device.type != "meta" and held.numel:
                with torch.no_grad():
                    if held.split and parameter.dtype is torch.float32 and parameter.requires_grad:
                        self.values.write_master(held, parameter.data, upload=False)
                    else:
                        self.values.write(held, parameter.data, upload=False)
            if parameter.grad is not None:
                raise ValueError(f"{held.name} has a gradient: call model.zero_grad() before tiermem.offload")
            if parameter.device.type == "meta":
                replace_meta(held)
            attach(held)
            parameter.data = held.placeholder
        self.values.upload(block)
        self.watch_trainable(block)

    def watch_trainable(self, block: Block) -> None:
        """Hook the arrival of gradients of parameters that require one; make room for those that were frozen until
        now."""
        for held in block.held:
            parameter = held.parameter
            if held.hook is None and parameter.requires_grad:
                self.make_trainable(held)
                held.hook = parameter.register_post_accumulate_grad_hook(self.gradients.arrived)

    def make_trainable(self, held: Held) -> None:
        """Room for the parameter's gradient and states, if it was frozen until now."""
        if not held.block.layout.sections[held.block.layout.slices[held.index].section].trainable:
            self._unfreeze(held)

    def _unfreeze(self, held: Held) -> None:
        """Give the section of a frozen parameter gradients and states. Costs an allocation; not the steady state."""
        block = held.block
        if held.dtype not in TRAINABLE_CODES:
            raise ValueError(
                f"{held.name} has dtype {held.dtype} and cannot be trained: tiermem trains torch.bfloat16 and "
                "torch.float32"
            )
        block.wait_update()
        self.gradients.settle()
        layout = block.layout.with_trainable(block.layout.slices[held.index].section)
        old = block.chunks
        block.layout = layout
        block.chunks = [ChunkHome(chunk) for chunk in layout.chunks]
        added = sum(
            new.layout.state_bytes
            for new, was in zip(block.chunks, old, strict=True)
            if new.layout.trainable and not was.layout.trainable
        )
        for new, was in zip(block.chunks, old, strict=True):
            new.weight, new.state, new.gradient = was.weight, was.state, was.gradient
            new.wide_gradient, new.gradient_is_wide = was.wide_gradient, was.gradient_is_wide
        has_disk = self.store is not None
        if block.states_home is None:
            block.states_home = Tier.DISK if has_disk and added > self.host_budget.free_bytes else Tier.HOST
        narrow = layout.gradient_plane(wide=False).nbytes
        if block.gradients_home is None and not self.eager:
            block.gradients_home = Tier.DISK if has_disk and narrow > self.host_budget.free_bytes else Tier.HOST
        region = None
        if block.states_home is Tier.HOST:
            self.host_budget.take(added, f"optimizer states of {held.name}")
            region = self._region(added)
            new_chunks = {c.layout.index for c in block.chunks if c.layout.trainable and c.state is None}
            block.host_states |= new_chunks
        for chunk in block.chunks:
            self._make_chunk(block, chunk, region)
        block.gradients.direct = self.device.unified and block.gradients_home is Tier.HOST
        if block.gradients_home is Tier.HOST:
            block.gradients.narrow = layout.gradient_plane(wide=False)
            self.gradients.remake_plane(block, wide=block.gradients.wide)
        else:
            block.gradients.relayout()
        if not block.gradients.direct:
            self.gradients.grow_slots(narrow)

    # Memory taken later.

    def staging_pool(self) -> SlabPool:
        if self._staging is None:
            raise AssertionError("nothing is staged in this placement")
        return self._staging

    def enlarge_staging(self, slab_bytes: int, what: str) -> None:
        """Slabs of at least that size. Nothing may be staged at the time."""
        old = self._staging
        if old is None or old.slab_bytes >= slab_bytes:
            return
        self.host_budget.take((slab_bytes - old.slab_bytes) * old.count, f"staging of {what}")
        self._staging = self.gathering.staging = SlabPool(
            slab_bytes, old.count, None if self.device.unified else self.device.pin
        )
        old.close()

    def states_region(self, nbytes: int) -> Region:
        """Zeroed memory for optimizer states. The caller has charged the budget."""
        return self._region(nbytes)

    def drop_regions(self, addresses: Iterable[int]) -> None:
        """Let go of the regions that start at one of these addresses."""
        starts = set(addresses)
        for region in [region for region in self._regions if region.address in starts]:
            self._regions.remove(region)
            region.close()

    def host_plane(self, nbytes: int, what: str) -> torch.Tensor:
        self.host_budget.take(round_up(nbytes, PAGE_BYTES), what)
        return self._region(nbytes, None if self.device.unified else self.device.pin).carve(nbytes)

    def give_back_host_plane(self, plane: torch.Tensor) -> None:
        self.host_budget.give_back(round_up(plane.numel(), PAGE_BYTES))
        for region in self._regions:
            if region.address == plane.data_ptr():
                self._regions.remove(region)
                region.close()
                return

    def take_slot_bytes(self, nbytes: int, what: str) -> None:
        self.device_budget.take(nbytes, what)

    def threads_for(self, numel: int) -> int:
        return self.threads if numel >= _INLINE_NUMEL else 1

    # Phases.

    def check(self) -> None:
        """Raise what has gone wrong in the background, or that the runtime is closed."""
        if self.error is not None:
            raise self.error
        if self.closed:
            raise RuntimeError("this model's tiermem runtime was closed")

    def failed(self, error: BaseException) -> None:
        """An update was lost: the states on both sides of it no longer belong together, so the runtime can only be
        closed."""
        if self.error is None:
            self.error = error

    async def settle_or_fail(self, work: Sequence[Awaitable[None]]) -> None:
        try:
            await all_of(work)
        except BaseException as error:
            self.failed(error)
            raise

    def enter_backward(self) -> None:
        """Called by everything that only happens in backward; the first call arranges for its end."""
        if self.in_backward:
            return
        if self.unstepped:
            raise RuntimeError(
                "a second backward before step(): Policy(update_in_backward=True) promises one step after every "
                "backward"
            )
        self.in_backward = True
        self.gathering.begin(training=True)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self.timeline.finish()
        self.in_backward = False
        for block in self.blocks:
            block.read_in_backward = False
            self.gradients.end_backward(block)
        if not self.forward_depth:
            self.gathering.release_soft()

    def reset_phase(self) -> None:
        """No forward is running. What an interrupted one or an interrupted backward has left behind is put right."""
        if torch._C._current_graph_task_id() >= 0:
            return
        if self.in_backward:
            self._end_backward()
        for block in self.blocks:
            if block.holds:
                block.holds = 0
                self.gathering.release_finished(block)

    # The optimizer's step.

    def hyperparameters_now(self, held: Held) -> Hyperparameters:
        """For an update inside backward: what the optimizer's param groups say at this moment."""
        optimizer = held.optimizer()
        if optimizer is None:
            raise RuntimeError(
                f"Policy(update_in_backward=True) updates {held.name} inside backward, but no tiermem optimizer has "
                "it: build the "
                "optimizer after tiermem.offload and before the first backward"
            )
        return optimizer.hyperparameters_of(held, held.steps + 1)

    def _end_eager_step(self, parameters: Sequence[tuple[Held, GradientHandle, Any]], scalars: Any) -> None:
        """All updates have begun; the promise is checked, and the next round may come."""
        for held, handle, group in parameters:
            if held.applied is None:
                raise RuntimeError(
                    f"{held.name} has a gradient that no backward produced: Policy(update_in_backward=True) cannot "
                    "use it"
                )
            held.steps -= 1
            expected = scalars(held, handle, group)
            held.steps += 1
            if expected != held.applied:
                error = RuntimeError(
                    f"a hyperparameter of {held.name} changed between backward and step(), but its update began "
                    "inside backward "
                    "(Policy(update_in_backward=True)): change it after step(), or set update_in_backward=False"
                )
                self.failed(error)
                raise error
        self.counters.steps += 1
        for held, _, _ in parameters:
            held.applied = None
        with uninterrupted():
            self.unstepped = False
            for block in self.blocks:
                block.applied = block.touched = False
            self.gathering.training.end_round()
        self.gathering.begin(training=True)
        self.gathering.prefetch()

    def nonfinite(self, handles: Iterable[GradientHandle]) -> Held | None:
        """A parameter whose gradient is not finite, if there is one and the policy says to skip such steps."""
        self.check()
        if not self.eager:
            self.gradients.settle()
        if not self.policy.skip_nonfinite or self.eager:
            return None
        handles = list(handles)
        if all(math.isfinite(handle.factor) for handle in handles):
            blocks = {handle.held.block for handle in handles}
            if all(math.isfinite(block.partials.sum()) for block in blocks):
                return None
        return next((handle.held for handle in handles if not self.gradients.finite(handle)), None)

    def step(self, parameters: Sequence[tuple[Held, GradientHandle, Any]], scalars: Any) -> None:
        """Hand the updates of these parameters to the background. ``scalars(held, handle, group)`` gives their
        hyperparameters."""
        with torch.profiler.record_function("tiermem::step"):
            self._step(parameters, scalars)
        self.timeline.step_ended(self.counters.steps)

    def _step(self, parameters: Sequence[tuple[Held, GradientHandle, Any]], scalars: Any) -> None:
        self.check()
        if self.eager:
            self._end_eager_step(parameters, scalars)
            return
        self.gradients.settle()
        by_block: dict[Block, ParameterUpdates] = {}
        for held, handle, group in parameters:
            hyperparameters: Hyperparameters = scalars(held, handle, group)
            by_block.setdefault(held.block, {})[held] = (hyperparameters, handle.zeroed)
        for block in by_block:
            self.gathering.settle(block)
        with uninterrupted():
            self._hand_over(by_block)
        self.gathering.begin(training=True)
        self.gathering.prefetch()

    def _hand_over(self, by_block: dict[Block, ParameterUpdates]) -> None:
        self.counters.steps += 1
        for block in sorted(by_block, key=lambda block: (self.rank(block), block.index)):
            for held in by_block[block]:
                held.steps += 1
                held.updated = True
            self.gathering.invalidate(block)
            block.update = self.updates.submit(block, by_block[block])
        for block in self.blocks:
            block.touched = False
        self.gathering.training.end_round()

    def rank(self, block: Block) -> int:
        """When the next round needs the block's new weights, among all blocks: those that stay on the device first."""
        return -1 if block.resident else self.gathering.training.rank(block.index)

    def skip(self, culprit: str) -> None:
        """Count a step that changes nothing because the gradient of ``culprit`` is not finite."""
        self.counters.steps_skipped += 1
        self.timeline.step_ended(self.counters.steps + self.counters.steps_skipped)
        if not self._warned_nonfinite:
            self._warned_nonfinite = True
            warnings.warn(
                f"the gradient of {culprit} is not finite: this step changes nothing. (Counted in tiermem.report; "
                "said once. If the "
                "loss reads a parameter outside its module's forward, read it under tiermem.gather. "
                "Policy(skip_nonfinite=False) updates anyway.)",
                RuntimeWarning,
                stacklevel=4,
            )

    # Reading.

    def synchronize(self) -> None:
        self.check()
        self.gradients.settle()
        for block in self.blocks:
            block.wait_update()
            if block.slot is not None and block.slot.load is not None:
                block.slot.load.result()
            self.gathering.wait_copies(block)
        self.check()

    def report(self) -> Report:
        fallbacks = [f"kernels: {self.kernels.passed_over}"] if self.kernels.passed_over else []
        if self.engine is not None:
            fallbacks += self.engine.fallbacks
        return Report(
            [
                BlockReport(b.name, b.numel, b.home, b.states_home, b.gradients_home, b.states_in_host)
                for b in self.blocks
            ],
            {
                Tier.DEVICE: self.device_budget.used_bytes,
                Tier.HOST: self.host_budget.used_bytes,
                Tier.DISK: self.store.allocated_bytes if self.store is not None else 0,
            },
            self.engine.bytes_read if self.engine is not None else 0,
            self.engine.bytes_written if self.engine is not None else 0,
            self.counters.bytes_copied_in,
            self.counters.bytes_copied_out,
            dict(self.counters.seconds_waited),
            self.counters.steps,
            self.counters.steps_skipped,
            self.engine.name if self.engine is not None else None,
            self.kernels.name,
            fallbacks,
            parse_bytes(self.memory.disk_endurance) if self.memory.disk_endurance is not None else None,
        )

    # The end.

    def close(self) -> None:
        """Put the current weights back into plain parameters and give everything back. What cannot be read any more
        becomes NaN, with a warning."""
        if self.closed:
            return
        for block in self.blocks:
            for future in (block.update, block.gradients.flush, block.slot.load if block.slot else None):
                if future is not None:
                    future.exception()
            block.update = None
        lost: list[str] = []
        for block in self.blocks:
            for held in block.held:
                gradient = self._final_gradient(held)
                try:
                    weights = self._final_value(held)
                except Exception as error:
                    lost.append(f"{held.name} ({str(error) or repr(error)})")
                    weights = torch.full(held.size, float("nan"), dtype=held.original_dtype)
                self._restore(held, weights, gradient)
        self._abandon()
        if lost:
            warnings.warn(
                f"the weights of {len(lost)} parameters could not be read back and are NaN now: {'; '.join(lost[:3])}",
                RuntimeWarning,
                stacklevel=3,
            )

    def _final_value(self, held: Held) -> torch.Tensor:
        if held.original_dtype is torch.float32 and held.split:
            return self.values.read_master(held)
        return self.values.read(held).to(held.original_dtype)

    def _final_gradient(self, held: Held) -> torch.Tensor | None:
        """The gradient, if there is one that can be had."""
        handle = self.gradients.live(held)
        if handle is None or self.eager or self.error is not None:
            return None
        with contextlib.suppress(Exception):
            return self.gradients.fetch(handle)
        return None

    def _restore(self, held: Held, weights: torch.Tensor, gradient: torch.Tensor | None) -> None:
        parameter = held.parameter
        if held.hook is not None:
            held.hook.remove()
        detach(held)
        parameter.grad = None
        parameter.data = weights.to(self.device.torch_device)
        if gradient is not None:
            parameter.grad = gradient.to(parameter.dtype)

    def _abandon(self) -> None:
        """Give back threads, memory and files. Parameters taken over before a failed construction get their values
        back."""
        for block in self.blocks:
            for held in block.held:
                if held_of(held.parameter) is held:
                    self._restore(held, self._final_value(held), None)
        self.closed = True
        self.background.close()
        self.device.close()  # before the memory goes that copies may still be reading and writing
        if self._finalizer is not None:
            self._finalizer.detach()
        if self.store is not None:
            self.store.close()
        if self.engine is not None and self.engine is not self.policy.io:
            self.engine.close()
        if self._staging is not None:
            self._staging.close()
        for region in self._regions:
            region.close()
        self._regions.clear()
        for block in self.blocks:
            block.plane = block.device_plane = None
            block.gradients = None  # type: ignore[assignment]
            block.chunks = []

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refuse_copy("this model")

    def __deepcopy__(self, memo: Any) -> Any:
        raise refuse_copy("this model")


def replace_meta(held: Held) -> None:
    """A parameter on the meta device becomes one that can point at real memory (the same object)."""
    real = nn.Parameter(held.placeholder, requires_grad=held.parameter.requires_grad)
    torch.utils.swap_tensors(held.parameter, real)


def _nesting(module: nn.Module, uses: Sequence[tuple[nn.Module, str, list[int]]], residents: Sequence[bool]) -> int:
    """Blocks that nested forwards may hold at the same time."""
    used = {id(part): {index for index in indices if not residents[index]} for part, _, indices in uses}

    def deepest(part: nn.Module, held: frozenset[int]) -> int:
        held = held | used.get(id(part), set())
        return max([len(held), *(deepest(child, held) for child in part.children())])

    return max(1, deepest(module, frozenset()))


def _close_leftovers(background: Background, store: Store | None, engine: Engine | None, device: Device) -> None:
    """The module was dropped without ``tiermem.close``, or the process ends."""
    background.close()
    device.close()
    if store is not None:
        store.close()
    if engine is not None:
        engine.close()
