"""The command from end to end on a small llama: what it learns, says, saves and leaves behind."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from small_llama import VOCABULARY, write_model, write_text

import tiermem
from tiermem import train
from tiermem.train import TrainOptions


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def options(tmp_path: Path, model: Path, home: str, **changes: Any) -> TrainOptions:
    disk = tmp_path / "disk"
    disk.mkdir(exist_ok=True)
    data = tmp_path / "text"
    if not data.exists():
        write_text(data)
    defaults: dict[str, Any] = {
        "model": str(model),
        "data": (str(data),),
        "sequence_length": 48,
        "batch_size": 2,
        "steps": 12,
        "grad_accum": 2,
        "lr": 3e-3,
        "eval_batches": 4,
        "device": "cpu",
        "memory": tiermem.Memory(device="64MiB", host="64MiB", disk=disk),
        "policy": tiermem.Policy(weights=home, states=home),  # type: ignore[arg-type]
    }
    return TrainOptions(**{**defaults, **changes})


def run(chosen: TrainOptions) -> tuple[train.TrainResult, str]:
    output = io.StringIO()
    return train.run(chosen, Console(file=output, width=120)), output.getvalue()


def test_training_on_disk_learns_saves_and_leaves_nothing(tmp_path: Path, model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result, shown = run(options(tmp_path, model, "disk", save=tmp_path / "saved"))
    assert result.loss_after < 0.7 * result.loss_before
    assert len(result.losses) == 12
    for words in ("held-out loss", "peak process memory", "the same in memory", "disk per step", "step 12/12"):
        assert words in shown

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    start = AutoModelForCausalLM.from_pretrained(model)
    assert loaded.dtype == torch.bfloat16
    assert any(not torch.equal(a, b) for a, b in zip(loaded.parameters(), start.parameters(), strict=True))
    assert all(parameter.isfinite().all() for parameter in loaded.parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("a")["input_ids"]


def test_placements_give_the_same_losses(tmp_path: Path, model: Path) -> None:
    on_host, on_disk = (run(options(tmp_path, model, home, steps=4))[0] for home in ("host", "disk"))
    assert on_host.losses == on_disk.losses
    assert on_host.loss_after == on_disk.loss_after


def test_the_saved_model_is_the_one_that_was_evaluated(tmp_path: Path, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    chosen = options(tmp_path, model, "disk", steps=4, save=tmp_path / "saved")
    result, _ = run(chosen)
    again = run(options(tmp_path, tmp_path / "saved", "host", steps=1))[0]
    assert again.loss_before == pytest.approx(result.loss_after, abs=1e-6)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").config.tie_word_embeddings


def test_an_untied_sharded_fp32_model_trains(tmp_path: Path) -> None:
    model = write_model(tmp_path / "sharded", tied=False, dtype=torch.float32, shards=True)
    assert len(list(model.glob("*.safetensors"))) > 1
    result, _ = run(options(tmp_path, model, "disk"))
    assert result.loss_after < 0.7 * result.loss_before


def test_recomputed_layers_give_the_same_losses_and_slices_nearly_so(tmp_path: Path, model: Path) -> None:
    def losses(**choices: Any) -> list[float]:
        policy = tiermem.Policy(weights="host", states="host", **choices)
        return run(options(tmp_path, model, "host", steps=3, policy=policy))[0].losses

    kept = losses()
    assert losses(activations="recompute") == kept
    assert losses(activations="disk", micro_batch=1) == pytest.approx(kept, rel=1e-2)


@pytest.mark.parametrize("capped", [False, True])
def test_the_loss_is_taken_in_the_heads_place_where_that_is_the_same(
    capped: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if capped:
        plain = type(lm).forward

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = plain(self, *args, **kwargs)
            output.logits = 3 * torch.tanh(output.logits / 3)
            return output

        monkeypatch.setattr(type(lm), "forward", forward)
    inputs, targets = torch.randint(0, VOCABULARY, (2, 3, 20))
    expected = F.cross_entropy(lm(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
    loss_of = train.Loss(lm, inputs[:1, :8])
    found = loss_of(inputs, targets)
    torch.testing.assert_close(found, expected)
    weight = lm.get_input_embeddings().weight
    gradients = [torch.autograd.grad(loss, weight)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients)
    assert "forward" not in lm.lm_head.__dict__
    assert (loss_of._head is None) == capped


def test_loss_and_its_gradient_are_those_of_cross_entropy() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 2 * train.LOSS_ROWS + 1, VOCABULARY, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, logits.shape[:2])
    loss = train.next_token_loss(logits, targets)
    (gradient,) = torch.autograd.grad(loss, logits)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    (expected_gradient,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    with torch.no_grad():
        torch.testing.assert_close(train.next_token_loss(logits, targets), expected)


def test_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    factors = [train.learning_rate_factor(step, 100, 10) for step in range(101)]
    assert factors[:10] == sorted(factors[:10])
    assert max(factors) == factors[10] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["steps", "batch_size", "grad_accum"])
def test_options_below_one_are_refused(tmp_path: Path, model: Path, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        options(tmp_path, model, "host", **{name: 0})
