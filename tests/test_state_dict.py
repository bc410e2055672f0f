"""State dicts of models and optimizers, both ways between tiermem and torch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Decoder, Stack, next_token_loss
from reference import (
    ON_DISK,
    SPREAD,
    Outcome,
    Placement,
    Plain,
    Tiered,
    assert_close,
    assert_same_bits,
    run_plain,
    run_tiered,
    same_bits,
    train,
)
from torch import Tensor, nn

Compare = Callable[..., Outcome]

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def saved_and_loaded(state: Any) -> Any:
    """Through a file, and read back without unpickling anything but tensors."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 2e-3},
    ]


# --- the optimizer's


def test_the_state_is_empty_before_the_first_step(tmp_path: Path) -> None:
    lib = Tiered(ON_DISK, tmp_path / "disk")
    model = lib.offload(Stack().bfloat16())
    optimizer = lib.AdamW(groups(model), lr=1e-3)
    assert optimizer.state_dict()["state"] == {}
    # accelerate does this when it prepares an optimizer.
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state_dict()["state"] == {}
    lib.close()


@both_dtypes
def test_the_format_is_torchs(dtype: torch.dtype, tmp_path: Path) -> None:
    """The same indices, the same keys, the same shapes; `master` besides, where the master is split."""

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack().to(dtype))
        train(lib, model, lib.AdamW(groups(model), lr=1e-3), steps=2)

    sides = []
    torch.manual_seed(0)
    for lib in (Plain(), Tiered(ON_DISK, tmp_path / "disk")):
        script(lib)
        sides.append(lib.optimizers[0].state_dict())
        lib.close()
    torchs, ours = sides
    assert ours["state"].keys() == torchs["state"].keys()
    for number, state in torchs["state"].items():
        assert ours["state"][number].keys() - {"master"} == state.keys()
        assert ("master" in ours["state"][number]) == (dtype == torch.bfloat16)
        for key, value in ours["state"][number].items():
            expected = state["exp_avg" if key == "master" else key]
            assert isinstance(value, Tensor)
            assert (value.shape, value.dtype, value.device) == (expected.shape, expected.dtype, expected.device)
    assert [group["params"] for group in ours["param_groups"]] == [group["params"] for group in torchs["param_groups"]]
    for mine, theirs in zip(ours["param_groups"], torchs["param_groups"], strict=True):
        for key in ("lr", "betas", "eps", "weight_decay", "maximize"):
            assert mine[key] == theirs[key]


@pytest.mark.parametrize("stepped", [False, True], ids=["into a fresh optimizer", "over an old state"])
@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_from_torch_to_tiermem(kind: str, stepped: bool, tmp_path: Path) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = Stack()
        optimizer = getattr(torch.optim, kind)(groups(model), lr=1e-3)
        plain = Plain()
        train(plain, model, optimizer, steps=2)
        state, weights = saved_and_loaded(optimizer.state_dict()), copy.deepcopy(model.state_dict())

        model = lib.offload(Stack())
        optimizer = getattr(lib, kind)(groups(model), lr=0.5)
        if stepped:
            train(lib, model, optimizer, steps=1)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[1]["lr"] == 2e-3
        train(lib, model, optimizer, steps=2)

    reference = run_plain(script)
    for number, placement in enumerate(SPREAD):
        assert_close(run_tiered(script, placement, tmp_path / str(number)), reference)


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_from_tiermem_to_torch(kind: str, tmp_path: Path) -> None:
    """What torch makes of our state dict goes on as if it had been torch all along."""

    def start(lib: Plain | Tiered) -> nn.Module:
        model = lib.offload(Stack())
        train(lib, model, getattr(lib, kind)(groups(model), lr=1e-3), steps=2)
        return model

    def go_on(lib: Plain | Tiered, model: nn.Module) -> Outcome:
        plain = Plain()
        plain.generator = lib.generator
        continued = plain.offload(Stack())
        continued.load_state_dict(model.state_dict())
        optimizer = getattr(plain, kind)(groups(continued), lr=0.5)
        optimizer.load_state_dict(saved_and_loaded(lib.optimizers[0].state_dict()))
        train(plain, continued, optimizer, steps=2)
        return plain.outcome()

    outcomes = []
    for lib in (Plain(), Tiered(ON_DISK, tmp_path / "disk")):
        torch.manual_seed(7)
        outcomes.append(go_on(lib, start(lib)))
        lib.close()
    assert_close(outcomes[1], outcomes[0])


