"""The `io_uring` engine: one ring, no threads, completions by an eventfd in the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from typing import TypeAlias

from tiermem._native import NativeLibraryError, library
from tiermem.io.engine import PIECE_BYTES, Engine, File, address_of, finish

__all__ = ["UringEngine"]

_FILE_SLOTS = 64
_BUFFER_SLOTS = 64
_BUFFER_BYTES_MAX = 1 << 30  # the kernel's limit for one registered buffer
_REAP_MAX = 64

_SETUP_REMEDIES = {
    errno.ENOSYS: "this kernel has no io_uring, or a container's seccomp profile hides it",
    errno.EPERM: "a container's seccomp profile or the sysctl kernel.io_uring_disabled forbids it",
    errno.ENOMEM: "the memlock limit (ulimit -l) is too small for its rings",
}

_InFlight: TypeAlias = dict[int, tuple["asyncio.Future[int]", memoryview]]


class UringEngine(Engine):
    """Linux's io_uring, with O_DIRECT where the file system takes it.

    Files that it opened are registered; so is memory given to `pin`, where the memlock limit allows. `OSError` when it
    is made if the kernel, a container or the build does not have it.
    """

    name = "io_uring"
    # An idle machine needs 8. While another Python thread holds the GIL, for 5 ms at a time, the disk works off what it
    # has: with 4 MiB pieces, 8 in flight gave 1.7 GB/s then, 16 gave 2.8 and 32 gave 3.2.
    usual_depth = 32

    def __init__(self, *, depth: int = usual_depth, piece_bytes: int = PIECE_BYTES, direct: bool = True) -> None:
        super().__init__(depth=depth, piece_bytes=piece_bytes, direct=direct)
        self._library = _load()
        self._bell = _Bell()
        self._ring = ctypes.c_void_p()
        code = self._library.tm_uring_open(depth, self._bell.fd, ctypes.byref(self._ring))
        if code < 0:
            self._bell.close()
            remedy = _SETUP_REMEDIES.get(-code, "it could not be set up")
            raise OSError(-code, f"{os.strerror(-code)}: {remedy}")
        self._in_flight: _InFlight = {}  # keeps the memory alive, whoever forgets it
        self._next_tag = 0
        self._file_slots = _Slots(_FILE_SLOTS)
        self._slot_of_fd: dict[int, int] = {}
        minus_ones = (ctypes.c_int32 * _FILE_SLOTS)(*[-1] * _FILE_SLOTS)
        if self._library.tm_uring_file_slots(self._ring, minus_ones, _FILE_SLOTS) < 0:
            self._file_slots = _Slots(0)
        self._buffer_slots = _Slots(_BUFFER_SLOTS)
        self._buffers: dict[int, tuple[int, int]] = {}  # slot: start, end
        if self._library.tm_uring_buffer_slots(self._ring, _BUFFER_SLOTS) < 0:
            self._buffer_slots = _Slots(0)
        self._end = weakref.finalize(self, _close, self._library, self._ring, self._bell, self._in_flight, os.getpid())

    def open(self, path: str | os.PathLike[str], *, create: bool = False) -> File:
        file = super().open(path, create=create)
        for fd in (file.fd, file.direct_fd):
            if fd is not None:
                self._register_file(fd)
        reference = weakref.ref(self)

        def retiring(fd: int) -> None:
            engine = reference()
            if engine is not None:
                engine._forget_file(fd)

        file.retiring = retiring
        return file

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        """Register memory as fixed buffers: its pages are looked up once, not at every transfer."""
        slots: list[int] = []
        end = address + nbytes
        for start in range(address, end, _BUFFER_BYTES_MAX):
            stop = min(start + _BUFFER_BYTES_MAX, end)
            slot = self._buffer_slots.take()
            code = -errno.EOPNOTSUPP
            if slot is not None:
                code = self._library.tm_uring_set_buffer(self._ring, slot, start, stop - start)
                if code == 0:
                    slots.append(slot)
                    self._buffers[slot] = (start, stop)
                    continue
                self._buffer_slots.give_back(slot)
            why = "memlock limit, ulimit -l" if code == -errno.ENOMEM else os.strerror(-code)
            self._note(f"I/O engine io_uring: {stop - start} bytes of buffers not registered ({why})")
        return lambda: self._unpin(slots)

    def close(self) -> None:
        self._end()

    async def _read_some(self, file: File, fd: int, offset_bytes: int, target: memoryview) -> int:
        return await self._run(0, fd, offset_bytes, target)

    async def _write_some(self, file: File, fd: int, offset_bytes: int, source: memoryview) -> int:
        return await self._run(1, fd, offset_bytes, source)

    async def _run(self, write: int, fd: int, offset_bytes: int, memory: memoryview) -> int:
        if not self._end.alive:
            raise RuntimeError("the I/O engine is closed")
        loop = asyncio.get_running_loop()
        if loop is not self._bell.loop:
            self._bell.attend(loop, functools.partial(_answer, weakref.ref(self)))
        address = address_of(memory)
        slot = self._slot_of_fd.get(fd)
        tag = self._next_tag
        self._next_tag += 1
        future: asyncio.Future[int] = loop.create_future()
        self._in_flight[tag] = (future, memory)
        code = self._library.tm_uring_submit(
            self._ring,
            write,
            fd if slot is None else slot,
            slot is not None,
            address,
            memory.nbytes,
            offset_bytes,
            self._buffer_at(address, memory.nbytes),
            tag,
        )
        if code < 0:
            del self._in_flight[tag]
            code = -errno.EAGAIN if code == -errno.EBUSY else code
            raise OSError(-code, os.strerror(-code))
        return await finish(future)

    def _reap(self) -> None:
        if not self._end.alive or not self._bell.silence():
            return
        for future, result in _completions(self._library, self._ring, self._in_flight):
            _settle(future, result)

    def _buffer_at(self, address: int, nbytes: int) -> int:
        for slot, (start, stop) in self._buffers.items():
            if start <= address and address + nbytes <= stop:
                return slot
        return -1

    def _unpin(self, slots: list[int]) -> None:
        while slots:
            slot = slots.pop()
            del self._buffers[slot]
            if self._end.alive:
                self._library.tm_uring_set_buffer(self._ring, slot, 0, 0)
                self._buffer_slots.give_back(slot)

    def _register_file(self, fd: int) -> None:
        slot = self._file_slots.take()
        if slot is None:
            return
        if self._library.tm_uring_set_file(self._ring, slot, fd) < 0:
            self._file_slots.give_back(slot)
        else:
            self._slot_of_fd[fd] = slot

    def _forget_file(self, fd: int) -> None:
        """Before the descriptor is closed or comes to mean another file: the slot would keep the old one open."""
        slot = self._slot_of_fd.pop(fd, None)
        if slot is not None and self._end.alive:
            self._library.tm_uring_set_file(self._ring, slot, -1)
            self._file_slots.give_back(slot)


class _Slots:
    """Free places of a table in the ring."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))

    def take(self) -> int | None:
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        self._free.append(slot)


