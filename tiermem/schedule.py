"""The order in which blocks are needed: recorded as it happens, replayed to say what comes next. Pure Python, no torch.

One *round* is everything from one optimizer step to the next. The first round is recorded; afterwards each gather is
looked up in the last complete round, and what followed it there is expected to follow it now. A round that takes
another order is only slower: the position is found again at the next gather that the recording knows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator


class Schedule:
    def __init__(self) -> None:
        self._recorded: list[int] = []  # the last complete round
        self._uses: dict[int, list[int]] = {}  # block: its places in _recorded
        self._round: list[int] = []  # the round being recorded
        self._ranks: dict[int, int] = {}  # block: its place among the first uses of the newest round
        self._position = 0  # in _recorded: where the next gather is expected

    def note(self, block: int) -> None:
        """``block`` is needed now."""
        if not self._round:
            self._ranks = {}
        self._round.append(block)
        self._ranks.setdefault(block, len(self._ranks))
        recorded = self._recorded
        if not recorded:
            return
        if self._position < len(recorded) and recorded[self._position] == block:
            self._position += 1
            return
        for found in (*range(self._position, len(recorded)), *range(min(self._position, len(recorded)))):
            if recorded[found] == block:
                self._position = found + 1
                return

    def end_round(self) -> None:
        """The optimizer steps: what was seen since the last time is what to expect next time."""
        if self._round:
            self._recorded, self._round = self._round, []
            self._uses = {}
            for position, block in enumerate(self._recorded):
                self._uses.setdefault(block, []).append(position)
        self._position = 0

    def upcoming(self) -> Iterator[int]:
        """All recorded blocks, each once, soonest first; past the end of the round it starts again."""
        found: set[int] = set()
        recorded = self._recorded
        for step in range(len(recorded)):
            block = recorded[(self._position + step) % len(recorded)]
            if block not in found:
                found.add(block)
                yield block

    def distance(self, block: int) -> int:
        """Gathers until ``block`` is needed; a block that the recording does not know is farthest."""
        uses = self._uses.get(block)
        if uses is None:
            return len(self._recorded)
        later = bisect_left(uses, self._position)
        return (uses[later] if later < len(uses) else uses[0] + len(self._recorded)) - self._position

    def rank(self, block: int) -> int:
        """Of ``block`` by first use in the newest round: the order in which the next one will need them. A block that
        it did not use is last."""
        return self._ranks.get(block, len(self._ranks))
