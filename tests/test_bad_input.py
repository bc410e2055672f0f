"""Wrong use is refused where it happens: the message names the parameter or the path, the bytes, and the remedy."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Block, Stack
from processes import run, script
from reference import ON_DISK, SPREAD, Placement, Tiered, train
from torch import nn
from torch.nn import functional as F

import tiermem

on_disk = {"weights": "disk", "states": "disk"}
spread = pytest.mark.parametrize("placement", SPREAD, ids=str)


def offloaded(tmp_path: Path, module: nn.Module | None = None, placement: Placement = ON_DISK) -> Tiered:
    lib = Tiered(placement, tmp_path / "disk")
    lib.offload(module or Stack())
    return lib


# --- sizes and choices


@pytest.mark.parametrize("size", ["20 parsecs", "", "GiB", "-1GiB", -5, "1e", "0x10"])
@pytest.mark.parametrize("field", ["device", "host", "disk_size"])
def test_a_budget_that_is_not_a_size(field: str, size: Any) -> None:
    with pytest.raises(ValueError, match=field):
        tiermem.Memory(**{field: size})


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("weights", "gpu"),
        ("states", "device"),
        ("states", "nvme"),
        ("kernels", "cuda"),
        ("moments", "int3"),
        ("chunk_numel", 1000),
        ("chunk_numel", 0),
        ("chunk_numel", -4096),
        ("threads", 0),
    ],
)
def test_a_policy_that_does_not_exist(field: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=field) as caught:
        tiermem.Policy(**{field: wrong})
    assert str(wrong) in str(caught.value)


def test_an_engine_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="floppy") as caught:
        tiermem.offload(
            Stack(),
            memory=tiermem.Memory(device="8MiB", host="8MiB", disk=tmp_path),
            policy=tiermem.Policy(io="floppy", **on_disk),
            device="cpu",
        )
    assert "threads" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_choices_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiermem.Policy().weights = "disk"
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiermem.Memory().host = 3


@pytest.mark.parametrize("entry", ["nothing.like.this", nn.Conv3d, nn.Linear(2, 2), 7])
def test_a_cut_that_matches_nothing(entry: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="blocks"):
        tiermem.offload(Stack(), policy=tiermem.Policy(blocks=[entry]), device="cpu")


def test_disk_placement_without_a_directory() -> None:
    with pytest.raises(ValueError, match="disk"):
        tiermem.offload(
            Stack(),
            memory=tiermem.Memory(device="64MiB", host="64MiB"),
            policy=tiermem.Policy(**on_disk),
            device="cpu",
        )


# --- budgets


def test_a_budget_too_small_for_the_largest_block(tmp_path: Path) -> None:
    """It names the block, both numbers of bytes, and what to do; the module stays as it was."""
    model = Stack()
    model.blocks[1] = Block(600)  # 2.9 MB
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"blocks\.1") as caught:
        tiermem.offload(
            model,
            memory=tiermem.Memory(device="1MiB", host="64MiB", disk=tmp_path),
            policy=tiermem.Policy(**on_disk),
            device="cpu",
        )
    message = str(caught.value)
    needed = sum(p.numel() * 4 for p in model.blocks[1].parameters())
    numbers = [int(word) for word in message.replace("(", " ").replace(")", " ").split() if word.isdigit()]
    assert any(number >= needed for number in numbers), f"no number of bytes >= {needed} in: {message}"
    assert any(number <= 1 << 20 for number in numbers), f"the bytes present are not in: {message}"
    assert "blocks=" in message or "device=" in message, f"no remedy in: {message}"
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert not list(tmp_path.iterdir())
    model.blocks[1].forward = lambda hidden: hidden
    model(torch.randn(2, 7)).sum().backward()  # a plain module, with no hooks left


@pytest.mark.parametrize("budget", ["device", "host"])
def test_a_budget_too_small_for_anything(budget: str, tmp_path: Path) -> None:
    memory = {"device": "64MiB", "host": "64MiB", "disk": tmp_path} | {budget: 4096}
    with pytest.raises(ValueError, match=budget):
        tiermem.offload(Stack(), memory=tiermem.Memory(**memory), policy=tiermem.Policy(**on_disk), device="cpu")
    assert not list(tmp_path.iterdir())


def test_more_than_a_host_budget_holds(tmp_path: Path) -> None:
    """The states are asked for in HOST, by name, and do not fit."""
    with pytest.raises(ValueError, match="host") as caught:
        tiermem.offload(
            Stack(width=256),
            memory=tiermem.Memory(device="64MiB", host="2MiB", disk=tmp_path),
            policy=tiermem.Policy(weights="host", states="host", chunk_numel=4096),
            device="cpu",
        )
    assert "host=" in str(caught.value) or "disk" in str(caught.value)


# --- directories


def refused(directory: Any, **memory: Any) -> str:
    with pytest.raises((OSError, ValueError)) as caught:
        tiermem.offload(
            Stack(),
            memory=tiermem.Memory(**({"device": "64MiB", "host": "64MiB", "disk": directory} | memory)),
            policy=tiermem.Policy(**on_disk),
            device="cpu",
        )
    return str(caught.value)


def test_a_directory_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is absolute in the message, also when it was not in the call."""
    monkeypatch.chdir(tmp_path)
    message = refused("no/such/place")
    assert str(tmp_path / "no/such/place") in message
    assert "create" in message or "missing" in message
    assert not list(tmp_path.iterdir()), "the runtime must not create what may be a mistyped mount"


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert str(file) in refused(file)
    assert file.read_text() == "mine"


