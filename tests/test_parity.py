"""Where bytes rest, what moves them and what computes never changes a bit, and the bits are those of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Block, Decoder, Mixed, Stack, next_token_loss
from reference import (
    ON_DISK,
    SPREAD,
    Outcome,
    Placement,
    Plain,
    Tiered,
    assert_close,
    assert_parity,
    assert_same_bits,
    every_placement,
    round_to_bf16,
    run_plain,
    run_tiered,
    train,
)
from torch import Tensor, nn

from tiermem.planes import held_of

Compare = Callable[..., Outcome]


def core(lib: Plain | Tiered) -> None:
    """bf16 and fp32, trained and frozen, tied, accumulated, clipped, scheduled."""
    model = lib.offload(Mixed())
    optimizer = lib.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    train(lib, model, optimizer, steps=2, micro_batches=2, clip=0.5, scheduler=scheduler, loss_of=next_token_loss)
    train(lib, model, optimizer, steps=1, scheduler=scheduler, loss_of=next_token_loss)


@pytest.fixture(scope="module")
def core_outcomes() -> dict[str, Outcome]:
    """The first placement's, once it has run and was compared with plain torch."""
    return {}


@pytest.mark.parametrize("placement", every_placement(), ids=str)
def test_every_placement_gives_the_same_bits_and_those_of_plain_torch(
    placement: Placement, core_outcomes: dict[str, Outcome], tmp_path: Path
) -> None:
    if placement.kernels == "native":
        kernels = pytest.importorskip("tiermem.kernels")
        try:
            kernels.load("native")
        except (ImportError, OSError, RuntimeError) as error:
            pytest.skip(f"no native kernels: {error}")
    outcome = run_tiered(core, placement, tmp_path / "disk")
    if "first" not in core_outcomes:
        assert_parity(outcome, core, tmp_path / "again")
    assert_same_bits(outcome, core_outcomes.setdefault("first", outcome))


HYPERPARAMETERS: list[dict[str, Any]] = [
    {"lr": 1e-4, "eps": 1e-8},
    {"lr": 3e-4, "weight_decay": 0.1, "betas": (0.9, 0.95)},
    {"lr": 0.05, "eps": 1e-3, "weight_decay": 0.0},
    {"lr": 1e-2, "betas": (0.0, 0.5), "maximize": True},
    {"lr": 0.0, "weight_decay": 0.5},
]


@pytest.mark.parametrize("hyper", HYPERPARAMETERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_the_optimizer_equals_torchs(compare: Compare, kind: str, dtype: torch.dtype, hyper: dict[str, Any]) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack(depth=2).to(dtype))
        train(lib, model, getattr(lib, kind)(model.parameters(), **hyper), steps=4, clip=1.0)

    compare(script, SPREAD[::2])


