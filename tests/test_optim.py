"""tiermem's optimizers are torch's: param groups, schedules, closures, freezing, steps that must not happen."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Stack
from reference import ON_DISK, SPREAD, Outcome, Plain, Tiered, assert_close, run_plain, run_tiered, same_bits, train
from torch import Tensor, nn

Compare = Callable[..., Outcome]

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
both_kinds = pytest.mark.parametrize("kind", ["AdamW", "Adam"])


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Decayed matrices, vectors without decay, and a head with everything its own; they share blocks and chunks."""
    body = [*model.inlet.parameters(), *model.blocks.parameters()]
    return [
        {"params": [p for p in body if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in body if p.ndim == 1], "weight_decay": 0.0, "lr": 3e-2},
        {"params": list(model.head.parameters()), "lr": 1e-3, "betas": (0.5, 0.9), "eps": 1e-4},
    ]


# --- a torch optimizer


@both_kinds
def test_it_is_a_torch_optimizer_with_torchs_defaults(kind: str) -> None:
    import tiermem

    ours, torchs = getattr(tiermem, kind), getattr(torch.optim, kind)
    assert issubclass(ours, torch.optim.Optimizer)
    parameter = nn.Parameter(torch.zeros(3))
    built, expected = ours([parameter]), torchs([parameter])
    assert built.defaults.items() >= {k: expected.defaults[k] for k in ("lr", "betas", "eps", "weight_decay")}.items()
    assert built.param_groups[0]["params"][0] is parameter
    assert built.param_groups[0].keys() >= {"params", "lr", "betas", "eps", "weight_decay", "maximize"}
    assert kind in repr(built)
    assert ours([parameter], 0.5).defaults["lr"] == 0.5


@pytest.mark.parametrize(
    "wrong",
    [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"eps": -1e-8}, {"weight_decay": -0.1}],
    ids=str,
)
@both_kinds
def test_it_refuses_what_torch_refuses(kind: str, wrong: dict[str, Any]) -> None:
    import tiermem

    with pytest.raises(ValueError):
        getattr(tiermem, kind)([nn.Parameter(torch.zeros(3))], **wrong)
    with pytest.raises(ValueError):
        getattr(tiermem, kind)([])


def test_parameters_that_the_runtime_does_not_hold(compare: Compare) -> None:
    """A plain head outside of the offloaded model is trained by the same optimizer."""

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        head = nn.Linear(5, 3)
        optimizer = lib.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
        for _ in range(3):
            head(model(*model.inputs(lib))).square().mean().backward()
            both = lib.trained([*model.parameters(), *head.parameters()])
            lib.note("norm", torch.nn.utils.clip_grad_norm_(both, 0.2))
            optimizer.step()
            optimizer.zero_grad()
        lib.optimizers.clear()  # an `Outcome` knows the parameters of models only, so:
        state = optimizer.state_dict()["state"]
        for number, (name, parameter) in enumerate(
            [*model.named_parameters(), *head.named_parameters(prefix="outside")]
        ):
            lib.note(f"exp_avg of {name}", state[number]["exp_avg"])
            if name.startswith("outside."):
                lib.note(name, parameter)

    compare(script)


