"""Every wait of the runtime is needed: a run without it is seen to go wrong.

What must happen in order, and the functions that see to it (a site is a line of one of them, and its caller's):

The device's copies wait for an event (``copy``).
  - A block is copied into a slot after the compute that last read the slot:
    gathering `_copy_in`, `_into_slot`
  - New weights are copied over those at home on the DEVICE after the compute that reads the old ones:
    update `_upload`, values `upload`
  - Gradients leave their slot after the compute that made them:
    gradients `_flush_to_host`, `_flush_to_disk`, update `_fetch_gradient`
  - An input leaves after the compute that made it, and comes back into memory that compute has done with:
    saved_inputs `start_out`, `start_in`, `_copy`
The compute stream waits for an event (``hold``).
  - A block is computed with after its copy has come: gathering `_gather_in_slot`
  - Weights at home on the DEVICE are computed with after their upload: gathering `_gather_in_place`
  - An input is read after its copy has come back: saved_inputs `arrive`
The host waits for an event (``synchronize``).
  - A gradient is read, and its slot used again, after it was copied out:
    gradients `_flush_to_host`, `_flush_to_disk`, update `_fetch_gradient`
  - A slab is given back after what was copied from it, or to it: gathering `_into_slot`, saved_inputs `_copy`
  - A HOST plane is written, by an update or a user, after the last copy from it: gathering `wait_copies`
  - An input's memory, and its buffer, are given back after the copies of it: saved_inputs `written`, `_take`
  - A value that was set is where it belongs when the call returns: values `upload`
The host waits for a job of the background (``result``; in the background itself, ``await``).
  - A block is copied to the device, or computed with at home, after its own update: gathering `_load`, `_timed_wait`
  - A block in a slot is computed with after its copies have been started: gathering `_timed_wait`
  - An update, a norm, a reader takes gradients after they have come: gradients `_wait_flush`
  - Values are read and written while no update does: planes `wait_update`; and no load: gathering `_settle_load`
  - What rests on DISK is used after it was read or written: background `run`
  - An input is read after it was swapped in, and its extents come back after both transfers:
    saved_inputs `arrive`, `_forget`
  - Memory is given back when nothing of the runtime is in flight: runtime `close`

Sites are found by running: a new wait is a new site, and has to be needed too. With `--seeds` they are looked for under
more seeds, and the waits in `KEPT` are tried as well; `-s` prints what was seen without each.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterable, Iterator

import pytest
from simulation import CASES, Case, Worker

KEPT = {
    "copy: values upload < runtime _fill": "a line for values that are set later, too; here nothing was computed yet",
    "synchronize: background reached": "an order: who can begin does; the copy waits for its gradient",
    "await: saved_inputs _swap_in": "raises what the swap-out raised; `leave` has waited for its end",
    "result: saved_inputs written < saved_inputs leave": "bounds memory: the swap-out itself keeps the bytes",
    "result: gathering _timed_wait < gathering settle": "raises what the load raised; `wait_copies` waits for its end",
    "result: runtime synchronize < offload synchronize": "raises what the load raised; `wait_copies` waits for its end",
}
"""Waits that nothing goes wrong without, and what they are there for."""

SEEDS = (9, 0, 3, 6, 21, 12)
"""Of four neighbours each has another room and end (see `run_simulated`); the last two are slower."""

KINDS = {"copy", "hold", "synchronize", "result", "await"}


def without_lines(site: str) -> str:
    return re.sub(r":\d+ ", " ", site)


def one_script_after_another(cases: Iterable[Case]) -> Iterator[tuple[Case, int]]:
    """Every case under every seed; neighbours differ as much as can be, so that a fault is soon seen."""
    taken: collections.Counter[object] = collections.Counter()
    ranked = []
    for seed, case in itertools.product(SEEDS, sorted(set(cases), key=CASES.index)):
        taken[case.script] += 1
        ranked.append((taken[case.script], case, seed))
    for _, case, seed in sorted(ranked, key=lambda one: one[0]):
        yield case, seed


@pytest.mark.hang(7200)
def test_a_run_without_any_one_wait_goes_wrong(request: pytest.FixtureRequest) -> None:
    exhaustive = request.config.getoption("--seeds") is not None
    with Worker() as worker:
        runs: dict[str, list[Case]] = {}
        for seed in SEEDS[:4] if exhaustive else SEEDS[:1]:
            for case in CASES:
                faults, sites = worker.run(case, seed)
                assert not faults, (case, seed)
                for site in sites:
                    runs.setdefault(site, []).append(case)
        assert {site.partition(":")[0] for site in runs} == KINDS
        assert len(runs) >= 40
        caught = {}
        for site, where in runs.items():
            if without_lines(site) in KEPT and not exhaustive:
                continue
            for case, seed in one_script_after_another(where):
                faults, _ = worker.run(case, seed, site)
                if faults:
                    caught[site] = f"{case}, seed {seed}: {faults[0]}"
                    break
    for site, fault in sorted(caught.items()):
        print(f"{site}\n    {fault[:200]}")
    missed = [site for site in runs if site not in caught and without_lines(site) not in KEPT]
    assert not missed, f"nothing goes wrong without {missed}: are they needed?"