@both_dtypes
def test_from_one_placement_to_another_the_bits_go_on(dtype: torch.dtype, tmp_path: Path) -> None:
    """Three steps, saved, two steps elsewhere: as five steps in one piece."""
    directories = iter(tmp_path / str(number) for number in range(9))

    def run(stops: list[tuple[Placement, int]]) -> Outcome:
        state = None
        generator = None
        for placement, steps in stops:
            torch.manual_seed(7)
            lib = Tiered(placement, next(directories))
            lib.generator = generator or lib.generator
            generator = lib.generator
            model = lib.offload(Decoder().to(dtype))
            optimizer = lib.AdamW(groups(model), lr=1e-3)
            if state is not None:
                model.load_state_dict(state[0])
                optimizer.load_state_dict(state[1])
            train(lib, model, optimizer, steps=steps, clip=0.3, loss_of=next_token_loss)
            state = saved_and_loaded((model.state_dict(), optimizer.state_dict()))
            outcome = lib.outcome()
            lib.close()
        outcome.records.clear()
        return outcome

    whole = run([(SPREAD[0], 5)])
    assert_same_bits(run([(SPREAD[0], 3), (ON_DISK, 2)]), whole)
    assert_same_bits(run([(ON_DISK, 1), (SPREAD[1], 2), (SPREAD[3], 2)]), whole)


def test_a_bf16_state_without_masters_leaves_them_as_they_are(compare: Compare) -> None:
    """It comes from torch, which has none; new weights come by the model's state dict."""

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack().bfloat16())
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        train(lib, model, optimizer, steps=2)
        state = copy.deepcopy(optimizer.state_dict())
        for entry in state["state"].values():
            entry.pop("master", None)
        optimizer.load_state_dict(state)
        train(lib, model, optimizer, steps=2)

    compare(script)


def test_what_is_saved_behind_a_step_is_complete(tmp_path: Path) -> None:
    """Although its updates were still under way when it was asked for."""
    sides = []
    for synchronized in (True, False):
        torch.manual_seed(1)
        lib = Tiered(ON_DISK, tmp_path / "disk")
        model = lib.offload(Stack().bfloat16())
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            model(*model.inputs(lib)).float().square().mean().backward()
            optimizer.step()
            if synchronized:
                lib.synchronize(model)
            saved = [*optimizer.state_dict()["state"].values(), model.state_dict()]
            sides.append([tensor.clone() for entry in saved for tensor in entry.values()])
            optimizer.zero_grad()
        lib.close()
    for synchronized, hasty in zip(sides[:3], sides[3:], strict=True):
        assert all(same_bits(a, b) for a, b in zip(synchronized, hasty, strict=True))


