"""A disk that fails, and code that raises: the right error, where it can be caught; no hang, no wrong number."""

from __future__ import annotations

import errno
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Block, Stack
from processes import settles, thread_count
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
    train,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.io.faults import Effect, Fault, FaultyEngine, delay, fail, short, slower, truncate
from tiermem.io.threads import ThreadsEngine

Compare = Callable[..., Outcome]

HOST_DISK = Placement("host", "disk", 4096, "threads", "auto", 1)
DISK_HOST = Placement("disk", "host", 4096, "threads", "auto", 1)
placements = pytest.mark.parametrize("placement", [ON_DISK, HOST_DISK, DISK_HOST], ids=str)

pytestmark = pytest.mark.hang(60)


@pytest.fixture
def faulty() -> Iterator[Callable[..., FaultyEngine]]:
    engines = []

    def make(*faults: Fault) -> FaultyEngine:
        engines.append(FaultyEngine(ThreadsEngine(depth=4), *faults))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def four_steps(lib: Plain | Tiered) -> None:
    model = lib.offload(Stack(depth=4).bfloat16())
    train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), steps=4, clip=0.3)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What four steps on a good disk leave."""
    return run_tiered(four_steps, ON_DISK, tmp_path_factory.mktemp("healthy") / "disk")


def assert_located(error: OSError, code: int, directory: Path) -> None:
    """Errno, absolute path, offset and bytes are all there."""
    assert error.errno == code, repr(error)
    assert str(error.filename).startswith(str(directory)), repr(error)
    message = str(error)
    assert "offset" in message and "bytes" in message and any(character.isdigit() for character in message), message


def close_in_spite_of(lib: Tiered) -> None:
    """After a fault the weights on a disk may be out of reach: then `close` warns, and leaves NaN."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lib.close()
    lost = [str(warning.message) for warning in caught if "NaN" in str(warning.message)]
    assert not list(lib.directory.iterdir()), "files are left"
    missing = [name for model in lib.models for name, p in model.named_parameters() if not p.isfinite().all()]
    assert bool(lost) == bool(missing), f"{missing[:3]} without their values; said: {lost}"
    if missing:
        assert lib.placement.weights == "disk"
        assert missing[0] in lost[0]
        assert str(lib.directory) in lost[0]


# --- errors of the disk


BROKEN: dict[str, tuple[str, Effect, int]] = {
    "EIO on reading": ("read", fail(errno.EIO), errno.EIO),
    "EIO on writing": ("write", fail(errno.EIO), errno.EIO),
    "ENOSPC on writing": ("write", fail(errno.ENOSPC), errno.ENOSPC),
    "a truncated file": ("read", truncate(), errno.EIO),
}


@placements
@pytest.mark.parametrize("lasting", [True, False], ids=["lasting", "once"])
@pytest.mark.parametrize("what", BROKEN)
def test_an_error_of_the_disk_is_raised_by_the_end_of_the_step(
    what: str,
    lasting: bool,
    placement: Placement,
    faulty: Callable[..., FaultyEngine],
    healthy: Outcome,
    tmp_path: Path,
) -> None:
    on, effect, code = BROKEN[what]
    threads = thread_count()
    engine = faulty()
    # A write still under way may make a truncated file long again. The gap reads as zeros, which only checksums tell.
    policy = {"io": engine, "verify_disk": what == "a truncated file"}
    lib = Tiered(placement, tmp_path / "disk", policy=policy)
    model = lib.offload(Stack(depth=4).bfloat16())
    optimizer = lib.AdamW(model.parameters(), lr=3e-3)
    train(lib, model, optimizer, steps=2, clip=0.3)
    tiermem.synchronize(model)
    engine.faults.append(Fault(on, effect, nth=3, count=None if lasting else 1))
    with pytest.raises(OSError) as caught:
        train(lib, model, optimizer, steps=1, clip=0.3)
        tiermem.synchronize(model)
    assert_located(caught.value, code, tmp_path / "disk")
    assert threading.current_thread() is threading.main_thread()
    if not lasting:
        engine.faults.clear()
    close_in_spite_of(lib)
    engine.close()
    del lib, model, optimizer, caught
    gc.collect()
    assert settles(lambda: thread_count() <= threads + 2), f"{thread_count()} threads, {threads} before"
    assert_same_bits(run_tiered(four_steps, placement, tmp_path / "disk"), healthy)