def test_one_bad_directory_of_several(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    assert str(tmp_path / "bad") in refused([tmp_path / "good", tmp_path / "bad"])
    assert not list((tmp_path / "good").iterdir())


def test_a_directory_that_cannot_be_written() -> None:
    """In a process that is not root: root may write anywhere."""
    body = """
        import os, tiermem, models
        if os.getuid() == 0:
            os.setgroups([]); os.setgid(65534); os.setuid(65534)
        try:
            tiermem.offload(
                models.Stack(), memory=tiermem.Memory(device="8MiB", host="8MiB", disk=directory),
                policy=tiermem.Policy(weights="disk", states="disk"), device="cpu",
            )
        except OSError as error:
            print(type(error).__name__, error)
        else:
            print("accepted")
    """
    with tempfile.TemporaryDirectory() as directory:  # not `tmp_path`, which others may not even enter
        os.chmod(directory, 0o555)
        done = run(body, directory=directory)
    assert directory in done.stdout, done.stdout + done.stderr
    assert "not writable" in done.stdout


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    """By the budget: both numbers are named."""
    message = refused(tmp_path, disk_size="16KiB")
    assert "disk" in message
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """A model of a few times the free space, which costs nothing as long as it is on the meta device."""
    free_bytes = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    width = int((free_bytes / 100 / 12) ** 0.5)  # 12 bytes of states and weights per parameter, 300 blocks
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(300)))
    with pytest.raises((OSError, ValueError)) as caught:
        tiermem.offload(
            model,
            memory=tiermem.Memory(device=64 * width * width, host="4GiB", disk=tmp_path),
            policy=tiermem.Policy(**on_disk),
            device="cpu",
        )
    message = str(caught.value)
    assert str(tmp_path) in message
    numbers = [int(word) for word in message.replace(",", " ").split() if word.isdigit()]
    assert any(number > free_bytes for number in numbers), f"the bytes needed are not in: {message}"
    assert any(free_bytes / 100 < number <= free_bytes * 1.1 for number in numbers), f"no bytes free in: {message}"
    assert not list(tmp_path.iterdir())


