"""Every optimizer is torch's, offloaded; and every format of its moments has the same bits wherever they rest."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Stack
from reference import SPREAD, Placement, same_bits
from torch import Tensor, nn

import tiermem
from tiermem.kernels.abi import NON_NEGATIVE

Build = Callable[[Any], torch.optim.Optimizer]


def paper_lion(parameters: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> torch.optim.Optimizer:
    """Algorithm 2 of the paper, one line each; in float64, so that no rounding decides a sign."""

    class PaperLion(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                state, gradient = self.state[parameter], parameter.grad.double()
                mean = state.setdefault("exp_avg", torch.zeros_like(gradient))
                update = torch.sign(betas[0] * mean + (1 - betas[0]) * gradient)
                parameter.copy_(parameter.double() - lr * (update + weight_decay * parameter.double()))
                state["exp_avg"] = betas[1] * mean + (1 - betas[1]) * gradient

    return PaperLion(parameters, {})


LION = {"lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.1}
OPTIMIZERS: dict[str, tuple[Build, Build]] = {  # ours, torch's
    "adamw": (
        lambda p: tiermem.AdamW(p, lr=1e-2, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    ),
    "amsgradw": (
        lambda p: tiermem.AdamW(p, lr=1e-2, betas=(0.9, 0.9), amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.9), amsgrad=True),
    ),
    "amsgrad": (
        lambda p: tiermem.Adam(p, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.9), amsgrad=True, maximize=True),
        lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.9), amsgrad=True, maximize=True),
    ),
    "sgd": (
        lambda p: tiermem.SGD(p, lr=0.1, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    ),
    "sgd-momentum": (
        lambda p: tiermem.SGD(p, lr=0.02, momentum=0.9, dampening=0.3),
        lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, dampening=0.3),
    ),
    "sgd-nesterov": (
        lambda p: tiermem.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
        lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
    ),
    "adagrad": (
        lambda p: tiermem.Adagrad(p, lr=0.05, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.25),
        lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.25),
    ),
    "lion": (lambda p: tiermem.Lion(p, **LION), lambda p: paper_lion(p, **LION)),
}
FORMATS = ["fp32", "bf16", "int8"]
STATES = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"}


@pytest.fixture(params=OPTIMIZERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def model_of(dtype: torch.dtype) -> Stack:
    torch.manual_seed(3)
    return Stack(width=36, depth=2).to(dtype)  # no multiple of a block or a vector


def offload(model: nn.Module, placement: Placement, directory: Path, moments: str, **memory: Any) -> nn.Module:
    directory.mkdir(parents=True, exist_ok=True)
    policy = tiermem.Policy(
        weights=placement.weights,  # type: ignore[arg-type]
        states=placement.states,  # type: ignore[arg-type]
        chunk_numel=placement.chunk_numel,
        io=placement.engine,
        kernels=placement.kernels,  # type: ignore[arg-type]
        threads=placement.threads,
        moments=moments,  # type: ignore[arg-type]
    )
    limits = {"device": "64MiB", "host": "64MiB", "disk": directory} | memory
    return tiermem.offload(model, memory=tiermem.Memory(**limits), policy=policy, device="cpu")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        dtype = next(model.parameters()).dtype
        inputs = torch.randn(6, 7, generator=generator).to(dtype)
        loss = (model(inputs).float() - torch.randn(6, 5, generator=generator)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def outcome(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights, masters and moments, by name."""
    names = dict(enumerate(name for name, _ in model.named_parameters()))
    found = {f"{name} weight": value.clone() for name, value in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        kept = {key: value for key, value in state.items() if key in STATES or key == "master"}
        found |= {f"{names[number]} {key}": value.clone() for key, value in kept.items() if value is not None}
    return found


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    wrong = [name for name, value in expected.items() if not same_bits(actual[name], value)]
    assert not wrong, wrong[:5]


def run(
    name: str, placement: Placement, directory: Path, moments: str, dtype: torch.dtype, steps: int = 4
) -> dict[str, Tensor]:
    model = offload(model_of(dtype), placement, directory, moments)
    try:
        optimizer = OPTIMIZERS[name][0](model.parameters())
        train(model, optimizer, steps)
        return outcome(model, optimizer)
    finally:
        tiermem.close(model)


@pytest.mark.parametrize("moments", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_placement_gives_the_same_bits(name: str, moments: str, dtype: torch.dtype, tmp_path: Path) -> None:
    first, *others = (
        run(name, placement, tmp_path / str(number), moments, dtype) for number, placement in enumerate(SPREAD)
    )
    for other in others:
        assert_same(other, first)


def test_fp32_models_train_as_with_torch(name: str, tmp_path: Path) -> None:
    reference = model_of(torch.float32)
    optimizer = OPTIMIZERS[name][1](reference.parameters())
    train(reference, optimizer, 4)
    expected = outcome(reference, optimizer)
    actual = run(name, SPREAD[0], tmp_path, "fp32", torch.float32)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key].double(), value.double(), rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_compact_moments_stay_near_the_exact_ones(name: str, moments: str, tmp_path: Path) -> None:
    exact = run(name, SPREAD[0], tmp_path / "exact", "fp32", torch.float32, steps=6)
    compact = run(name, SPREAD[0], tmp_path / "compact", moments, torch.float32, steps=6)
    start = model_of(torch.float32).state_dict()
    for key, value in start.items():
        moved = (exact[f"{key} weight"] - value).norm()
        if name != "lion":  # a sign is right or wrong
            assert (compact[f"{key} weight"] - exact[f"{key} weight"]).norm() < 0.25 * moved, key


@pytest.mark.parametrize("moments", FORMATS)
@pytest.mark.parametrize("placement", [SPREAD[0], SPREAD[2]], ids=str)
def test_a_state_that_was_saved_and_loaded_goes_on_with_the_same_bits(
    name: str, moments: str, placement: Placement, tmp_path: Path
) -> None:
    def run_with_break(directory: Path, *, is_broken: bool) -> dict[str, Tensor]:
        model = offload(model_of(torch.bfloat16), placement, directory, moments)
        optimizer = OPTIMIZERS[name][0](model.parameters())
        train(model, optimizer, 3)
        if is_broken:
            saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
            tiermem.close(model)
            model = offload(model_of(torch.bfloat16), placement, directory / "again", moments)
            optimizer = OPTIMIZERS[name][0](model.parameters())
            optimizer.load_state_dict(saved)
        train(model, optimizer, 2, first=3)
        found = outcome(model, optimizer)
        tiermem.close(model)
        return found

    whole = run_with_break(tmp_path / "whole", is_broken=False)
    assert_same(run_with_break(tmp_path / "broken", is_broken=True), whole)


def test_states_move_to_torch_and_back(name: str, tmp_path: Path) -> None:
    if name == "lion":
        pytest.skip("torch has none")
    ours, theirs = OPTIMIZERS[name]
    model = offload(model_of(torch.float32), SPREAD[0], tmp_path, "fp32")
    optimizer = ours(model.parameters())
    train(model, optimizer, 3)
    plain = model_of(torch.float32)
    plain.load_state_dict(model.state_dict())
    torch_optimizer = theirs(plain.parameters())
    torch_optimizer.load_state_dict(optimizer.state_dict())
    train(plain, torch_optimizer, 2, first=3)
    train(model, optimizer, 2, first=3)
    expected, actual = outcome(plain, torch_optimizer), outcome(model, optimizer)
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-5, atol=1e-6, msg=key)
    again = ours(model.parameters())
    again.load_state_dict(torch_optimizer.state_dict())
    reloaded = outcome(model, again)
    assert_same({k: v for k, v in reloaded.items() if "weight" not in k.split()[-1]},
                {k: v for k, v in expected.items() if "weight" not in k.split()[-1]})  # fmt: skip
    tiermem.close(model)


