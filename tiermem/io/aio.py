"""The `aiofiles` engine: portable, through the page cache."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiofiles.base import wrap

from tiermem.io.engine import PIECE_BYTES, Engine, File, finish

__all__ = ["AiofilesEngine"]


class AiofilesEngine(Engine):
    """Positional reads and writes as `aiofiles` runs them: in an executor, buffered by the operating system.

    It works wherever Python does, and is slower: each byte is copied once more, and the page cache takes memory.
    """

    name = "aiofiles"
    usual_depth = 4

    def __init__(self, *, depth: int = usual_depth, piece_bytes: int = PIECE_BYTES) -> None:
        super().__init__(depth=depth, piece_bytes=piece_bytes, direct=False)
        self._executor = ThreadPoolExecutor(depth, thread_name_prefix="tiermem-aiofiles")
        self._preadv = wrap(os.preadv)
        self._pwritev = wrap(os.pwritev)

    async def _read_some(self, file: File, fd: int, offset_bytes: int, target: memoryview) -> int:
        return await self._run(self._preadv, fd, target, offset_bytes)

    async def _write_some(self, file: File, fd: int, offset_bytes: int, source: memoryview) -> int:
        return await self._run(self._pwritev, fd, source, offset_bytes)

    async def _run(self, call: Any, fd: int, memory: memoryview, offset_bytes: int) -> int:
        # A task of its own: a cancelled caller must not leave while the thread still uses the memory.
        task = asyncio.ensure_future(call(fd, [memory], offset_bytes, executor=self._executor))
        return int(await finish(task))

    def close(self) -> None:
        self._executor.shutdown()