@pytest.mark.parametrize("what", BROKEN)
def test_without_any_wait_the_error_comes_before_the_next_step_has_ended(
    what: str, faulty: Callable[..., FaultyEngine], tmp_path: Path
) -> None:
    """Nobody calls `synchronize`: the next forward, backward or step raises."""
    on, effect, code = BROKEN[what]
    engine = faulty()
    lib = Tiered(HOST_DISK, tmp_path / "disk", policy={"io": engine})
    model = lib.offload(Stack())
    optimizer = lib.AdamW(model.parameters(), lr=3e-3)
    train(lib, model, optimizer, steps=2)
    tiermem.synchronize(model)
    model(*model.inputs(lib)).square().mean().backward()
    engine.faults.append(Fault(on, effect, nth=2))
    raised = None
    try:
        optimizer.step()
        optimizer.zero_grad()
        train(lib, model, optimizer, steps=1)
    except OSError as error:
        raised = error
    assert raised is not None, "two whole steps after the fault nothing was said"
    assert_located(raised, code, tmp_path / "disk")
    close_in_spite_of(lib)


@pytest.mark.parametrize("nth", [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 10_000])
@pytest.mark.parametrize("on", ["read", "write"])
def test_an_error_at_any_moment(
    on: str, nth: int, faulty: Callable[..., FaultyEngine], healthy: Outcome, tmp_path: Path
) -> None:
    """From the first transfer of `offload` on: either everything was right, or an `OSError` came; then it closes."""
    engine = faulty(Fault(on, fail(errno.EIO), nth=nth))
    torch.manual_seed(7)
    lib = Tiered(ON_DISK, tmp_path / "disk", policy={"io": engine})
    try:
        four_steps(lib)
        outcome = lib.outcome()
    except OSError as error:
        assert_located(error, errno.EIO, tmp_path / "disk")
        assert engine.faults[0].seen >= nth
    else:
        assert engine.faults[0].seen < nth, "a fault passed without a word"
        assert_same_bits(outcome, healthy)
    close_in_spite_of(lib)


@placements
def test_what_failed_is_not_trained_on_as_if_nothing_had_happened(
    placement: Placement, faulty: Callable[..., FaultyEngine], tmp_path: Path
) -> None:
    """After the error, a further step is refused, or is exactly right."""
    engine = faulty()
    torch.manual_seed(7)
    lib = Tiered(placement, tmp_path / "disk", policy={"io": engine})
    model = lib.offload(Stack(depth=4).bfloat16())
    optimizer = lib.AdamW(model.parameters(), lr=3e-3)
    train(lib, model, optimizer, steps=2, clip=0.3)
    tiermem.synchronize(model)
    engine.faults.append(Fault("write", fail(errno.ENOSPC), nth=4))
    with pytest.raises(OSError):
        train(lib, model, optimizer, steps=1, clip=0.3)
        tiermem.synchronize(model)
    try:
        optimizer.zero_grad()
        train(lib, model, optimizer, steps=1, clip=0.3)
        outcome = lib.outcome()
    except (RuntimeError, OSError) as error:
        assert "close" in str(error) or "earlier" in str(error) or isinstance(error, OSError), error
    else:
        outcome.records.clear()
        reference = run_plain(four_steps)
        reference.records.clear()
        assert_close(outcome, reference)
    close_in_spite_of(lib)


@pytest.mark.parametrize(
    "read",
    [
        lambda lib, model: lib.gather(model).__enter__(),
        lambda lib, model: model.state_dict(),
        lambda lib, model: lib.optimizers[0].state_dict(),
        lambda lib, model: model(*model.inputs(lib)),
    ],
    ids=["gather", "state_dict", "optimizer.state_dict", "forward"],
)
def test_every_reader_gets_the_error(
    read: Callable[[Tiered, nn.Module], Any], faulty: Callable[..., FaultyEngine], tmp_path: Path
) -> None:
    engine = faulty()
    lib = Tiered(ON_DISK, tmp_path / "disk", policy={"io": engine}, memory={"device": "256KiB"})
    model = lib.offload(Stack(width=64, depth=8))
    train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), steps=1)
    tiermem.synchronize(model)
    engine.faults.append(Fault("read", fail(errno.EIO), count=None))
    with pytest.raises(OSError) as caught:
        read(lib, model)
    assert_located(caught.value, errno.EIO, tmp_path / "disk")
    close_in_spite_of(lib)