def test_a_directory_in_memory_is_warned_about() -> None:
    directory = Path("/dev/shm")
    if not os.access(directory, os.W_OK) or "tmpfs /dev/shm" not in Path("/proc/mounts").read_text():
        pytest.skip("no tmpfs to try")
    directory = directory / f"tiermem-test-of-{os.getpid()}"
    directory.mkdir()
    try:
        lib = Tiered(ON_DISK, directory)
        with pytest.warns(UserWarning, match="tmpfs") as caught:
            model = lib.offload(Stack())
        assert str(directory) in str(caught[0].message)
        train(lib, model, lib.AdamW(model.parameters()), steps=1)
        lib.close()
        assert not list(directory.iterdir())
    finally:
        directory.rmdir()


def test_a_disk_is_not_warned_about(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lib = offloaded(tmp_path)
        train(lib, lib.models[0], lib.AdamW(lib.models[0].parameters()), steps=1)
        lib.close()


def test_the_directory_of_another_live_process_is_left_alone(tmp_path: Path) -> None:
    """And that of a dead one is removed."""
    body = """
        import os, signal, tiermem, models
        model = tiermem.offload(
            models.Stack(), memory=tiermem.Memory(device="64MiB", host="64MiB", disk=directory),
            policy=tiermem.Policy(weights="disk", states="disk"), device="cpu",
        )
        print("ready", flush=True)
        sys.stdin.readline()
        with tiermem.gather(model):
            print(float(model.head.weight.sum()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    other = subprocess.Popen(
        script(body, directory=str(tmp_path)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "ready\n"
        (theirs,) = tmp_path.iterdir()
        lib = Tiered(ON_DISK, tmp_path)
        model = lib.offload(Stack())
        train(lib, model, lib.AdamW(model.parameters()), steps=1)
        assert theirs.is_dir()
        lib.close()
        assert [*tmp_path.iterdir()] == [theirs]
        other.stdin.write("\n")
        other.stdin.flush()
        assert abs(float(other.stdout.readline())) > 0  # its files were whole
        other.wait()
        assert theirs.is_dir()  # killed: nothing could clean up
        lib = Tiered(ON_DISK, tmp_path)
        lib.offload(Stack())
        assert not theirs.exists()
        lib.close()
        assert not list(tmp_path.iterdir())
    finally:
        other.kill()
        other.wait()
        other.stdin.close()
        other.stdout.close()


def test_files_are_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        lib = offloaded(tmp_path)
    finally:
        os.umask(old)
    (directory,) = (tmp_path / "disk").iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    files = list(directory.iterdir())
    assert files and all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    lib.close()


# --- models


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_a_dtype_that_cannot_be_trained(dtype: torch.dtype, tmp_path: Path) -> None:
    model = Stack()
    model.blocks[1].up.weight = nn.Parameter(torch.zeros(66, 33, dtype=dtype))
    with pytest.raises((ValueError, TypeError), match=r"blocks\.1\.up\.weight") as caught:
        tiermem.offload(model, memory=tiermem.Memory(device="64MiB", host="64MiB", disk=tmp_path), device="cpu")
    assert str(dtype) in str(caught.value)
    assert not list(tmp_path.iterdir())
    assert model.blocks[0].up.weight.isfinite().all()


def test_what_is_not_a_module() -> None:
    with pytest.raises((TypeError, ValueError)):
        tiermem.offload([nn.Linear(2, 2)], device="cpu")


def test_offloading_twice(tmp_path: Path) -> None:
    lib = offloaded(tmp_path)
    model = lib.models[0]
    for again in (model, model.blocks, model.blocks[0], nn.Sequential(model)):
        with pytest.raises((ValueError, RuntimeError), match="close"):
            tiermem.offload(again, memory=lib.memory(), policy=lib.policy(), device="cpu")
    train(lib, model, lib.AdamW(model.parameters()), steps=1)
    lib.close()
    lib.offload(model)  # after close it may be offloaded again
    train(lib, model, lib.AdamW(model.parameters()), steps=1)
    tiermem.close(model)


def test_functions_that_need_an_offloaded_model() -> None:
    plain = nn.Linear(2, 2)
    for function in (tiermem.report, tiermem.synchronize):
        with pytest.raises((ValueError, RuntimeError), match="offload"):
            function(plain)


def test_a_model_with_no_parameters(tmp_path: Path) -> None:
    """Works, or is refused with a sentence."""
    try:
        model = tiermem.offload(nn.ReLU(), memory=tiermem.Memory(device="8MiB", host="8MiB"), device="cpu")
    except ValueError as error:
        assert "parameter" in str(error)
    else:
        assert model(torch.tensor([-1.0])) == 0
        tiermem.close(model)


CASTS: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "to(dtype)": lambda model: model.to(torch.float64),
    "to(device, dtype)": lambda model: model.to("cpu", torch.bfloat16),
    "a block's half": lambda model: model.blocks[1].half(),
    "type": lambda model: model.type(torch.float16),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "to another device": lambda model: model.to("meta"),
}


@spread
@pytest.mark.parametrize("cast", CASTS)
def test_casting_an_offloaded_model_is_refused(cast: str, placement: Placement, tmp_path: Path) -> None:
    """It would make tensors full of NaN; the remedy is to cast before."""
    lib = offloaded(tmp_path, placement=placement)
    model = lib.models[0]
    with pytest.raises((RuntimeError, ValueError, TypeError), match="tiermem") as caught:
        CASTS[cast](model)
    assert "close" in str(caught.value) or "before" in str(caught.value)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    train(lib, model, lib.AdamW(model.parameters()), steps=1)
    with tiermem.gather(model):
        assert all(p.isfinite().all() for p in model.parameters())
    lib.close()


def test_moving_to_where_it_is_does_nothing(tmp_path: Path) -> None:
    """Trainers call `model.to(device)` without being asked."""
    lib = offloaded(tmp_path)
    model = lib.models[0]
    assert model.to("cpu") is model
    assert model.to(torch.float32) is model
    assert model.cpu() is model
    train(lib, model, lib.AdamW(model.parameters()), steps=1)
    lib.close()


# --- stray reads and writes


@spread
def test_a_stray_read_never_gives_a_plausible_number(placement: Placement, tmp_path: Path) -> None:
    """NaN, or an error that says how to read; before training, between forward and backward, and after a step."""
    lib = offloaded(tmp_path, placement=placement)
    model = lib.models[0]
    optimizer = lib.AdamW(model.parameters())
    weight = model.blocks[1].up.weight
    with tiermem.gather(model):
        real = weight.detach().clone()

    def read() -> None:
        assert weight.shape == (66, 33) and weight.dtype == torch.float32 and weight.device.type == "cpu"
        assert weight.numel() == 66 * 33 and weight.requires_grad
        with torch.no_grad():
            for value in (weight.sum(), weight[3, 4], weight.data.abs().max(), weight.norm(), weight.detach().mean()):
                assert value.isnan() or placement.weights == "device"

    read()
    if placement.weights == "device":
        assert torch.equal(weight, real)
    model(*model.inputs(lib)).sum().backward()
    read()
    optimizer.step()
    read()
    lib.close()
    assert weight.isfinite().all()


@spread
def test_a_stray_write_is_refused(placement: Placement, tmp_path: Path) -> None:
    if placement.weights == "device":
        pytest.skip("weights at home on the device are ordinary tensors")
    lib = offloaded(tmp_path, placement=placement)
    model = lib.models[0]
    for write in (
        lambda p: p.copy_(torch.zeros_like(p)),
        lambda p: p.zero_(),
        lambda p: p.mul_(2),
        lambda p: nn.init.normal_(p),
        lambda p: nn.init.constant_(p, 0.5),
        lambda p: p[0].fill_(1.0),
        lambda p: p.data.fill_(1.0),
    ):
        # Where torch itself cannot see it (`fill_` of one element for all), the next use of the block does.
        with torch.no_grad(), pytest.raises(RuntimeError):
            write(model.blocks[1].up.weight)
            model(*model.inputs(lib))
        assert model.blocks[1].up.weight.isnan().all(), "a stray read would give what was written"
    train(lib, model, lib.AdamW(model.parameters()), steps=1)
    lib.close()


def uses(model: nn.Module, way: str) -> torch.Tensor:
    weight = model.blocks[1].up.weight
    if way == "linear":
        return F.linear(torch.randn(2, 33, requires_grad=True), weight).sum()
    if way == "sum":
        return weight.sum()
    if way == "penalty":
        return weight.square().sum()
    return (model.blocks[1].up.weight.t() @ torch.randn(66, 2)).sum()


@pytest.mark.parametrize("way", ["linear", "sum", "penalty", "transposed"])
@pytest.mark.parametrize("placement", [p for p in SPREAD if p.weights != "device"], ids=str)
def test_a_stray_use_in_autograd_names_the_parameter_and_gather(placement: Placement, way: str, tmp_path: Path) -> None:
    """Autograd saves it, or a gradient arrives for it: either way the runtime sees it before a step goes wrong."""
    lib = offloaded(tmp_path, placement=placement)
    model = lib.models[0]
    with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight") as caught:
        uses(model, way).backward()
    assert "tiermem.gather" in str(caught.value)
    train(lib, model, lib.AdamW(model.parameters()), steps=1)  # and it goes on
    lib.close()


@pytest.mark.parametrize("placement", SPREAD, ids=str)
def test_the_remedy_that_is_named_works(placement: Placement, tmp_path: Path) -> None:
    """A penalty on weights, inside of a gather, is trained on like any loss."""
    sides = []
    for plain in (True, False):
        torch.manual_seed(0)
        model = Stack()
        lib = Tiered(placement, tmp_path / f"disk{plain}")
        inputs = torch.randn(3, 7)
        if not plain:
            lib.offload(model)
        optimizer = (torch.optim.AdamW if plain else tiermem.AdamW)(model.parameters(), lr=3e-3)
        for _ in range(2):
            loss = model(inputs).square().mean()
            with tiermem.gather(model.blocks[1]):
                loss = loss + model.blocks[1].up.weight.square().sum()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        lib.close()
        sides.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*sides, strict=True))


def test_a_gradient_kept_over_zero_grad_is_not_mistaken_for_another(tmp_path: Path) -> None:
    """The handle of an old gradient gives the old values, or an error; never those of the new one."""
    lib = offloaded(tmp_path)
    model = lib.models[0]
    optimizer = lib.AdamW(model.parameters())
    model(*model.inputs(lib)).square().sum().backward()
    old = model.head.weight.grad
    value = old.clone()
    optimizer.step()
    optimizer.zero_grad()
    model(*model.inputs(lib)).square().sum().backward()
    try:
        read = old.clone()
    except RuntimeError as error:
        assert "head.weight" in str(error)
    else:
        assert torch.equal(read, value)
    lib.close()


def test_a_gradient_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    lib = offloaded(tmp_path)
    model = lib.models[0]
    with pytest.raises(RuntimeError):
        model.head.weight.grad = torch.zeros(3, 3)
    lib.close()


def test_sparse_gradients_work_or_are_refused_by_name(tmp_path: Path) -> None:
    sides = []
    for plain in (True, False):
        torch.manual_seed(0)
        model = nn.ModuleDict({"table": nn.Embedding(50, 8, sparse=True), "head": nn.Linear(8, 3)})
        lib = Tiered(ON_DISK, tmp_path / "disk")
        if not plain:
            lib.offload(model)
        tokens = torch.tensor([3, 5, 3])
        optimizer = (torch.optim.AdamW if plain else tiermem.AdamW)(model.parameters(), lr=3e-3)
        try:
            model["head"](model["table"](tokens)).sum().backward()
            if plain:
                model["table"].weight.grad = model["table"].weight.grad.to_dense()
            optimizer.step()
        except (RuntimeError, ValueError) as error:
            assert not plain and "table.weight" in str(error)
            return
        finally:
            lib.close()
        sides.append(model["table"].weight.detach().clone())
    assert torch.allclose(*sides, rtol=1e-5, atol=1e-6)
