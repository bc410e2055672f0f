"""`tiermem bench io`: how fast a directory's disk is, with which engine, request size and depth.

A *setting* is an engine with the size of its requests and the number it keeps in flight. A *mode* is reading, writing,
or both at once. Every setting is measured several times in rounds over all settings, so that a drift of the machine's
speed reaches all of them; medians are compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import itertools
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tiermem.io import ENGINES, Engine, File, depth_in_use, probe
from tiermem.io.engine import address_of
from tiermem.io.mounts import file_system
from tiermem.io.profile import Profile, save_profile
from tiermem.memory import format_bytes
from tiermem.slab import SlabPool
from tiermem.store import OwnedDirectories, allocate, check_directory, free_bytes, remove_leftovers

__all__ = ["Bench", "Comparison", "Measurement", "Options", "Setting", "Stream", "measure", "measure_quickly", "run"]

Mode = Literal["read", "write", "mixed"]
T = TypeVar("T")
MODES: tuple[Mode, ...] = ("read", "write", "mixed")

_MIB = 1 << 20
_GIB = 1 << 30
_STREAM_SECONDS_MAX = 15.0
_TRANSFERS = 2  # begun for each piece in flight, so that an engine has something to go on with when one has ended
_CALL_BYTES, _CALLS_MIN = 8 * _MIB, 8  # of an engine that cuts calls by itself: about what updates on a disk ask for
_ALONE_SECONDS_MAX = 2.0
_STALL_SECONDS_MIN = 100e-6  # a thread that looks at the clock all the time sees it move by 0.1 us
_SAME_SPEED = 0.97  # within this of the best score, what best_setting says of equals counts


@dataclass(frozen=True)
class Options:
    """What to measure.

    engines: names of `ENGINES`; those that do not work in the directory are passed over, with the reason.
    file_bytes: size of the file that is read and written; it is removed at the end.
    seconds: length of one measurement. repeats: measurements of each setting and mode.
    stream_bytes: moved with every engine to see what it costs the processor and other threads; 0: not at all.
    stream_rounds: how often, all engines in turns.
    compare_seconds, compare_rounds: runs against fio.
    """

    engines: tuple[str, ...] = tuple(ENGINES)
    request_bytes: tuple[int, ...] = (1 * _MIB, 4 * _MIB, 8 * _MIB)
    depths: tuple[int, ...] = (4, 8, 16)
    file_bytes: int = 4 * _GIB
    seconds: float = 0.5
    repeats: int = 3
    stream_bytes: int = 8 * _GIB
    stream_rounds: int = 5
    compare_seconds: float = 2.0
    compare_rounds: int = 7

    def __post_init__(self) -> None:
        if not (self.engines and self.request_bytes and self.depths) or self.repeats < 1 or self.seconds <= 0:
            raise ValueError("nothing to measure: engines, request sizes, depths, repeats and seconds must be positive")
        if self.stream_bytes and self.stream_rounds < 1:
            raise ValueError(f"stream_rounds is at least 1, not {self.stream_rounds}: stream_bytes=0 for no streams")
        for nbytes in self.request_bytes:
            if nbytes < 4096 or nbytes % 4096:
                raise ValueError(f"request sizes are multiples of 4096 bytes, not {nbytes}")
        if min(self.depths) < 1:
            raise ValueError(f"a depth is at least 1, not {min(self.depths)}")
        if self.file_bytes < 2 * max(self.request_bytes):
            raise ValueError(f"a file of {self.file_bytes} bytes is too small for these requests")
        unknown = [name for name in self.engines if name not in ENGINES]
        if unknown:
            raise ValueError(f"there is no I/O engine {unknown[0]!r}: choose among {', '.join(ENGINES)}")


@dataclass(frozen=True)
class Setting:
    engine: str
    request_bytes: int
    depth: int

    def __str__(self) -> str:
        return f"{self.engine}, {format_bytes(self.request_bytes)} x {self.depth}"


@dataclass
class Measurement:
    """One setting and mode; a value per repeat."""

    setting: Setting
    mode: Mode
    bytes_per_second: list[float] = field(default_factory=list)
    cpu_seconds_per_gib: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.bytes_per_second)

    @property
    def spread(self) -> float:
        """Largest distance of a repeat from the median, as a share of it."""
        return max(abs(value / self.median - 1) for value in self.bytes_per_second)


@dataclass
class Stream:
    """Long mixed streams in the background of a busy Python thread, which looks at the clock; a value per round.

    setting: None for that thread alone, for comparison: it stands still when the machine has other things to do.
    longest_stall_seconds: the longest time between two looks. stalled_share: of the whole time, in stalls of 0.1 ms and
        more.
    """

    setting: Setting | None
    moved_bytes: int  # in each round
    bytes_per_second: list[float] = field(default_factory=list)
    cpu_seconds_per_gib: list[float] = field(default_factory=list)
    longest_stall_seconds: list[float] = field(default_factory=list)
    stalled_share: list[float] = field(default_factory=list)


@dataclass
class Comparison:
    """The same setting on the same file, ours and another program's, run in turns."""

    against: str
    mode: Mode
    ours: list[float] = field(default_factory=list)  # bytes per second
    theirs: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(self.ours) / statistics.median(self.theirs)


