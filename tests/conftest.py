"""What every test gets: one torch thread, and an end to whatever hangs."""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import reference
import torch

HANG_SECONDS = 120  # the slowest test takes a tenth of this


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seeds", type=int, default=None, help="try the simulated device with so many seeds, and mutations at length"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hang(seconds): end the test when it takes longer")
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _end_of_hangs(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that hangs fails by `TimeoutError`; one that cannot even be interrupted ends the run with its stacks."""
    marker = request.node.get_closest_marker("hang")
    seconds = marker.args[0] if marker else HANG_SECONDS

    def interrupt(signum: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        raise TimeoutError(f"the test took more than {seconds} s")

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(3 * seconds, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., reference.Outcome]:
    """`reference.compare` in a directory of this test."""

    def run(script: reference.Script, *args: Any, **kwargs: Any) -> reference.Outcome:
        return reference.compare(script, tmp_path, *args, **kwargs)

    return run
