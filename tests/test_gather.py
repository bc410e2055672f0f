"""Reading and writing weights outside of forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import Stack
from reference import ON_DISK, SPREAD, Outcome, Placement, Plain, Tiered, same_bits, train
from torch import nn

Compare = Callable[..., Outcome]

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
spread = pytest.mark.parametrize("placement", SPREAD, ids=str)


@both_dtypes
def test_weights_read_between_steps(compare: Compare, dtype: torch.dtype) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack().to(dtype))
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            loss = model(*model.inputs(lib)).float().square().mean()
            with lib.gather(model):
                lib.note("between forward and backward", model.blocks[1].up.weight.sum())
            loss.backward()
            with lib.gather(model.blocks):
                lib.note("before the step", model.blocks[1].up.weight.sum())
            optimizer.step()
            with lib.gather([model.blocks[2].down.weight, model.inlet.bias]):
                lib.note("behind the step", model.blocks[2].down.weight.sum())
                lib.note("behind the step", model.inlet.bias)
            optimizer.zero_grad()
            with lib.gather(model.head.weight):
                lib.note("one", model.head.weight.sum())
            with lib.gather(p for p in model.parameters() if p.ndim == 1):
                lib.note("a generator of some", model.blocks[0].norm.weight)

    compare(script)


@both_dtypes
def test_weights_written_between_steps(compare: Compare, dtype: torch.dtype) -> None:
    """What was written is trained on; moments stay."""

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack().to(dtype))
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        train(lib, model, optimizer, steps=2)
        with lib.gather(model.blocks[1], write=True), torch.no_grad():
            for parameter in model.blocks[1].parameters():
                parameter.copy_(lib.randn(*parameter.shape) / 8)
        lib.note("written", model(*model.inputs(lib)))
        train(lib, model, optimizer, steps=2)
        with lib.gather(model.head.weight, write=True):
            nn.init.constant_(model.head.weight, 0.125)
        train(lib, model, optimizer, steps=1)

    compare(script)


def test_initialisation_after_offload(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        for module in model.modules():
            if isinstance(module, nn.Linear):
                with lib.gather(module, write=True):
                    nn.init.orthogonal_(module.weight, generator=lib.generator)
                    nn.init.zeros_(module.bias)
        train(lib, model, lib.AdamW(model.parameters(), lr=1e-3))

    compare(script)


@spread
def test_gathers_nest(placement: Placement, tmp_path: Path) -> None:
    lib = Tiered(placement, tmp_path / "disk")
    model = lib.offload(Stack())
    weight = model.blocks[1].up.weight
    with lib.gather(model.blocks[1]):
        before = weight.detach().clone()
        with lib.gather(weight):
            assert same_bits(weight.detach(), before)
        assert same_bits(weight.detach(), before)
        with torch.no_grad():
            model(*model.inputs(lib))  # a forward inside a gather releases nothing that is still read
        assert same_bits(weight.detach(), before)
    assert before.isfinite().all()
    lib.close()


@spread
def test_an_exception_inside_a_gather_leaves_it(placement: Placement, tmp_path: Path) -> None:
    lib = Tiered(placement, tmp_path / "disk")
    model = lib.offload(Stack())
    optimizer = lib.AdamW(model.parameters(), lr=1e-3)
    for write in (False, True):
        with pytest.raises(KeyError), lib.gather(model, write=write):
            raise KeyError("mine")
        train(lib, model, optimizer, steps=1)
    lib.close()


def test_gather_of_parameters_that_are_not_offloaded_does_nothing(tmp_path: Path) -> None:
    lib = Tiered(ON_DISK, tmp_path / "disk")
    model = lib.offload(Stack())
    other = nn.Linear(3, 3)
    before = other.weight.detach().clone()
    with lib.gather([other.weight, model.head.weight]):
        assert same_bits(other.weight.detach(), before)
        assert model.head.weight.isfinite().all()
    lib.close()
    with lib.gather(model):  # closed: they are there anyway
        assert model.head.weight.isfinite().all()


def test_gather_gives_its_memory_back(tmp_path: Path) -> None:
    """Many gathers of everything never need more than the budget."""
    lib = Tiered(ON_DISK, tmp_path / "disk", memory={"device": "1MiB", "host": "2MiB"})
    model = lib.offload(Stack(width=64, depth=6))
    optimizer = lib.AdamW(model.parameters(), lr=1e-3)
    for _ in range(20):
        for block in model.blocks:
            with lib.gather(block):
                assert block.up.weight.isfinite().all()
    train(lib, model, optimizer, steps=1)
    lib.close()
