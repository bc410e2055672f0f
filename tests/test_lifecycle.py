"""From `offload` to `close`, and every other way to end: nothing is left behind."""

from __future__ import annotations

import gc
import signal
import subprocess
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import Stack
from processes import open_files, run, script, settles, thread_count
from reference import ON_DISK, SPREAD, Outcome, Placement, Plain, Tiered, same_bits, train
from torch import nn

import tiermem

Compare = Callable[..., Outcome]

spread = pytest.mark.parametrize("placement", SPREAD, ids=str)


# --- close


@spread
def test_close_leaves_a_plain_module(placement: Placement, tmp_path: Path) -> None:
    """Ordinary parameters, the same objects, no hooks, no files; torch trains it on."""
    model = Stack().bfloat16()
    parameters = list(model.parameters())
    before = {name: len(module.__dict__) for name, module in model.named_modules()}
    lib = Tiered(placement, tmp_path / "disk")
    lib.offload(model)
    train(lib, model, lib.AdamW(model.parameters(), lr=3e-3))
    lib.close()
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert not list((tmp_path / "disk").iterdir())
    for name, module in model.named_modules():
        assert len(module.__dict__) == before[name], f"{name} keeps {module.__dict__.keys()}"
        hooks = [key for key, value in module.__dict__.items() if "hooks" in key and value]
        assert not hooks, f"{name} has {hooks}"
    for parameter in parameters:
        assert parameter.is_leaf and parameter.requires_grad and parameter.isfinite().all()
        assert type(parameter.grad) in (type(None), torch.Tensor)
        assert not parameter._backward_hooks and not parameter._post_accumulate_grad_hooks
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    before_step = [p.detach().clone() for p in parameters]
    optimizer.zero_grad()
    model(*model.inputs(lib)).float().square().mean().backward()
    optimizer.step()
    assert not any(same_bits(p.detach(), old) for p, old in zip(parameters, before_step, strict=True))
    model.float().double().half()


def test_close_twice_and_close_of_a_plain_module(tmp_path: Path) -> None:
    lib = Tiered(ON_DISK, tmp_path / "disk")
    model = lib.offload(Stack())
    tiermem.close(model)
    tiermem.close(model)


@spread
def test_close_right_behind_a_step_waits_for_its_updates(placement: Placement, tmp_path: Path) -> None:
    ends = []
    for synchronized in (True, False):
        torch.manual_seed(1)
        lib = Tiered(placement, tmp_path / "disk")
        model = lib.offload(Stack())
        optimizer = lib.AdamW(model.parameters(), lr=3e-3)
        model(*model.inputs(lib)).square().mean().backward()
        optimizer.step()
        if synchronized:
            tiermem.synchronize(model)
        lib.close()
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(same_bits(a, b) for a, b in zip(*ends, strict=True))


def test_close_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """A graph that is still there may fail, but not give numbers from memory that is gone."""
    lib = Tiered(ON_DISK, tmp_path / "disk")
    model = lib.offload(Stack())
    optimizer = lib.AdamW(model.parameters(), lr=3e-3)
    train(lib, model, optimizer, steps=1)
    inputs = model.inputs(lib)
    loss = model(*inputs).square().mean()
    lib.close()
    expected = torch.autograd.grad(model(*inputs).square().mean(), list(model.parameters()))
    try:
        gradients = torch.autograd.grad(loss, list(model.parameters()))
    except RuntimeError:
        pass
    else:
        for gradient, right in zip(gradients, expected, strict=True):
            assert gradient.isnan().any() or torch.allclose(gradient, right, rtol=1e-5, atol=1e-6)


@spread
def test_gradients_read_after_close(placement: Placement, tmp_path: Path) -> None:
    """They are real tensors, or gone; never handles of a runtime that is closed."""
    lib = Tiered(placement, tmp_path / "disk")
    model = lib.offload(Stack())
    model(*model.inputs(lib)).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    lib.close()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is None or torch.equal(parameter.grad, gradient)