def test_an_optimizer_of_plain_parameters_only() -> None:
    """With nothing offloaded it is plain torch."""
    import tiermem

    ends = []
    for optimizer_class in (torch.optim.AdamW, tiermem.AdamW):
        torch.manual_seed(3)
        linear = nn.Linear(9, 4)
        optimizer = optimizer_class(linear.parameters(), lr=0.1)
        for _ in range(3):
            linear(torch.randn(5, 9)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(linear.weight.detach())
    assert torch.allclose(*ends, rtol=1e-5, atol=1e-6)


def test_an_optimizer_over_one_parameter_of_a_block(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        optimizer = lib.AdamW([model.blocks[1].up.weight], lr=1e-3)
        train(lib, model, optimizer)

    assert len(compare(script).exp_avg) == 1


def test_named_parameters(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        optimizer = lib.AdamW(list(model.named_parameters()), lr=1e-3)
        train(lib, model, optimizer)
        assert optimizer.param_groups[0]["param_names"][0] == "inlet.weight"

    compare(script)


def test_two_optimizers_over_one_model(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        first = lib.AdamW([*model.inlet.parameters(), *model.blocks[1].up.parameters()], lr=1e-3)
        rest = {*model.parameters()} - {*first.param_groups[0]["params"]}
        second = lib.Adam([p for p in model.parameters() if p in rest], lr=1e-3, weight_decay=0.1)
        for step in range(4):
            model(*model.inputs(lib)).square().mean().backward()
            first.step()
            first.zero_grad()
            if step % 2:
                second.step()
                second.zero_grad()

    compare(script)


def test_optimizer_step_hooks(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        train(lib, model, optimizer, steps=2)
        assert seen == ["before", "after"] * 2

    compare(script)


# --- param groups


@both_dtypes
@both_kinds
def test_groups_with_their_own_hyperparameters(compare: Compare, kind: str, dtype: torch.dtype) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack().to(dtype))
        train(lib, model, getattr(lib, kind)(groups(model), lr=1e-3), clip=0.3)

    compare(script)


def test_groups_changed_between_steps(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        optimizer = lib.AdamW(groups(model), lr=1e-3)
        for step in range(4):
            train(lib, model, optimizer, steps=1)
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.param_groups[1]["weight_decay"] = 0.1 * step
            optimizer.param_groups[2]["betas"] = (0.9 - 0.1 * step, 0.95)
            optimizer.param_groups[2]["eps"] = 10.0**-step

    compare(script)


def test_groups_changed_right_after_a_step_do_not_change_it(compare: Compare) -> None:
    """`step` fixes the hyperparameters: its updates may still be waiting when the next line changes them."""

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack(depth=6))
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.param_groups[0].update(lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1)
            model(*model.inputs(lib)).square().mean().backward()
            optimizer.step()
            optimizer.param_groups[0].update(lr=100.0, betas=(0.1, 0.2), weight_decay=0.9)
            optimizer.zero_grad()

    compare(script)


@both_dtypes
def test_add_param_group(compare: Compare, dtype: torch.dtype) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack().to(dtype))
        optimizer = lib.AdamW(model.head.parameters(), lr=1e-3)
        train(lib, model, optimizer, steps=2)
        lib.zero_grad(model)  # of those that the optimizer does not know, it grew until now
        optimizer.add_param_group({"params": model.blocks[2].parameters(), "lr": 1e-3})
        train(lib, model, optimizer, steps=2)
        lib.zero_grad(model)
        optimizer.add_param_group({"params": [*model.inlet.parameters(), *model.blocks[:2].parameters()]})
        train(lib, model, optimizer, steps=2, clip=0.3)

    compare(script)


def test_a_learning_rate_in_a_tensor(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        optimizer = lib.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False)
        train(lib, model, optimizer, steps=1)
        optimizer.param_groups[0]["lr"].fill_(3e-3)
        train(lib, model, optimizer, steps=2)

    compare(script)


# --- schedules

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 3)),
    "lambda per group": lambda o: torch.optim.lr_scheduler.LambdaLR(o, [lambda s: 0.5**s, lambda s: 1.0, lambda s: s]),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
    "one cycle, betas too": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=6),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(compare: Compare, schedule: str) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        optimizer = lib.AdamW(groups(model), lr=1e-3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # "scheduler before optimizer" would be one
            train(lib, model, optimizer, steps=5, clip=0.3, scheduler=SCHEDULES[schedule](optimizer))

    compare(script)


def test_a_schedule_by_the_loss(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0)
        for _ in range(4):
            train(lib, model, optimizer, steps=1)
            scheduler.step(lib.records["loss"][-1])
            lib.note("lr", optimizer.param_groups[0]["lr"])

    compare(script)


# --- closures


@both_dtypes
@both_kinds
def test_closures(compare: Compare, kind: str, dtype: torch.dtype) -> None:
    """The closure runs under `enable_grad`, once, and its value is returned."""

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack().to(dtype))
        optimizer = getattr(lib, kind)(model.parameters(), lr=1e-3)

        def closure() -> Tensor:
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = model(*model.inputs(lib)).float().square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            with torch.no_grad():
                lib.note("loss", optimizer.step(closure))
        assert len(lib.records["loss"]) == 3

    compare(script)


