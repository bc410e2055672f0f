"""What every I/O engine shares.

Two layers. The lower one, `_read_some` and `_write_some`, makes one *call* and returns how many bytes it moved, or
raises `OSError`. The upper one, `read` and `write`, moves all bytes or raises: it cuts large transfers into calls that
run at the same time, continues short ones, retries EINTR and EAGAIN, goes around a refused O_DIRECT, and gives every
error its path, offset and size. Tests put faults between the two.

A *piece* is what the system is asked to move at once; *depth* is how many pieces an engine has in flight. A call is a
piece, and the upper layer keeps to the depth, unless the engine takes larger calls, to cut and to queue them itself.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np

__all__ = [
    "DIRECT_ALIGNMENT",
    "PIECE_BYTES",
    "TRANSFER_BYTES_MAX",
    "Engine",
    "File",
    "UnstoppableFuture",
    "address_of",
    "finish",
]

DIRECT_ALIGNMENT = 4096
"""Address, offset and length of direct I/O are multiples of this: enough for every usual device."""

PIECE_BYTES = 4 << 20
"""Large enough to reach a disk's speed, small enough that one transfer keeps several pieces in flight."""

TRANSFER_BYTES_MAX = 0x7FFFF000
"""The most that Linux moves in one read or write."""

RETRIES_MAX = 100
"""How often in a row a transfer may be told EAGAIN or EINTR before that becomes its error."""

T = TypeVar("T")


class File:
    """An open file: `fd` goes through the page cache; `direct_fd` goes around it, or is None where that is refused.

    `refusal` says why there is no direct descriptor. Closing waits for the transfers in flight, so that a descriptor
    number is never reused under one.
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool = False, direct: bool = True) -> None:
        self.path = Path(path).absolute()
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0)
        self._users = 0
        self._closing = False
        self.retiring: Callable[[int], None] | None = None  # told of a descriptor before it stops meaning this file
        self.direct_fd: int | None = None
        self._retired_fd: int | None = None
        self.refusal: str | None = None if direct else "buffered by request"
        self.fd = os.open(self.path, flags, 0o600)
        if direct:
            self._open_direct()

    def _open_direct(self) -> None:
        o_direct = getattr(os, "O_DIRECT", None)
        if o_direct is None:
            self.refusal = "this platform has no O_DIRECT"
            return
        try:
            self.direct_fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | o_direct)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                os.close(self.fd)
                raise
            self.refusal = f"the file system refuses O_DIRECT ({error.strerror})"

    @property
    def direct(self) -> bool:
        """Whether aligned transfers go around the page cache."""
        return self.direct_fd is not None

    def refuse_direct(self, reason: str) -> None:
        """Use the page cache from now on."""
        if self.direct_fd is None:
            return
        self.refusal = reason
        # Others may be in the middle of a call on it: it keeps its number, and from now on means the buffered file.
        self._retired_fd, self.direct_fd = self.direct_fd, None
        if self.retiring is not None:
            self.retiring(self._retired_fd)
        os.dup2(self.fd, self._retired_fd, inheritable=False)

    def enter(self) -> None:
        """Announce a transfer."""
        if self._closing:
            raise ValueError(f"{self.path} is closed")
        self._users += 1

    def leave(self) -> None:
        """End a transfer announced by `enter`."""
        self._users -= 1
        if self._closing and not self._users:
            self._close_now()

    def close(self) -> None:
        """Refuse new transfers; close the descriptors when the last one in flight has ended."""
        if self._closing:
            return
        self._closing = True
        if not self._users:
            self._close_now()

    def _close_now(self) -> None:
        for fd in (self.fd, self.direct_fd, self._retired_fd):
            if fd is not None and fd >= 0:
                if self.retiring is not None:
                    self.retiring(fd)
                os.close(fd)
        self.fd = -1
        self.direct_fd = self._retired_fd = None

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self._close_now()


class Gate:
    """At most `width` at a time, first come, first served; not tied to one event loop."""

    def __init__(self, width: int) -> None:
        self.free = width
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        if self.free and not self._waiting:
            self.free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.free += 1


def address_of(memory: memoryview) -> int:
    """Where a contiguous buffer starts."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))
    except (TypeError, ValueError):  # read-only, or of no bytes; numpy takes all, and ten times as long
        return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


