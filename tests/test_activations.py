"""Activations kept, recomputed, in HOST or on DISK: the numbers of plain torch, the bits of each other."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Decoder, Stack, next_token_loss
from reference import Placement, Plain, Tiered, assert_close, assert_same_bits, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem import saved_inputs
from tiermem.activations import Layer
from tiermem.offload import _runtime_of
from tiermem.simulated import SimulatedDevice

WAYS = ("keep", "recompute", "host", "disk")
PLACEMENT = Placement("host", "host", 4096, "threads", "auto", 1)
WIDTH = 32


@pytest.fixture(autouse=True)
def everything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_inputs, "SMALL_BYTES", 64)


class OnDevice(Tiered):
    """tiermem on a simulated accelerator, whose memory is not host memory."""

    seed = 0

    def offload(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        device = SimulatedDevice(seed=self.seed, delay_max_s=0.002)
        self.tiermem.offload(module, memory=self.memory(), policy=self.policy(), device=device)
        self.models.append(module)
        return module


class Busy(nn.Module):
    """A layer that takes keywords, a tuple and what needs no gradient, draws random numbers and returns a tuple."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(
        self, hidden: Tensor, *, mask: Tensor, scales: tuple[Tensor, dict[str, Tensor]], flag: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        inner = self.dropout(nn.functional.gelu(self.up(self.norm(hidden)))) * scales[0]
        hidden = hidden + self.down(inner) * mask + scales[1]["shift"]
        return hidden, {"mean": hidden.mean(-1), "flag": flag, "nothing": None}


class BusyStack(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.inlet = nn.Linear(7, WIDTH)
        self.layers = nn.ModuleList(Busy(WIDTH) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 5)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, extra = self.inlet(inputs), 0.0
        mask = (inputs[..., :1] > 0).to(hidden.dtype)
        shift = self.shift + 0.0
        for layer in self.layers:
            hidden, more = layer(hidden, mask=mask, scales=(inputs.new_tensor(0.5), {"shift": shift}), flag=True)
            extra = extra + more["mean"].mean()
        return self.head(hidden) + extra

    def inputs(self, lib: Plain | Tiered) -> tuple[Tensor, ...]:
        return (lib.randn(6, 4, 7, dtype=self.head.weight.dtype),)


class SelfCheckpointing(Stack):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.inlet(inputs)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return self.head(hidden)


def stack(lib: Plain | Tiered) -> None:
    model = lib.offload(Stack(WIDTH, depth=5))
    train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), clip=0.3, steps=3)


def half(lib: Plain | Tiered) -> None:
    model = lib.offload(Stack(WIDTH, depth=4).bfloat16())
    train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), clip=0.3, micro_batches=2, steps=2)


def busy(lib: Plain | Tiered) -> None:
    model = lib.offload(BusyStack())
    optimizer = lib.AdamW(model.parameters(), lr=3e-3)
    for _ in range(2):
        torch.manual_seed(11)  # of the dropout masks
        train(lib, model, optimizer, steps=1)


def tied(lib: Plain | Tiered) -> None:
    model = lib.offload(Decoder())
    optimizer = lib.AdamW(model.parameters(), lr=3e-3)
    for _ in range(2):
        loss = next_token_loss(lib, model)
        loss.backward()
        lib.note("loss", loss)
        optimizer.step()
        lib.zero_grad(model)


def frozen_inlet(lib: Plain | Tiered) -> None:
    model = Stack(WIDTH, depth=4)
    model.inlet.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model = lib.offload(model)
    train(lib, model, lib.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3), steps=2)


def evaluated(lib: Plain | Tiered) -> None:
    model = lib.offload(Stack(WIDTH, depth=4))
    optimizer = lib.AdamW(model.parameters(), lr=3e-3)
    for _ in range(2):
        train(lib, model, optimizer, steps=1)
        with torch.no_grad():
            lib.note("evaluated", model(*model.inputs(lib)).square().mean())
        lib.note("unused", model(*model.inputs(lib)).square().mean().detach())


def self_checkpointing(lib: Plain | Tiered) -> None:
    model = lib.offload(SelfCheckpointing(WIDTH, depth=4))
    train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), steps=2)


