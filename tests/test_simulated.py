"""The discipline of an accelerator without one: late copies, poisoned buffers, slots. The bits are those of the CPU,
and an oracle that knows what is ordered finds nothing that is not.

`python -m pytest tests/test_simulated.py --seeds 200` tries 200 seeds; each runs a third of the cases, neighbours
another third. Add `-n 2` for two processes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from reference import Outcome
from simulation import (
    CASES,
    COMPUTE,
    COPY_IN,
    COPY_OUT,
    DELAY_MAX_S,
    HOST,
    PLACEMENTS,
    SCRATCH,
    Case,
    Oracle,
    Simulated,
    Watch,
    faults_of,
    reference_of,
)

from tiermem.simulated import POISON_BYTE, SimulatedDevice

__all__ = ["PLACEMENTS", "Simulated"]

SEEDS = 6  # two for each case; see `run_simulated` for what they change


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--seeds") or SEEDS))


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    return {case: reference_of(case, tmp_path_factory.mktemp("cpu")) for case in CASES}


@pytest.mark.hang(600)
@pytest.mark.filterwarnings("ignore:.*tmpfs")
def test_an_accelerator_gives_the_bits_of_the_cpu_and_does_nothing_out_of_order(
    seed: int, references: dict[Case, Outcome]
) -> None:
    found = {}
    with tempfile.TemporaryDirectory(dir=SCRATCH) as directory:
        for number, case in enumerate(CASES[seed % 3 :: 3]):
            watch = Watch(seed=seed, delay_max_s=DELAY_MAX_S)
            faults = faults_of(case, Path(directory) / str(number), seed, references[case], watch)
            if faults:
                found[str(case)] = faults
            else:
                assert watch.oracle.launches > 100 and len(watch.sites) > 3  # it has seen the run
    assert not found


# The oracle.


def test_the_oracle_reports_what_no_wait_orders() -> None:
    oracle = Oracle()
    oracle.allocated([1, 2], HOST)
    oracle.launch("copy", (), [1], COPY_IN)
    oracle.launch("compute", [2], (), COMPUTE)
    assert not oracle.errors
    oracle.launch("compute", [1], (), COMPUTE)
    assert list(oracle.errors) == ["compute (reading from host memory) is not ordered after copy (writing to it)"]


def test_the_oracle_follows_waits_from_stream_to_stream_and_thread() -> None:
    oracle = Oracle()
    oracle.allocated([1], HOST)
    oracle.launch("copy in", (), [1], COPY_IN)
    oracle.wait(oracle.record(COPY_IN), COMPUTE)
    oracle.launch("compute", [1], (), COMPUTE)
    oracle.wait(oracle.record(COMPUTE), COPY_OUT)
    oracle.launch("copy out", [1], (), COPY_OUT)
    oracle.wait(oracle.record(COPY_OUT))
    with oracle.transfer("swap in", (), [1]):
        pass
    oracle.launch("kernel", (), [1])
    assert not oracle.errors
    with oracle.transfer("swap out", [1], ()):
        oracle.launch("kernel", (), [1])
    assert list(oracle.errors) == ["kernel (writing to host memory) is not ordered after swap out (reading from it)"]


# The device.


def test_a_copy_is_poison_until_it_is_complete() -> None:
    device = SimulatedDevice(seed=3, delay_max_s=0.05)
    source = torch.arange(256, dtype=torch.uint8)
    target = torch.zeros(256, dtype=torch.uint8)
    event = device.copy_in(target, source)
    early = target.clone()
    event.synchronize()
    assert bool((early == POISON_BYTE).all()) or torch.equal(early, source)
    assert torch.equal(target, source)
    device.close()


def test_a_copy_that_waits_leaves_its_target_alone_until_then() -> None:
    device = SimulatedDevice(seed=3, delay_max_s=0.02)
    source, first, target = torch.ones(64, dtype=torch.uint8), *torch.zeros(2, 64, dtype=torch.uint8)
    before = device.copy_out(first, source, device.mark())
    event = device.copy_in(target, source, before)
    early = target.clone()
    before.synchronize()
    event.synchronize()
    assert bool((early == 0).all())
    assert torch.equal(target, source)
    device.close()


def test_copies_of_one_direction_keep_their_order_and_wait_for_their_event() -> None:
    device = SimulatedDevice(seed=4, delay_max_s=0.01)
    first, second, third = (torch.full((64,), value, dtype=torch.uint8) for value in (1, 2, 3))
    middle = torch.zeros(64, dtype=torch.uint8)
    end = torch.zeros(64, dtype=torch.uint8)
    device.copy_in(middle, first)
    arrived = device.copy_in(middle, second)
    left = device.copy_out(end, middle, arrived)
    overwritten = device.copy_in(middle, third, left)
    overwritten.synchronize()
    assert torch.equal(end, second)
    assert torch.equal(middle, third)
    device.close()


def test_an_error_in_a_copy_is_raised_by_its_event() -> None:
    device = SimulatedDevice(delay_max_s=0)
    event = device.copy_in(torch.zeros(4, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8))
    with pytest.raises(RuntimeError):
        event.synchronize()
    device.close()


def test_a_copy_keeps_no_memory_alive() -> None:
    device = SimulatedDevice(seed=1, delay_max_s=0.05)
    gate = device.copy_in(torch.zeros(4, dtype=torch.uint8), kept := torch.zeros(4, dtype=torch.uint8), device.mark())
    event = device.copy_in(torch.zeros(4, dtype=torch.uint8), kept, gate)  # the target is gone
    with pytest.raises(RuntimeError, match="given back"):
        event.synchronize()
    device.close()