def test_a_state_of_some_of_the_parameters(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        model.blocks[1].requires_grad_(False)
        train(lib, model, optimizer, steps=1)
        model.blocks[1].requires_grad_(True)
        state = copy.deepcopy(optimizer.state_dict())
        train(lib, model, optimizer, steps=2)
        optimizer.load_state_dict(state)  # blocks.1 has no state any more
        train(lib, model, optimizer, steps=2)

    assert set(compare(script).steps.values()) == {3.0, 2.0}


def test_an_emptied_state_starts_again(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        empty = copy.deepcopy(optimizer.state_dict())
        train(lib, model, optimizer, steps=2)
        optimizer.load_state_dict(empty)
        train(lib, model, optimizer, steps=2)

    assert set(compare(script).steps.values()) == {2.0}


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    lib = Tiered(ON_DISK, tmp_path / "disk")
    model = lib.offload(Stack())
    optimizer = lib.AdamW(model.parameters(), lr=1e-3)
    train(lib, model, optimizer, steps=1)
    good = copy.deepcopy(optimizer.state_dict())
    fewer = copy.deepcopy(good)
    fewer["param_groups"][0]["params"].pop()
    shape = copy.deepcopy(good)
    shape["state"][3]["exp_avg"] = torch.zeros(5)
    for bad in (fewer, shape):
        with pytest.raises((ValueError, RuntimeError)):
            optimizer.load_state_dict(bad)
    for number, entry in optimizer.state_dict()["state"].items():
        assert all(same_bits(value, good["state"][number][key]) for key, value in entry.items())
    lib.close()


def test_the_hyperparameters_of_the_loaded_state_count(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        optimizer = lib.AdamW(groups(model), lr=1e-3)
        state = copy.deepcopy(optimizer.state_dict())
        state["param_groups"][0].update(lr=1e-3, betas=(0.8, 0.9), weight_decay=0.5)
        optimizer.load_state_dict(state)
        train(lib, model, optimizer)

    compare(script)


# --- the model's


@both_dtypes
def test_a_models_state_dict_has_its_real_values(compare: Compare, dtype: torch.dtype) -> None:
    """Before training, and right behind a step."""

    def script(lib: Plain | Tiered) -> None:
        model = Stack().to(dtype)
        model.register_buffer("count", torch.arange(4))
        lib.offload(model)
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            for name, tensor in saved_and_loaded(model.state_dict()).items():
                lib.note(f"saved {name}", tensor)
            model(*model.inputs(lib)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    compare(script)


def test_a_state_dict_of_a_part_of_the_model(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        train(lib, model, lib.AdamW(model.parameters(), lr=1e-3))
        for part in (model.blocks, model.blocks[1], model.blocks[0].up, model.head):
            for name, tensor in part.state_dict().items():
                lib.note(name, tensor)

    compare(script)


@both_dtypes
@pytest.mark.parametrize("when", ["before the optimizer", "before the first step", "behind a step"])
def test_loading_weights_after_offload(compare: Compare, when: str, dtype: torch.dtype) -> None:
    def script(lib: Plain | Tiered) -> None:
        source = Stack().to(dtype).state_dict()
        model = lib.offload(Stack().to(dtype))

        def load() -> None:
            result = model.load_state_dict(source)
            assert not result.missing_keys and not result.unexpected_keys
            lib.weights_changed(model.parameters())

        if when == "before the optimizer":
            load()
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        if when == "before the first step":
            load()
        train(lib, model, optimizer, steps=2)
        if when == "behind a step":
            load()
        lib.note("output", model(*model.inputs(lib)))
        train(lib, model, optimizer, steps=2)

    compare(script)


def test_loading_some_weights(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        source = {name: tensor for name, tensor in Stack().state_dict().items() if "blocks.1" in name}
        model = lib.offload(Stack())
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        train(lib, model, optimizer, steps=1)
        result = model.load_state_dict(source | {"other": torch.zeros(3)}, strict=False)
        assert result.unexpected_keys == ["other"] and "head.bias" in result.missing_keys
        model.blocks[2].load_state_dict(Stack().blocks[2].state_dict())
        train(lib, model, optimizer, steps=2)

    compare(script)


def test_loading_by_assignment_works_or_is_refused(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        source = {name: tensor * 2 for name, tensor in Stack().state_dict().items()}
        model = lib.offload(Stack())
        try:
            model.load_state_dict(source, assign=True)
        except (RuntimeError, ValueError) as error:
            assert not lib.is_reference and "assign" in str(error)
            model.load_state_dict(source)
        train(lib, model, lib.AdamW(model.parameters(), lr=1e-3))

    compare(script)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    lib = Tiered(ON_DISK, tmp_path / "disk")
    model = lib.offload(Stack())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="blocks.0.up.weight"):
        model.load_state_dict(before | {"blocks.0.up.weight": torch.zeros(3, 3)})
    with pytest.raises(RuntimeError, match="head.bias"):
        model.load_state_dict({name: tensor for name, tensor in before.items() if name != "head.bias"})
    train(lib, model, lib.AdamW(model.parameters()), steps=1)
    lib.close()


def test_loading_fp32_weights_into_a_bf16_model(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        source = Stack().state_dict()
        model = lib.offload(Stack().bfloat16())
        model.load_state_dict({name: tensor.bfloat16().float() for name, tensor in source.items()})
        train(lib, model, lib.AdamW(model.parameters(), lr=1e-3))

    compare(script)


def test_a_model_on_the_meta_device_is_zero_until_it_is_filled(tmp_path: Path) -> None:
    def script(lib: Plain | Tiered) -> None:
        source = Stack().state_dict()
        if lib.is_reference:
            model = lib.offload(Stack())
        else:
            with torch.device("meta"):
                model = Stack()
            lib.offload(model)
            with lib.gather(model):
                assert all((p == 0).all() and p.device.type == "cpu" for p in model.parameters())
            model.load_state_dict(source)
        model.load_state_dict(source)
        train(lib, model, lib.AdamW(model.parameters(), lr=1e-3))

    reference = run_plain(script)
    for number, placement in enumerate(SPREAD):
        assert_close(run_tiered(script, placement, tmp_path / str(number)), reference)


# --- copies


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_have_real_values_or_are_refused_with_the_remedy(way: str, tmp_path: Path) -> None:
    lib = Tiered(ON_DISK, tmp_path / "disk")
    model = lib.offload(Stack())
    train(lib, model, lib.AdamW(model.parameters(), lr=1e-3))
    try:
        if way == "deepcopy":
            twin = copy.deepcopy(model)
        elif way == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
    except (RuntimeError, TypeError, pickle.PicklingError) as error:
        assert "tiermem" in str(error) and ("state_dict" in str(error) or "close" in str(error)), error
    else:
        with torch.no_grad():
            inputs = model.inputs(lib)
            assert same_bits(twin(*inputs), model(*inputs))
        with lib.gather(model):
            for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                assert same_bits(mine.detach(), theirs.detach())
    # Whatever it was, the model itself goes on.
    train(lib, model, lib.optimizers[0], steps=1)
    lib.close()


def test_a_copy_after_close_is_a_plain_module(tmp_path: Path) -> None:
    lib = Tiered(ON_DISK, tmp_path / "disk")
    model = lib.offload(Stack())
    train(lib, model, lib.AdamW(model.parameters(), lr=1e-3))
    lib.close()
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    inputs = model.inputs(lib)
    assert same_bits(twin(*inputs).detach(), model(*inputs).detach())


def test_saving_a_pretrained_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    lib = Tiered(ON_DISK, tmp_path / "disk")
    model = lib.offload(transformers.LlamaForCausalLM(config).bfloat16())
    optimizer = lib.AdamW(model.parameters(), lr=1e-3)
    tokens = lib.integers(101, 2, 12)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "saved")
    with lib.gather(model):
        expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    lib.close()
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    for name, parameter in loaded.named_parameters():
        assert same_bits(parameter.detach(), expected[name]), name
