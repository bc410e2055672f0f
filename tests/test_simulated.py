"""The discipline of an accelerator without one: late copies, poisoned buffers, slots. The bits are those of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import Stack
from reference import Outcome, Placement, Plain, Tiered, assert_same_bits, train
from torch import nn
from torch.utils.checkpoint import checkpoint

from tiermem.simulated import POISON_BYTE, SimulatedDevice


class Simulated(Tiered):
    """tiermem on a simulated accelerator."""

    seed = 0

    def offload(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        device = SimulatedDevice(seed=self.seed, delay_max_s=0.003)
        self.tiermem.offload(module, memory=self.memory(), policy=self.policy(), device=device)
        self.models.append(module)
        return module


class Recomputed(Stack):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.inlet(inputs)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return self.head(hidden)


def clipped(lib: Plain | Tiered) -> None:
    model = lib.offload(Stack(depth=4))
    train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), clip=0.3, steps=3)


def accumulated(lib: Plain | Tiered) -> None:
    model = lib.offload(Stack(depth=4).bfloat16())
    train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), clip=0.3, micro_batches=3, steps=2)


def recomputed(lib: Plain | Tiered) -> None:
    model = lib.offload(Recomputed(depth=4).bfloat16())
    train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), micro_batches=2, steps=2)


def evaluated(lib: Plain | Tiered) -> None:
    model = lib.offload(Stack(depth=4))
    optimizer = lib.AdamW(model.parameters(), lr=3e-3)
    for _ in range(3):
        train(lib, model, optimizer, steps=1)
        with torch.no_grad():
            lib.note("evaluated", model(*model.inputs(lib)).square().mean())


PLACEMENTS = [
    Placement("device", "host", 4096),
    Placement("host", "host", 4096),
    Placement("host", "disk", 4096),
    Placement("disk", "disk", 4096),
]


def run_simulated(script: object, placement: Placement, directory: Path, seed: int, memory: dict[str, str]) -> Outcome:
    torch.manual_seed(7)
    lib = Simulated(placement, directory, memory=memory)
    lib.seed = seed
    script(lib)  # type: ignore[operator]
    for model in lib.models:
        lib.synchronize(model)
    outcome = lib.outcome()
    lib.close()
    return outcome


def run_on_cpu(script: object, directory: Path) -> Outcome:
    torch.manual_seed(7)
    lib = Tiered(PLACEMENTS[1], directory)
    script(lib)  # type: ignore[operator]
    outcome = lib.outcome()
    lib.close()
    return outcome


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("script", [clipped, accumulated, recomputed, evaluated], ids=lambda script: script.__name__)
def test_an_accelerator_gives_the_bits_of_the_cpu(script: object, placement: Placement, tmp_path: Path) -> None:
    reference = run_on_cpu(script, tmp_path / "cpu")
    for seed, device_memory in ((1, "64MiB"), (2, "256KiB")):  # room for every block, and for two slots
        outcome = run_simulated(
            script,
            placement,
            tmp_path / str(seed),
            seed,
            {"device": device_memory if placement.weights != "device" else "64MiB"},
        )
        assert_same_bits(outcome, reference)


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
