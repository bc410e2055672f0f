"""Faults on demand, between an engine's system calls and everything that must survive them.

`FaultyEngine` wraps another engine and lets *effects* happen to chosen calls of its lower layer; retries, continuation
of short transfers and error messages above it are the real ones. For tests:

    engine = FaultyEngine(ThreadsEngine(), Fault("write", fail(errno.EIO), nth=3))
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tiermem.io.engine import Engine, File

__all__ = ["Call", "Fault", "FaultyEngine", "corrupt", "delay", "fail", "short", "slower", "truncate"]


@dataclass(frozen=True)
class Call:
    """One call of the lower layer that an effect may change. `proceed` makes it (with less memory, if given)."""

    on: Literal["read", "write"]
    file: File
    offset_bytes: int
    memory: memoryview
    proceed: Callable[[memoryview], Awaitable[int]]


Effect: TypeAlias = Callable[[Call], Awaitable[int]]


@dataclass
class Fault:
    """What happens to the `nth` call (from 1) of a direction and to the `count` - 1 after it (None: to all after it).

    where: only calls on files with this in their path are meant and counted.
    """

    on: Literal["read", "write", "both"]
    effect: Effect
    nth: int = 1
    count: int | None = 1
    where: str = ""
    seen: int = field(default=0, init=False)

    def applies(self, call: Call) -> bool:
        """Counts the call, if it is of the kind meant; says whether the effect happens to it."""
        if self.on not in ("both", call.on) or self.where not in str(call.file.path):
            return False
        self.seen += 1
        return self.nth <= self.seen and (self.count is None or self.seen < self.nth + self.count)


class FaultyEngine(Engine):
    """An engine to which faults happen. The first of `faults` that applies to a call is the one that happens."""

    def __init__(self, inner: Engine, *faults: Fault) -> None:
        super().__init__(depth=inner.depth, piece_bytes=inner.piece_bytes, direct=inner.direct)
        self.name = f"faulty {inner.name}"
        self.inner = inner
        self.faults = list(faults)
        self.fallbacks = inner.fallbacks

    def open(self, path: str | os.PathLike[str], *, create: bool = False) -> File:
        return self.inner.open(path, create=create)

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        return self.inner.pin(address, nbytes)

    def close(self) -> None:
        self.inner.close()

    async def _read_some(self, file: File, fd: int, offset_bytes: int, target: memoryview) -> int:
        async def proceed(memory: memoryview) -> int:
            return await self.inner._read_some(file, fd, offset_bytes, memory)

        return await self._call(Call("read", file, offset_bytes, target, proceed))

    async def _write_some(self, file: File, fd: int, offset_bytes: int, source: memoryview) -> int:
        async def proceed(memory: memoryview) -> int:
            return await self.inner._write_some(file, fd, offset_bytes, memory)

        return await self._call(Call("write", file, offset_bytes, source, proceed))

    async def _call(self, call: Call) -> int:
        applying = [fault for fault in self.faults if fault.applies(call)]
        return await (applying[0].effect(call) if applying else call.proceed(call.memory))


def fail(code: int) -> Effect:
    """The call fails with this errno, having moved nothing."""

    async def effect(call: Call) -> int:
        raise OSError(code, os.strerror(code))

    return effect


def short(nbytes: int) -> Effect:
    """At most so many bytes are moved."""

    async def effect(call: Call) -> int:
        return await call.proceed(call.memory[:nbytes])

    return effect


def truncate() -> Effect:
    """The file ends in the middle of the transfer's range before the call is made."""

    async def effect(call: Call) -> int:
        os.ftruncate(call.file.fd, call.offset_bytes + call.memory.nbytes // 2)
        return await call.proceed(call.memory)

    return effect


def corrupt() -> Effect:
    """One bit of what was moved is wrong, in the file after a write, in memory after a read."""

    async def effect(call: Call) -> int:
        moved = await call.proceed(call.memory)
        at = moved // 2
        wrong = bytes([call.memory[at] ^ 0x10])
        if call.on == "read":
            call.memory[at : at + 1] = wrong
        else:
            os.pwrite(call.file.fd, wrong, call.offset_bytes + at)
        return moved

    return effect


def slower(factor: float) -> Effect:
    """The call takes `factor` times as long."""

    async def effect(call: Call) -> int:
        begun = time.perf_counter()
        moved = await call.proceed(call.memory)
        await asyncio.sleep((time.perf_counter() - begun) * (factor - 1))
        return moved

    return effect


def delay(seconds_max: float, seed: int = 0) -> Effect:
    """Completions come late by a random time, hence in another order than the calls."""
    rng = random.Random(seed)

    async def effect(call: Call) -> int:
        moved = await call.proceed(call.memory)
        await asyncio.sleep(rng.random() * seconds_max)
        return moved

    return effect