SCRIPTS: list[Callable[[Any], None]] = [stack, half, busy, tied, frozen_inlet, evaluated, self_checkpointing]


def outcome(script: Callable[[Any], None], lib: Any) -> Any:
    torch.manual_seed(7)
    script(lib)
    for model in lib.models:
        lib.synchronize(model)
    result = lib.outcome()
    lib.close()
    return result


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_every_way_gives_the_bits_of_keeping_and_the_numbers_of_plain_torch(
    script: Callable[[Any], None], tmp_path: Path
) -> None:
    kept = outcome(script, Tiered(PLACEMENT, tmp_path / "keep", policy={"activations": "keep"}))
    if script is not half:  # its reference follows bf16 roundings; the parity tests compare that
        assert_close(kept, outcome(script, Plain()))
    for way in WAYS[1:]:
        assert_same_bits(outcome(script, Tiered(PLACEMENT, tmp_path / way, policy={"activations": way})), kept)


@pytest.mark.parametrize("way", ["recompute", "host", "disk"])
@pytest.mark.parametrize("script", [stack, half, busy, self_checkpointing], ids=lambda script: script.__name__)
def test_an_accelerator_gives_the_same_bits(script: Callable[[Any], None], way: str, tmp_path: Path) -> None:
    kept = outcome(script, Tiered(PLACEMENT, tmp_path / "keep"))
    for seed, device in ((1, "64MiB"), (2, "256KiB")):
        lib = OnDevice(PLACEMENT, tmp_path / str(seed), policy={"activations": way}, memory={"device": device})
        lib.seed = seed
        assert_same_bits(outcome(script, lib), kept)


@pytest.mark.parametrize("way", ["host", "disk"])
def test_inputs_really_move_and_memory_is_used_again(way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Stack(WIDTH, depth=8)
    memory = tiermem.Memory(device="64MiB", host="64MiB", disk=tmp_path)
    policy = tiermem.Policy(weights="host", states="host", activations=way)  # type: ignore[arg-type]
    tiermem.offload(model, memory=memory, policy=policy, device=SimulatedDevice(delay_max_s=0.0005))
    optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
    taken: list[tuple[int, int]] = []
    before = tiermem.report(model)
    for _ in range(4):
        model(torch.randn(64, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        report = tiermem.report(model)
        taken.append((report.bytes_resident[tiermem.Tier.HOST], report.bytes_resident[tiermem.Tier.DISK]))
    inputs = 4 * 8 * 64 * WIDTH * 4
    weights = 4 * sum(block.layout.weight_bytes for block in _runtime_of(model).blocks)
    assert report.bytes_copied_out - before.bytes_copied_out >= inputs
    assert report.bytes_copied_in - before.bytes_copied_in < inputs + 2 * weights
    if way == "disk":
        assert report.bytes_written >= inputs
    assert len(set(taken[1:])) == 1
    tiermem.close(model)


def test_a_forward_that_raises_leaves_the_next_step_right(tmp_path: Path) -> None:
    class Fails(nn.Module):
        fail = False

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden: Tensor) -> Tensor:
            if Fails.fail:
                raise ArithmeticError("as asked")
            return self.inner(hidden)

    def script(lib: Any) -> None:
        model = Stack(WIDTH, depth=4)
        model.blocks[2] = Fails(model.blocks[2])
        model = lib.offload(model)
        optimizer = lib.AdamW(model.parameters(), lr=3e-3)
        train(lib, model, optimizer, steps=1)
        Fails.fail = True
        with pytest.raises(ArithmeticError):
            model(torch.ones(6, 7))
        Fails.fail = False
        train(lib, model, optimizer, steps=1)

    reference = outcome(script, Plain())
    for way in WAYS:
        for kind in (Tiered, OnDevice):
            lib = kind(PLACEMENT, tmp_path / f"{way}-{kind.__name__}", policy={"activations": way})
            assert_close(outcome(script, lib), reference)


def test_a_disk_that_fails_is_an_error_of_backward_and_the_next_step_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(lib: Any) -> None:
        model = lib.offload(Stack(WIDTH, depth=6))
        optimizer = lib.AdamW(model.parameters(), lr=3e-3)
        train(lib, model, optimizer, steps=1)
        if isinstance(lib, Tiered):
            with monkeypatch.context() as patch:

                async def fail(*_: Any) -> None:
                    raise OSError(errno.EIO, "as asked")

                patch.setattr(saved_inputs.DiskShelf, "_swap_out_piece", fail)
                loss = model(torch.ones(6, 7)).square().mean()
                with pytest.raises(OSError, match="as asked"):
                    loss.backward()
                del loss
            model.zero_grad()
        train(lib, model, optimizer, steps=1)

    lib = Tiered(PLACEMENT, tmp_path, policy={"activations": "disk"})
    assert_close(outcome(script, lib), outcome(script, Plain()))


def test_running_statistics_count_a_batch_once(tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(3)))

    inputs = torch.randn(16, 8)
    plain = build()
    plain(inputs).sum().backward()
    model = tiermem.offload(build(), policy=tiermem.Policy(activations="recompute"), device="cpu")
    model(inputs).sum().backward()
    for (name, expected), (_, buffer) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), name
    tiermem.close(model)