def test_they_are_optimizers_of_torch(name: str) -> None:
    ours, theirs = OPTIMIZERS[name]
    parameter = nn.Parameter(torch.ones(5))
    built = ours([parameter])
    assert isinstance(built, torch.optim.Optimizer)
    if name != "lion":
        assert isinstance(built, type(theirs([parameter])))
    torch.optim.lr_scheduler.LambdaLR(built, lambda step: 0.5)
    assert built.param_groups[0]["lr"] == built.param_groups[0]["initial_lr"] / 2


def test_parameters_that_are_not_offloaded_are_stepped_by_torch(name: str) -> None:
    ours, theirs = OPTIMIZERS[name]
    mine, other = model_of(torch.float32), model_of(torch.float32)
    train(mine, ours(mine.parameters()), 3)
    train(other, theirs(other.parameters()), 3)
    for one, two in zip(mine.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


def test_adagrad_makes_no_sums_for_offloaded_parameters(tmp_path: Path) -> None:
    model = offload(model_of(torch.float32), SPREAD[0], tmp_path, "fp32")
    optimizer = tiermem.Adagrad([{"params": list(model.parameters())[:2]}, {"params": [nn.Parameter(torch.ones(3))]}])
    assert not optimizer.state
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
    with pytest.raises(ValueError, match="empty parameter list"):
        tiermem.Adagrad([])
    tiermem.close(model)


# ---- room for moments


def state_bytes(model: nn.Module) -> int:
    return sum(block.layout.state_bytes for block in runtime_of(model).blocks)


def runtime_of(model: nn.Module) -> Any:
    from tiermem.planes import held_of

    held = held_of(next(model.parameters()))
    assert held is not None
    return held.runtime


class Wide(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(256, 256, bias=False) for _ in range(3)))


