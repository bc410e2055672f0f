"""Deciding where everything rests, before anything moves: homes for every block, sizes of slots, slabs and chunks,
within the budgets.

Order of preference for scarce HOST memory, by traffic saved per byte and step: weights (three bytes moved per byte),
then gradients and states (two). Every decision is a function of sizes and budgets alone, so it can be made for a
model that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiermem.layout import (
    MOMENT_FORMATS,
    MOMENTS_PLANNED,
    PAGE_BYTES,
    BlockLayout,
    MomentFormat,
    ParameterSpec,
    lay_out,
    round_up,
)
from tiermem.memory import Budget, format_bytes
from tiermem.policy import CHUNK_ALIGNMENT, Policy, Tier

CHUNK_NUMEL_MAX = 1 << 20
STAGING_SLABS = 4
SLOTS_DEFAULT_MAX = 4
GRADIENT_SLOTS = 2
GRADIENT_SLOTS_MAX = 8
"""With updates inside backward, gradients wait in slots for their updates, which may go on during the next forward."""


@dataclass
class BlockPlan:
    """One block's sizes (bytes) and homes."""

    name: str
    layout: BlockLayout
    resident: bool
    home: Tier = Tier.HOST
    states_home: Tier | None = None
    """DISK also where some chunks' states are in HOST: see ``host_states``."""
    host_states: frozenset[int] = frozenset()
    """Chunks whose states rest in HOST."""
    gradients_home: Tier | None = None
    gradient_plane_bytes: int = 0
    """Taken in HOST: room for fp32 sums over micro-batches where that fits (charged in full, resident when used)."""

    @property
    def gradient_bytes(self) -> int:
        return self.layout.gradient_plane(wide=False).nbytes

    @property
    def trainable(self) -> bool:
        return any(section.trainable for section in self.layout.sections)


@dataclass(frozen=True)
class Placement:
    """Where everything rests, and the buffers between."""

    blocks: list[BlockPlan]
    chunk_numel: int
    slab_bytes: int
    slab_count: int  # 0: nothing is staged
    slots: list[int]
    """Bytes of each weight slot, largest first."""
    gradient_slots: list[int]


def slab_bytes_for(chunk_numel: int, moment_format: MomentFormat, moments: int = MOMENTS_PLANNED) -> int:
    """Room for a chunk's states, weights and widest gradients at once: 16 bytes per element with two fp32 moments."""
    return 8 * chunk_numel + moments * moment_format.nbytes(chunk_numel) + 4 * PAGE_BYTES


def choose_chunk_numel(policy: Policy, blocks: Sequence[Sequence[ParameterSpec]], host_limit_bytes: int) -> int:
    """As asked; else the largest power of two whose staging slabs take at most a quarter of the host budget, and no
    larger than the largest section could fill."""
    if policy.chunk_numel is not None:
        return policy.chunk_numel
    moment_format = MOMENT_FORMATS[policy.moments]
    largest = max((sum(spec.numel for spec in block) for block in blocks), default=1)
    chunk = CHUNK_NUMEL_MAX
    while chunk > CHUNK_ALIGNMENT and (
        STAGING_SLABS * slab_bytes_for(chunk, moment_format) > host_limit_bytes // 4 or chunk // 2 >= largest
    ):
        chunk //= 2
    return chunk


