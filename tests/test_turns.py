"""Turns: one at a time, the most urgent of those who wait, and a cancelled one holds up nobody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tiermem.turns import Turns


async def _taken(ranks: Sequence[int], cancelled: set[int]) -> list[int]:
    """Numbers of those who got a turn, in order. All of them wait behind one that has it."""
    turns = Turns()
    order: list[int] = []
    inside = 0

    async def take(number: int, rank: int) -> None:
        nonlocal inside
        async with turns.turn(rank):
            inside += 1
            assert inside == 1
            order.append(number)
            await asyncio.sleep(0)
            inside -= 1

    async with turns.turn(0):
        tasks = [asyncio.ensure_future(take(number, rank)) for number, rank in enumerate(ranks)]
        await asyncio.sleep(0)
        for number in cancelled:
            tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with turns.turn(0):  # nobody has it any more
        return order


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.sets(st.integers(0, 7)))
def test_the_lowest_rank_is_next_and_equals_in_order(ranks: list[int], chosen: set[int]) -> None:
    cancelled = {number for number in chosen if number < len(ranks)}
    expected = sorted(set(range(len(ranks))) - cancelled, key=lambda number: (ranks[number], number))
    assert asyncio.run(_taken(ranks, cancelled)) == expected


def test_a_turn_given_to_one_that_is_cancelled_in_the_same_moment_goes_on() -> None:
    async def run() -> bool:
        turns = Turns()
        async with turns.turn(0):
            first = asyncio.ensure_future(turns.turn(0).__aenter__())
            second = asyncio.ensure_future(turns.turn(1).__aenter__())
            await asyncio.sleep(0)
        first.cancel()  # it was just chosen, and has not run
        with contextlib.suppress(asyncio.CancelledError):
            await first
        await asyncio.wait_for(second, 5)
        return first.cancelled()

    assert asyncio.run(run())


def test_an_error_inside_passes_the_turn_on() -> None:
    async def run() -> None:
        turns = Turns()
        with contextlib.suppress(ZeroDivisionError):
            async with turns.turn(0):
                raise ZeroDivisionError
        async with turns.turn(0):
            pass

    asyncio.run(asyncio.wait_for(run(), 5))
