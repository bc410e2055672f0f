"""Nothing waits that need not, and everything waits that must: proved by order, with a disk that moves when told to."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Block, Stack
from reference import Outcome, Placement, Plain, Tiered, assert_parity, assert_same_bits, run_tiered, train
from torch import Tensor, nn

import tiermem
from tiermem.io.faults import Call, Fault, FaultyEngine, delay
from tiermem.io.threads import ThreadsEngine
from tiermem.placement import STAGING_SLABS
from tiermem.planes import held_of
from tiermem.simulated import TimedDevice

pytestmark = pytest.mark.hang(60)

PATIENCE_SECONDS = 20.0  # how long anything is waited for; passing tests never wait that long
MOMENT_SECONDS = 0.2  # how long something is given to happen that must not

STATES_ON_DISK = Placement("host", "disk", 4096, "threads", "auto", 1)
WEIGHTS_ON_DISK = Placement("disk", "host", 4096, "threads", "auto", 1)
EVERYTHING_ON_DISK = Placement("disk", "disk", 4096, "threads", "auto", 1)


class Valve:
    """An effect for faults: calls wait in it until they are let through; it opens by itself when patience ends."""

    def __init__(self) -> None:
        self.is_open = True
        self.permits = 0  # calls that may pass although it is shut
        self.arrived = 0
        self.passed = 0
        self.patience_ended = False

    async def __call__(self, call: Call) -> int:
        self.arrived += 1
        end = time.monotonic() + PATIENCE_SECONDS
        while not self.is_open:
            if self.permits > 0:
                self.permits -= 1
                break
            if time.monotonic() > end:
                self.patience_ended = self.is_open = True
            await asyncio.sleep(0.001)
        moved = await call.proceed(call.memory)
        self.passed += 1
        return moved

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Shut inside the block. Whoever waited for it to open in there waited in vain."""
        self.is_open = False
        self.arrived = self.passed = 0
        try:
            yield
            assert not self.patience_ended, "something waited for the disk that need not"
        finally:
            self.is_open = True


def becomes(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


@pytest.fixture
def valves() -> Iterator[tuple[FaultyEngine, Valve, Valve]]:
    """An engine, the valve of its reads and that of its writes."""
    reads, writes = Valve(), Valve()
    engine = FaultyEngine(ThreadsEngine(depth=8), Fault("read", reads, count=None), Fault("write", writes, count=None))
    yield engine, reads, writes
    reads.is_open = writes.is_open = True
    engine.close()


class Counted(Stack):
    """Notes which block has been passed in forward."""

    def __init__(self, depth: int = 4, width: int = 64) -> None:
        super().__init__(width, depth, bias=False)
        self.passed: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.inlet(inputs)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)
            self.passed.append(number)
        return self.head(hidden)


def started(tmp_path: Path, engine: FaultyEngine, placement: Placement, depth: int = 4, **memory: str) -> Tiered:
    """A model that has trained two steps; the blocks of the list are the only ones that are moved."""
    lib = Tiered(placement, tmp_path / "disk", policy={"io": engine, "blocks": [Block]}, memory=memory)
    model = lib.offload(Counted(depth))
    train(lib, model, lib.AdamW(model.parameters(), lr=3e-3), steps=2)
    tiermem.synchronize(model)
    return lib


def backward(lib: Tiered, model: nn.Module) -> None:
    model(*model.inputs(lib)).square().mean().backward()


