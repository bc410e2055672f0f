"""What tests of I/O engines move, and a transfer there and back."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np

from tiermem.io import Engine
from tiermem.slab import SlabPool

PIECE = 65536


def noise(nbytes: int, seed: int = 0) -> bytearray:
    return bytearray(np.random.default_rng(seed).bytes(nbytes))


def write_then_read(engine: Engine, path: Path, nbytes: int, offset: int = 0, shift: int = 0) -> None:
    """Through slabs, starting `shift` bytes after a page; the file around the range must stay as it was."""

    async def main() -> None:
        file = engine.open(path, create=True)
        os.pwrite(file.fd, b"\xee" * (offset + nbytes + 10_000), 0)
        pool = SlabPool(nbytes + shift, 2)
        async with pool.loan() as source, pool.loan() as target:
            pattern = noise(nbytes, nbytes + offset)
            source.view[shift : shift + nbytes] = pattern
            target.view[:] = b"\xdd" * target.nbytes
            await engine.write(file, offset, source.view[shift : shift + nbytes])
            await engine.read(file, offset, target.view[shift : shift + nbytes])
            assert target.view[shift : shift + nbytes] == pattern
            assert set(target.view[:shift]) | set(target.view[shift + nbytes :]) <= {0xDD}
        file.close()
        pool.close()
        whole = path.read_bytes()
        assert whole[:offset].strip(b"\xee") == whole[offset + nbytes :].strip(b"\xee") == b""
        assert whole[offset : offset + nbytes] == pattern
        path.unlink()

    asyncio.run(main())
