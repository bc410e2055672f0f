"""The `io_uring` engine: a ring with a thread of its own (csrc/uring.cpp), which never needs the interpreter.

Python hands it whole calls and is woken by an eventfd in the event loop when some have ended. Nothing on that way lets
go of the GIL: another thread that computes would keep it for 5 ms each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator

from tiermem._native import NativeLibraryError, library
from tiermem.io.engine import TRANSFER_BYTES_MAX, Engine, File, UnstoppableFuture, address_of

__all__ = ["UringEngine"]

_CALLS_MAX = 1024  # in the thread's queue

_FILE_SLOTS = 64
_BUFFER_SLOTS = 64
_BUFFER_BYTES_MAX = 1 << 30  # the kernel's limit for one registered buffer
_REAP_MAX = 64

_SETUP_REMEDIES = {
    errno.ENOSYS: "this kernel has no io_uring, or a container's seccomp profile hides it",
    errno.EPERM: "a container's seccomp profile or the sysctl kernel.io_uring_disabled forbids it",
    errno.ENOMEM: "the memlock limit (ulimit -l) is too small for its rings",
}


class UringEngine(Engine):
    """Linux's io_uring, with O_DIRECT where the file system takes it.

    Files that it opened are registered; so is memory given to `pin`, where the memlock limit allows. `OSError` when it
    is made if the kernel, a container or the build does not have it.
    """

    name = "io_uring"
    cuts_calls = True
    # 16 MiB in flight, as few as keep a disk busy: what comes first then ends first, and its memory goes on to the next
    # stage while the rest moves. With 128 MiB, transfers that began together ended together. Beside a Python thread
    # that keeps the GIL for 5 ms at a time, four transfers of 8 MiB, half of them reads, went at 2.9 GB/s with 128 MiB
    # in flight and at 4.0 with 16 (4.3 with 8, but then sixteen lose 4 %); 16 of them at 4.4 and 5.3.
    usual_depth = 8
    usual_piece_bytes = 2 << 20

    def __init__(self, *, depth: int = usual_depth, piece_bytes: int = usual_piece_bytes, direct: bool = True) -> None:
        super().__init__(
            depth=depth,
            piece_bytes=piece_bytes,
            direct=direct,
            call_bytes_max=TRANSFER_BYTES_MAX,
            calls_max=_CALLS_MAX,
        )
        self._bell = _Bell()
        try:
            self._ring = _Ring(self.depth, self.piece_bytes, self._bell.fd)
        except OSError:
            self._bell.close()
            raise
        self._flushing = False
        self._file_slots = _Slots(_FILE_SLOTS if self._ring.command("file_slots", _FILE_SLOTS) >= 0 else 0)
        self._slot_of_fd: dict[int, int] = {}
        self._buffer_slots = _Slots(_BUFFER_SLOTS if self._ring.command("buffer_slots", _BUFFER_SLOTS) >= 0 else 0)
        self._buffers: dict[int, tuple[int, int]] = {}  # slot: start, end
        self._end = weakref.finalize(self, _close, self._ring, self._bell)

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
                code = self._ring.command("set_buffer", slot, start, stop - start)
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
        loop = asyncio.get_running_loop()
        if loop is not self._bell.loop and self._end.alive:
            self._bell.attend(loop, functools.partial(_answer, weakref.ref(self)))
            self._flushing = False  # the loop before may have been closed before it came to that
        address = address_of(memory)
        call = _Call(loop, self._ring, memory)
        self._ring.begin(
            call,
            write,
            fd,
            self._slot_of_fd.get(fd, -1),
            address,
            memory.nbytes,
            offset_bytes,
            self._buffer_at(address, memory.nbytes),
        )
        self._flush_soon(loop)
        return await call.outcome()

    def _flush_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the thread once for all that is begun in this turn of the loop.

        Awake, it would compete with this thread for the processor, which meanwhile keeps the GIL from the others.
        """
        if not self._flushing:
            self._flushing = True
            loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        self._ring.flush()

    def _settle_ended(self) -> None:
        for call, result in self._ring.reap():
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits any more
                call.settle(result)
        if self._bell.loop is not None:
            self._flush_soon(self._bell.loop)  # behind those that wait for these results and will begin others

    def _buffer_at(self, address: int, nbytes: int) -> int:
        for slot, (start, stop) in self._buffers.items():
            if start <= address and address + nbytes <= stop:
                return slot
        return -1

    def _unpin(self, slots: list[int]) -> None:
        while slots:
            slot = slots.pop()
            del self._buffers[slot]
            if self._ring.command("set_buffer", slot, 0, 0) >= 0:
                self._buffer_slots.give_back(slot)

    def _register_file(self, fd: int) -> None:
        slot = self._file_slots.take()
        if slot is None:
            return
        if self._ring.command("set_file", slot, fd) < 0:
            self._file_slots.give_back(slot)
        else:
            self._slot_of_fd[fd] = slot

    def _forget_file(self, fd: int) -> None:
        """Before the descriptor is closed or comes to mean another file: the slot would keep the old one open."""
        slot = self._slot_of_fd.pop(fd, None)
        if slot is not None and self._ring.command("set_file", slot, -1) >= 0:
            self._file_slots.give_back(slot)