# --- freezing


@both_dtypes
def test_freezing_and_unfreezing_between_steps(compare: Compare, dtype: torch.dtype) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack(depth=4).to(dtype))
        optimizer = lib.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        parts = [model.blocks[1], model.blocks[3].down, model.inlet, model.blocks[2].norm]
        for step in range(5):
            parts[step % 4].requires_grad_(False)
            train(lib, model, optimizer, steps=1, clip=0.3)
            parts[step % 4].requires_grad_(True)
        model.blocks.requires_grad_(False)
        train(lib, model, optimizer, steps=2)

    compare(script)


@both_dtypes
def test_a_part_frozen_at_first_is_trained_later(compare: Compare, dtype: torch.dtype) -> None:
    """It had no state when the model was offloaded."""

    def script(lib: Plain | Tiered) -> None:
        model = Stack().to(dtype)
        model.blocks[1].requires_grad_(False)
        model.inlet.weight.requires_grad_(False)
        lib.offload(model)
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        train(lib, model, optimizer, steps=2)
        model.requires_grad_(True)
        train(lib, model, optimizer, steps=2, clip=0.3)

    compare(script)


def test_a_gradient_from_before_freezing_is_still_applied(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        model(*model.inputs(lib)).square().mean().backward()
        model.blocks[0].requires_grad_(False)
        optimizer.step()
        optimizer.zero_grad()
        train(lib, model, optimizer, steps=1)

    compare(script)


# --- steps that must not happen


def poisoned(lib: Plain | Tiered, model: nn.Module, value: float) -> None:
    """A backward that leaves `value` in one gradient of one block."""
    handle = model.blocks[1].up.bias.register_hook(lambda g: torch.full_like(g, value))
    model(*model.inputs(lib)).float().square().mean().backward()
    handle.remove()


def nonfinite(lib: Plain | Tiered, dtype: torch.dtype, value: float, clip: bool) -> nn.Module:
    model = lib.offload(Stack().to(dtype))
    optimizer = lib.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    train(lib, model, optimizer, steps=1)
    for _ in range(2):
        poisoned(lib, model, value)
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(lib.trained(model.parameters()), 0.3)
            assert not norm.isfinite()
        optimizer.step()
        optimizer.zero_grad()
    train(lib, model, optimizer, steps=2, clip=0.3)
    return model


@both_dtypes
@pytest.mark.parametrize("clip", [True, False], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_step_with_a_non_finite_gradient_changes_nothing(
    compare: Compare, value: float, clip: bool, dtype: torch.dtype
) -> None:
    """Not weights, not moments, not step counts, not weight decay."""

    def script(lib: Plain | Tiered) -> None:
        nonfinite(lib, dtype, value, clip)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = compare(script, skip_nonfinite=True)
    assert set(reference.steps.values()) == {3.0}


def test_skipped_steps_are_counted_warned_about_once_and_reported(tmp_path: Path) -> None:
    import tiermem

    lib = Tiered(ON_DISK, tmp_path / "disk")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = nonfinite(lib, torch.bfloat16, float("nan"), True)
        report = tiermem.report(model)
    ours = [w for w in caught if "finite" in str(w.message)]
    assert len(ours) == 1, [str(w.message) for w in caught]
    assert report.steps_skipped == 2
    assert report.steps == 3
    assert "skip" in str(report)
    lib.close()


def test_a_non_finite_gradient_of_a_parameter_that_the_runtime_does_not_hold(tmp_path: Path) -> None:
    """One optimizer step is one decision: nothing of it happens."""

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        scale = nn.Parameter(torch.ones(5))
        optimizer = lib.AdamW([*model.parameters(), scale], lr=1e-3)
        for bad in (False, True, False):
            (model(*model.inputs(lib)) * scale).square().mean().backward()
            if bad:
                scale.grad.fill_(float("inf"))
            optimizer.step()
            optimizer.zero_grad()
        lib.note("scale", scale)
        lib.optimizers.clear()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_close(run_tiered(script, ON_DISK, tmp_path / "disk"), run_plain(script, skip_nonfinite=True))


@both_dtypes
@pytest.mark.parametrize("clip", [True, False], ids=["clipped", "unclipped"])
def test_torchs_behaviour_on_request(compare: Compare, clip: bool, dtype: torch.dtype) -> None:
    """`skip_nonfinite=False`: NaN goes where torch lets it go, and stays NaN in bf16."""

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack().to(dtype))
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        train(lib, model, optimizer, steps=1)
        poisoned(lib, model, float("nan"))
        if clip:
            torch.nn.utils.clip_grad_norm_(lib.trained(model.parameters()), 0.3)
        optimizer.step()

    reference = compare(script, equal_nan=True, policy={"skip_nonfinite": False})
    broken = [name for name, weight in reference.weights.items() if weight.isnan().any()]
    assert len(broken) == (len(reference.weights) if clip else 1)


@pytest.mark.parametrize("policy", [{}, {"update_in_backward": True}], ids=["after backward", "in backward"])
@both_dtypes
def test_a_model_frozen_as_a_whole_at_first_is_trained_later(
    compare: Compare, dtype: torch.dtype, policy: dict[str, bool]
) -> None:
    """Nothing was planned for gradients or states: room is made for them, in budgets that have it."""

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack().to(dtype).requires_grad_(False))
        with torch.no_grad():
            model(*model.inputs(lib))
        model.requires_grad_(True)
        train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), steps=3)

    compare(script, [replace(placement, tight=False) for placement in SPREAD], policy=policy)


