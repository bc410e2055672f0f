"""What comes next: the order of one round is expected of the next, and another order is only slower."""

from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from tiermem.schedule import Schedule


def replay(schedule: Schedule, order: list[int]) -> None:
    for block in order:
        schedule.note(block)
    schedule.end_round()


def soonest(schedule: Schedule, count: int) -> list[int]:
    return list(islice(schedule.upcoming(), count))


def test_nothing_is_expected_before_a_round_is_complete() -> None:
    schedule = Schedule()
    schedule.note(0)
    assert soonest(schedule, 3) == []


def test_forward_and_backward_are_expected_as_they_were() -> None:
    schedule = Schedule()
    replay(schedule, [0, 1, 2, 2, 1, 0])
    assert soonest(schedule, 2) == [0, 1]
    schedule.note(0)
    schedule.note(1)
    assert soonest(schedule, 3) == [2, 1, 0]
    assert schedule.distance(2) == 0
    assert schedule.distance(1) == 2
    assert schedule.distance(7) == 6  # unknown: farthest


def test_the_round_begins_again_behind_its_end() -> None:
    schedule = Schedule()
    replay(schedule, [0, 1, 2])
    for block in (0, 1, 2):
        schedule.note(block)
    assert soonest(schedule, 2) == [0, 1]


def test_another_order_is_followed_as_soon_as_it_is_recognised() -> None:
    schedule = Schedule()
    replay(schedule, [0, 1, 2, 3, 4])
    schedule.note(0)
    schedule.note(3)  # 1 and 2 are skipped
    assert soonest(schedule, 1) == [4]
    schedule.note(9)  # never seen
    assert soonest(schedule, 1) == [4]
    schedule.end_round()
    assert soonest(schedule, 3) == [0, 3, 9]


def test_updates_are_needed_in_the_order_of_first_use() -> None:
    schedule = Schedule()
    for block in (2, 0, 1, 1, 0, 2):
        schedule.note(block)
    assert sorted(range(4), key=schedule.rank) == [2, 0, 1, 3]
    schedule.end_round()
    assert sorted(range(4), key=schedule.rank) == [2, 0, 1, 3]
    schedule.note(1)
    assert sorted(range(4), key=schedule.rank)[0] == 1


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12), st.lists(st.integers(0, 7), max_size=12), st.integers(1, 9)
)
def test_any_order_gives_different_known_blocks(recorded: list[int], seen: list[int], count: int) -> None:
    schedule = Schedule()
    replay(schedule, recorded)
    for block in seen:
        schedule.note(block)
    for block in range(8):
        ahead = [(schedule._position + step) % len(recorded) for step in range(len(recorded))]
        expected = next((step for step, at in enumerate(ahead) if recorded[at] == block), len(recorded))
        assert schedule.distance(block) == expected
    upcoming = soonest(schedule, count)
    assert len(upcoming) == len(set(upcoming)) == min(count, len(set(recorded)))
    assert [schedule.distance(block) for block in upcoming] == sorted(schedule.distance(block) for block in upcoming)
