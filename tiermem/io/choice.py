"""The choice of an engine: by really writing and reading where it will be used."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from tiermem.io.aio import AiofilesEngine
from tiermem.io.engine import DIRECT_ALIGNMENT, Engine
from tiermem.io.profile import DEPTH_MAX, Profile, load_profile
from tiermem.io.threads import ThreadsEngine
from tiermem.io.uring import UringEngine
from tiermem.slab import SlabPool

__all__ = ["ENGINES", "depth_in_use", "probe", "select"]

ENGINES: dict[str, Callable[..., Engine]] = {
    "io_uring": UringEngine,
    "threads": ThreadsEngine,
    "aiofiles": AiofilesEngine,
}
"""Every engine, the preferred one first."""

_PROBE_BYTES = 3 * 65536 + 513  # aligned pieces and an unaligned end

_NOT_THE_ENGINE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOENT, errno.ENOTDIR, errno.EMFILE}
)
"""Errors that no other engine would be spared."""


def select(directories: str | Path | Sequence[str | Path], choice: str | Engine = "auto") -> Engine:
    """The engine for some directories.

    choice: `"auto"`: the first of `ENGINES` that writes and reads in every directory, beginning with the one that
        `tiermem bench io` found best on the first one's device; why others were passed over stands in its `fallbacks`.
        A name: that engine, or `RuntimeError` with the reason. An `Engine`: that one, as it is.
    """
    if isinstance(choice, Engine):
        return choice
    paths = [Path(path) for path in ([directories] if isinstance(directories, (str, Path)) else directories)]
    if choice != "auto" and choice not in ENGINES:
        raise ValueError(f"there is no I/O engine {choice!r}: choose 'auto' or one of {', '.join(map(repr, ENGINES))}")
    profile = load_profile(paths[0]) if paths and paths[0].is_dir() else None
    passed_over: list[str] = []
    for name in _in_order(profile) if choice == "auto" else (choice,):
        try:
            engine = ENGINES[name](**_setting(name, profile, paths))
        except OSError as error:
            passed_over.append(f"I/O engine {name} passed over: {error}")
            continue
        try:
            for path in paths:
                probe(path, engine)
        except OSError as error:
            engine.close()
            if error.errno in _NOT_THE_ENGINE:
                raise
            passed_over.append(f"I/O engine {name} passed over: {error}")
        except BaseException:
            engine.close()
            raise
        else:
            engine.fallbacks[:0] = passed_over
            return engine
    raise RuntimeError(f"no I/O engine works in {', '.join(map(str, paths))}: {'; '.join(passed_over)}")


def _in_order(profile: Profile | None) -> list[str]:
    """What was measured to be best goes first."""
    return sorted(ENGINES, key=lambda name: profile is None or profile.engine != name)


def _setting(name: str, profile: Profile | None, paths: Sequence[Path]) -> dict[str, int]:
    """What was measured, else what is usual; for several drives as much in flight as each of them needs, since one
    engine serves all in the order of its calls."""
    setting = {}
    if profile is not None and profile.engine == name:
        depth = depth_in_use(name, profile.depth, profile.piece_bytes)
        setting = {"depth": depth, "piece_bytes": profile.piece_bytes}
    drives = len({path.stat().st_dev for path in paths if path.exists()})
    if drives > 1:
        one = setting.get("depth", int(getattr(ENGINES[name], "usual_depth", 1)))
        setting["depth"] = min(drives * one, DEPTH_MAX)
    return setting


def depth_in_use(name: str, measured: int, piece_bytes: int) -> int:
    """How many pieces an engine has in flight where that many were best.

    Never less than usual: what was measured on an idle machine is too little for a busy one. To an engine that cuts
    calls by itself bytes count, to others how many calls the interpreter has begun.
    """
    engine = ENGINES[name]
    usual = int(getattr(engine, "usual_depth", 1))
    if getattr(engine, "cuts_calls", False):
        usual = -(-usual * int(getattr(engine, "usual_piece_bytes", 0)) // piece_bytes)
    return min(max(measured, usual), DEPTH_MAX)


def probe(directory: Path, engine: Engine) -> None:
    """Write a file there, read it back, compare, remove it; `OSError` if anything goes wrong."""
    _run_apart(_probe(directory.absolute(), engine))


async def _probe(directory: Path, engine: Engine) -> None:
    pool = SlabPool(_PROBE_BYTES, 2)
    path = directory / f".tiermem-probe-{secrets.token_hex(4)}"
    file = engine.open(path, create=True)
    try:
        async with pool.loan() as source, pool.loan() as target:
            pattern = secrets.token_bytes(_PROBE_BYTES)
            source.view[:_PROBE_BYTES] = pattern
            await engine.write(file, DIRECT_ALIGNMENT, source.view[:_PROBE_BYTES])
            await engine.read(file, DIRECT_ALIGNMENT, target.view[:_PROBE_BYTES])
            if target.view[:_PROBE_BYTES] != pattern:
                raise OSError(errno.EIO, "what was read is not what was written", str(path))
    finally:
        file.close()
        os.unlink(path)
        pool.close()


def _run_apart(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, whether or not this thread has a running event loop."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(coroutine)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="tiermem-probe")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
