"""``Policy(update_in_backward=True)``: the same bits with no gradient at rest; a broken promise is an error."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from models import Stack
from reference import ON_DISK, SPREAD, Placement, Plain, Tiered, assert_same_bits, run_tiered, train
from test_simulated import PLACEMENTS, Simulated
from torch import nn

import tiermem


def script(lib: Plain | Tiered) -> None:
    model = lib.offload(Stack(depth=4).bfloat16())
    optimizer = lib.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(3):
        train(lib, model, optimizer, steps=1)
        scheduler.step()


@pytest.mark.parametrize("placement", SPREAD, ids=str)
def test_the_bits_are_those_of_updates_after_backward(placement: Placement, tmp_path: Path) -> None:
    reference = run_tiered(script, placement, tmp_path / "after")
    eager = run_tiered(script, placement, tmp_path / "inside", policy={"update_in_backward": True})
    assert_same_bits(eager, reference)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_and_on_a_simulated_accelerator(placement: Placement, tmp_path: Path) -> None:
    reference = run_tiered(script, placement, tmp_path / "after")
    torch.manual_seed(7)
    lib = Simulated(placement, tmp_path / "inside", policy={"update_in_backward": True})
    script(lib)
    assert_same_bits(lib.outcome(), reference)
    lib.close()


HOST_AND_DISK = Placement("host", "disk", 4096, "threads", "auto", 1)


class Uneven(nn.Module):
    """Blocks of many sizes: not every one fits every slot."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 200, 8, 16, 120, 16, 40, 8, 200)
        self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return hidden

    def inputs(self, lib: Plain | Tiered) -> tuple[torch.Tensor, ...]:
        return (lib.randn(5, 8),)


@pytest.mark.parametrize("eager", [False, True], ids=["after backward", "in backward"])
@pytest.mark.parametrize("device", ["32KiB", "48KiB", "96KiB"])
def test_slots_of_many_sizes_give_the_same_bits(device: str, eager: bool, tmp_path: Path) -> None:
    def uneven(lib: Plain | Tiered) -> None:
        model = lib.offload(Uneven())
        train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), steps=4)

    reference = run_tiered(uneven, ON_DISK, tmp_path / "ample")
    policy = {"update_in_backward": eager, "blocks": [nn.Linear]}
    for lib in (
        Tiered(ON_DISK, tmp_path / "disk", memory={"device": device}, policy=policy),
        Simulated(HOST_AND_DISK, tmp_path / "simulated", memory={"device": device}, policy=policy),
    ):
        torch.manual_seed(7)
        uneven(lib)
        assert_same_bits(lib.outcome(), reference)
        lib.close()


def test_parameters_without_a_gradient_are_left_alone(tmp_path: Path) -> None:
    def half_used(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack(depth=3))
        model.blocks[1].up.bias.requires_grad_(False)
        train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), steps=3)

    reference = run_tiered(half_used, ON_DISK, tmp_path / "after")
    eager = run_tiered(half_used, ON_DISK, tmp_path / "inside", policy={"update_in_backward": True})
    assert_same_bits(eager, reference)


@pytest.fixture
def eager(tmp_path: Path) -> tuple[Tiered, torch.nn.Module, torch.optim.Optimizer]:
    lib = Tiered(SPREAD[1], tmp_path, policy={"update_in_backward": True})
    model = lib.offload(Stack())
    return lib, model, lib.AdamW(model.parameters(), lr=1e-3)


Eager = tuple[Tiered, torch.nn.Module, torch.optim.Optimizer]


def backward(lib: Tiered, model: torch.nn.Module) -> None:
    model(*model.inputs(lib)).square().mean().backward()


def test_no_gradient_rests_anywhere(eager: Eager) -> None:
    lib, model, optimizer = eager
    train(lib, model, optimizer, steps=2)
    assert all(block.grads is None for block in tiermem.report(model).blocks)
    lib.close()


def test_clipping_is_an_error(eager: Eager) -> None:
    lib, model, _ = eager
    backward(lib, model)
    with pytest.raises(RuntimeError, match="update_in_backward"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    lib.close()


def test_a_second_backward_before_step_is_an_error(eager: Eager) -> None:
    lib, model, _ = eager
    outputs = model(*model.inputs(lib))
    outputs.square().mean().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        outputs.sum().backward()
    lib.close()


def test_a_forward_before_step_is_an_error(eager: Eager) -> None:
    lib, model, optimizer = eager
    backward(lib, model)
    with pytest.raises(RuntimeError, match="between backward and step"), torch.no_grad():
        model(*model.inputs(lib))
    optimizer.step()
    optimizer.zero_grad()
    train(lib, model, optimizer, steps=1)
    lib.close()


def test_a_hyperparameter_changed_behind_backward_is_an_error(eager: Eager) -> None:
    lib, model, optimizer = eager
    backward(lib, model)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match="hyperparameter"):
        optimizer.step()
    lib.close()


def test_without_an_optimizer_backward_says_what_is_missing(tmp_path: Path) -> None:
    lib = Tiered(SPREAD[1], tmp_path, policy={"update_in_backward": True})
    model = lib.offload(Stack())
    with pytest.raises(RuntimeError, match="optimizer"):
        backward(lib, model)
    lib.close()
