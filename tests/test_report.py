"""What the report says, and what wears the disk."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from models import Stack
from reference import ON_DISK, Tiered, train

import tiermem
from tiermem.io import select
from tiermem.io.faults import Fault, FaultyEngine, corrupt


def test_every_byte_written_is_counted_per_step_and_against_the_drives_life(tmp_path: Path) -> None:
    lib = Tiered(ON_DISK, tmp_path, memory={"disk_endurance": "1GiB"})
    model = lib.offload(Stack(width=128))
    before = tiermem.report(model).bytes_written
    train(lib, model, lib.AdamW(model.parameters()), steps=4)
    report = tiermem.report(model)
    state_bytes = sum(8 * p.numel() for p in model.parameters())
    assert report.bytes_written - before >= 4 * state_bytes
    assert report.bytes_written_per_step == report.bytes_written / 4
    share = 100 * report.bytes_written / 2**30
    assert f"{share:.2g} % of its rated 1.0 GiB" in report.wear()
    assert report.wear() in str(report)
    lib.close()


def test_without_a_rating_only_bytes_are_told(tmp_path: Path) -> None:
    lib = Tiered(ON_DISK, tmp_path)
    model = lib.offload(Stack())
    train(lib, model, lib.AdamW(model.parameters()), steps=1)
    assert "rated" not in tiermem.report(model).wear()
    lib.close()


def test_bytes_that_change_on_disk_are_noticed(tmp_path: Path) -> None:
    """With ``verify_disk`` a flipped bit is an error that names the file, never a number."""
    engine = FaultyEngine(select(tmp_path, "threads"), Fault("read", corrupt(), nth=60, count=100_000))
    lib = Tiered(ON_DISK, tmp_path, policy={"io": engine, "verify_disk": True})
    model = lib.offload(Stack())
    with pytest.raises(OSError) as caught:
        train(lib, model, lib.AdamW(model.parameters()), steps=3)
        tiermem.synchronize(model)
    assert caught.value.errno in (errno.EIO, errno.EBADMSG)
    assert str(tmp_path) in str(caught.value)
    with pytest.warns(RuntimeWarning, match="could not be read back"):
        tiermem.close(model)
    engine.close()
    assert not list(tmp_path.iterdir())