def test_close_leaves_the_plain_module() -> None:
    model = Stack(WIDTH)
    forwards = [block.forward for block in model.blocks]
    tiermem.offload(model, policy=tiermem.Policy(activations="recompute"), device="cpu")
    assert all("forward" in block.__dict__ for block in model.blocks)
    assert not any(isinstance(part.__dict__["forward"], Layer) for part in (model.inlet, model.head))
    tiermem.close(model)
    assert all("forward" not in block.__dict__ for block in model.blocks)
    assert [block.forward for block in model.blocks] == forwards
    model(torch.randn(3, 7)).sum().backward()
    assert model.head.weight.grad is not None


def test_backward_twice_through_a_retained_graph(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, inputs = Stack(WIDTH, depth=5), torch.randn(16, 7)
    plain = model.inlet.weight.detach().clone()
    loss = model(inputs).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    expected = model.inlet.weight.grad
    model.zero_grad()
    for way in ("recompute", "host", "disk"):
        memory = tiermem.Memory(disk=tmp_path, host="64MiB", device="64MiB")
        policy = tiermem.Policy(activations=way)  # type: ignore[arg-type]
        tiermem.offload(model, memory=memory, policy=policy, device=SimulatedDevice(delay_max_s=0.001))
        loss = model(inputs).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        found = model.inlet.weight.grad + 0
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
        model.zero_grad()
        tiermem.close(model)
        assert torch.equal(model.inlet.weight, plain)


def test_a_layer_that_changes_its_input_in_place_is_refused() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.linear(hidden.mul_(2.0))

    model = nn.Sequential(nn.Linear(8, 8), InPlace(), InPlace())
    tiermem.offload(model, policy=tiermem.Policy(activations="recompute"), device="cpu")
    with pytest.raises(RuntimeError, match="1 changes an input .* in place"):
        model(torch.randn(4, 8))
    tiermem.close(model)


def test_disk_needs_a_directory_and_leaves_nothing_behind_when_it_is_missing() -> None:
    model = Stack(WIDTH)
    with pytest.raises(ValueError, match="activations='disk'.*needs a directory"):
        tiermem.offload(model, policy=tiermem.Policy(activations="disk"), device="cpu")
    model(torch.randn(3, 7)).sum().backward()


def test_a_host_budget_that_inputs_do_not_fit_is_named() -> None:
    model = Stack(WIDTH, depth=6)
    memory = tiermem.Memory(device="64MiB", host="1MiB")
    policy = tiermem.Policy(activations="host", chunk_numel=4096)
    tiermem.offload(model, memory=memory, policy=policy, device=SimulatedDevice(delay_max_s=0))
    with pytest.raises(ValueError, match="activations='host'.*host memory"):
        model(torch.randn(4096, 7))
    tiermem.close(model)


@pytest.mark.parametrize("field", [{"activations": "no"}, {"micro_batch": 0}])
def test_choices_that_do_not_exist_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        tiermem.Policy(**field)