# --- wrapping before or after the optimizer is built


@both_kinds
def test_an_optimizer_built_before_offload_trains_right_or_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = Stack()
        optimizer = getattr(lib, kind)(model.parameters(), lr=1e-3)
        lib.offload(model)
        train(lib, model, optimizer, clip=0.3)

    try:
        outcome = run_tiered(script, ON_DISK, tmp_path / "disk")
    except (ValueError, RuntimeError) as error:
        assert "offload" in str(error) and "optimizer" in str(error).lower()
    else:
        assert_close(outcome, run_plain(script))


@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_a_torch_optimizer_on_an_offloaded_model_is_an_error_not_a_wrong_number(early: bool, tmp_path: Path) -> None:
    import tiermem

    lib = Tiered(ON_DISK, tmp_path / "disk")
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if early else None
    lib.offload(model)
    with tiermem.gather(model.blocks):
        before = [p.detach().clone() for p in model.blocks.parameters()]
    with pytest.raises((RuntimeError, ValueError), match="tiermem"):
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(*model.inputs(lib)).square().mean().backward()
        optimizer.step()
    with tiermem.gather(model.blocks):
        assert all(same_bits(p.detach(), old) for p, old in zip(model.blocks.parameters(), before, strict=True))
    lib.close()


def test_placements_agree_on_groups_and_schedules(compare: Compare) -> None:
    """The most entangled case in one: groups, schedule, clipping, accumulation, freezing, bf16."""

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack(depth=4).bfloat16())
        optimizer = lib.AdamW(groups(model), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.01, 0.02, 0.03], total_steps=9)
        for frozen in (model.blocks[0], model.head, model.inlet):
            frozen.requires_grad_(False)
            train(lib, model, optimizer, steps=2, micro_batches=2, clip=0.2, scheduler=scheduler)
            frozen.requires_grad_(True)

    compare(script, SPREAD)
