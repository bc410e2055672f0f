from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tiermem.io import ThreadsEngine
from tiermem.slab import SlabPool
from tiermem.store import NoFreeExtentError, Store

SIZES = [1, 7, 199, 513, 4095, 4096, 4097, 1_000_003]


@pytest.fixture
def engine() -> Iterator[ThreadsEngine]:
    engine = ThreadsEngine(depth=4)
    yield engine
    engine.close()


def noise(nbytes: int, seed: int = 0) -> bytearray:
    return bytearray(np.random.default_rng(seed).bytes(nbytes))


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_swapped_out_is_swapped_in(tmp_path: Path, engine: ThreadsEngine, nbytes: int) -> None:
    async def main() -> None:
        store = Store([tmp_path], engine)
        store.reserve("state", nbytes, 2)
        records = [store.record("state", nbytes) for _ in range(2)]
        assert not records[0].valid
        for turn in range(3):
            for i, record in enumerate(records):
                await record.swap_out(memoryview(noise(nbytes, turn * 2 + i)))
                assert record.valid
            for i, record in enumerate(records):
                target = bytearray(nbytes)
                await record.swap_in(memoryview(target))
                assert target == noise(nbytes, turn * 2 + i)
        store.close()
        assert list(tmp_path.iterdir()) == []

    asyncio.run(main())


def test_slabs_go_around_the_page_cache(tmp_path: Path, engine: ThreadsEngine) -> None:
    async def main() -> None:
        store = Store([tmp_path], engine)
        store.reserve("state", 100_000, 1)
        record = store.record("state", 100_000)
        async with SlabPool(100_000, 1).loan() as slab:
            slab.view[:] = noise(slab.nbytes)
            await record.swap_out(slab.view)
            slab.view[:] = bytes(slab.nbytes)
            await record.swap_in(slab.view)
            assert slab.view[:100_000] == noise(slab.nbytes)[:100_000]
        assert engine.bytes_read == engine.bytes_written == 102_400
        store.close()

    asyncio.run(main())


def test_a_pinned_version_survives_later_ones(tmp_path: Path, engine: ThreadsEngine) -> None:
    async def main() -> None:
        store = Store([tmp_path], engine, spare=1)
        store.reserve("state", 4096, 1)
        record = store.record("state", 4096)
        await record.swap_out(memoryview(b"1" * 4096))
        version = record.pin()
        await record.swap_out(memoryview(b"2" * 4096))
        with pytest.raises(NoFreeExtentError, match="pinned"):
            await record.swap_out(memoryview(b"3" * 4096))
        target = bytearray(4096)
        await version.swap_in(memoryview(target))
        assert target == b"1" * 4096
        version.unpin()
        await record.swap_out(memoryview(b"3" * 4096))
        await record.swap_in(memoryview(target))
        assert target == b"3" * 4096
        store.close()

    asyncio.run(main())


def test_reading_what_was_never_written_is_a_bug(tmp_path: Path, engine: ThreadsEngine) -> None:
    async def main() -> None:
        store = Store([tmp_path], engine)
        store.reserve("state", 4096, 1)
        with pytest.raises(AssertionError, match="before it was ever swapped out"):
            await store.record("state", 10).swap_in(memoryview(bytearray(10)))
        store.close()

    asyncio.run(main())


def test_files_are_private(tmp_path: Path, engine: ThreadsEngine) -> None:
    old = os.umask(0)
    try:
        store = Store([tmp_path], engine)
        store.reserve("state", 4096, 1)
    finally:
        os.umask(old)
    (directory,) = store.directories
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()} == {
        "lock": 0o600,
        "state.extents": 0o600,
    }
    store.close()