@pytest.mark.parametrize(("moments", "bytes_per_parameter"), [("fp32", 10), ("bf16", 6), ("int8", 4.0625)])
def test_states_take_the_bytes_that_were_promised(moments: str, bytes_per_parameter: float, tmp_path: Path) -> None:
    """With the two bytes of the weight: 12, 8 and 6.06."""
    model = offload(Wide().bfloat16(), SPREAD[0], tmp_path, moments)
    assert state_bytes(model) == 3 * 256 * 256 * bytes_per_parameter
    tiermem.close(model)


@pytest.mark.parametrize("placement", [SPREAD[0], SPREAD[2]], ids=str)
def test_optimizers_with_fewer_moments_move_fewer_bytes(placement: Placement, tmp_path: Path) -> None:
    written = {}
    for name in ("sgd", "lion", "adamw", "amsgradw"):
        model = offload(Wide().bfloat16(), placement, tmp_path / name, "fp32")
        optimizer = OPTIMIZERS[name][0](model.parameters())
        model(torch.ones(1, 256, dtype=torch.bfloat16)).float().sum().backward()
        before = tiermem.report(model).bytes_written
        optimizer.step()
        tiermem.synchronize(model)
        written[name] = state_bytes(model)
        if placement.states == "disk":
            assert tiermem.report(model).bytes_written - before == written[name] + 3 * 256 * 256 * 2
        tiermem.close(model)
    numel = 3 * 256 * 256
    assert written == {"sgd": 2 * numel, "lion": 6 * numel, "adamw": 10 * numel, "amsgradw": 14 * numel}


@pytest.mark.parametrize("placement", [SPREAD[0], SPREAD[2]], ids=str)
def test_an_optimizer_that_needs_more_moments_may_follow_one_that_needs_fewer(
    placement: Placement, tmp_path: Path
) -> None:
    """Masters and moments stay what they are when room is made for more."""
    model = offload(model_of(torch.bfloat16), placement, tmp_path, "fp32")
    parameters = list(model.parameters())
    lion = tiermem.Lion(parameters[:3], lr=1e-3)
    train(model, lion, 2)
    before = lion.state_dict()["state"]
    adamw = tiermem.AdamW(parameters[3:], lr=1e-3, amsgrad=True)
    after = lion.state_dict()["state"]
    for number, state in before.items():
        for key, value in state.items():
            assert same_bits(after[number][key], value)
    train(model, adamw, 2, first=2)
    train(model, lion, 1, first=4)
    assert set(adamw.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master"}
    tiermem.close(model)


def test_a_third_moment_that_does_not_fit_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    model = Wide()
    numel = 3 * 256 * 256
    host = numel * (4 + 4 + 8) + 4 * (1 << 20) + (2 << 20)
    model = tiermem.offload(
        model,
        memory=tiermem.Memory(device="64MiB", host=host),
        policy=tiermem.Policy(weights="host", states="host"),
        device="cpu",
    )
    used = tiermem.report(model).bytes_resident[tiermem.Tier.HOST]
    free = host - used
    optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
    if free >= 4 * numel:
        runtime_of(model).host_budget.take(free - numel, "the test")
    with pytest.raises(ValueError, match="3 moments"):
        tiermem.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    assert state_bytes(model) == 8 * numel
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    tiermem.close(model)


def test_the_table_of_moments_is_that_of_the_optimizers() -> None:
    parameter = nn.Parameter(torch.ones(5))
    for ours, _ in OPTIMIZERS.values():
        built = ours([parameter])
        group = built.param_groups[0]
        assert len(built._moment_names(group)) == len(NON_NEGATIVE[built._formula(group)])  # type: ignore[attr-defined]
