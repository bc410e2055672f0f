"""The disk tier: records in files, under one directory per mount that this process owns.

A *kind* is a set of records that need extents of one size. An *extent* is a range of a preallocated file, 4096-byte
aligned; a kind has one file on every mount and a list of free extents in each. A *record* is what a caller swaps out
and in. Its bytes are never overwritten: a swap out goes to a free extent, and only when it has completed does the
record point there, as a new *version*. The extent of the old version is free when nothing has pinned it; a swap in
pins the version it reads.

The store is used from one event loop, and its bookkeeping needs no lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import stat
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tiermem.io.engine import DIRECT_ALIGNMENT, Engine, File, address_of, finish
from tiermem.io.mounts import file_system
from tiermem.timeline import DISK_READ, DISK_WRITE, Timeline

__all__ = [
    "NoFreeExtentError",
    "OwnedDirectories",
    "Record",
    "Store",
    "Traffic",
    "Version",
    "check_directory",
    "find_owned",
    "free_bytes",
    "is_locked",
    "remove_leftovers",
]

_DIRECTORY_PATTERN = re.compile(r"tiermem-(\d+)-[0-9a-f]{8}")
_KIND_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_LOCK_NAME = "lock"
_EXTENTS_SUFFIX = ".extents"
_SPEED_WINDOW_BYTES = 32 << 20
_MISSED_MAX = 4
_FULL_SECONDS = 10.0
_PUNCH_HOLE = 0x3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


Checksum: TypeAlias = Callable[[int, int], int]


class NoFreeExtentError(RuntimeError):
    """Every extent of a kind is the current or a pinned version of some record, so nothing can be written."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one mount carried, and its speed: bytes per second while it was busy, or None if not yet known."""

    directory: Path
    bytes_read: int
    bytes_written: int
    bytes_per_second: float | None