async def finish(future: asyncio.Future[T]) -> T:
    """The future's result; a cancellation meanwhile is raised only when the future is done.

    For work that cannot be stopped and uses memory that its caller will reuse.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # seen: the cancellation goes first
        raise cancelled
    return future.result()


class UnstoppableFuture(asyncio.Future[T]):
    """Of work that uses memory which its caller will reuse: who awaits it is cancelled only when it is done."""

    def stop(self) -> None:
        """Told of a cancellation, to make the work end soon."""

    def cancel(self, msg: object = None) -> bool:
        if not self.done():
            self.stop()
        return False  # the task that awaits it takes note and raises when it next runs (`asyncio.Task.cancel`)

    async def outcome(self) -> T:
        """The result."""
        try:
            return await self
        except asyncio.CancelledError:
            if self.done():
                self.exception()  # seen: the cancellation goes first
            raise


class Engine(ABC):
    """Moves bytes between memory and files. Used from one event loop at a time; the transfers may overlap freely.

    read, write: return when every byte has moved. Both raise `OSError` with errno, path, offset and size. Cancelled,
    they return only when nothing touches the memory any more. Transfers, or parts of them, whose address, offset and
    length are multiples of 4096 go around the page cache where the file allows it.

    bytes_read, bytes_written: what was moved so far. `fallbacks` says what is not as fast as it could be, and why.
    usual_depth: pieces in flight unless told otherwise, of usual_piece_bytes. cuts_calls: the interpreter has no part
    in what happens to a call's pieces.
    """

    name: str
    usual_depth: ClassVar[int] = 1
    usual_piece_bytes: ClassVar[int] = PIECE_BYTES
    cuts_calls: ClassVar[bool] = False

    def __init__(
        self,
        *,
        depth: int,
        piece_bytes: int = PIECE_BYTES,
        direct: bool = True,
        call_bytes_max: int | None = None,
        calls_max: int | None = None,
    ) -> None:
        """call_bytes_max, calls_max: of an engine that cuts calls and keeps to the depth itself."""
        if depth < 1 or piece_bytes < DIRECT_ALIGNMENT or piece_bytes % DIRECT_ALIGNMENT:
            raise ValueError(f"depth must be at least 1 and piece_bytes a multiple of 4096: {depth}, {piece_bytes}")
        self.depth = depth
        self.piece_bytes = min(piece_bytes, TRANSFER_BYTES_MAX)
        self.direct = direct
        self.bytes_read = 0
        self.bytes_written = 0
        self.fallbacks: list[str] = []
        self._owner_pid = os.getpid()
        self._call_bytes_max = self.piece_bytes if call_bytes_max is None else call_bytes_max
        self._gate = Gate(depth if calls_max is None else calls_max)

    def open(self, path: str | os.PathLike[str], *, create: bool = False) -> File:
        """Open a file in the way this engine wants it; `create` makes a new one with mode 0600."""
        file = File(path, create=create, direct=self.direct)
        if self.direct and file.refusal is not None:
            self._note(f"{file.path.parent}: buffered, because {file.refusal}")
        return file

    async def read(self, file: File, offset_bytes: int, target: memoryview) -> None:
        """Fill `target` from the file."""
        await self._move(_READ, file, offset_bytes, target)

    async def write(self, file: File, offset_bytes: int, source: memoryview) -> None:
        """Put all of `source` into the file."""
        await self._move(_WRITE, file, offset_bytes, source)

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        """Tell the engine of memory that many transfers will use (a `SlabPool`'s `pin`); returns what undoes it."""
        return lambda: None

    @abstractmethod
    def close(self) -> None:
        """Wait for what is in flight and release threads and rings."""

    @abstractmethod
    async def _read_some(self, file: File, fd: int, offset_bytes: int, target: memoryview) -> int:
        """One read. It must not end, not even by cancellation, while the system may write to `target`."""

    @abstractmethod
    async def _write_some(self, file: File, fd: int, offset_bytes: int, source: memoryview) -> int:
        """One write. It must not end, not even by cancellation, while the system may read from `source`."""

    async def _move(self, direction: _Direction, file: File, offset_bytes: int, memory: memoryview) -> None:
        if os.getpid() != self._owner_pid:
            raise RuntimeError("an I/O engine's threads are not in a forked child: make another one there")
        if memory.format != "B" or memory.ndim != 1:
            memory = memory.cast("B")
        if offset_bytes < 0:
            raise ValueError(f"negative offset {offset_bytes} in {file.path}")
        if not memory.nbytes:
            return
        parts = list(_cut(offset_bytes, memory, address_of(memory), self._call_bytes_max))
        file.enter()
        try:
            if len(parts) == 1:
                await self._move_part(direction, file, *parts[0])
            else:
                await _all(self._move_part(direction, file, *part) for part in parts)
        finally:
            file.leave()

    async def _move_part(
        self, direction: _Direction, file: File, offset_bytes: int, memory: memoryview, aligned: bool
    ) -> None:
        some = self._read_some if direction is _READ else self._write_some
        done = 0
        retries = 0
        await self._gate.enter()
        try:
            while done < memory.nbytes:
                direct = aligned and done % DIRECT_ALIGNMENT == 0
                fd = file.direct_fd if direct and file.direct_fd is not None else file.fd
                rest = memory[done : done + TRANSFER_BYTES_MAX]
                try:
                    moved = await some(file, fd, offset_bytes + done, rest)
                except OSError as error:
                    if error.errno in (errno.EINTR, errno.EAGAIN) and retries < RETRIES_MAX:
                        retries += 1
                        await asyncio.sleep(min(retries, 100) * 1e-4)
                    elif error.errno == errno.EINVAL and fd != file.fd:
                        file.refuse_direct(f"a direct {direction.name} of {rest.nbytes} bytes was refused (EINVAL)")
                        self._note(f"{file.path.parent}: buffered, because {file.refusal}")
                    else:
                        raise _located(error, direction, file, offset_bytes + done, rest.nbytes) from error
                    continue
                if not 0 < moved <= rest.nbytes:
                    raise _stuck(moved, direction, file, offset_bytes + done, rest.nbytes)
                retries = 0
                done += moved
                if direction is _READ:
                    self.bytes_read += moved
                else:
                    self.bytes_written += moved
        finally:
            self._gate.leave()

    def _note(self, fallback: str) -> None:
        if fallback not in self.fallbacks:
            self.fallbacks.append(fallback)


class _Direction:
    def __init__(self, name: str, gerund: str) -> None:
        self.name = name
        self.gerund = gerund


_READ = _Direction("read", "reading")
_WRITE = _Direction("write", "writing")


def _cut(
    offset_bytes: int, memory: memoryview, address: int, part_bytes: int
) -> Iterator[tuple[int, memoryview, bool]]:
    """Parts (offset, memory, whether all of it is aligned); an unaligned end is a part of its own."""
    nbytes = memory.nbytes
    aligned_bytes = 0
    if offset_bytes % DIRECT_ALIGNMENT == 0 and address % DIRECT_ALIGNMENT == 0:
        aligned_bytes = nbytes // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
    for start, stop, aligned in ((0, aligned_bytes, True), (aligned_bytes, nbytes, False)):
        for at in range(start, stop, part_bytes):
            yield offset_bytes + at, memory[at : min(at + part_bytes, stop)], aligned


async def _all(parts: Iterator[Awaitable[None]]) -> None:
    """Run the parts together; end when all have ended, with the first error or the cancellation."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    cancelled: asyncio.CancelledError | None = None
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
            for task in tasks:
                task.cancel()
    failures = [task.exception() for task in tasks if not task.cancelled()]
    if cancelled is not None:
        raise cancelled
    for failure in failures:
        if failure is not None:
            raise failure
    if any(task.cancelled() for task in tasks):
        raise asyncio.CancelledError


def _located(error: OSError, direction: _Direction, file: File, offset_bytes: int, nbytes: int) -> OSError:
    code = error.errno or errno.EIO
    what = f"{os.strerror(code)}, {direction.gerund} {nbytes} bytes at offset {offset_bytes}"
    return OSError(code, what, str(file.path))


def _stuck(moved: int, direction: _Direction, file: File, offset_bytes: int, nbytes: int) -> OSError:
    if moved == 0 and direction is _READ:
        why = f"the file ends at or before offset {offset_bytes}"
    else:
        why = f"the system reported {moved} bytes moved"
    what = f"{why}, {direction.gerund} {nbytes} bytes at offset {offset_bytes}"
    return OSError(errno.EIO, what, str(file.path))
