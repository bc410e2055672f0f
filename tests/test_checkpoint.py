from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tiermem
from tiermem import checkpoint


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(513, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Linear(16, 513, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(7.0))
        self.register_buffer("computed", torch.arange(5.0), persistent=False)


def offloaded(tmp_path: Path) -> Net:
    with checkpoint.parameters_on_meta():
        net = Net()
    disk = tmp_path / "disk"
    disk.mkdir()
    memory = tiermem.Memory(device="16MiB", host="64MiB", disk=disk)
    return tiermem.offload(net, memory=memory, policy=tiermem.Policy(weights="disk", states="disk"), device="cpu")


def random_state(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = {name: torch.randn_like(value).to(dtype) for name, value in Net().state_dict().items()}
    del state["head.weight"]
    return state


def assert_holds(net: Net, state: dict[str, torch.Tensor]) -> None:
    with tiermem.gather(net):
        for name, parameter in net.named_parameters():
            assert torch.equal(parameter, state[name].float()), name
        assert net.head.weight is net.embedding.weight
    assert torch.equal(net.table, state["table"].float())
    assert torch.equal(net.computed, torch.arange(5.0))


def test_only_parameters_are_on_meta_and_only_inside() -> None:
    with checkpoint.parameters_on_meta():
        net = Net()
    assert all(parameter.is_meta for parameter in net.parameters())
    assert not any(buffer.is_meta for buffer in net.buffers())
    assert net.head.weight is net.embedding.weight
    assert not any(parameter.is_meta for parameter in Net().parameters())


@pytest.mark.parametrize("slice_bytes", [1, 1000, 1 << 25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_value_arrives_whatever_the_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_bytes: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(checkpoint, "SLICE_BYTES", slice_bytes)
    state = random_state(dtype)
    save_file(state, tmp_path / "model.safetensors")
    net = offloaded(tmp_path)
    loaded = checkpoint.load(net, tmp_path)
    assert_holds(net, state)
    assert (loaded.parameters, loaded.buffers, loaded.unused) == (8, 1, [])
    assert loaded.bytes_read == sum(value.nbytes for value in state.values())


def write_shards(directory: Path, state: dict[str, torch.Tensor], file_names: list[str]) -> None:
    weight_map = {name: file_names[index % len(file_names)] for index, name in enumerate(state)}
    for file_name in file_names:
        save_file({n: v for n, v in state.items() if weight_map[n] == file_name}, directory / Path(file_name).name)
    (directory / checkpoint.INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    state = random_state()
    write_shards(tmp_path, state, ["a.safetensors", "b.safetensors", "c.safetensors"])
    net = offloaded(tmp_path)
    checkpoint.load(net, tmp_path)
    assert_holds(net, state)


def test_an_index_cannot_lead_out_of_its_directory(tmp_path: Path) -> None:
    write_shards(tmp_path, random_state(), ["../a.safetensors"])
    with pytest.raises(ValueError, match="not in the same directory"):
        checkpoint.load(offloaded(tmp_path), tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, random_state(), ["a.safetensors", "b.safetensors"])
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "b.safetensors")):
        checkpoint.load(offloaded(tmp_path), tmp_path)


@pytest.mark.parametrize("spoil", ["missing", "shape"])
def test_a_misfit_names_the_parameter_and_changes_nothing(tmp_path: Path, spoil: str) -> None:
    state = random_state()
    if spoil == "missing":
        del state["layers.1.weight"]
    else:
        state["layers.1.weight"] = torch.zeros(16, 15)
    save_file(state, tmp_path / "model.safetensors")
    net = offloaded(tmp_path)
    with pytest.raises(ValueError, match=r"layers\.1\.weight"):
        checkpoint.load(net, tmp_path)
    with tiermem.gather(net):
        assert all(not parameter.any() for parameter in net.parameters())


def test_names_that_the_model_lacks_are_reported(tmp_path: Path) -> None:
    save_file({**random_state(), "extra": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert checkpoint.load(offloaded(tmp_path), tmp_path).unused == ["extra"]


class Wrapped(nn.Module):
    base_model_prefix = "base"

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)


@pytest.mark.parametrize("prefix", ["", "base."])
def test_a_base_model_is_found_with_and_without_its_prefix(tmp_path: Path, prefix: str) -> None:
    state: dict[str, Any] = {f"{prefix}weight": torch.randn(4, 4), f"{prefix}bias": torch.randn(4)}
    save_file(state, tmp_path / "model.safetensors")
    with checkpoint.parameters_on_meta():
        net = Wrapped()
    memory = tiermem.Memory(device="16MiB", host="64MiB")
    net = tiermem.offload(net, memory=memory, policy=tiermem.Policy(weights="host", states="host"), device="cpu")
    checkpoint.load(net, tmp_path)
    with tiermem.gather(net):
        assert torch.equal(net.base.weight, state[f"{prefix}weight"])


def test_a_directory_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        checkpoint.load(Net(), tmp_path)


def filled(tmp_path: Path) -> tuple[Net, dict[str, torch.Tensor]]:
    state = random_state()
    source = tmp_path / "source"
    source.mkdir()
    save_file(state, source / "model.safetensors")
    net = offloaded(tmp_path)
    checkpoint.load(net, source)
    return net, state


@pytest.mark.parametrize("shard_bytes", [1, 2000, 1 << 30])
def test_what_is_saved_is_what_was_there(tmp_path: Path, shard_bytes: int) -> None:
    net, state = filled(tmp_path)
    paths = checkpoint.save(net, tmp_path / "saved", shard_bytes=shard_bytes)
    read = {name: value for path in paths for name, value in load_file(path).items()}
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], value) for name, value in state.items())
    again = offloaded(tmp_path / "saved")
    checkpoint.load(again, tmp_path / "saved")
    assert_holds(again, state)


def test_a_save_with_fewer_files_removes_those_of_the_last(tmp_path: Path) -> None:
    net, _ = filled(tmp_path)
    saved = tmp_path / "saved"
    assert len(checkpoint.save(net, saved, shard_bytes=1000)) > 1
    (saved / "notes.txt").write_text("mine")
    checkpoint.save(net, saved)
    assert sorted(path.name for path in saved.iterdir()) == ["model.safetensors", "notes.txt"]


def test_dtypes_of_odd_sizes_stay_aligned(tmp_path: Path) -> None:
    """Three bf16 elements before fp32 ones would leave those at an odd address."""
    module = nn.Module()
    module.narrow = nn.Parameter(torch.randn(3).bfloat16())
    module.wide = nn.Parameter(torch.randn(3, 5).t())
    module.register_buffer("mask", torch.tensor([True, False, True]))
    module.register_buffer("empty", torch.zeros(0, 4))
    (path,) = checkpoint.save(module, tmp_path / "saved")
    for name, value in load_file(path).items():
        assert torch.equal(value, getattr(module, name)), name


def test_a_save_that_fails_leaves_the_last_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, state = filled(tmp_path)
    checkpoint.save(net, tmp_path / "saved")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write_shard", fail)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(net, tmp_path / "saved")
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["model.safetensors"]
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == state.keys()
