"""Layer-major batches: the gradients of the whole batch, to rounding, for the working set of a slice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Decoder, Stack, next_token_loss
from reference import Placement, Plain, Tiered, assert_close, assert_same_bits, train
from test_activations import PLACEMENT, WIDTH, BusyStack, OnDevice, SelfCheckpointing, outcome
from torch import Tensor, nn

import tiermem
from tiermem import saved_inputs
from tiermem.micro_batch import GradientSum, Splitter
from tiermem.simulated import SimulatedDevice

EPS = 1e-3
"""Adam must not make whole steps of gradients that are next to nothing, and so of how sums were rounded."""


@pytest.fixture(autouse=True)
def everything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_inputs, "SMALL_BYTES", 64)


def stack(lib: Plain | Tiered) -> None:
    model = lib.offload(Stack(WIDTH, depth=4))
    train(lib, model, lib.AdamW(model.parameters(), lr=3e-3, eps=EPS), clip=0.3, micro_batches=2, steps=2)


def busy(lib: Plain | Tiered) -> None:
    model = BusyStack()
    for layer in model.layers:
        layer.dropout.p = 0.0  # else other random numbers are drawn than for the whole batch
    model = lib.offload(model)
    train(lib, model, lib.AdamW(model.parameters(), lr=3e-3, eps=EPS), steps=2)


def decoder(lib: Plain | Tiered) -> None:
    model = lib.offload(Decoder())
    optimizer = lib.AdamW(model.parameters(), lr=3e-3, eps=EPS)
    for _ in range(2):
        loss = next_token_loss(lib, model)
        loss.backward()
        lib.note("loss", loss)
        optimizer.step()
        lib.zero_grad(model)


def frozen_inlet(lib: Plain | Tiered) -> None:
    model = Stack(WIDTH, depth=3)
    model.inlet.requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    model = lib.offload(model)
    train(lib, model, lib.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, eps=EPS), steps=2)


def evaluated(lib: Plain | Tiered) -> None:
    model = lib.offload(Stack(WIDTH, depth=3))
    optimizer = lib.AdamW(model.parameters(), lr=3e-3, eps=EPS)
    for _ in range(2):
        train(lib, model, optimizer, steps=1)
        with torch.no_grad():
            lib.note("evaluated", model(*model.inputs(lib)).square().mean())


def self_checkpointing(lib: Plain | Tiered) -> None:
    model = lib.offload(SelfCheckpointing(WIDTH, depth=3))
    train(lib, model, lib.AdamW(model.parameters(), lr=3e-3, eps=EPS), steps=2)


def unclipped(lib: Plain | Tiered) -> None:
    model = lib.offload(Stack(WIDTH, depth=4))
    train(lib, model, lib.AdamW(model.parameters(), lr=3e-3, eps=EPS), steps=3)


SCRIPTS: list[Callable[[Any], None]] = [stack, busy, decoder, frozen_inlet, evaluated, self_checkpointing]


@pytest.mark.parametrize("size", [2, 4, 6, 50])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_gradients_are_those_of_the_whole_batch(script: Callable[[Any], None], size: int, tmp_path: Path) -> None:
    lib = Tiered(PLACEMENT, tmp_path, policy={"micro_batch": size})
    assert_close(outcome(script, lib), outcome(script, Plain()))


@pytest.mark.parametrize("activations", ["keep", "host", "disk"])
@pytest.mark.parametrize("placement", [PLACEMENT, Placement("disk", "disk", 4096)], ids=str)
@pytest.mark.parametrize("script", [stack, busy, self_checkpointing], ids=lambda script: script.__name__)
def test_it_matters_not_where_bytes_rest(
    script: Callable[[Any], None], placement: Placement, activations: str, tmp_path: Path
) -> None:
    expected = outcome(script, Tiered(PLACEMENT, tmp_path / "here", policy={"micro_batch": 2}))
    policy = {"micro_batch": 2, "activations": activations}
    lib = OnDevice(placement, tmp_path / "there", policy=policy, memory={"device": "512KiB"})
    assert_same_bits(outcome(script, lib), expected)


def test_updates_in_backward_take_the_sum_over_slices(tmp_path: Path) -> None:
    expected = outcome(unclipped, Tiered(PLACEMENT, tmp_path / "after", policy={"micro_batch": 2}))
    assert_close(expected, outcome(unclipped, Plain()))
    policy = {"micro_batch": 2, "update_in_backward": True, "activations": "host"}
    assert_same_bits(outcome(unclipped, OnDevice(PLACEMENT, tmp_path / "in", policy=policy)), expected)


def test_bf16_gradients_are_summed_in_fp32_and_rounded_once() -> None:
    total = GradientSum()
    total.add(torch.tensor([256.0], dtype=torch.bfloat16))
    for _ in range(4):  # each of them would be lost in bf16
        total.add(torch.tensor([0.75], dtype=torch.bfloat16))
    assert total.take(torch.float32) == torch.tensor([259.0])


def test_half_precision_agrees_with_the_whole_batch_as_well_as_its_dtype_allows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Stack(WIDTH, depth=2).bfloat16(), torch.randn(32, 7, dtype=torch.bfloat16)
    exact = Stack(WIDTH, depth=2)
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    exact(inputs.float()).square().mean().backward()
    tiermem.offload(model, policy=tiermem.Policy(micro_batch=4), device="cpu")
    model(inputs).square().mean().backward()
    for (name, parameter), reference in zip(model.named_parameters(), exact.parameters(), strict=True):
        error = (parameter.grad.float() - reference.grad).norm() / reference.grad.norm()
        assert error < 0.02, name
    tiermem.close(model)


def test_random_numbers_of_a_slice_are_drawn_again_in_backward() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.seen: list[Tensor] = []

        def forward(self, hidden: Tensor) -> Tensor:
            noise = torch.rand_like(hidden)
            self.seen.append(noise)
            return hidden * self.scale * noise

    model = nn.Sequential(Noisy(), Noisy())
    tiermem.offload(model, policy=tiermem.Policy(micro_batch=3), device="cpu")
    inputs, state = torch.randn(8, 8), torch.get_rng_state()
    model(inputs).sum().backward()
    for layer in model:
        forward, backward = layer.seen[:3], layer.seen[3:]
        assert len(backward) == 3
        assert all(map(torch.equal, forward, backward))
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    for count in (3, 3, 2) * 2:
        torch.rand(count, 8)
    assert torch.equal(torch.get_rng_state(), after)
    tiermem.close(model)


def test_autocast_is_what_it_was_in_forward(tmp_path: Path) -> None:
    gradients = []
    for policy in (tiermem.Policy(), tiermem.Policy(micro_batch=2)):
        torch.manual_seed(5)
        model = Stack(WIDTH, depth=2)
        tiermem.offload(model, policy=policy, device="cpu")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(6, 7)).float().square().mean()
        loss.backward()
        gradients.append([p.grad + 0 for p in model.parameters()])
        tiermem.close(model)
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=2e-2, atol=1e-3)


def test_a_hook_on_a_parameter_sees_its_whole_gradient_once() -> None:
    torch.manual_seed(2)
    model, inputs = Stack(WIDTH, depth=2), torch.randn(6, 7)
    seen: list[Tensor] = []
    hooked = model.blocks[0].up.weight
    hooked.register_hook(lambda gradient: seen.append(gradient.clone()))
    model(inputs).square().mean().backward()
    model.zero_grad()
    tiermem.offload(model, policy=tiermem.Policy(micro_batch=2), device="cpu")
    model(inputs).square().mean().backward()
    assert len(seen) == 2
    assert torch.allclose(*seen, rtol=1e-5, atol=1e-6)
    assert hooked._backward_hooks
    tiermem.close(model)


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(self.linear(hidden))


def test_batch_statistics_are_refused_by_name_and_allowed_in_eval() -> None:
    model = nn.Sequential(BatchNormed(), BatchNormed())
    with pytest.raises(ValueError, match=r"0\.norm \(BatchNorm1d\) computes statistics of the whole batch"):
        tiermem.offload(model, policy=tiermem.Policy(micro_batch=2), device="cpu")
    model.eval()
    inputs = torch.randn(4, 8)
    expected = model(inputs)
    tiermem.offload(model, policy=tiermem.Policy(micro_batch=2), device="cpu")
    assert torch.allclose(model(inputs), expected, atol=1e-6)
    model.train()
    with pytest.raises(ValueError, match=r"0\.norm \(BatchNorm1d\)"):
        model(inputs)
    tiermem.close(model)


def test_a_sequence_first_layer_is_refused_by_name() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2, enable_nested_tensor=False)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn .*batch_first=False"):
        tiermem.offload(model, policy=tiermem.Policy(micro_batch=2), device="cpu")
    model(torch.randn(3, 2, 8))


def splitter(function: Callable[..., Any], size: int = 2) -> Splitter:
    return Splitter("layer", function, [], size, torch.device("cpu"))


def test_arguments_that_are_not_of_the_batch_are_passed_whole() -> None:
    whole, hidden = torch.randn(1, 4), torch.randn(5, 4, requires_grad=True)
    scale = torch.randn(4, requires_grad=True)

    def function(hidden: Tensor, *, table: Tensor, scale: Tensor, names: list[str]) -> tuple[Tensor, Tensor, str]:
        assert len(hidden) <= 2 and table.shape == whole.shape
        return hidden * scale + table, table, names[0]

    output, same, name = splitter(function)(hidden, table=whole, scale=scale, names=["a"])
    assert same is whole and name == "a"
    output.square().sum().backward()
    expected = torch.autograd.grad((hidden * scale + whole).square().sum(), [hidden, scale])
    assert torch.allclose(hidden.grad, expected[0]) and torch.allclose(scale.grad, expected[1])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda hidden: hidden.mean(), r"layer returns a tensor of shape \(\) for 2 elements"),
        (lambda hidden: (hidden, len(hidden)), "layer returns 2 for one slice .* and 1 for another"),
        (lambda hidden: {"a": object()}, "layer returns a object"),
    ],
)
def test_outputs_that_cannot_be_joined_are_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        splitter(function)(torch.randn(5, 4))


def test_an_argument_that_may_or_may_not_be_of_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"an argument of shape \(6, 6\)"):
        splitter(lambda hidden, mask: hidden)(torch.randn(6, 6, 4), torch.ones(6, 6))


def test_a_tensor_that_comes_in_by_a_side_door_is_refused() -> None:
    stranger = torch.randn(4, requires_grad=True)
    output = splitter(lambda hidden: hidden * stranger)(torch.randn(5, 4, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"layer computes with a tensor of shape \(4,\)"):
        output.sum().backward()


def test_weights_cross_the_link_as_often_as_for_the_batch_in_one_piece() -> None:
    moved = []
    for policy in ({"activations": "recompute"}, {"micro_batch": 2}):
        torch.manual_seed(0)
        model = Stack(64, depth=6)
        memory = tiermem.Memory(device="600KiB", host="64MiB")
        chosen = tiermem.Policy(weights="host", chunk_numel=4096, **policy)  # type: ignore[arg-type]
        tiermem.offload(model, memory=memory, policy=chosen, device=SimulatedDevice(delay_max_s=0))
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            model(torch.randn(16, 7)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                before = tiermem.report(model)
        after = tiermem.report(model)
        moved.append((after.bytes_copied_in - before.bytes_copied_in, after.bytes_copied_out - before.bytes_copied_out))
        tiermem.close(model)
    assert moved[0] == moved[1]