class _Ring:
    """The ring and its thread, and the calls that they have in hand."""

    def __init__(self, depth: int, piece_bytes: int, bell_fd: int) -> None:
        self._library = _load()
        self._quick = _quick(self._library)
        self._made = ctypes.c_void_p()  # NULL again when it is closed; these functions then answer -ESHUTDOWN
        self._owner_pid = os.getpid()
        self._turn = threading.RLock()  # of commands, and of closing: a collected `File` gives one inside another
        self._calls: dict[int, _Call] = {}  # keeps their memory alive, whoever forgets it
        self._next_tag = 0
        code = self._library.tm_uring_open(depth, piece_bytes, bell_fd, ctypes.byref(self._made))
        if code < 0:
            raise OSError(-code, f"{os.strerror(-code)}: {_SETUP_REMEDIES.get(-code, 'it could not be set up')}")

    @property
    def own(self) -> bool:
        """Whether this is the process that made it: a forked child has the memory, but not the thread."""
        return os.getpid() == self._owner_pid

    def begin(self, call: _Call, write: int, fd: int, *where: int) -> None:
        """Put a call into the queue. where: file slot or -1, address, bytes, offset, buffer slot or -1."""
        call.tag = tag = self._next_tag
        self._next_tag += 1
        self._calls[tag] = call
        code = self._quick.tm_uring_submit(self._made, write, fd, *where, tag)
        if code < 0:
            del self._calls[tag]
            if code == -errno.ESHUTDOWN:
                raise RuntimeError("the I/O engine is closed")
            raise OSError(-code, os.strerror(-code))

    def flush(self) -> None:
        """Have the thread see what was begun."""
        self._quick.tm_uring_flush(self._made)

    def cancel(self, call: _Call) -> None:
        """Begin no more of its pieces. It is over when it has been reaped, not before."""
        self._quick.tm_uring_cancel(self._made, call.tag)

    def reap(self) -> Iterator[tuple[_Call, int]]:
        """What has ended since the last time, with its result: bytes or a negative errno."""
        tags, results = _Tags(), _Results()
        count = _REAP_MAX
        while count == _REAP_MAX:
            count = self._quick.tm_uring_reap(self._made, tags, results, _REAP_MAX)
            for i in range(count):
                yield self._calls.pop(tags[i]), results[i]

    def command(self, name: str, *arguments: int) -> int:
        """Have the thread change the ring's tables; waits for it."""
        if not self.own:
            return -errno.ESHUTDOWN
        with self._turn:
            return int(getattr(self._library, f"tm_uring_{name}")(self._made, *arguments))

    def close(self) -> None:
        """Wait for what is in flight and deliver it; end the thread."""
        self._library.tm_uring_finish(self._made)
        for call, result in self.reap():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                call.get_loop().call_soon_threadsafe(call.settle, result)
        with self._turn:
            made = ctypes.c_void_p(self._made.value)
            self._made.value = None
            self._quick.tm_uring_free(made)


class _Call(UnstoppableFuture[int]):
    """One call in the ring's hands."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: _Ring, memory: memoryview) -> None:
        super().__init__(loop=loop)
        self.tag = -1
        self._ring = ring
        self._memory = memory

    def stop(self) -> None:
        self._ring.cancel(self)

    def settle(self, result: int) -> None:
        if self.done():
            return
        if result < 0:
            self.set_exception(OSError(-result, os.strerror(-result)))
        else:
            self.set_result(result)


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
        engine._settle_ended()


def _close(ring: _Ring, bell: _Bell) -> None:
    if ring.own:
        ring.close()
        bell.close()


_Tags = ctypes.c_uint64 * _REAP_MAX
_Results = ctypes.c_int64 * _REAP_MAX


@functools.cache
def _load() -> ctypes.CDLL:
    try:
        loaded = library()
        _declare(loaded, "open", ctypes.c_uint32, ctypes.c_uint32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
        _declare(loaded, "finish", ctypes.c_void_p)
        _declare(loaded, "file_slots", ctypes.c_void_p, ctypes.c_uint32)
        _declare(loaded, "set_file", ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int32)
        _declare(loaded, "buffer_slots", ctypes.c_void_p, ctypes.c_uint32)
        _declare(loaded, "set_buffer", ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64)
    except (NativeLibraryError, AttributeError) as error:
        raise OSError(errno.ENOSYS, f"it needs the native library: {error}") from error
    return loaded


@functools.cache
def _quick(loaded: ctypes.CDLL) -> ctypes.PyDLL:
    """What keeps the GIL, because it takes less time than getting it back would."""
    quick = ctypes.PyDLL(loaded._name, handle=loaded._handle)
    ring, tag, size, flag, index = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int32
    _declare(quick, "submit", ring, flag, index, index, size, size, size, index, tag)
    _declare(quick, "flush", ring)
    _declare(quick, "cancel", ring, tag)
    _declare(quick, "reap", ring, ctypes.POINTER(tag), ctypes.POINTER(ctypes.c_int64), ctypes.c_int32)
    _declare(quick, "free", ring)
    return quick


def _declare(loaded: ctypes.CDLL, name: str, *arguments: type) -> None:
    function = getattr(loaded, f"tm_uring_{name}")
    function.argtypes = arguments
    function.restype = ctypes.c_int32
