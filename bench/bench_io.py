"""Reading and writing one large buffer: tiermem's engines and DeepSpeed's aio handle, each at its best setting.

Both move the same bytes of the same file, around the page cache, in turns; figures are medians. Without DeepSpeed only
ours are measured (`tiermem bench io` measures more).

    python bench/bench_io.py DIR [--size 1GiB] [--rounds N]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from common import console, print_machine, spread, table

from tiermem.io import ENGINES
from tiermem.memory import format_bytes, parse_bytes
from tiermem.slab import SlabPool
from tiermem.store import OwnedDirectories, allocate, check_directory

MODES = ("read", "write")
RATIO_LIMIT = 1.1
"""At least this many times the speed of DeepSpeed's best."""

MIB = 1 << 20
TRIES = 3  # of each setting, before the best is compared


class Subject(Protocol):
    name: str

    def settings(self) -> list[Any]: ...

    def seconds(self, setting: Any, mode: str) -> float:
        """How long the whole buffer takes."""


class Ours:
    name = "tiermem"

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._pool = SlabPool(nbytes, 1)
        self._slab = asyncio.run(self._pool.acquire())
        tile = random.Random(0).randbytes(MIB)
        for at in range(0, nbytes, MIB):
            self._slab.view[at : at + MIB] = tile

    def settings(self) -> list[Any]:
        return list(itertools.product(("io_uring", "threads"), (4 * MIB, 8 * MIB), (8, 16, 32)))

    def seconds(self, setting: Any, mode: str) -> float:
        name, piece_bytes, depth = setting
        engine = ENGINES[name](piece_bytes=piece_bytes, depth=depth)
        unpin = engine.pin(self._slab.address, self._slab.nbytes)
        file = engine.open(self._path)

        async def move() -> float:
            began = time.perf_counter()
            await (engine.read if mode == "read" else engine.write)(file, 0, self._slab.view)
            return time.perf_counter() - began

        try:
            return asyncio.run(move())
        finally:
            file.close()
            unpin()
            engine.close()


class DeepSpeed:
    name = "DeepSpeed"

    def __init__(self, path: Path, nbytes: int) -> None:
        import torch
        from deepspeed.ops.op_builder import AsyncIOBuilder

        self._aio = AsyncIOBuilder().load()
        self._path = str(path)
        self._allocator = self._aio.aio_handle(MIB, 32, False, True, 1)
        self._buffer = self._allocator.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
        self._buffer.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8))

    def settings(self) -> list[Any]:
        return list(itertools.product((MIB, 8 * MIB), (8, 32), (1, 2, 4, 8)))

    def seconds(self, setting: Any, mode: str) -> float:
        block_bytes, depth, threads = setting
        handle = self._aio.aio_handle(block_bytes, depth, False, True, threads)
        began = time.perf_counter()
        (handle.sync_pread if mode == "read" else handle.sync_pwrite)(self._buffer, self._path, 0)
        return time.perf_counter() - began


def main() -> None:
    options = _arguments()
    print_machine()
    nbytes = parse_bytes(options.size) // (64 * MIB) * 64 * MIB
    with _file(options.directory, nbytes) as path:
        subjects: list[Subject] = [Ours(path, nbytes)]
        try:
            subjects.append(DeepSpeed(path, nbytes))
        except ImportError:
            console.print("DeepSpeed is not installed: only ours is measured")
        best = {(s.name, mode): _best_setting(s, mode) for s in subjects for mode in MODES}
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in best}
        for turn in range(options.rounds):
            for mode in MODES:
                for subject in subjects if turn % 2 == 0 else reversed(subjects):
                    seconds[subject.name, mode].append(subject.seconds(best[subject.name, mode], mode))
    speeds = {key: [nbytes / s / 1e9 for s in values] for key, values in seconds.items()}
    rows = [[name, mode, str(best[name, mode]), spread(speeds[name, mode])] for name, mode in best]
    table(f"GB/s, {format_bytes(nbytes)} at a time, median (quartiles)", ["", "mode", "setting", "GB/s"], rows)
    if len(subjects) > 1:
        kept = [_verdict(speeds, mode) for mode in MODES]
        sys.exit(0 if all(kept) else 1)


def _best_setting(subject: Subject, mode: str) -> Any:
    console.print(f"{subject.name}: looking for its best setting to {mode} with ...")
    tries = {s: statistics.median(subject.seconds(s, mode) for _ in range(TRIES)) for s in subject.settings()}
    return min(tries, key=lambda setting: tries[setting])


def _verdict(speeds: dict[tuple[str, str], list[float]], mode: str) -> bool:
    ratio = statistics.median(speeds["tiermem", mode]) / statistics.median(speeds["DeepSpeed", mode])
    mark = "[green]kept[/]" if ratio >= RATIO_LIMIT else "[red]missed[/]"
    console.print(f"{mode}, tiermem over DeepSpeed: {ratio:.2f}, at least {RATIO_LIMIT:g}: {mark}")
    return ratio >= RATIO_LIMIT


@contextmanager
def _file(directory: Path, nbytes: int) -> Iterator[Path]:
    """A file on the disk, full of data, removed afterwards."""
    owned = OwnedDirectories()
    try:
        path = owned.create(check_directory(directory)) / "bench.extents"
        engine = ENGINES["threads"]()
        file = engine.open(path, create=True)
        try:
            allocate(file, 0, nbytes)
            Ours(path, nbytes).seconds(("threads", 8 * MIB, 8), "write")
        finally:
            file.close()
            engine.close()
        yield path
    finally:
        owned.remove()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="on the disk to measure")
    parser.add_argument("--size", default="1GiB", help="of the buffer and the file")
    parser.add_argument("--rounds", type=int, default=9, help="of the comparison")
    return parser.parse_args()


if __name__ == "__main__":
    main()
