"""Gradients: summed over micro-batches, clipped, changed by hand, dropped; always those of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Mixed, Stack, next_token_loss
from reference import ON_DISK, SPREAD, Outcome, Placement, Plain, Tiered, train
from torch import nn

Compare = Callable[..., Outcome]

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def backward(lib: Plain | Tiered, model: nn.Module, scale: float = 1.0) -> None:
    loss = model(*model.inputs(lib)).float().square().mean() * scale
    loss.backward()
    lib.note("loss", loss)


def started(lib: Plain | Tiered, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = lib.offload(Stack().to(dtype))
    return model, lib.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)


# --- accumulation


@both_dtypes
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
def test_any_number_of_micro_batches(compare: Compare, micro_batches: int, dtype: torch.dtype) -> None:
    def script(lib: Plain | Tiered) -> None:
        model, optimizer = started(lib, dtype)
        train(lib, model, optimizer, micro_batches=micro_batches, clip=0.3)

    compare(script)


def test_the_number_of_micro_batches_changes(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Mixed())
        optimizer = lib.AdamW(model.parameters(), lr=3e-3)
        for micro_batches in (1, 3, 2, 1):
            train(lib, model, optimizer, steps=1, micro_batches=micro_batches, clip=0.5, loss_of=next_token_loss)

    compare(script)


@both_dtypes
def test_accumulation_goes_on_after_a_step_without_zero_grad(compare: Compare, dtype: torch.dtype) -> None:
    def script(lib: Plain | Tiered) -> None:
        model, optimizer = started(lib, dtype)
        for step in range(5):
            backward(lib, model)
            optimizer.step()
            if step == 2:
                optimizer.zero_grad()

    compare(script)


@both_dtypes
def test_accumulation_goes_on_after_clipping(compare: Compare, dtype: torch.dtype) -> None:
    """Clipping scales what is there; what comes later is added unscaled."""

    def script(lib: Plain | Tiered) -> None:
        model, optimizer = started(lib, dtype)
        for _ in range(2):
            for scale in (1.0, 2.0, 0.5):
                backward(lib, model, scale)
                lib.note("norm", torch.nn.utils.clip_grad_norm_(lib.trained(model.parameters()), 0.1))
            optimizer.step()
            optimizer.zero_grad()

    compare(script)


def test_steps_between_the_micro_batches(compare: Compare) -> None:
    """A clipped gradient that stays across a step is added to."""

    def script(lib: Plain | Tiered) -> None:
        model, optimizer = started(lib)
        for _ in range(4):
            backward(lib, model)
            lib.note("norm", torch.nn.utils.clip_grad_norm_(lib.trained(model.parameters()), 0.2))
            optimizer.step()

    compare(script)


def test_two_steps_after_one_backward(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model, optimizer = started(lib)
        for _ in range(2):
            backward(lib, model)
            optimizer.step()
            optimizer.step()
            optimizer.zero_grad()

    compare(script)


def test_a_step_with_no_gradients_changes_nothing(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model, optimizer = started(lib)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        train(lib, model, optimizer, steps=1)
        optimizer.step()

    reference = compare(script)
    assert set(reference.steps.values()) == {1.0}


def test_no_step_at_all_leaves_the_weights_alone(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model, _ = started(lib)
        backward(lib, model)

    assert not compare(script).steps


@both_dtypes
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("by", ["optimizer", "module"])
def test_zero_grad(compare: Compare, by: str, set_to_none: bool, dtype: torch.dtype) -> None:
    """Also in the middle of accumulation, before any gradient, and before steps: zero gradients still decay weights."""

    def script(lib: Plain | Tiered) -> None:
        model, optimizer = started(lib, dtype)

        def zero_grad() -> None:
            if by == "optimizer":
                optimizer.zero_grad(set_to_none=set_to_none)
            else:
                lib.zero_grad(model, set_to_none)

        zero_grad()
        for _ in range(2):
            backward(lib, model)
            zero_grad()
            backward(lib, model)
            backward(lib, model)
            optimizer.step()
            zero_grad()
            optimizer.step()

    compare(script)


def test_gradients_of_one_parameter_dropped(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model, optimizer = started(lib)
        for step in range(3):
            backward(lib, model)
            backward(lib, model)
            if step == 1:
                model.blocks[1].up.weight.grad = None
                model.head.bias.grad = None
            lib.note("norm", torch.nn.utils.clip_grad_norm_(lib.trained(model.parameters()), 0.1))
            optimizer.step()
            optimizer.zero_grad()

    compare(script)


# --- clipping


@both_dtypes
@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 1e6])
def test_clipping_by_norm(compare: Compare, max_norm: float, dtype: torch.dtype) -> None:
    def script(lib: Plain | Tiered) -> None:
        model, optimizer = started(lib, dtype)
        train(lib, model, optimizer, clip=max_norm)

    compare(script)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
def test_clipping_by_other_norms(compare: Compare, norm_type: float, foreach: bool | None) -> None:
    def script(lib: Plain | Tiered) -> None:
        model, optimizer = started(lib)
        for _ in range(2):
            backward(lib, model)
            backward(lib, model)
            norm = torch.nn.utils.clip_grad_norm_(
                lib.trained(model.parameters()), 0.1, norm_type=norm_type, foreach=foreach
            )
            lib.note("norm", norm)
            optimizer.step()
            optimizer.zero_grad()

    compare(script, [SPREAD[0], ON_DISK])


@both_dtypes
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_by_value(compare: Compare, foreach: bool | None, dtype: torch.dtype) -> None:
    def script(lib: Plain | Tiered) -> None:
        model, optimizer = started(lib, dtype)
        for _ in range(3):
            backward(lib, model)
            backward(lib, model)
            torch.nn.utils.clip_grad_value_(lib.trained(model.parameters()), 1e-3, foreach=foreach)
            lib.note("norm", torch.nn.utils.get_total_norm([p.grad for p in lib.trained(model.parameters())]))
            optimizer.step()
            optimizer.zero_grad()

    compare(script)


@pytest.mark.parametrize("placement", SPREAD, ids=str)
def test_the_norm_of_very_many_elements_is_right_to_the_last_digit(placement: Placement, tmp_path: Path) -> None:
    """Where torch's own, summed in fp32, is not; so it is compared with the truth."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1_000_003))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return (self.weight * inputs).sum()

    lib = Tiered(placement, tmp_path / "disk")
    model = lib.offload(Large())
    total = torch.zeros(1_000_003, dtype=torch.float64)
    for scale in (1.0, 1e-3, 30.0):
        gradient = lib.randn(1_000_003) * scale
        total += gradient
        model(gradient).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        assert abs(norm.double() / total.norm() - 1) < 3e-7
    lib.close()