def test_an_error_in_a_forward_and_one_in_the_wake_of_it(faulty: Callable[..., FaultyEngine], tmp_path: Path) -> None:
    """Many failures at once: one is raised, none is lost in a thread, nothing hangs."""
    engine = faulty()
    lib = Tiered(ON_DISK, tmp_path / "disk", policy={"io": engine})
    model = lib.offload(Stack(depth=6))
    optimizer = lib.AdamW(model.parameters(), lr=3e-3)
    train(lib, model, optimizer, steps=1)
    engine.faults.append(Fault("both", fail(errno.EIO), count=None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "exception was never retrieved" would be one
        for _ in range(3):
            with pytest.raises((OSError, RuntimeError)):
                train(lib, model, optimizer, steps=2)
                tiermem.synchronize(model)
    close_in_spite_of(lib)


# --- a disk that is only strange

STRANGE: dict[str, Callable[[], list[Fault]]] = {
    "short transfers": lambda: [Fault("both", short(4096), count=None)],
    "very short transfers at times": lambda: [Fault("both", short(1), nth=1 + 7 * n) for n in range(40)],
    "EINTR": lambda: [Fault("both", fail(errno.EINTR), nth=1 + 2 * n) for n in range(60)],
    "EAGAIN": lambda: [Fault("both", fail(errno.EAGAIN), nth=1 + 5 * n) for n in range(30)],
    "a slow disk": lambda: [Fault("both", slower(20), count=None)],
    "completions out of order": lambda: [Fault("both", delay(0.004, seed=1), count=None)],
    "late writes": lambda: [Fault("write", delay(0.008, seed=2), count=None)],
    "late reads": lambda: [Fault("read", delay(0.008, seed=3), count=None)],
}


@pytest.mark.parametrize("placement", [ON_DISK, HOST_DISK], ids=str)
@pytest.mark.parametrize("strange", STRANGE)
def test_a_strange_disk_changes_no_bit(
    strange: str, placement: Placement, faulty: Callable[..., FaultyEngine], healthy: Outcome, tmp_path: Path
) -> None:
    engine = faulty(*STRANGE[strange]())
    outcome = run_tiered(four_steps, placement, tmp_path / "disk", policy={"io": engine})
    assert_same_bits(outcome, healthy)
    assert engine.faults[0].seen > 10


# --- exceptions of the user's code


class Unlucky(Exception):
    """Raised on purpose."""


class Raises(torch.autograd.Function):
    """Identity, but raises in backward when armed."""

    armed = False

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Raises.armed:
            raise Unlucky("in backward")
        return gradient


class Fragile(Block):
    """A block that raises where it is told to."""

    raises = ""

    def forward(self, hidden: Tensor) -> Tensor:
        if self.raises == "at first":
            raise Unlucky("in forward")
        hidden = Raises.apply(super().forward(hidden))
        if self.raises == "at last":
            raise Unlucky("in forward")
        if self.raises == "interrupt":
            raise KeyboardInterrupt
        return hidden


class FragileStack(Stack):
    way: Callable[[nn.Module, Tensor], Tensor] = staticmethod(lambda block, hidden: block(hidden))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Fragile(33) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.inlet(inputs)
        for block in self.blocks:
            hidden = self.way(block, hidden)
        return self.head(hidden)


WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda block, hidden: block(hidden),
    "reentrant": lambda block, hidden: checkpoint(block, hidden, use_reentrant=True),
    "non-reentrant": lambda block, hidden: checkpoint(block, hidden, use_reentrant=False),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("block", [0, 2, 3])
@pytest.mark.parametrize("where", ["at first", "at last", "interrupt"])
def test_after_an_exception_in_forward_training_is_exact(compare: Compare, where: str, block: int, way: str) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = FragileStack()
        model.way = WAYS[way]
        lib.offload(model)
        optimizer = lib.AdamW(model.parameters(), lr=3e-3)
        train(lib, model, optimizer, steps=1)
        model.blocks[block].raises = where
        for _ in range(2):
            with pytest.raises((Unlucky, KeyboardInterrupt)):
                train(lib, model, optimizer, steps=1)
        model.blocks[block].raises = ""
        train(lib, model, optimizer, steps=2, clip=0.3)

    compare(script, SPREAD[1:3])


@pytest.mark.parametrize("way", WAYS)
def test_after_an_exception_in_backward_training_is_exact(compare: Compare, way: str) -> None:
    """Some gradients had come; `zero_grad` drops them."""

    def script(lib: Plain | Tiered) -> None:
        model = FragileStack()
        model.way = WAYS[way]
        lib.offload(model)
        optimizer = lib.AdamW(model.parameters(), lr=3e-3)
        train(lib, model, optimizer, steps=1)
        for _ in range(2):
            loss = model(*model.inputs(lib)).square().mean()
            Raises.armed = True
            with pytest.raises(Unlucky):
                loss.backward()
            Raises.armed = False
            optimizer.zero_grad()
        train(lib, model, optimizer, steps=2, clip=0.3)

    compare(script)


def test_gradients_of_an_interrupted_backward_are_those_that_had_come(compare: Compare) -> None:
    """As in torch: without `zero_grad` they are part of the next step."""

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(FragileStack())
        optimizer = lib.AdamW(model.parameters(), lr=3e-3)
        train(lib, model, optimizer, steps=1)

        def raise_unlucky(gradient: Tensor) -> None:
            raise Unlucky("in a hook")

        output = model.inlet(*model.inputs(lib))
        for number, block in enumerate(model.blocks):
            output = block(output)
            if number == 1:
                output.register_hook(raise_unlucky)
        with pytest.raises(Unlucky):
            model.head(output).square().mean().backward()
        assert model.head.weight.grad is not None or lib.is_reference
        train(lib, model, optimizer, steps=2, clip=0.3)

    compare(script)


HOOKS: dict[str, Callable[[nn.Module, Callable[..., None]], Any]] = {
    "forward": lambda block, bad: block.register_forward_hook(bad),
    "forward pre": lambda block, bad: block.register_forward_pre_hook(bad),
    "full backward": lambda block, bad: block.register_full_backward_hook(bad),
    "full backward pre": lambda block, bad: block.register_full_backward_pre_hook(bad),
    "tensor": lambda block, bad: block.up.weight.register_hook(bad),
    "post accumulate": lambda block, bad: block.up.weight.register_post_accumulate_grad_hook(bad),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("early", [True, False], ids=["registered before", "registered after"])
def test_after_an_exception_in_a_users_hook_training_is_exact(compare: Compare, hook: str, early: bool) -> None:
    def script(lib: Plain | Tiered) -> None:
        armed = False

        def bad(*_: Any) -> None:
            if armed:
                raise Unlucky("in a hook")

        model = Stack(depth=4)
        handle = HOOKS[hook](model.blocks[1], bad) if early else None
        lib.offload(model)
        handle = handle or HOOKS[hook](model.blocks[1], bad)
        optimizer = lib.AdamW(model.parameters(), lr=3e-3)
        train(lib, model, optimizer, steps=1)
        armed = True
        with pytest.raises(Unlucky):
            train(lib, model, optimizer, steps=1)
        armed = False
        optimizer.zero_grad()
        train(lib, model, optimizer, steps=1, clip=0.3)
        handle.remove()
        train(lib, model, optimizer, steps=1, clip=0.3)

    compare(script, SPREAD[1:3])


def test_after_an_exception_in_a_closure_training_is_exact(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        optimizer = lib.AdamW(model.parameters(), lr=3e-3)

        def closure() -> Tensor:
            model(*model.inputs(lib)).square().mean().backward()
            raise Unlucky("in a closure")

        train(lib, model, optimizer, steps=1)
        with pytest.raises(Unlucky):
            optimizer.step(closure)
        optimizer.zero_grad()
        train(lib, model, optimizer, steps=2)

    compare(script)


def test_wrong_shapes_in_forward_change_nothing(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        optimizer = lib.AdamW(model.parameters(), lr=3e-3)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="shape"):
                model(torch.zeros(2, 8))
            with pytest.raises((RuntimeError, IndexError)):
                model.blocks[1](torch.zeros(2, 8))
            train(lib, model, optimizer, steps=1)

    compare(script)


def test_running_out_of_slots_is_an_error_not_a_hang(tmp_path: Path) -> None:
    """Every block is gathered by hand at once, in a device budget for a few: refused by name, or really there."""
    lib = Tiered(ON_DISK, tmp_path / "disk", memory={"device": "256KiB"})
    model = lib.offload(Stack(width=64, depth=8))
    train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), steps=1)
    try:
        with tiermem.gather(model):
            assert all(p.isfinite().all() for p in model.parameters())
    except (RuntimeError, ValueError) as error:
        assert "device" in str(error) or "budget" in str(error)
    train(lib, model, lib.optimizers[0], steps=1)
    lib.close()
    assert all(p.isfinite().all() for p in model.parameters())