@dataclass
class Bench:
    """Everything measured in one directory."""

    directory: Path
    file_system: str
    device: str
    file_bytes: int
    direct: bool
    passed_over: dict[str, str]
    measurements: list[Measurement] = field(default_factory=list)
    best: Setting | None = None
    streams: list[Stream] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)

    def of(self, setting: Setting, mode: Mode) -> Measurement:
        return next(m for m in self.measurements if m.setting == setting and m.mode == mode)

    def settings(self) -> list[Setting]:
        return list(dict.fromkeys(m.setting for m in self.measurements))

    def profile(self) -> Profile:
        """The best setting, for `select`."""
        if self.best is None:
            raise AssertionError("nothing was measured")
        speeds = [self.of(self.best, mode).median for mode in MODES]
        return Profile(self.best.engine, self.best.request_bytes, self.best.depth, *speeds)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        values = asdict(self)
        values["directory"] = str(self.directory)
        for compared, made in zip(self.comparisons, values["comparisons"], strict=True):
            made["ratio"] = compared.ratio
        return values


def run(
    console: Console,
    directories: Sequence[Path],
    options: Options | None = None,
    *,
    against: Literal["fio"] | None = None,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    keep_profile: bool = True,
) -> list[Bench]:
    """Measure each directory, print a table, and keep the best setting as the profile of its device.

    against: also run that program with the best setting, in turns with ours. json_path, plot_path: write all values
    there. Errors: `OSError` for a directory that is missing, not writable or has too little space; `ValueError` or
    `RuntimeError`, before anything is measured, for what cannot be done.
    """
    options = options or Options()
    if not directories:
        raise ValueError("name at least one directory to measure")
    if against is not None and shutil.which(against) is None:
        raise RuntimeError(f"{against} is not on the PATH: install it (apt-get install {against}) to compare with it")
    if plot_path is not None:
        _figure_class()
    benches = []
    for directory in directories:
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            auto_refresh=False,  # its thread would take part in what is measured
        )
        with progress:
            bar = progress.add_task("")

            def show(what: str, done: float, bar: Any = bar, progress: Progress = progress) -> None:
                progress.update(bar, description=what, completed=100 * done, refresh=True)

            bench = measure(directory, options, against=against, progress=show)
        benches.append(bench)
        _print(console, bench)
        if keep_profile:
            with contextlib.suppress(OSError):
                console.print(
                    f"kept for `auto` in {save_profile(bench.directory, bench.profile())}",
                    markup=False,
                    highlight=False,
                )
    if json_path is not None:
        json_path.write_text(json.dumps([bench.as_dict() for bench in benches], indent=2) + "\n")
    if plot_path is not None:
        _plot(benches, plot_path)
    return benches


def measure(
    directory: Path,
    options: Options,
    *,
    against: Literal["fio"] | None = None,
    progress: Callable[[str, float], None] = lambda what, done: None,
) -> Bench:
    """Measure one directory. `progress` is told what is being done and which share of it is."""
    directory = check_directory(directory)
    remove_leftovers(directory)
    engines, passed_over = _working(directory, options.engines)
    if not engines:
        raise RuntimeError(f"no I/O engine works in {directory}: {passed_over}")
    found = file_system(directory)
    owned = OwnedDirectories()
    try:
        file = File(owned.create(directory) / "bench.extents", create=True)
        bench = Bench(directory, found.type, found.device, options.file_bytes, file.direct, passed_over)
        try:
            with _memory(options) as memory:
                _Measuring(file, memory, options, bench, progress).all(engines, against)
        finally:
            file.close()
    finally:
        owned.remove()
    return bench