def place(
    names: Sequence[str],
    specs: Sequence[Sequence[ParameterSpec]],
    residents: Sequence[bool],
    nesting: int,
    *,
    policy: Policy,
    unified: bool,
    has_disk: bool,
    device: Budget,
    host: Budget,
) -> Placement:
    """Choose homes and take their bytes from the budgets.

    nesting: blocks that a forward may need gathered at the same time.
    Errors: ``ValueError`` naming what does not fit, the bytes needed and present, and the remedy.
    """
    chunk_numel = choose_chunk_numel(policy, specs, host.limit_bytes)
    moment_format = MOMENT_FORMATS[policy.moments]
    plans = [
        BlockPlan(name, lay_out(block, chunk_numel, moment_format), resident)
        for name, block, resident in zip(names, specs, residents, strict=True)
    ]
    slab_bytes = slab_bytes_for(chunk_numel, moment_format)
    staged = has_disk or not unified
    slab_count = 0
    if staged:
        slab_count = min(STAGING_SLABS, max(1, host.limit_bytes // 2 // slab_bytes))
        host.take(slab_count * slab_bytes, f"staging of {slab_count} chunks of {chunk_numel} elements")
    _choose_weights(plans, policy, unified, has_disk, device, host, nesting)
    if not policy.update_in_backward:
        _choose_gradients(plans, has_disk, host)
    _choose_states(plans, policy, has_disk, host)
    slots, gradient_slots = _choose_slots(plans, policy, nesting, unified, device)
    return Placement(plans, chunk_numel, slab_bytes, slab_count, slots, gradient_slots)


def _in_slots(plan: BlockPlan, unified: bool) -> bool:
    """The block is gathered into a slot: its home is not where the device computes."""
    return plan.home is Tier.DISK or (plan.home is Tier.HOST and not unified)


def _choose_weights(
    plans: list[BlockPlan], policy: Policy, unified: bool, has_disk: bool, device: Budget, host: Budget, nesting: int
) -> None:
    def to_host(plan: BlockPlan, what: str) -> None:
        host.take(plan.layout.weight_bytes, f"{what} of block {plan.name}")

    for plan in plans:
        if plan.resident:
            plan.home = Tier.DEVICE
            device.take(plan.layout.weight_bytes, f"resident weights of block {plan.name}")
            if not unified:
                to_host(plan, "host copy of the resident weights")
    movable = [plan for plan in plans if not plan.resident]
    largest = max((plan.layout.weight_bytes for plan in movable), default=0)
    gradients = max((plan.gradient_bytes for plan in movable), default=0)
    # What slots and gradient slots will need if any block is not at home on the device.
    reserve = 0 if unified else (nesting + 1) * largest + GRADIENT_SLOTS * gradients
    if policy.weights == "auto":
        on_device = not unified
        for plan in movable:
            nbytes = plan.layout.weight_bytes
            remaining = sum(later.layout.weight_bytes for later in movable[movable.index(plan) :])
            fits_all = remaining + GRADIENT_SLOTS * gradients <= device.free_bytes
            if on_device and nbytes <= host.free_bytes and (fits_all or nbytes + reserve <= device.free_bytes):
                plan.home = Tier.DEVICE
                device.take(nbytes, f"weights of block {plan.name}")
                to_host(plan, "host copy of the weights")
                continue
            on_device = False
            plan.home = Tier.HOST if nbytes <= host.free_bytes or not has_disk else Tier.DISK
            if plan.home is Tier.HOST:
                to_host(plan, "weights")
        return
    for plan in movable:
        assert isinstance(policy.weights, Tier)
        plan.home = policy.weights
        if plan.home is Tier.DEVICE:
            device.take(plan.layout.weight_bytes, f"weights of block {plan.name}")
            if not unified:
                to_host(plan, "host copy of the weights")
        elif plan.home is Tier.HOST:
            to_host(plan, "weights")
        elif not has_disk:
            raise ValueError("Policy(weights='disk') needs a directory: Memory(disk=...)")


def _choose_gradients(plans: list[BlockPlan], has_disk: bool, host: Budget) -> None:
    for plan in plans:
        if plan.trainable:
            wide = plan.layout.gradient_plane(wide=True).nbytes
            plan.gradients_home = Tier.HOST if wide <= host.free_bytes or not has_disk else Tier.DISK
            if plan.gradients_home is Tier.HOST:
                plan.gradient_plane_bytes = wide if wide <= host.free_bytes else plan.gradient_bytes
                host.take(plan.gradient_plane_bytes, f"gradients of block {plan.name}")


def _choose_states(plans: list[BlockPlan], policy: Policy, has_disk: bool, host: Budget) -> None:
    if policy.states is Tier.DISK and not has_disk:
        raise ValueError("Policy(states='disk') needs a directory: Memory(disk=...)")
    trained = [plan for plan in plans if plan.trainable]
    total = sum(plan.layout.state_bytes for plan in trained)
    all_in_host = policy.states is Tier.HOST or (policy.states == "auto" and (total <= host.free_bytes or not has_disk))
    # What fits in HOST is spread evenly over the blocks, so that memory and disk work on every block at the same time.
    share = min(1.0, host.free_bytes / total) if total and policy.states == "auto" else 0.0
    credit = 0.0
    for plan in trained:
        chunks = [chunk for chunk in plan.layout.chunks if chunk.trainable]
        plan.states_home = Tier.HOST if all_in_host else Tier.DISK
        if all_in_host:
            plan.host_states = frozenset(chunk.index for chunk in chunks)
            host.take(plan.layout.state_bytes, f"optimizer states of block {plan.name}")
            continue
        kept = set()
        for chunk in chunks:
            credit += share * chunk.state_bytes
            if chunk.state_bytes <= min(credit, host.free_bytes):
                credit -= chunk.state_bytes
                host.take(chunk.state_bytes, f"optimizer states of block {plan.name}")
                kept.add(chunk.index)
        plan.host_states = frozenset(kept)


def _choose_slots(
    plans: list[BlockPlan], policy: Policy, nesting: int, unified: bool, device: Budget
) -> tuple[list[int], list[int]]:
    """Bytes of the weight slots and of the gradient slots. What must be, first; then what lets copies run ahead, as far
    as the budget goes.

    The weight slots that nesting needs are as large as the largest block, the one gradient slot too: so there is always
    one that fits. Each further slot is as large as the largest block that would otherwise have none.
    """
    gathered = _largest_first([plan for plan in plans if _in_slots(plan, unified)], weights=True)
    staged = [plan for plan in plans if plan.trainable and (not unified or plan.gradients_home is not Tier.HOST)]
    produced = _largest_first(staged, weights=False)
    slots: list[int] = []
    if gathered:
        count = min(nesting, len(gathered))
        nbytes, name = gathered[0]
        what = f"{count} weight slot{'s' if count > 1 else ''} for the largest block, {name} ({format_bytes(nbytes)}),"
        device.take(count * nbytes, what)
        slots = [nbytes] * count
    gradient_slots: list[int] = []
    if produced:
        nbytes, name = produced[0]
        device.take(nbytes, f"a gradient slot for the largest block, {name},")
        gradient_slots = [nbytes]
    _add_slots(gradient_slots, produced, GRADIENT_SLOTS, device)
    _add_slots(slots, gathered, SLOTS_DEFAULT_MAX, device)
    if policy.update_in_backward:
        _add_slots(gradient_slots, produced, GRADIENT_SLOTS_MAX, device)
    return slots, gradient_slots


def _largest_first(plans: list[BlockPlan], *, weights: bool) -> list[tuple[int, str]]:
    """Bytes that one slot needs for each block, with the block's name."""
    sizes = [(plan.layout.weight_bytes if weights else plan.gradient_bytes, plan.name) for plan in plans]
    return sorted(sizes, key=lambda one: -one[0])


def _add_slots(slots: list[int], blocks: list[tuple[int, str]], count_max: int, device: Budget) -> None:
    for nbytes, _ in blocks[len(slots) : count_max]:
        if 0 < nbytes <= device.free_bytes:
            device.take(nbytes, "a slot")
            slots.append(nbytes)


def extent_class(nbytes: int) -> int:
    """Extents are equal within a kind; a kind is a size class, so that blocks of many sizes need few kinds and waste
    at most an eighth."""
    step = max(PAGE_BYTES, 1 << max(0, nbytes.bit_length() - 4))
    return round_up(nbytes, step)
