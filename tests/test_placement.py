"""Homes are chosen within the budgets, before anything moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.layout import ParameterSpec
from tiermem.memory import Budget
from tiermem.placement import (
    GRADIENT_SLOTS,
    GRADIENT_SLOTS_MAX,
    SLOTS_DEFAULT_MAX,
    Placement,
    extent_class,
    place,
)
from tiermem.policy import Policy, Tier

MIB = 1 << 20


def decide(
    sizes: list[int],
    *,
    host: int,
    device: int = 64 * MIB,
    unified: bool = True,
    has_disk: bool = True,
    policy: Policy | None = None,
    nesting: int = 1,
) -> tuple[Placement, Budget, Budget]:
    budgets = Budget(Tier.DEVICE, device, "more device"), Budget(Tier.HOST, host, "more host")
    placement = place(
        [f"layers.{index}" for index in range(len(sizes))],
        [[ParameterSpec(numel, "torch.bfloat16", 2, True)] for numel in sizes],
        [False] * len(sizes),
        nesting,
        policy=policy or Policy(chunk_numel=4096),
        unified=unified,
        has_disk=has_disk,
        device=budgets[0],
        host=budgets[1],
    )
    return placement, *budgets


def test_all_in_host_where_it_fits() -> None:
    placement, _, _ = decide([100_000] * 4, host=64 * MIB)
    assert {plan.home for plan in placement.blocks} == {Tier.HOST}
    assert {plan.states_home for plan in placement.blocks} == {Tier.HOST}
    assert placement.slots == []


def test_weights_go_to_host_before_gradients_and_states() -> None:
    # 10 blocks of 200 KB of weights, 400 KB for sums of gradients, 1 MB of states; room for half of the sums.
    placement, _, _ = decide([100_000] * 10, host=4 * MIB + 4 * (16 * 4096 + 16384))
    assert {plan.home for plan in placement.blocks} == {Tier.HOST}
    assert {plan.gradients_home for plan in placement.blocks} == {Tier.HOST, Tier.DISK}
    assert {plan.states_home for plan in placement.blocks} == {Tier.DISK}


def test_what_fits_of_the_states_is_spread_evenly_over_the_blocks() -> None:
    placement, _, host = decide([400_000] * 8, host=(8 * 6 + 8 * 2) * 400_000)
    shares = [
        sum(plan.layout.chunks[index].state_bytes for index in plan.host_states) / plan.layout.state_bytes
        for plan in placement.blocks
    ]
    assert min(shares) > 0.1
    assert max(shares) - min(shares) < 0.02  # a chunk more or less
    assert host.free_bytes < 100_000


def test_nothing_fits_and_there_is_no_disk() -> None:
    with pytest.raises(ValueError, match=r"layers\.\d+ needs .*host.*more host"):
        decide([1_000_000] * 4, host=2 * MIB, has_disk=False)


def test_the_largest_block_must_fit_the_device() -> None:
    with pytest.raises(ValueError, match=r"layers\.1.*device.*more device"):
        decide([1000, 10_000_000], host=2 * MIB, device=10 * MIB)


def test_the_first_blocks_stay_on_an_accelerator_that_has_room() -> None:
    placement, device, _ = decide([500_000] * 12, host=256 * MIB, device=12 * MIB, unified=False)
    homes = [plan.home for plan in placement.blocks]
    assert homes[0] is Tier.DEVICE
    assert homes[-1] is Tier.HOST
    assert homes == sorted(homes, key=[Tier.DEVICE, Tier.HOST].index)
    assert len(placement.slots) >= 2
    assert device.used_bytes <= device.limit_bytes


def test_a_model_that_fits_the_accelerator_needs_no_slots() -> None:
    placement, _, _ = decide([500_000] * 4, host=256 * MIB, device=64 * MIB, unified=False)
    assert {plan.home for plan in placement.blocks} == {Tier.DEVICE}
    assert placement.slots == []


def test_slots_are_as_large_as_the_largest_blocks_and_no_larger() -> None:
    sizes = [40_960, 4_096, 409_600, 8_192, 4_096, 409_600, 16_384]  # elements of bf16: whole pages
    bytes_of = sorted((2 * numel for numel in sizes), reverse=True)
    policy = Policy(chunk_numel=4096, weights="host")
    placement, _, _ = decide(sizes, host=64 * MIB, unified=False, policy=policy)
    assert placement.slots == bytes_of[:SLOTS_DEFAULT_MAX]
    assert placement.gradient_slots == bytes_of[:GRADIENT_SLOTS]
    placement, _, _ = decide(sizes, host=64 * MIB, unified=False, policy=policy, nesting=3)
    assert placement.slots == [bytes_of[0]] * 3 + bytes_of[3:SLOTS_DEFAULT_MAX]
    eager = replace(policy, update_in_backward=True)
    placement, _, _ = decide(sizes, host=64 * MIB, unified=False, policy=eager)
    assert placement.gradient_slots == bytes_of[:GRADIENT_SLOTS_MAX]


SIZES = st.lists(st.integers(1, 300_000), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(1, 64), st.integers(1, 64), st.booleans(), st.booleans(), st.integers(1, 3), st.booleans())
def test_budgets_hold_whatever_is_asked(
    sizes: list[int], host: int, device: int, unified: bool, has_disk: bool, nesting: int, eager: bool
) -> None:
    try:
        placement, device_budget, host_budget = decide(
            sizes,
            host=host * MIB // 4,
            device=device * MIB // 4,
            unified=unified,
            has_disk=has_disk,
            nesting=nesting,
            policy=Policy(chunk_numel=4096, update_in_backward=eager),
        )
    except ValueError as error:
        assert "bytes" in str(error)
        return
    blocks = placement.blocks
    in_host = placement.slab_bytes * placement.slab_count
    on_device = sum(placement.slots) + sum(placement.gradient_slots)
    for plan in blocks:
        weight = plan.layout.weight_bytes
        on_device += weight if plan.home is Tier.DEVICE else 0
        in_host += weight if plan.home is Tier.HOST or (plan.home is Tier.DEVICE and not unified) else 0
        in_host += plan.gradient_plane_bytes
        in_host += sum(plan.layout.chunks[index].state_bytes for index in plan.host_states)
        slotted = plan.home is Tier.DISK or (plan.home is Tier.HOST and not unified)
        assert not slotted or weight <= min(placement.slots[:nesting])
        assert has_disk or Tier.DISK not in (plan.home, plan.states_home, plan.gradients_home)
    assert in_host == host_budget.used_bytes <= host_budget.limit_bytes
    assert on_device == device_budget.used_bytes <= device_budget.limit_bytes


@given(st.integers(1, 1 << 40))
def test_extents_of_a_class_waste_at_most_an_eighth_or_a_page(nbytes: int) -> None:
    size = extent_class(nbytes)
    assert size >= nbytes
    assert size % 4096 == 0
    assert size - nbytes < max(4096, nbytes / 8 + 1)
    assert extent_class(size) == size