class Sizes(nn.Module):
    """One parameter of each size, each in a module of its own."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Module() for _ in sizes)
        for part, size in zip(self.parts, sizes, strict=True):
            part.weight = nn.Parameter(torch.randn(size))
            part.forward = lambda inputs, part=part: (
                (part.weight.float() * inputs[: part.weight.numel()]).square().sum()
            )

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([part(inputs) / part.weight.numel() for part in self.parts]).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_sizes_divisible_by_nothing(compare: Compare, dtype: torch.dtype) -> None:
    sizes = [1, 7, 199, 513, 4095, 4096, 4097, 12289, 1_000_003]

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Sizes(sizes).to(dtype))
        train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), steps=2, clip=0.1, loss_of=loss)

    def loss(lib: Plain | Tiered, model: nn.Module) -> Tensor:
        return model(lib.randn(max(sizes)))

    compare(script)


def test_every_engine_gives_the_same_bits(core_outcomes: dict[str, Outcome], tmp_path: Path) -> None:
    from tiermem.io import ENGINES

    for engine in ENGINES:
        try:
            outcome = run_tiered(core, Placement("disk", "disk", 4096, engine), tmp_path / engine)
        except (RuntimeError, OSError) as error:
            if "no I/O engine works" not in str(error):  # io_uring is often forbidden
                raise
            continue
        assert_same_bits(outcome, core_outcomes.setdefault("first", outcome))


def test_two_directories_give_the_bits_of_one(tmp_path: Path) -> None:
    """And both carry traffic, reads and writes."""
    one = run_tiered(core, ON_DISK, tmp_path / "one")
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    torch.manual_seed(7)
    lib = Tiered(ON_DISK, tmp_path / "unused", memory={"disk": directories})
    core(lib)
    held = held_of(next(lib.models[0].parameters()))
    assert held is not None
    assert held.runtime.store is not None
    assert [traffic.directory for traffic in held.runtime.store.traffic()] == directories
    assert all(traffic.bytes_read and traffic.bytes_written for traffic in held.runtime.store.traffic())
    assert_same_bits(lib.outcome(), one)
    lib.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_chunk_size_changes_no_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack(width=129, depth=2).to(dtype))
        train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), clip=0.1)

    first = None
    for chunk_numel in (4096, 8192, 12288, 65536, None):
        placement = Placement("disk", "disk", chunk_numel, "threads", "auto", 2)
        outcome = run_tiered(script, placement, tmp_path / str(chunk_numel))
        first = first or outcome
        assert_same_bits(outcome, first)
    assert_parity(first, script, tmp_path / "again")


CUTS: dict[str, Callable[[nn.Module], Any]] = {
    "found": lambda model: None,
    "by class": lambda model: [Block],
    "by smaller classes": lambda model: [nn.Linear, nn.LayerNorm],
    "by pattern": lambda model: ["blocks.*.up", "blocks.*.down", "head"],
    "by module": lambda model: [model.blocks[1], model.blocks[0].up],
    "whole": lambda model: [model],
}


def test_how_the_model_is_cut_changes_no_bit(tmp_path: Path) -> None:
    def script(lib: Plain | Tiered, cut: str = "found") -> None:
        model = Stack()
        if not lib.is_reference:
            lib._policy["blocks"] = CUTS[cut](model)
        lib.offload(model)
        train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), clip=0.1)

    first = None
    for cut in CUTS:
        outcome = run_tiered(lambda lib, cut=cut: script(lib, cut), ON_DISK, tmp_path / cut)
        first = first or outcome
        assert_same_bits(outcome, first)
    assert_parity(first, script, tmp_path / "again")


@pytest.mark.parametrize("host", ["1MiB", "2MiB", "3MiB", "64MiB"])
def test_auto_placement_gives_the_same_bits_at_any_budget(host: str, tmp_path: Path) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack(width=64, depth=6, bias=False).bfloat16())
        train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), clip=0.1)

    outcome = run_tiered(
        script, Placement(chunk_numel=4096), tmp_path / "disk", memory={"device": "1MiB", "host": host}
    )
    assert_parity(outcome, script, tmp_path / "other")


def test_random_numbers_are_the_models_alone(compare: Compare) -> None:
    """Dropout draws the same masks: the runtime takes nothing from torch's generator."""

    def script(lib: Plain | Tiered) -> None:
        model = Stack()
        model.blocks.insert(1, nn.Dropout(0.4))
        model.blocks.append(nn.Dropout(0.1))
        lib.offload(model)
        train(lib, model, lib.AdamW(model.parameters(), lr=3e-3))
        lib.note("next random number", torch.rand(3))

    compare(script)