def test_the_optimizer_after_close(tmp_path: Path) -> None:
    """Its state can still be saved, or it says that it had to be saved before; and it never trains wrongly."""
    lib = Tiered(ON_DISK, tmp_path / "disk")
    model = lib.offload(Stack())
    optimizer = lib.AdamW(model.parameters(), lr=3e-3)
    train(lib, model, optimizer)
    state = optimizer.state_dict()["state"]
    lib.close()
    try:
        after = optimizer.state_dict()["state"]
    except RuntimeError as error:
        assert "close" in str(error)
        return
    assert after.keys() == state.keys()
    assert all(same_bits(after[number]["exp_avg"], state[number]["exp_avg"]) for number in state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_offloading_again_after_close(compare: Compare, dtype: torch.dtype) -> None:
    """The state goes over by its state dict."""

    def run_script(lib: Plain | Tiered) -> None:
        model = Stack().to(dtype)
        state = None
        for _ in range(3):
            lib.models.clear()
            lib.optimizers.clear()
            lib.offload(model)
            optimizer = lib.AdamW(model.parameters(), lr=3e-3)
            if state is not None:
                optimizer.load_state_dict(state)
            if lib.is_reference:
                for trained in optimizer.param_groups[0]["params"]:
                    trained.grad = None
            train(lib, model, optimizer, steps=2)
            state = optimizer.state_dict()
            if not lib.is_reference and len(lib.records["loss"]) < 6:
                tiermem.close(model)

    compare(run_script)


def test_twenty_lives_leave_no_threads_files_or_descriptors(tmp_path: Path) -> None:
    def live() -> None:
        lib = Tiered(ON_DISK, tmp_path / "disk")
        model = lib.offload(Stack())
        train(lib, model, lib.AdamW(model.parameters()), steps=1)
        lib.close()

    live()  # torch, numba and the kernels start threads that stay
    gc.collect()
    files, threads = open_files(), thread_count()
    for _ in range(20):
        live()
    assert settles(lambda: open_files() <= files), f"{open_files()} descriptors, {files} before"
    assert settles(lambda: thread_count() <= threads), f"{thread_count()} threads, {threads} before"
    assert not list((tmp_path / "disk").iterdir())


def test_a_model_that_is_forgotten_is_cleaned_up(tmp_path: Path) -> None:
    """No close: the last reference to the model takes files and threads with it."""

    def live() -> weakref.ref[nn.Module]:
        lib = Tiered(ON_DISK, tmp_path / "disk")
        model = lib.offload(Stack())
        train(lib, model, lib.AdamW(model.parameters()), steps=1)
        return weakref.ref(model)

    lib = Tiered(ON_DISK, tmp_path / "other")
    lib.offload(Stack())
    lib.close()
    gc.collect()
    files, threads = open_files(), thread_count()
    model = live()
    assert settles(lambda: model() is None), "something holds the model"
    assert settles(lambda: not list((tmp_path / "disk").iterdir())), "its files are still there"
    assert settles(lambda: open_files() <= files), f"{open_files()} descriptors, {files} before"
    assert settles(lambda: thread_count() <= threads), f"{thread_count()} threads, {threads} before"


def test_closing_one_model_leaves_the_other_alone(tmp_path: Path) -> None:
    lib = Tiered(ON_DISK, tmp_path / "disk")
    first, second = lib.offload(Stack()), lib.offload(Stack())
    optimizers = [lib.AdamW(model.parameters()) for model in (first, second)]
    for model, optimizer in zip((first, second), optimizers, strict=True):
        train(lib, model, optimizer, steps=1)
    tiermem.close(first)
    train(lib, second, optimizers[1], steps=2)
    assert len(list((tmp_path / "disk").iterdir())) == 1
    tiermem.close(second)
    assert not list((tmp_path / "disk").iterdir())


def test_offload_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error late in construction, when files and threads are there."""
    import tiermem.store

    lib = Tiered(ON_DISK, tmp_path / "disk")
    model = Stack()
    before = [p.detach().clone() for p in model.parameters()]
    lib.offload(Stack())
    lib.close()
    gc.collect()
    files, threads = open_files(), thread_count()

    async def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "disk"))

    with monkeypatch.context() as patch:
        patch.setattr(tiermem.store.Record, "swap_out", full)
        with pytest.raises(OSError, match="No space"):
            lib.offload(model)
    assert not list((tmp_path / "disk").iterdir())
    assert settles(lambda: open_files() <= files), f"{open_files()} descriptors, {files} before"
    assert settles(lambda: thread_count() <= threads), f"{thread_count()} threads, {threads} before"
    assert all(same_bits(p.detach(), old) for p, old in zip(model.parameters(), before, strict=True))
    model(*model.inputs(lib)).sum().backward()


# --- the ends of a process

LIFE = """
    from pathlib import Path
    import tiermem
    from models import Stack
    from reference import ON_DISK, Tiered, train

    lib = Tiered(ON_DISK, Path(directory))
    model = lib.offload(Stack())
    optimizer = lib.AdamW(model.parameters())
    train(lib, model, optimizer, steps=2)
    model(*model.inputs(lib)).sum().backward()
    optimizer.step()  # its updates are under way
    assert list(Path(directory).iterdir())
"""

ENDS = {
    "the end of the script": ("pass", 0),
    "an exception": ("raise KeyError('mine')", 1),
    "an exception in forward": ("model(torch.zeros(1, 2, 3))", 1),
    "in the middle of a step": ("loss = model(*model.inputs(lib)).sum()", 0),
    "globals that die in any order": ("del optimizer; keep = [model]; keep.append(keep)", 0),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_that_ends_without_close_leaves_no_file(end: str, tmp_path: Path) -> None:
    last_line, code = ENDS[end]
    done = run(LIFE + "    " + last_line, directory=str(tmp_path))
    assert done.returncode == code, done.stderr
    assert not list(tmp_path.iterdir())
    if code == 0:
        assert not done.stderr, done.stderr
    if code == 1:
        assert done.stderr.strip().splitlines()[-1].startswith(("KeyError", "RuntimeError")), done.stderr


@pytest.mark.parametrize("where", ["in a step", "in Python", "while waiting"])
def test_ctrl_c_leaves_no_file(where: str, tmp_path: Path) -> None:
    body = (
        LIFE
        + {
            "in a step": """
    print("ready", flush=True)
    while True:
        train(lib, model, optimizer, steps=1)
""",
            "in Python": """
    print("ready", flush=True)
    import time
    time.sleep(60)
""",
            "while waiting": """
    print("ready", flush=True)
    while True:
        optimizer.step()
        tiermem.synchronize(model)
""",
        }[where]
    )
    process = subprocess.Popen(
        script(body, directory=str(tmp_path)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert "KeyboardInterrupt" in errors
    assert not list(tmp_path.iterdir())


def test_training_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    """In a notebook, the interrupt ends a cell and not the process: wherever it struck, the next steps are right."""
    done = run(
        """
        import signal, threading, time
        from pathlib import Path
        import tiermem
        from models import Stack
        from reference import ON_DISK, Plain, Tiered, train

        lib = Tiered(ON_DISK, Path(directory))
        model = lib.offload(Stack())
        optimizer = lib.AdamW(model.parameters())
        for number in range(5):
            main = threading.main_thread().ident
            timer = threading.Timer(0.05 + 0.013 * number, signal.pthread_kill, [main, signal.SIGINT])
            try:
                timer.start()
                while True:
                    train(lib, model, optimizer, steps=1)
            except KeyboardInterrupt:
                pass
            timer.join()
            optimizer.zero_grad()
        weights = {k: v.clone() for k, v in model.state_dict().items()}
        state = optimizer.state_dict()
        lib.generator.manual_seed(5)
        train(lib, model, optimizer, steps=2)
        outcome = lib.outcome()
        lib.close()

        plain = Plain()
        plain.generator.manual_seed(5)
        twin = plain.offload(Stack())
        twin.load_state_dict(weights)
        reference = plain.AdamW(twin.parameters())
        reference.load_state_dict(state)
        train(plain, twin, reference, steps=2)
        for name, weight in plain.outcome().weights.items():
            assert torch.allclose(outcome.weights[name], weight, rtol=1e-5, atol=1e-6), name
        print("the same")
        """,
        directory=str(tmp_path),
    )
    assert done.stdout.endswith("the same\n"), done.stderr
    assert not list(tmp_path.iterdir())


def test_leftovers_of_a_killed_process_are_removed_by_the_next(tmp_path: Path) -> None:
    done = run(LIFE + "    import os, signal; os.kill(os.getpid(), signal.SIGKILL)", directory=str(tmp_path))
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    (tmp_path / "mine.txt").write_text("not tiermem's")
    (tmp_path / "tiermem-notes").mkdir()
    lib = Tiered(ON_DISK, tmp_path)
    lib.offload(Stack())
    assert not left.exists()
    lib.close()
    assert {path.name for path in tmp_path.iterdir()} == {"mine.txt", "tiermem-notes"}


def test_a_forked_child_leaves_its_parents_files_alone(tmp_path: Path) -> None:
    """As the workers of a `DataLoader` do."""
    done = run(
        LIFE
        + """
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, index):
            return torch.randn(7)

    for epoch in range(2):
        for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert list(Path(directory).iterdir())
    lib.close()
    print("done")
""",
        directory=str(tmp_path),
    )
    assert done.stdout == "done\n", done.stderr
    assert not list(tmp_path.iterdir())