def reads_per_block(lib: Tiered, model: nn.Module) -> int:
    """Each chunk of states is one read; a block has one section, and the chunks are those of the policy."""
    numel = sum(p.numel() for p in model.blocks[0].parameters())
    return -(-numel // lib.policy().chunk_numel)


# --- what must not wait


def test_step_returns_before_its_updates_have_begun(valves: tuple[FaultyEngine, Valve, Valve], tmp_path: Path) -> None:
    engine, reads, _ = valves
    lib = started(tmp_path, engine, STATES_ON_DISK)
    (model,), (optimizer,) = lib.models, lib.optimizers
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    backward(lib, model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with reads.shut():
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert reads.passed == 0
        assert becomes(lambda: reads.arrived > 0), "the updates never began"
        assert reads.passed == 0
    tiermem.synchronize(model)
    lib.close()


def test_step_returns_before_its_updates_are_written(valves: tuple[FaultyEngine, Valve, Valve], tmp_path: Path) -> None:
    engine, _, writes = valves
    lib = started(tmp_path, engine, STATES_ON_DISK)
    (model,), (optimizer,) = lib.models, lib.optimizers
    backward(lib, model)
    with writes.shut():
        optimizer.step()
        optimizer.zero_grad()
        assert becomes(lambda: writes.arrived > 0)
        assert writes.passed == 0
    lib.close()


def test_a_forward_waits_for_the_update_of_its_own_block_only(
    valves: tuple[FaultyEngine, Valve, Valve], tmp_path: Path
) -> None:
    """The first block's states come through, the others' do not: the first block runs, the second waits."""
    engine, reads, _ = valves
    lib = started(tmp_path, engine, STATES_ON_DISK)
    (model,), (optimizer,) = lib.models, lib.optimizers
    backward(lib, model)
    model.passed.clear()
    outside = reads_outside_blocks(lib)
    for passes in range(1, 4):
        watched: list[bool] = []

        def watch(passes: int = passes, watched: list[bool] = watched) -> None:
            watched.append(becomes(lambda: len(model.passed) >= passes))
            time.sleep(MOMENT_SECONDS)
            watched.append(len(model.passed) == passes)
            reads.is_open = True

        with reads.shut():
            reads.permits = outside + passes * reads_per_block(lib, model)
            optimizer.step()
            optimizer.zero_grad()
            watcher = threading.Thread(target=watch)
            watcher.start()
            loss = model(*model.inputs(lib)).square().mean()
            watcher.join()
        reads.permits = 0
        assert watched[0], f"block {passes - 1} waited for more than its own update"
        assert watched[1], f"block {passes} did not wait for its update"
        loss.backward()
        model.passed.clear()
    lib.close()


def reads_outside_blocks(lib: Tiered) -> int:
    """Chunks of what is in no block: it stays on the device, every forward needs it first, so it is updated first."""
    outside = [block for block in tiermem.report(lib.models[0]).blocks if not block.name.startswith("blocks.")]
    return sum(-(-block.numel // lib.policy().chunk_numel) for block in outside if block.states is tiermem.Tier.DISK)


def test_reading_one_block_waits_for_the_update_of_that_block_only(
    valves: tuple[FaultyEngine, Valve, Valve], tmp_path: Path
) -> None:
    engine, reads, _ = valves
    lib = started(tmp_path, engine, STATES_ON_DISK)
    (model,), (optimizer,) = lib.models, lib.optimizers
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    backward(lib, model)
    with reads.shut():
        reads.permits = reads_outside_blocks(lib) + reads_per_block(lib, model)
        optimizer.step()
        with tiermem.gather(model.blocks[0]):
            assert not torch.equal(model.blocks[0].up.weight, before["blocks.0.up.weight"])
    reads.permits = 0
    lib.close()


def test_chunks_are_read_while_others_are_written(valves: tuple[FaultyEngine, Valve, Valve], tmp_path: Path) -> None:
    """With every write stuck, a second chunk and more are read already."""
    engine, reads, writes = valves
    lib = started(tmp_path, engine, STATES_ON_DISK)
    (model,), (optimizer,) = lib.models, lib.optimizers
    backward(lib, model)
    reads.passed = 0
    with writes.shut():
        optimizer.step()
        assert becomes(lambda: writes.arrived > 0 and reads.passed >= 2)
        assert writes.passed == 0
    lib.close()


def test_weights_are_prefetched_while_a_block_computes(
    valves: tuple[FaultyEngine, Valve, Valve], tmp_path: Path
) -> None:
    """Reads begin while the main thread is inside a block's forward or backward, where it asks for nothing."""
    engine, reads, _ = valves
    lib = started(tmp_path, engine, WEIGHTS_ON_DISK, depth=10, device="256KiB")
    (model,) = lib.models
    seen = {"forward": 0, "backward": 0}

    def look(phase: str) -> None:
        arrived, end = reads.arrived, time.monotonic() + MOMENT_SECONDS
        while time.monotonic() < end and seen[phase] < 2:
            if reads.arrived > arrived:
                seen[phase] += 1
                return
            time.sleep(0.001)

    def inside(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        look("forward")
        if output.requires_grad:
            output.register_hook(lambda gradient: look("backward"))

    for block in model.blocks:
        block.down.register_forward_hook(inside)
    for _ in range(3):
        train(lib, model, lib.optimizers[0], steps=1)
    assert seen["forward"] >= 2, "no block was read while another computed forward"
    assert seen["backward"] >= 2, "no block was read while another computed backward"
    lib.close()


def test_swap_ins_leave_slabs_for_kernels_and_swap_outs(
    valves: tuple[FaultyEngine, Valve, Valve], tmp_path: Path
) -> None:
    """Half of the slabs read at most, so that chunks come one after another and the disk reads and writes together."""
    engine, reads, _ = valves
    lib = started(tmp_path, engine, STATES_ON_DISK)
    (model,), (optimizer,) = lib.models, lib.optimizers
    backward(lib, model)
    with reads.shut():
        optimizer.step()
        assert becomes(lambda: reads.arrived >= STAGING_SLABS // 2)
        time.sleep(MOMENT_SECONDS)
        assert reads.arrived == STAGING_SLABS // 2  # a chunk's states are one read
    lib.close()


def test_new_weights_go_from_their_update_to_the_slot_that_waits(
    valves: tuple[FaultyEngine, Valve, Valve], tmp_path: Path
) -> None:
    """Between step and the end of the forward, the disk is read for the updates and for nothing else."""
    engine, reads, _ = valves
    lib = started(tmp_path, engine, EVERYTHING_ON_DISK)
    (model,), (optimizer,) = lib.models, lib.optimizers
    held = held_of(model.head.weight)
    assert held is not None
    runtime = held.runtime
    blocks = [block for block in runtime.blocks if not block.resident]
    backward(lib, model)
    before = engine.bytes_read
    with reads.shut():
        optimizer.step()
        optimizer.zero_grad()
        assert becomes(lambda: all(block.slot is not None and block.slot.missing for block in blocks))
    model(*model.inputs(lib))
    tiermem.synchronize(model)
    states = sum(block.layout.state_bytes for block in runtime.blocks)
    assert engine.bytes_read - before == states + sum(block.layout.weight_bytes for block in blocks)
    lib.close()


def test_inside_backward_the_update_needed_first_goes_first(
    valves: tuple[FaultyEngine, Valve, Valve], tmp_path: Path
) -> None:
    """The last block's has begun when the others come; of those that wait, the first block's is next."""
    engine, reads, _ = valves
    policy = {"io": engine, "blocks": [Block], "update_in_backward": True}
    lib = Tiered(STATES_ON_DISK, tmp_path / "disk", policy=policy)
    model = lib.offload(Counted(4))
    optimizer = lib.AdamW(model.parameters(), lr=3e-3)
    train(lib, model, optimizer, steps=2)
    tiermem.synchronize(model)
    ended: list[str] = []
    with reads.shut():
        backward(lib, model)
        for number, module in enumerate(model.blocks):
            update = held_of(module.up.weight).block.update
            assert update is not None
            update.add_done_callback(partial(lambda name, _: ended.append(name), number))
        optimizer.step()
        optimizer.zero_grad()
        assert ended == []
    tiermem.synchronize(model)
    assert ended == [3, 0, 1, 2]
    lib.close()


# --- what must wait


def test_a_forward_never_overtakes_the_update_of_its_block(
    valves: tuple[FaultyEngine, Valve, Valve], tmp_path: Path
) -> None:
    """However long the disk takes, nothing is computed with weights of the step before."""
    engine, reads, _ = valves
    lib = started(tmp_path, engine, STATES_ON_DISK)
    (model,), (optimizer,) = lib.models, lib.optimizers
    backward(lib, model)
    model.passed.clear()
    reads.is_open = False
    optimizer.step()
    optimizer.zero_grad()
    overtaken: list[bool] = []

    def watch() -> None:
        time.sleep(MOMENT_SECONDS)
        overtaken.append(bool(model.passed))
        reads.is_open = True

    watcher = threading.Thread(target=watch)
    watcher.start()
    model(*model.inputs(lib))
    watcher.join()
    assert overtaken == [False]
    lib.close()


def test_synchronize_waits_for_the_last_write(valves: tuple[FaultyEngine, Valve, Valve], tmp_path: Path) -> None:
    engine, _, writes = valves
    lib = started(tmp_path, engine, STATES_ON_DISK)
    (model,), (optimizer,) = lib.models, lib.optimizers
    backward(lib, model)
    writes.is_open = False
    optimizer.step()
    returned = threading.Event()
    early: list[bool] = []

    def watch() -> None:
        time.sleep(MOMENT_SECONDS)
        early.append(returned.is_set())
        writes.is_open = True

    watcher = threading.Thread(target=watch)
    watcher.start()
    tiermem.synchronize(model)
    returned.set()
    watcher.join()
    assert early == [False]
    passed = writes.passed
    time.sleep(MOMENT_SECONDS)
    assert writes.passed == passed == writes.arrived, "writes were still under way"
    lib.close()


# --- and the result is the same


def script(lib: Plain | Tiered) -> None:
    model = lib.offload(Counted().bfloat16())
    optimizer = lib.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    train(lib, model, optimizer, steps=4, micro_batches=2, clip=0.1, scheduler=scheduler)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    directory = tmp_path_factory.mktemp("expected")
    outcome = run_tiered(script, STATES_ON_DISK, directory / "disk")
    assert_parity(outcome, script, directory / "again")
    return outcome


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "placement", [STATES_ON_DISK, WEIGHTS_ON_DISK, Placement("disk", "disk", 4096, "threads", "auto", 2)], ids=str
)
def test_random_delays_change_no_bit(placement: Placement, seed: int, expected: Outcome, tmp_path: Path) -> None:
    """Small budgets besides: whatever overlaps, overlaps differently."""
    engine = FaultyEngine(ThreadsEngine(depth=4), Fault("both", delay(0.005, seed), count=None))
    outcome = run_tiered(script, placement, tmp_path / "disk", policy={"io": engine}, memory={"device": "512KiB"})
    engine.close()
    assert_same_bits(outcome, expected)


# --- a device that computes when told to


class Gated(torch.autograd.Function):
    """Backward on the device's compute stream, where it waits for the gate."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, device: TimedDevice, gate: threading.Event) -> Tensor:
        ctx.device, ctx.gate, ctx.numel = device, gate, weight.numel()
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.device.compute(0, partial(ctx.gate.wait, PATIENCE_SECONDS))
        return gradient, torch.zeros(ctx.numel, dtype=torch.bfloat16), None, None


class Stage(nn.Module):
    def __init__(self, device: TimedDevice) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2 * STAGING_SLABS * 4096, dtype=torch.bfloat16))
        self.device, self.gate = device, threading.Event()
        self.gate.set()

    def forward(self, hidden: Tensor) -> Tensor:
        return Gated.apply(hidden, self.weight, self.device, self.gate)  # type: ignore[no-any-return]


def test_an_update_waits_for_its_gradient_without_keeping_others_from_theirs(tmp_path: Path) -> None:
    """Backward is submitted ahead of the device. The first block's update is the most urgent, but its gradient comes
    last; it has more chunks than there are slabs."""
    device = TimedDevice(bytes_in_per_s=1e12, bytes_out_per_s=1e12)
    stages = [Stage(device) for _ in range(4)]
    model = tiermem.offload(
        nn.Sequential(*stages),
        memory=tiermem.Memory(device="64MiB", host="64MiB", disk=tmp_path),
        policy=tiermem.Policy(weights="host", states="disk", update_in_backward=True, chunk_numel=4096),
        device=device,
    )
    optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
    blocks = [held_of(stage.weight).block for stage in stages]
    for gate_shut in (False, True):
        output = model(torch.ones(1, requires_grad=True)).sum()
        for stage in stages if gate_shut else []:
            stage.gate.clear()
        output.backward()
        for stage, block in list(zip(stages, blocks, strict=True))[:1:-1] if gate_shut else []:
            stage.gate.set()
            update = block.update
            assert update is not None
            assert becomes(update.done), f"the update of {block.name} waits for gradients of other blocks"
        for stage in stages:
            stage.gate.set()
        optimizer.step()
        optimizer.zero_grad()
    tiermem.close(model)


class _Lost:
    """A mark whose compute failed."""

    def synchronize(self) -> None:
        raise RuntimeError("the device is gone")


def test_a_device_that_fails_while_an_update_waits_for_it_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = TimedDevice(bytes_in_per_s=1e12, bytes_out_per_s=1e12)
    stage = Stage(device)
    model = tiermem.offload(
        nn.Sequential(stage),
        memory=tiermem.Memory(device="64MiB", host="64MiB", disk=tmp_path),
        policy=tiermem.Policy(weights="host", states="disk", update_in_backward=True, chunk_numel=4096),
        device=device,
    )
    optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
    output = model(torch.ones(1, requires_grad=True)).sum()
    monkeypatch.setattr(device, "mark", _Lost)
    output.backward()
    monkeypatch.undo()
    update = held_of(stage.weight).block.update
    assert update is not None
    with pytest.raises(RuntimeError, match="the device is gone"):
        update.result(PATIENCE_SECONDS)
    assert held_of(stage.weight).runtime.error is not None
    with pytest.raises(RuntimeError, match="the device is gone"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="the device is gone"):
        tiermem.synchronize(model)
    tiermem.close(model)