@pytest.mark.parametrize("exponent", [-40, 40], ids=["tiny", "huge"])
def test_gradients_far_from_one(exponent: int, tmp_path: Path) -> None:
    scale = 2.0**exponent

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack().bfloat16())
        optimizer = lib.AdamW(model.parameters(), lr=3e-3, eps=1e-8 * scale)
        for step in range(3):
            loss = model(*model.inputs(lib)).float().square().mean() * scale
            loss.backward()
            if step != 1:
                norm = torch.nn.utils.clip_grad_norm_(lib.trained(model.parameters()), scale)
                lib.note("norm", norm / scale)
            optimizer.step()
            optimizer.zero_grad()

    def unscaled(outcome: Outcome) -> Outcome:
        """A power of two changes no digit, and brings the moments into the range of the tolerance."""
        for moment in outcome.exp_avg.values():
            moment.div_(scale)
        for moment in outcome.exp_avg_sq.values():
            moment.div_(scale**2)
        return outcome

    roundings: list[dict[str, Tensor]] = []
    run_tiered(script, SPREAD[0], tmp_path / "roundings", roundings=roundings)
    expected = unscaled(run_plain(script, roundings=roundings))
    first = None
    for number, placement in enumerate(SPREAD):
        outcome = unscaled(run_tiered(script, placement, tmp_path / str(number)))
        assert_close(outcome, expected)
        first = first or outcome
        assert_same_bits(outcome, first)


def test_many_steps_do_not_drift(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack(depth=2))
        train(lib, model, lib.AdamW(model.parameters(), lr=1e-3), steps=40, clip=1.0)

    compare(script, [ON_DISK])


def test_a_model_of_one_leaf_module(compare: Compare) -> None:
    class Leaf(nn.Linear):
        def inputs(self, lib: Plain | Tiered) -> tuple[Tensor, ...]:
            return (lib.randn(3, 129),)

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Leaf(129, 67))
        train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), clip=0.1)

    compare(script)


def test_an_untied_decoder(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Decoder(tied=False))
        train(lib, model, lib.AdamW(model.parameters(), lr=1e-3), clip=0.1, loss_of=next_token_loss)

    compare(script)


def test_where_it_was_placed_is_reported(tmp_path: Path) -> None:
    """The placements above are what they are called."""
    import tiermem

    for number, placement in enumerate(SPREAD):
        lib = Tiered(placement, tmp_path / str(number))
        model = lib.offload(Stack(width=256, depth=3))
        train(lib, model, lib.AdamW(model.parameters()), steps=1)
        report = tiermem.report(model)
        blocks = [block for block in report.blocks if block.name.startswith("blocks.")]
        assert len(blocks) == 3
        assert {block.weights for block in blocks} == {tiermem.Tier[placement.weights.upper()]}
        assert {block.states for block in blocks} == {tiermem.Tier[placement.states.upper()]}
        if placement.kernels != "auto":
            assert placement.kernels in report.kernels
        if placement.engine != "auto":
            assert report.engine == placement.engine
        if "disk" in (placement.weights, placement.states):
            assert report.bytes_read > 0 and report.bytes_written > 0
        assert report.steps == 1
        lib.close()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_bf16_computation_of_an_fp32_model(compare: Compare, micro_batches: int) -> None:
    """`compute_dtype`: the fp32 values are the masters, inputs are cast, and `close` gives the masters back."""

    def script(lib: Plain | Tiered) -> None:
        model = Stack()
        if not lib.is_reference:
            lib._policy["compute_dtype"] = torch.bfloat16
            lib.offload(model)
            optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        else:
            values = [p.detach().clone() for p in model.parameters()]
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.data = round_to_bf16(value)
            lib.offload(model)
            optimizer = lib.AdamW(model.parameters(), lr=1e-3)
            for parameter, value in zip(model.parameters(), values, strict=True):
                lib.masters[parameter].data.copy_(value)
        train(lib, model, optimizer, micro_batches=micro_batches, clip=0.5, loss_of=loss)

    def loss(lib: Plain | Tiered, model: nn.Module) -> Tensor:
        inputs = lib.randn(6, 7)
        output = model(inputs.bfloat16() if lib.is_reference else inputs)
        assert output.dtype == torch.bfloat16
        return (output.float() - lib.randn(6, 5)).square().mean()

    compare(script)