class Store:
    """Records on one or several mounts.

    directories: existing directories, at best on different mounts; each gets a private subdirectory, which `close`
        removes (so do interpreter exit and the next store there, should this process be killed).
    engine: moves the bytes. The store does not close it.
    spare: extents of each kind, on each mount, beyond what the records need: how many records can be swapped out at a
        time before one waits.
    checksum: a function of (address, bytes), such as `Kernels.checksum`. With one, the sum of every version is kept in
        memory, and a swap in that reads anything else raises `OSError`.
    timeline: where transfers are recorded while it is on.

    Raises `OSError` when a directory is missing, not a directory, not writable or full, naming it. Warns when one is in
    memory (tmpfs).
    """

    def __init__(
        self,
        directories: Sequence[Path | str],
        engine: Engine,
        *,
        spare: int = 4,
        checksum: Checksum | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        if not directories:
            raise ValueError("the disk tier needs at least one directory")
        if spare < 1:
            raise ValueError(f"a store never overwrites, so it needs at least one spare extent, not {spare}")
        self.engine = engine
        self.spare = spare
        self.checksum = checksum
        self.timeline = timeline
        self._kinds: dict[str, _Kind] = {}
        self._owned = OwnedDirectories()
        self._finalizer = weakref.finalize(self, self._owned.remove)
        self._mounts: list[_Mount] = []
        try:
            for directory in directories:
                parent = check_directory(Path(directory))
                remove_leftovers(parent)
                self._mounts.append(_Mount(parent, self._owned.create(parent)))
        except BaseException:
            self._finalizer()
            raise

    @property
    def directories(self) -> list[Path]:
        """The private directories, one per mount."""
        return [mount.directory for mount in self._mounts]

    def traffic(self) -> list[Traffic]:
        """What each mount carried so far, in the order of the directories."""
        return [Traffic(m.parent, m.bytes_read, m.bytes_written, m.bytes_per_second) for m in self._mounts]

    @property
    def allocated_bytes(self) -> int:
        """Disk space preallocated so far."""
        return sum(kind.extent_bytes * kind.extent_count for kind in self._kinds.values())

    def reserve(self, kind: str, extent_bytes: int, count: int) -> None:
        """Preallocate extents of `extent_bytes` (rounded up to 4096) for `count` more records of a kind.

        Raises `OSError` (ENOSPC) with the bytes needed and present when they do not fit.
        """
        self._check_open()
        if not _KIND_PATTERN.fullmatch(kind):
            raise ValueError(f"{kind!r} cannot be part of a file name")
        if extent_bytes < 1 or count < 0:
            raise ValueError(f"cannot reserve {count} extents of {extent_bytes} bytes")
        rounded = _round_up(extent_bytes)
        known = self._kinds.get(kind)
        if known is not None and known.extent_bytes != rounded:
            raise ValueError(f"kind {kind!r} has extents of {known.extent_bytes} bytes, not {rounded}")
        if known is None:
            known = _Kind(kind, rounded)
            try:
                for mount in self._mounts:
                    known.parts.append(self._create_part(mount, kind, rounded))
                known.grow(count, self.spare * len(self._mounts))
            except BaseException:
                for part in known.parts:
                    part.file.close()
                    part.file.path.unlink()
                raise
            self._kinds[kind] = known
        else:
            known.grow(count, 0)

    def record(self, kind: str, nbytes: int, label: tuple[str, str] = ("", "")) -> Record:
        """A new record of at most a whole extent of that kind. It holds nothing until it is swapped out. ``label``:
        whose bytes these are, and which of them, for the timeline."""
        self._check_open()
        if kind not in self._kinds:
            raise ValueError(f"nothing was reserved for kind {kind!r}")
        known = self._kinds[kind]
        if not 0 < nbytes <= known.extent_bytes:
            raise ValueError(f"a record of kind {kind!r} has 1 to {known.extent_bytes} bytes, not {nbytes}")
        if known.record_count == known.record_count_max:
            raise ValueError(f"kind {kind!r} was reserved for {known.record_count_max} records; reserve more first")
        known.record_count += 1
        return Record(self, known, nbytes, label)

    def close(self) -> None:
        """Remove every file and directory. Transfers in flight complete, into files that have no name any more."""
        for kind in self._kinds.values():
            kind.fail_waiters(RuntimeError("the store was closed"))
            for part in kind.parts:
                part.file.close()
        self._kinds.clear()
        self._finalizer()

    @contextlib.contextmanager
    def scratch_file(self) -> Iterator[Path]:
        """A path for a file of the caller's own, on the mount with most space; removed afterwards, whatever happens."""
        self._check_open()
        directory = max(self.directories, key=free_bytes)
        path = directory / f"scratch-{secrets.token_hex(4)}{_EXTENTS_SUFFIX}"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _create_part(self, mount: _Mount, kind: str, extent_bytes: int) -> _Part:
        path = mount.directory / f"{kind}{_EXTENTS_SUFFIX}"
        return _Part(mount, self.engine.open(path, create=True), extent_bytes)

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("the store is closed")


class Record:
    """Bytes with a home on disk.

    A memoryview given to `swap_out` or `swap_in` holds `nbytes`, or better `padded_bytes`: the same rounded up to 4096,
    and page-aligned, which lets all of it go around the page cache. What lies between the two is not meaningful.
    """

    def __init__(self, store: Store, kind: _Kind, nbytes: int, label: tuple[str, str]) -> None:
        self.nbytes = nbytes
        self.label = label
        self.padded_bytes = _round_up(nbytes)
        self._store = store
        self._kind = kind
        self._current: Version | None = None
        self._swapping_out = False
        self._dropped = False

    @property
    def valid(self) -> bool:
        """Whether a swap out has completed, so that there is something to swap in."""
        return self._current is not None

    async def swap_out(self, source: memoryview) -> None:
        """Write a new version; the record points to it when this returns. If it raises, the old version stands."""
        source = self._window(source)
        self._check_usable()
        if self._swapping_out:
            raise AssertionError(f"a record of kind {self._kind.name!r} is swapped out twice at once")
        self._swapping_out = True
        try:
            version = Version(self, await self._kind.take())
            try:
                await self._write(version, source)
            finally:
                self._kind.end()
        finally:
            self._swapping_out = False

    async def _write(self, version: Version, source: memoryview) -> None:
        try:
            self._check_usable()
            await version._write(source)
        except BaseException:
            version.unpin()
            raise
        old, self._current = self._current, version
        if old is not None:
            old.unpin()
        if self._dropped:
            self._current = None
            version.unpin()

    async def swap_in(self, target: memoryview) -> None:
        """Read the current version. A swap out that completes meanwhile does not disturb it."""
        version = self.pin()
        self._kind.begin()
        try:
            await version.swap_in(target)
        finally:
            version.unpin()
            self._kind.end()

    def pin(self) -> Version:
        """The current version, kept readable until its `unpin`, whatever happens to the record."""
        self._check_usable()
        if self._current is None:
            raise AssertionError(f"a record of kind {self._kind.name!r} is read before it was ever swapped out")
        self._current._pins += 1
        return self._current

    def drop(self) -> None:
        """Give up the record and, unless pinned, its extent."""
        if self._dropped:
            return
        self._dropped = True
        self._kind.record_count -= 1
        if self._current is not None:
            version, self._current = self._current, None
            version.unpin()

    @contextlib.contextmanager
    def _busy(self, mount: _Mount, nbytes: int, *, write: bool) -> Iterator[None]:
        start = time.perf_counter()
        with mount.busy(nbytes, write=write):
            yield
        timeline = self._store.timeline
        if timeline is not None and timeline.on:
            row = DISK_WRITE if write else DISK_READ
            timeline.add(row, *self.label, start, time.perf_counter(), nbytes, str(mount.parent))

    def _window(self, memory: memoryview) -> memoryview:
        if memory.format != "B" or memory.ndim != 1:
            memory = memory.cast("B")
        if memory.nbytes < self.nbytes:
            raise ValueError(f"a record of {self.nbytes} bytes does not fit a buffer of {memory.nbytes}")
        return memory[: self.padded_bytes if memory.nbytes >= self.padded_bytes else self.nbytes]

    def _check_usable(self) -> None:
        self._store._check_open()
        if self._dropped:
            raise AssertionError(f"a record of kind {self._kind.name!r} is used after it was dropped")


class Version:
    """What one swap out wrote: an extent that stays as it is until `unpin`."""

    def __init__(self, record: Record, place: _Place) -> None:
        self.nbytes = record.nbytes
        self.path = place.part.file.path
        self.offset_bytes = place.index * place.part.extent_bytes
        self._record = record
        self._place = place
        self._pins = 1
        self._checksum: int | None = None

    async def swap_in(self, target: memoryview) -> None:
        """Read it."""
        target = self._record._window(target)
        part = self._place.part
        with self._record._busy(part.mount, target.nbytes, write=False):
            await self._record._store.engine.read(part.file, self.offset_bytes, target)
        if self._checksum is not None and await self._sum(target) != self._checksum:
            what = f"checksum mismatch, reading {self.nbytes} bytes at offset {self.offset_bytes}: not what was written"
            raise OSError(errno.EIO, what, str(self.path))

    async def _write(self, source: memoryview) -> None:
        part = self._place.part
        checksum = asyncio.ensure_future(self._sum(source)) if self._record._store.checksum is not None else None
        try:
            with self._record._busy(part.mount, source.nbytes, write=True):
                await self._record._store.engine.write(part.file, self.offset_bytes, source)
        finally:
            if checksum is not None:
                self._checksum = await finish(checksum)

    async def _sum(self, memory: memoryview) -> int:
        function = self._record._store.checksum
        if function is None:
            raise AssertionError("a checksum without a function")
        # `memory` stays alive here while another thread reads it.
        job = asyncio.get_running_loop().run_in_executor(None, function, address_of(memory), self.nbytes)
        return await finish(job)

    def unpin(self) -> None:
        """Undo one `pin`. The extent is free when nothing else holds it."""
        if not self._pins:
            raise AssertionError("a version was unpinned more often than pinned")
        self._pins -= 1
        if not self._pins:
            self._record._kind.give_back(self._place)


class _Mount:
    """One directory and how busy its device is: bytes pending, and bytes per second while anything was."""

    def __init__(self, parent: Path, directory: Path) -> None:
        self.parent = parent
        self.directory = directory
        self.pending_bytes = 0
        self.bytes_read = 0
        self.bytes_written = 0
        self.bytes_per_second: float | None = None  # unknown until enough was moved
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._window_bytes = 0

    @contextlib.contextmanager
    def busy(self, nbytes: int, *, write: bool) -> Iterator[None]:
        """Counts a transfer as pending while the block runs, and measures."""
        if not self.pending_bytes:
            self._busy_since = time.perf_counter()
        self.pending_bytes += nbytes
        try:
            yield
        except BaseException:
            self.pending_bytes -= nbytes
            raise
        self.pending_bytes -= nbytes
        if write:
            self.bytes_written += nbytes
        else:
            self.bytes_read += nbytes
        self._measure(nbytes)

    def _measure(self, nbytes: int) -> None:
        now = time.perf_counter()
        self._busy_seconds += now - self._busy_since
        self._busy_since = now
        self._window_bytes += nbytes
        if self._window_bytes < _SPEED_WINDOW_BYTES or not self._busy_seconds:
            return
        speed = self._window_bytes / self._busy_seconds
        known = self.bytes_per_second
        self.bytes_per_second = speed if known is None else known + 0.3 * (speed - known)
        self._window_bytes = 0
        self._busy_seconds = 0.0


class _Part:
    """The file of a kind on one mount, and which of its extents are free."""

    def __init__(self, mount: _Mount, file: File, extent_bytes: int) -> None:
        self.mount = mount
        self.file = file
        self.extent_bytes = extent_bytes
        self.extent_count = 0  # holes included
        self.free: deque[int] = deque()  # oldest first, so that writes stay roughly sequential
        self.holes: list[int] = []  # extents whose disk space was given up for one on another mount
        self.missed = 0  # writes in a row that this mount would have finished first, had it had a free extent
        self.full_until = 0.0  # no attempt to get more space before

    def grow(self, count: int) -> None:
        if not count:
            return
        old_bytes = self.extent_count * self.extent_bytes
        try:
            allocate(self.file, old_bytes, count * self.extent_bytes)
        except OSError:
            os.ftruncate(self.file.fd, old_bytes)  # a part may have been allocated
            raise
        self.free.extend(range(self.extent_count, self.extent_count + count))
        self.extent_count += count

    def shrink(self, count: int) -> None:
        """Undo the latest `grow`, of which nothing has been handed out."""
        self.extent_count -= count
        self.free = deque(index for index in self.free if index < self.extent_count)
        os.ftruncate(self.file.fd, self.extent_count * self.extent_bytes)

    def take_hole(self) -> int:
        """The index of an extent that has no disk space yet."""
        if self.holes:
            return self.holes.pop()
        self.extent_count += 1
        return self.extent_count - 1


class _Kind:
    """Extents of one size: hands them out, takes them back, and keeps those who wait in order."""

    def __init__(self, name: str, extent_bytes: int) -> None:
        self.name = name
        self.extent_bytes = extent_bytes
        self.parts: list[_Part] = []
        self.record_count = 0
        self.record_count_max = 0
        self._moving = False
        self._in_flight = 0  # transfers begun and not ended: each may still free an extent
        self._waiting: deque[asyncio.Future[_Place]] = deque()

    @property
    def extent_count(self) -> int:
        return sum(part.extent_count - len(part.holes) for part in self.parts)

    def grow(self, count: int, spare: int) -> None:
        """Room for `count` more records and for `spare` more versions than that."""
        grown: list[tuple[_Part, int]] = []
        try:
            for part, share in zip(self.parts, self._shares(count + spare), strict=True):
                part.grow(share)
                grown.append((part, share))
        except BaseException:
            for part, share in grown:
                part.shrink(share)
            raise
        self.record_count_max += count

    def _shares(self, count: int) -> list[int]:
        """Equal shares, as far as there is room on each mount."""
        rooms = [free_bytes(part.mount.directory) // self.extent_bytes for part in self.parts]
        if sum(rooms) < count:
            where = ", ".join(str(part.mount.directory) for part in self.parts)
            raise _no_space(where, count * self.extent_bytes, sum(rooms) * self.extent_bytes)
        shares = [0] * len(rooms)
        left = count
        while left:
            roomy = [i for i, room in enumerate(rooms) if shares[i] < room]
            roomy.sort(key=lambda i: self.parts[i].extent_count)
            for i in roomy:
                more = min(-(-left // len(roomy)), rooms[i] - shares[i], left)
                shares[i] += more
                left -= more
        return shares

    def begin(self) -> None:
        """Announce a transfer, at whose end an extent may become free."""
        self._in_flight += 1

    def end(self) -> None:
        """End a transfer announced by `begin` or `take`."""
        self._in_flight -= 1
        self._settle()

    async def take(self) -> _Place:
        """Begin a transfer to a free extent, on the mount that will be done first; waits in turn if there is none."""
        place = None if self._waiting else self._take_now()
        if place is None:
            place = await self._wait()
        if len(self.parts) == 1:
            return place
        return await self._move_space(place)

    async def _wait(self) -> _Place:
        waiter: asyncio.Future[_Place] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._settle()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.give_back(waiter.result())
                self.end()
            raise

    async def _move_space(self, place: _Place) -> _Place:
        """Let capacity follow speed: if a faster mount keeps running out of extents, it gets the space of this one."""
        now = time.monotonic()
        poor = [p for p in self.parts if p.missed >= _MISSED_MAX and p.full_until < now and p is not place.part]
        if not poor or self._moving:
            return place
        self._moving = True
        target = _Place(poor[0], poor[0].take_hole())
        target.part.missed = 0
        moving = asyncio.get_running_loop().run_in_executor(None, _move_space, place, target)
        try:
            await finish(moving)
        except OSError:
            target.part.full_until = now + _FULL_SECONDS
        except asyncio.CancelledError:
            if moving.cancelled() or moving.exception() is not None:
                target.part.holes.append(target.index)
                self.give_back(place)
            else:
                place.part.holes.append(place.index)
                self.give_back(target)
            self.end()
            raise
        finally:
            self._moving = False
        if moving.exception() is not None:
            target.part.holes.append(target.index)
            return place
        place.part.holes.append(place.index)
        return target

    def give_back(self, place: _Place) -> None:
        place.part.free.append(place.index)
        self._settle()

    def fail_waiters(self, error: Exception) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(error)
        self._waiting.clear()

    def _settle(self) -> None:
        """Serve those who wait; if nothing in flight can help them, tell them."""
        while self._waiting:
            if self._waiting[0].done():
                self._waiting.popleft()
                continue
            place = self._take_now()
            if place is None:
                break
            self._waiting.popleft().set_result(place)
        if self._waiting and not self._in_flight:
            self.fail_waiters(
                NoFreeExtentError(
                    f"no extent of kind {self.name!r} is free: all {self.extent_count} hold current or pinned versions "
                    "and no transfer is in flight. Unpin versions, or reserve more extents"
                )
            )

    def _take_now(self) -> _Place | None:
        best_first = sorted(self.parts, key=self._seconds_until_done) if len(self.parts) > 1 else self.parts
        for rank, part in enumerate(best_first):
            if part.free:
                part.missed = 0
                for better in best_first[:rank]:
                    better.missed += 1
                self.begin()
                return _Place(part, part.free.popleft())
        return None

    def _seconds_until_done(self, part: _Part) -> float:
        speeds = [p.mount.bytes_per_second for p in self.parts if p.mount.bytes_per_second]
        usual = sum(speeds) / len(speeds) if speeds else 1.0
        return (part.mount.pending_bytes + self.extent_bytes) / (part.mount.bytes_per_second or usual)


@dataclass(frozen=True)
class _Place:
    part: _Part
    index: int


class OwnedDirectories:
    """Private directories that must be gone when their owner is: when `remove` is called or, if the owner was killed,
    when the next one looks there. Knows nothing of who uses it, so that `weakref.finalize` can hold it.
    """

    def __init__(self) -> None:
        self._owner_pid = os.getpid()
        self._directories: list[tuple[Path, int]] = []

    def create(self, parent: Path) -> Path:
        """A new directory, locked while this process lives. Of the files in it, those named `*.extents` are owned."""
        while True:
            directory = parent / f"tiermem-{self._owner_pid}-{secrets.token_hex(4)}"
            directory.mkdir(mode=0o700)
            lock_fd = _lock(directory, create=True)
            if lock_fd is not None:
                self._directories.append((directory, lock_fd))
                return directory
            # Another process, looking for leftovers, was faster than our lock and removes it.

    def remove(self) -> None:
        if os.getpid() != self._owner_pid:  # a forked child must leave its parent's files alone
            return
        while self._directories:
            directory, lock_fd = self._directories.pop()
            with contextlib.suppress(OSError):  # somebody put something into it; all of ours is gone
                _empty(directory)
            os.close(lock_fd)


def check_directory(directory: Path) -> Path:
    """Its absolute path, if a store can live there; otherwise an `OSError` that says why. Warns about tmpfs."""
    directory = directory.absolute()
    if not directory.exists():
        raise FileNotFoundError(errno.ENOENT, "the directory for the disk tier is missing; create it", str(directory))
    if not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "the disk tier needs a directory", str(directory))
    probe = directory / f".tiermem-probe-{secrets.token_hex(4)}"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        probe.unlink()
    except OSError as error:
        what = f"the directory for the disk tier is not writable ({error.strerror}); choose another or change it"
        raise OSError(error.errno, what, str(directory)) from error
    kind = file_system(directory).type
    if kind in ("tmpfs", "ramfs"):
        warnings.warn(
            f"{directory} is on {kind}, which lies in memory: the disk tier saves nothing there. Use a disk",
            stacklevel=3,
        )
    return directory


def remove_leftovers(parent: Path) -> list[Path]:
    """Remove what processes that no longer live left in a directory; returns what was removed."""
    removed: list[Path] = []
    for directory in find_owned(parent):
        lock_fd = _lock(directory, create=False)
        if lock_fd is None:
            _remove_if_abandoned(directory)
            continue
        try:
            _empty(directory)
            removed.append(directory)
        except OSError:  # not ours to remove, or somebody else is removing it now
            pass
        finally:
            os.close(lock_fd)
    return removed


def find_owned(parent: Path) -> list[Path]:
    """Directories of stores, of live and dead processes of this user."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for path in sorted(parent.iterdir()):
            status = path.lstat()
            if (
                _DIRECTORY_PATTERN.fullmatch(path.name)
                and stat.S_ISDIR(status.st_mode)
                and status.st_uid == os.geteuid()
            ):
                found.append(path)
    return found


def is_locked(directory: Path) -> bool:
    """Whether the owner of a store's directory is alive."""
    lock_fd = _lock(directory, create=False)
    if lock_fd is not None:
        os.close(lock_fd)
        return False
    return (directory / _LOCK_NAME).exists()


def free_bytes(directory: Path) -> int:
    """What this user can still write there."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def allocate(file: File, offset_bytes: int, nbytes: int) -> None:
    """Give a range of a file disk space, or raise `OSError` (ENOSPC) with the bytes needed and present."""
    present_bytes = free_bytes(file.path.parent)
    if nbytes > present_bytes:
        raise _no_space(str(file.path), nbytes, present_bytes)
    try:
        _fallocate(file.fd, 0, offset_bytes, nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _no_space(str(file.path), nbytes, free_bytes(file.path.parent), error.errno) from error
        if error.errno not in _UNSUPPORTED:
            raise OSError(error.errno, f"{error.strerror}, allocating {nbytes} bytes", str(file.path)) from error
        if os.fstat(file.fd).st_size < offset_bytes + nbytes:  # running full will show as ENOSPC at a write
            os.ftruncate(file.fd, offset_bytes + nbytes)


def _move_space(source: _Place, target: _Place) -> None:
    """Allocate one extent and give up the space of another. If it raises, nothing has changed."""
    nbytes = target.part.extent_bytes
    offset_bytes = target.index * nbytes
    if free_bytes(target.part.mount.directory) < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    _fallocate(target.part.file.fd, 0, offset_bytes, nbytes)
    try:
        _fallocate(source.part.file.fd, _PUNCH_HOLE, source.index * nbytes, nbytes)
    except OSError:
        _fallocate(target.part.file.fd, _PUNCH_HOLE, offset_bytes, nbytes)
        raise


def _no_space(path: str, needed_bytes: int, present_bytes: int, code: int = errno.ENOSPC) -> OSError:
    what = (
        f"{os.strerror(code)}: {needed_bytes} bytes needed, {present_bytes} bytes free; free some, "
        "choose another directory, or put less on disk"
    )
    return OSError(code, what, path)


def _fallocate(fd: int, mode: int, offset_bytes: int, nbytes: int) -> None:
    # Not os.posix_fallocate: where the file system cannot, the C library would write every block.
    if _libc_fallocate is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while _libc_fallocate(fd, mode, offset_bytes, nbytes):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def _find_fallocate() -> Callable[[int, int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).fallocate
    except AttributeError:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_int
    return function


_libc_fallocate = _find_fallocate()


def _lock(directory: Path, *, create: bool) -> int | None:
    """A descriptor that holds the directory's lock; None if another process holds it, or it is not there (any more)."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0)
    try:
        fd = os.open(directory / _LOCK_NAME, flags, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _empty(directory: Path) -> None:
    """Remove what a store makes, and the directory if nothing else is in it."""
    for path in directory.glob(f"*{_EXTENTS_SUFFIX}"):
        path.unlink(missing_ok=True)
    (directory / _LOCK_NAME).unlink(missing_ok=True)
    directory.rmdir()


def _remove_if_abandoned(directory: Path) -> None:
    # Killed between making the directory and its lock. A live one gets there within the minute, and copes if not.
    with contextlib.suppress(OSError):
        if time.time() - directory.stat().st_mtime > 60:
            directory.rmdir()


def _round_up(nbytes: int) -> int:
    return -(-nbytes // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