def measure_quickly(directory: Path, engine: str, seconds: float) -> tuple[float, float]:
    """Bytes per second read and written in a directory, from half the time each and at most 2 GiB of new file."""
    setting = Setting(engine, 4 * _MIB, 8)
    file_bytes = min(2 * _GIB, free_bytes(directory) // 2) // setting.request_bytes * setting.request_bytes
    options = Options((engine,), (setting.request_bytes,), (setting.depth,), file_bytes)
    owned = OwnedDirectories()
    try:
        file = File(owned.create(directory) / "bench.extents", create=True)
        try:
            allocate(file, 0, file_bytes)
            bench = Bench(directory, "", "", file_bytes, file.direct, {})
            with _memory(options) as memory:
                measuring = _Measuring(file, memory, options, bench, lambda what, done: None)
                written = measuring._move(setting, "write", seconds=seconds / 2)
                # Only what was written is on the disk to be read.
                read_options = replace(
                    options, file_bytes=max(2 * setting.request_bytes, min(file_bytes, written.nbytes))
                )
                measuring = _Measuring(file, memory, read_options, bench, lambda what, done: None)
                read = measuring._move(setting, "read", seconds=seconds / 2)
        finally:
            file.close()
    finally:
        owned.remove()
    return read.nbytes / read.seconds, written.nbytes / written.seconds


def _working(directory: Path, names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    working: list[str] = []
    passed_over: dict[str, str] = {}
    for name in names:
        try:
            engine = ENGINES[name]()
            try:
                probe(directory, engine)
            finally:
                engine.close()
        except OSError as error:
            passed_over[name] = str(error)
        else:
            working.append(name)
    return working, passed_over


def _calls(options: Options, setting: Setting) -> tuple[int, int]:
    """Bytes of a call to the engine, and how many there are at a time.

    A call is a request, unless the engine cuts calls by itself: then the runtime hands it whole chunks.
    """
    size, count = setting.request_bytes, _TRANSFERS * setting.depth
    if getattr(ENGINES.get(setting.engine), "cuts_calls", False):
        requests = max(1, min(_CALL_BYTES, options.file_bytes // (2 * _CALLS_MIN)) // size)
        return requests * size, max(_CALLS_MIN, -(-count // requests))
    return size, count


@contextlib.contextmanager
def _memory(options: Options) -> Iterator[memoryview]:
    """Page-aligned, and filled with what no disk can compress."""
    settings = [
        Setting(name, size, depth)
        for name in options.engines
        for size in options.request_bytes
        for depth in (*options.depths, depth_in_use(name, 1, size))
    ]
    pool = SlabPool(max(math.prod(_calls(options, setting)) for setting in settings), 1)
    slab = asyncio.run(pool.acquire())
    try:
        tile = random.Random(0).randbytes(_MIB)
        for at in range(0, slab.nbytes, _MIB):
            part = slab.view[at : at + _MIB]
            part[:] = tile[: part.nbytes]
        yield slab.view
    finally:
        slab.give_back()
        pool.close()


class _Measuring:
    """One file, and the measurements on it."""

    def __init__(
        self,
        file: File,
        memory: memoryview,
        options: Options,
        bench: Bench,
        progress: Callable[[str, float], None],
    ) -> None:
        self.file = file
        self.memory = memory
        self.options = options
        self.bench = bench
        self.progress = progress
        self._stopped = False
        self._position = 0  # goes on from one measurement to the next: what was just moved may still be in some cache

    def all(self, engines: Sequence[str], against: Literal["fio"] | None) -> None:
        self._fill(engines[0])
        self._sweep(engines)
        if self.options.stream_bytes:
            self._stream_in_turns([self._in_use(name) for name in engines])
        if against is not None:
            self._compare(against)

    def _fill(self, engine: str) -> None:
        """Write the whole file once: what was only allocated reads as zeros, without the disk."""
        allocate(self.file, 0, self.options.file_bytes)
        setting = Setting(engine, max(self.options.request_bytes), max(self.options.depths))
        done = 0
        while done < self.options.file_bytes:
            self.progress("writing the file", done / self.options.file_bytes)
            done += self._move(setting, "write", bytes_max=min(_GIB, self.options.file_bytes - done)).nbytes

    def _sweep(self, engines: Sequence[str]) -> None:
        settings = []
        for name in engines:
            # Through the page cache, size and depth hardly matter, and the kernel's writing back disturbs what follows.
            sizes = self.options.request_bytes if name != "aiofiles" else self.options.request_bytes[-1:]
            depths = self.options.depths if name != "aiofiles" else self.options.depths[:1]
            settings += [Setting(name, size, depth) for size, depth in itertools.product(sizes, depths)]
        measurements = [Measurement(setting, mode) for setting in settings for mode in MODES]
        total = len(measurements) * self.options.repeats
        for number, (_, measurement) in enumerate(itertools.product(range(self.options.repeats), measurements)):
            self.progress(f"{measurement.setting}, {measurement.mode}", number / total)
            moved = self._move(measurement.setting, measurement.mode, seconds=self.options.seconds)
            measurement.bytes_per_second.append(moved.nbytes / moved.seconds)
            measurement.cpu_seconds_per_gib.append(moved.cpu_seconds / moved.nbytes * _GIB)
        self.bench.measurements = measurements
        self.bench.best = best_setting(self.bench, settings)

    def _in_use(self, engine: str) -> Setting:
        """As `select` would have it."""
        best = best_setting(self.bench, [setting for setting in self.bench.settings() if setting.engine == engine])
        return replace(best, depth=depth_in_use(engine, best.depth, best.request_bytes))

    def _stream_in_turns(self, settings: Sequence[Setting]) -> None:
        streams = [Stream(setting, 0) for setting in settings]
        alone = Stream(None, 0)
        self.bench.streams = [*streams, alone]
        rounds = self.options.stream_rounds
        for turn in range(rounds):
            for number, stream in enumerate(streams):
                self.progress(f"streaming with {stream.setting}", (turn + number / len(streams)) / rounds)
                self._stream(stream)
            seconds = min(_ALONE_SECONDS_MAX, streams[0].moved_bytes / streams[0].bytes_per_second[-1])
            self._watch(alone, functools.partial(time.sleep, seconds))

    def _stream(self, stream: Stream) -> None:
        setting = stream.setting
        if setting is None:
            raise AssertionError("nothing to move")
        moved, cpu_seconds = self._watch(
            stream,
            lambda: self._move(setting, "mixed", seconds=_STREAM_SECONDS_MAX, bytes_max=self.options.stream_bytes),
        )
        stream.moved_bytes = moved.nbytes
        stream.bytes_per_second.append(moved.nbytes / moved.seconds)
        stream.cpu_seconds_per_gib.append(cpu_seconds / moved.nbytes * _GIB)

    def _watch(self, stream: Stream, work: Callable[[], T]) -> tuple[T, float]:
        """Work in a background thread, as a runtime does, while this one does nothing but look at the clock.

        What the work returned, and the processor time that the process took for it.
        """
        ended = threading.Event()
        results: list[T | BaseException] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:
                results.append(error)
            finally:
                ended.set()

        thread = threading.Thread(target=run, name="tiermem-bench")
        cpu_seconds, own_seconds = time.process_time(), time.thread_time()
        thread.start()
        longest = stalled = 0.0
        first = last = time.perf_counter()
        try:
            while not ended.is_set():
                now = time.perf_counter()
                gap, last = now - last, now
                longest = max(longest, gap)
                if gap >= _STALL_SECONDS_MIN:
                    stalled += gap
        finally:
            self._stopped = not ended.is_set()  # Ctrl-C
            thread.join()
        cpu_seconds = time.process_time() - cpu_seconds - (time.thread_time() - own_seconds)
        result = results[0]
        if isinstance(result, BaseException):
            raise result
        stream.longest_stall_seconds.append(longest)
        stream.stalled_share.append(stalled / (last - first))
        return result, cpu_seconds

    def _compare(self, against: Literal["fio"]) -> None:
        setting = self.bench.best
        if setting is None:
            raise AssertionError("nothing was measured")
        comparisons = [Comparison(against, mode) for mode in MODES]
        self.bench.comparisons = comparisons
        rounds = self.options.compare_rounds
        for number, (turn, comparison) in enumerate(itertools.product(range(rounds), comparisons)):
            self.progress(f"{comparison.mode} against {against}", number / (rounds * len(comparisons)))

            def ours(comparison: Comparison = comparison) -> None:
                self._position = 0  # where fio begins too
                moved = self._move(setting, comparison.mode, seconds=self.options.compare_seconds)
                comparison.ours.append(moved.nbytes / moved.seconds)

            def theirs(comparison: Comparison = comparison) -> None:
                comparison.theirs.append(
                    fio(self.file.path, setting, comparison.mode, self.options.compare_seconds, self.options.file_bytes)
                )

            for one in (ours, theirs) if turn % 2 == 0 else (theirs, ours):
                one()

    def _move(
        self, setting: Setting, mode: Mode, *, seconds: float | None = None, bytes_max: int | None = None
    ) -> _Moved:
        engine = ENGINES[setting.engine](depth=setting.depth, piece_bytes=setting.request_bytes)
        file = engine.open(self.file.path)
        try:
            with contextlib.ExitStack() as stack:
                used = self.memory[: math.prod(_calls(self.options, setting))]
                stack.callback(engine.pin(address_of(used), used.nbytes))
                return asyncio.run(self._move_on_loop(engine, file, setting, mode, seconds, bytes_max))
        finally:
            if not file.direct:
                _drop_cache(file)  # or what is read next comes from there, and direct writes have to drop it
            file.close()
            engine.close()

    async def _move_on_loop(
        self, engine: Engine, file: File, setting: Setting, mode: Mode, seconds: float | None, bytes_max: int | None
    ) -> _Moved:
        size, count = _calls(self.options, setting)
        places = self.options.file_bytes // size
        first = self._position // size
        # Reads and writes at once are half a file apart, so that they never meet.
        reads = itertools.count(first)
        writes = itertools.count(first + (places // 2 if mode == "mixed" else 0))
        turns = itertools.cycle((True, False)) if mode == "mixed" else itertools.repeat(mode == "write")
        budget = itertools.count() if bytes_max is None else iter(range(max(1, bytes_max // size)))
        moved_bytes = 0
        began, cpu_began = time.perf_counter(), time.process_time()
        deadline = float("inf") if seconds is None else began + seconds

        async def worker(number: int) -> None:
            nonlocal moved_bytes
            view = self.memory[number * size : (number + 1) * size]
            while time.perf_counter() < deadline and not self._stopped and next(budget, None) is not None:
                if next(turns):
                    await engine.write(file, next(writes) % places * size, view)
                else:
                    await engine.read(file, next(reads) % places * size, view)
                moved_bytes += size

        await asyncio.gather(*(worker(number) for number in range(count)))
        if not file.direct and mode != "read":
            os.fdatasync(file.fd)
        elapsed, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        self._position = (self._position + moved_bytes) % (places * size)
        return _Moved(moved_bytes, elapsed, cpu_seconds)


@dataclass(frozen=True)
class _Moved:
    nbytes: int
    seconds: float
    cpu_seconds: float


def best_setting(bench: Bench, settings: Sequence[Setting]) -> Setting:
    """The setting that keeps most of each mode's best speed.

    Among equals, one of an engine that cuts calls by itself, with the fewest bytes in flight: what was begun first ends
    first. Of others the one with the largest requests, as each one's end needs the interpreter, which is busy while a
    model trains; then the one with the fewest in flight. Then the one that costs the processor least.
    """
    fastest = {mode: max(bench.of(setting, mode).median for setting in settings) for mode in MODES}

    def score(setting: Setting) -> float:
        product = 1.0
        for mode in MODES:
            product *= bench.of(setting, mode).median / fastest[mode]
        return float(product ** (1 / len(MODES)))

    def cpu_seconds(setting: Setting) -> float:
        return sum(statistics.median(bench.of(setting, mode).cpu_seconds_per_gib) for mode in MODES)

    def rank(setting: Setting) -> tuple[int, int, int]:
        if getattr(ENGINES.get(setting.engine), "cuts_calls", False):
            return 0, setting.request_bytes * setting.depth, 0
        return 1, -setting.request_bytes, setting.depth

    enough = _SAME_SPEED * max(map(score, settings))
    return min(
        (setting for setting in settings if score(setting) >= enough),
        key=lambda setting: (rank(setting), cpu_seconds(setting)),
    )


def fio(path: Path, setting: Setting, mode: Mode, seconds: float, file_bytes: int) -> float:
    """Bytes per second that fio moves on the file with the setting."""
    engine = ["--ioengine=io_uring", "--registerfiles=1", "--fixedbufs=1"]
    if setting.engine != "io_uring":
        engine = ["--ioengine=libaio"]
    command = [
        "fio",
        "--name=tiermem",
        f"--filename={path}",
        f"--rw={'rw' if mode == 'mixed' else mode}",
        f"--bs={setting.request_bytes}",
        f"--iodepth={setting.depth}",
        *engine,
        "--direct=1",
        "--thread",
        "--allow_file_create=0",
        "--time_based",
        f"--runtime={int(seconds * 1000)}ms",
        f"--size={file_bytes}",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"fio failed ({' '.join(command)}): {done.stderr.strip() or done.stdout.strip()}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job["read"]["bw_bytes"]) + float(job["write"]["bw_bytes"])


def _drop_cache(file: File) -> None:
    os.fdatasync(file.fd)
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _speed(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f}"


def _print(console: Console, bench: Bench) -> None:
    way = "around the page cache" if bench.direct else "through the page cache: direct I/O is refused there"
    console.print(
        f"[bold]{escape(str(bench.directory))}[/]: {bench.file_system} on {bench.device or 'an unknown device'}, "
        f"a file of {format_bytes(bench.file_bytes)}, {way}",
        highlight=False,
    )
    for name, reason in bench.passed_over.items():
        console.print(f"{name} passed over: {reason}", markup=False, highlight=False)
    table = Table(caption="GB/s: median of the repeats, and how far the farthest was from it. * best")
    for heading in ("engine", "request", "depth", "read", "write", "both at once", "CPU s/GiB"):
        table.add_column(heading, justify="left" if heading == "engine" else "right", no_wrap=True)
    for setting in bench.settings():
        measured = [bench.of(setting, mode) for mode in MODES]
        best = setting == bench.best
        table.add_row(
            setting.engine + (" *" if best else ""),
            format_bytes(setting.request_bytes),
            str(setting.depth),
            *(f"{_speed(m.median)} ± {m.spread:.0%}" for m in measured),
            f"{statistics.median(m.median for m in map(_cpu, measured)):.3f}",
            style="bold" if best else None,
        )
    console.print(table)
    if bench.streams:
        console.print(_table_of_streams(bench.streams))
    if bench.comparisons:
        table = Table(caption=f"{bench.best}, the same file, in turns; medians in GB/s")
        for heading in ("mode", "tiermem", bench.comparisons[0].against, "ratio"):
            table.add_column(heading, justify="left" if heading == "mode" else "right")
        for comparison in bench.comparisons:
            table.add_row(
                comparison.mode,
                _speed(statistics.median(comparison.ours)),
                _speed(statistics.median(comparison.theirs)),
                f"{comparison.ratio:.3f}",
            )
        console.print(table)


def _table_of_streams(streams: Sequence[Stream]) -> Table:
    rounds = len(streams[0].bytes_per_second)
    table = Table(
        caption=f"Streams both ways in the background of a busy Python thread, medians of {rounds} in turns; how long "
        "at most, and for which share of the time, that thread stood still"
    )
    for heading in ("engine", "moved", "GB/s", "CPU s/GiB", "longest stall", "stood still"):
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    for stream in streams:
        stalls = (
            f"{statistics.median(stream.longest_stall_seconds) * 1000:.1f} ms",
            f"{statistics.median(stream.stalled_share):.1%}",
        )
        if stream.setting is None:
            table.add_row("no stream", "", "", "", *stalls)
        else:
            table.add_row(
                str(stream.setting),
                format_bytes(stream.moved_bytes),
                _speed(statistics.median(stream.bytes_per_second)),
                f"{statistics.median(stream.cpu_seconds_per_gib):.4f}",
                *stalls,
            )
    return table


def _cpu(measurement: Measurement) -> Measurement:
    return Measurement(measurement.setting, measurement.mode, measurement.cpu_seconds_per_gib)


def _figure_class() -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise RuntimeError("a plot needs matplotlib: pip install 'tiermem[plot]'") from None


def _plot(benches: Sequence[Bench], path: Path) -> None:
    figure = _figure_class()(figsize=(12, 4 * len(benches)), layout="tight")
    axes = figure.subplots(len(benches), len(MODES), squeeze=False, sharey="row")
    for row, bench in zip(axes, benches, strict=True):
        for axis, mode in zip(row, MODES, strict=True):
            lines: dict[tuple[str, int], list[Measurement]] = {}
            for measurement in bench.measurements:
                if measurement.mode == mode:
                    key = (measurement.setting.engine, measurement.setting.request_bytes)
                    lines.setdefault(key, []).append(measurement)
            for (engine, size), points in lines.items():
                axis.errorbar(
                    [p.setting.depth for p in points],
                    [p.median / 1e9 for p in points],
                    [p.median * p.spread / 1e9 for p in points],
                    label=f"{engine}, {format_bytes(size)}",
                    marker="o",
                    capsize=2,
                )
            axis.set_title(f"{bench.directory}: {mode}", fontsize=9)
            axis.set_xlabel("depth")
            axis.set_ylim(bottom=0)
        row[0].set_ylabel("GB/s")
        row[-1].legend(fontsize=7)
    figure.savefig(path, dpi=150, format="png")