def test_clipping_groups_of_parameters_apart(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model, optimizer = started(lib)
        for _ in range(3):
            backward(lib, model)
            for part in (model.inlet, model.blocks[0], model.blocks[2].up):
                lib.note("norm", torch.nn.utils.clip_grad_norm_(lib.trained(part.parameters()), 0.05))
            lib.note("norm", torch.nn.utils.clip_grad_norm_(lib.trained([model.head.weight])[0], 0.05))
            optimizer.step()
            optimizer.zero_grad()

    compare(script)


def test_norm_first_and_scaling_later(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model, optimizer = started(lib)
        for _ in range(2):
            backward(lib, model)
            parameters = lib.trained(model.parameters())
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
            lib.note("norm", norm)
            torch.nn.utils.clip_grads_with_norm_(parameters, 0.1, norm)
            optimizer.step()
            optimizer.zero_grad()

    compare(script)


def test_clipping_twice(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model, optimizer = started(lib)
        for _ in range(2):
            backward(lib, model)
            for max_norm in (0.5, 0.1, 0.2):
                lib.note("norm", torch.nn.utils.clip_grad_norm_(lib.trained(model.parameters()), max_norm))
            optimizer.step()
            optimizer.zero_grad()

    compare(script)


def test_a_clip_that_refuses_what_is_not_finite(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model, optimizer = started(lib)
        for poisoned in (False, True, False):
            backward(lib, model)
            if poisoned:
                (model(*model.inputs(lib)).sum() * float("nan")).backward()
                with pytest.raises(RuntimeError, match="non-finite"):
                    torch.nn.utils.clip_grad_norm_(lib.trained(model.parameters()), 0.5, error_if_nonfinite=True)
            else:
                lib.note("norm", torch.nn.utils.clip_grad_norm_(lib.trained(model.parameters()), 0.5))
                optimizer.step()
            optimizer.zero_grad()

    compare(script)


# --- gradients in the user's hands

Change = Callable[[torch.Tensor], Any]
CHANGES: dict[str, Change] = {
    "mul_": lambda g: g.mul_(0.5),
    "div_": lambda g: g.div_(3.0),
    "mul_ by a tensor": lambda g: g.mul_(torch.tensor(0.25)),
    "add_": lambda g: g.add_(1e-3),
    "clamp_": lambda g: g.clamp_(-1e-3, 2e-3),
    "zero_": lambda g: g.zero_(),
    "fill_": lambda g: g.fill_(1e-2),
    "copy_": lambda g: g.copy_(torch.full(g.shape, 1e-2)),
    "index": lambda g: g.__setitem__(0, 1e-2),
    "scale, add, scale": lambda g: g.mul_(0.5).add_(1e-3).mul_(0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_changed_in_place(compare: Compare, change: str) -> None:
    def script(lib: Plain | Tiered) -> None:
        model, optimizer = started(lib)
        for _ in range(2):
            backward(lib, model)
            backward(lib, model)
            for parameter in lib.trained([model.blocks[0].up.weight, model.blocks[2].norm.bias, model.head.weight]):
                CHANGES[change](parameter.grad)
            backward(lib, model)
            lib.note("norm", torch.nn.utils.clip_grad_norm_(lib.trained(model.parameters()), 0.1))
            optimizer.step()
            optimizer.zero_grad()

    compare(script, [SPREAD[0], ON_DISK])


def test_gradients_read(compare: Compare) -> None:
    """The handle in `.grad` has the shape of its parameter and gives real numbers to every reader."""

    def script(lib: Plain | Tiered) -> None:
        model, optimizer = started(lib)
        for _ in range(2):
            backward(lib, model)
            backward(lib, model)
            for name, parameter in model.named_parameters():
                gradient = parameter.grad
                assert gradient.shape == parameter.shape and gradient.device == parameter.device
                assert not gradient.requires_grad
                lib.note(f"clone {name}", gradient.clone())
                lib.note(f"sum {name}", gradient.abs().sum())
                lib.note(f"norm {name}", gradient.norm())
                lib.note(f"max {name}", gradient.max().item())
                lib.note(f"numpy {name}", torch.tensor(gradient.flatten()[:2].numpy()))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for name, parameter in model.named_parameters():
                lib.note(f"clipped {name}", parameter.grad + 0)
                lib.note(f"first {name}", parameter.grad.flatten()[0])
            optimizer.step()
            for name, parameter in model.named_parameters():
                lib.note(f"after the step {name}", parameter.grad + 0)
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters())

    compare(script)


def test_bf16_gradients_read(compare: Compare) -> None:
    """They have their parameter's dtype: a sum over micro-batches is rounded where it is read, and only there."""

    def script(lib: Plain | Tiered) -> None:
        model, optimizer = started(lib, torch.bfloat16)
        for _ in range(3):
            backward(lib, model)
        for parameter in lib.trained(model.parameters()):
            lib.note("read", parameter.grad.bfloat16().float().sum())
            lib.note("norm", parameter.grad.norm().float())
        optimizer.step()

    reference = compare(script)
    assert len(reference.records["read"]) > 10


def test_gradients_set_by_hand(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model, optimizer = started(lib)
        for step in range(3):
            if step != 1:
                backward(lib, model)
            for parameter in (model.blocks[0].up.weight, model.head.bias):
                parameter.grad = lib.randn(*parameter.shape)
            if step == 2:
                backward(lib, model)
            lib.note("norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()

    compare(script)


def test_gradients_kept_by_the_user_outlive_zero_grad(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model, optimizer = started(lib)
        backward(lib, model)
        kept = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        backward(lib, model)
        optimizer.step()
        optimizer.zero_grad()
        for gradient in kept:
            lib.note("kept", gradient)

    compare(script)


def test_a_users_post_accumulate_hook_sees_the_gradient(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = Stack()

        def watch(name: str) -> None:
            parameter = model.get_parameter(name)
            parameter.register_post_accumulate_grad_hook(lambda p: lib.note(f"grad of {name}", p.grad.abs().sum()))

        watch("blocks.0.up.weight")  # before and after offload
        lib.offload(model)
        watch("blocks.1.up.weight")
        optimizer = lib.AdamW(model.parameters(), lr=3e-3)
        for _ in range(2):
            backward(lib, model)
            optimizer.step()
            optimizer.zero_grad()

    compare(script)
