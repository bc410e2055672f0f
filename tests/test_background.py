"""The background threads: what they may and may not do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tiermem.background import Background


async def _threads() -> int:
    return torch.get_num_threads()


class _Mark:
    """An event that is waited for: what the thread that waits sees."""

    threads = 0

    def synchronize(self) -> None:
        self.threads = torch.get_num_threads()


def _seen_by_the_mark(background: Background) -> int:
    mark = _Mark()
    background.run(background.reached(mark))
    return mark.threads


@pytest.mark.parametrize(
    "where",
    [
        lambda background: background.run(_threads()),
        lambda background: background.start_kernel(torch.get_num_threads).result(),
        lambda background: background.run(background.wait(torch.get_num_threads)),
        lambda background: _seen_by_the_mark(background),
    ],
    ids=["loop", "kernel", "wait", "mark"],
)
def test_torch_has_no_team_there(where: Callable[[Background], int]) -> None:
    """A team that idles would make the main thread's team slow; the main thread keeps its own."""
    mine = torch.get_num_threads()
    torch.set_num_threads(2)  # what threads that begin later would take over
    background = Background("test")
    try:
        assert where(background) == 1
        assert torch.get_num_threads() == 2
    finally:
        background.close()
        torch.set_num_threads(mine)
