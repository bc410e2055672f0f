"""Turns: one at a time, the most urgent first."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator

__all__ = ["Turns"]


class Turns:
    """Like a lock, but of those who wait the one with the lowest rank is next; first come, first served among equals.

    Whoever has the turn keeps it: a more urgent one that comes later waits for its end. Used on one event loop.
    """

    def __init__(self) -> None:
        self._taken = False
        self._number = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def turn(self, rank: int) -> AsyncIterator[None]:
        await self._take(rank)
        try:
            yield
        finally:
            self._pass_on()

    async def _take(self, rank: int) -> None:
        if not self._taken:
            self._taken = True
            return
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, next(self._number), ready))
        try:
            await ready
        except asyncio.CancelledError:
            if ready.done() and not ready.cancelled():
                self._pass_on()  # it was given the turn in the same moment
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            _, _, ready = heapq.heappop(self._waiting)
            if not ready.done():
                ready.set_result(None)
                return
        self._taken = False