class _Bell:
    """The eventfd that rings at completions, and the loop that hears it."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.loop: asyncio.AbstractEventLoop | None = None

    def attend(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Have the callback called on this loop, the running one, and on no other from now on."""
        if self.loop is not None:
            # Its selector must not be left with a descriptor that rings for somebody else.
            old_fd, self.fd = self.fd, os.dup(self.fd)
            _leave(self.loop, old_fd)
        loop.add_reader(self.fd, callback)
        self.loop = loop

    def silence(self) -> bool:
        """Whether it has rung since the last time."""
        try:
            return os.eventfd_read(self.fd) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        _leave(self.loop, self.fd)
        self.loop = None


def _leave(loop: asyncio.AbstractEventLoop | None, fd: int) -> None:
    """Close a descriptor after the loop has stopped watching it."""

    def leave() -> None:
        if loop is not None and not loop.is_closed():
            loop.remove_reader(fd)
        os.close(fd)

    if loop is None or not loop.is_running() or loop is _running_loop():
        leave()
    else:
        loop.call_soon_threadsafe(leave)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _answer(reference: weakref.ref[UringEngine]) -> None:
    engine = reference()
    if engine is not None:
        engine._reap()


def _completions(
    library: ctypes.CDLL, ring: ctypes.c_void_p, in_flight: _InFlight
) -> Iterator[tuple[asyncio.Future[int], int]]:
    """Everything that has completed, with its result."""
    tags, results = (ctypes.c_uint64 * _REAP_MAX)(), (ctypes.c_int32 * _REAP_MAX)()
    count = _REAP_MAX
    while count == _REAP_MAX:
        count = library.tm_uring_reap(ring, tags, results, _REAP_MAX)
        for i in range(count):
            future, _ = in_flight.pop(tags[i])
            yield future, results[i]


def _settle(future: asyncio.Future[int], result: int) -> None:
    if future.done():
        return
    if result < 0:
        future.set_exception(OSError(-result, os.strerror(-result)))
    else:
        future.set_result(result)


def _close(library: ctypes.CDLL, ring: ctypes.c_void_p, bell: _Bell, in_flight: _InFlight, owner_pid: int) -> None:
    if os.getpid() != owner_pid:  # a forked child shares the ring, which is its parent's to empty
        return
    while in_flight and library.tm_uring_wait(ring) == 0:
        for future, result in _completions(library, ring, in_flight):
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                future.get_loop().call_soon_threadsafe(_settle, future, result)
    library.tm_uring_close(ring)
    bell.close()


@functools.cache
def _load() -> ctypes.CDLL:
    try:
        loaded = library()
        address, descriptor, size, code = ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint64, ctypes.c_int32
        slot = flag = ctypes.c_int32
        ring = ctypes.c_void_p
        for name, arguments in {
            "open": [ctypes.c_uint32, descriptor, ctypes.POINTER(ctypes.c_void_p)],
            "close": [ring],
            "submit": [ring, flag, descriptor, flag, address, ctypes.c_uint32, ctypes.c_uint64, slot, ctypes.c_uint64],
            "reap": [ring, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_int32), ctypes.c_int32],
            "wait": [ring],
            "file_slots": [ring, ctypes.POINTER(ctypes.c_int32), ctypes.c_uint32],
            "set_file": [ring, ctypes.c_uint32, descriptor],
            "buffer_slots": [ring, ctypes.c_uint32],
            "set_buffer": [ring, ctypes.c_uint32, address, size],
        }.items():
            function = getattr(loaded, f"tm_uring_{name}")
            function.argtypes = arguments
            function.restype = None if name == "close" else code
    except (NativeLibraryError, AttributeError) as error:
        raise OSError(errno.ENOSYS, f"it needs the native library: {error}") from error
    return loaded
