"""Sizes, budgets and regions."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tiermem.memory import Budget, Memory, Region, format_bytes, parse_bytes
from tiermem.policy import Policy, Tier


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("20GiB", 20 << 30),
        ("20 gib", 20 << 30),
        ("1.5K", 1536),
        ("2MB", 2_000_000),
        ("1T", 1 << 40),
        (".5M", 1 << 19),
    ],
)
def test_sizes_are_read(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "12 parsecs", "-1", -1, "1e9GiB ", None, True])
def test_what_is_not_a_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)  # type: ignore[arg-type]


def test_memory_names_the_field_that_is_wrong() -> None:
    with pytest.raises(ValueError, match="host"):
        Memory(host="lots")


def test_sizes_are_written_readably() -> None:
    assert format_bytes(512) == "512 B"
    assert format_bytes(3 << 20) == "3.0 MiB"
    assert format_bytes(5 << 40) == "5.00 TiB"


def test_a_budget_never_gives_more_than_it_has() -> None:
    budget = Budget(Tier.HOST, 100, "raise it")
    budget.take(60, "one thing")
    with pytest.raises(ValueError, match=r"another thing.*host.*41.*40.*raise it"):
        budget.take(41, "another thing")
    assert budget.used_bytes == 60
    budget.give_back(60)
    assert budget.free_bytes == 100
    with pytest.raises(AssertionError):
        budget.give_back(1)


def test_a_region_is_zeroed_page_aligned_and_pinned_once() -> None:
    pinned: list[tuple[int, int]] = []
    unpinned: list[int] = []

    def pin(address: int, nbytes: int) -> object:
        pinned.append((address, nbytes))
        return lambda: unpinned.append(address)

    region = Region(3 * 4096, pin)  # type: ignore[arg-type]
    parts = [region.carve(5000), region.carve(1)]
    assert pinned == [(region.address, 3 * 4096)]
    assert [part.data_ptr() for part in parts] == [region.address, region.address + 8192]
    assert not any(part.any() for part in parts)
    with pytest.raises(AssertionError):
        region.carve(1)
    region.close()
    region.close()
    assert unpinned == [region.address]


def test_a_region_lives_as_long_as_what_was_carved_from_it() -> None:
    region = Region(4096)
    part = region.carve(4096)
    gone = weakref.ref(region)
    region.close()
    del region
    gc.collect()
    assert gone() is None
    part.fill_(7)
    assert int(part.to(torch.int64).sum()) == 7 * 4096


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights": "moon"},
        {"states": "device"},
        {"moments": "fp7"},
        {"kernels": "fast"},
        {"chunk_numel": 5000},
        {"chunk_numel": 0},
        {"threads": 0},
    ],
)
def test_a_wrong_choice_is_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Policy(**wrong)  # type: ignore[arg-type]


def test_homes_can_be_tiers_or_names() -> None:
    assert Policy(weights=Tier.DISK).weights is Policy(weights="disk").weights is Tier.DISK
    assert Policy().weights == "auto"
