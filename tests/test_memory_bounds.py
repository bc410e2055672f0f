"""A budget is a promise: peak process memory follows from it by a formula without the size of the model.

Each measurement runs in a process of its own, whose baseline is a runtime that was imported, used and closed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from models import Stack
from processes import run
from reference import ON_DISK, Tiered, train

import tiermem

MIB = 1 << 20

CONSTANT_BYTES = 64 * MIB
"""What may come on top of the budgets: Python objects per parameter, thread stacks, allocator slack, one gradient."""

WIDTH = 1024
BATCH = 4
BLOCK_NUMEL = 2 * WIDTH * WIDTH + 2 * WIDTH

PRELUDE = """
import gc, json, os
from pathlib import Path
import tiermem
from torch import nn
from models import Stack
from processes import forget_peak, open_files, status_bytes, thread_count
from reference import ON_DISK, Placement, Plain, Tiered, train

class Layer(nn.Module):
    def __init__(self, width, dtype):
        super().__init__()
        self.up = nn.Linear(width, width, dtype=dtype)
        self.down = nn.Linear(width, width, dtype=dtype)

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(hidden)))

class Deep(nn.Module):
    def __init__(self, width, depth, dtype):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, dtype) for _ in range(depth))
        self.like = dtype, width

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def inputs(self, lib):
        dtype, width = self.like
        return (lib.randn(4, width, dtype=dtype),)

def warm_up(dtype):
    with torch.device("meta"):
        model = Deep(256, 2, dtype)
    lib = Tiered(ON_DISK, Path(directory) / "warm")
    lib.offload(model)
    train(lib, model, lib.AdamW(model.parameters()), steps=2, micro_batches=2, clip=1.0)
    lib.close()

def baseline(dtype):
    warm_up(dtype)
    gc.collect()
    forget_peak()
    return status_bytes("VmRSS")
"""


def measured(body: str, directory: Path, **values: Any) -> dict[str, Any]:
    done = run(PRELUDE + body, directory=str(directory), **values)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


LARGE = """
dtype = getattr(torch, dtype_name)
before = baseline(dtype)
with torch.device("meta"):
    model = Deep(width, depth, dtype)
lib = Tiered(Placement("disk", "disk", None, "threads"), Path(directory) / "disk",
             memory={"device": device_bytes, "host": host_bytes}, policy={"chunk_numel": chunk_numel})
lib.offload(model)
for layer in model.layers:
    with tiermem.gather(layer, write=True):
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.02)
optimizer = lib.AdamW(model.parameters(), lr=1e-3)
train(lib, model, optimizer, steps=2, micro_batches=micro_batches, clip=1.0)
tiermem.synchronize(model)
peak = status_bytes("VmHWM") - before
report = tiermem.report(model)
written = report.bytes_written
resident = {tier.name: nbytes for tier, nbytes in report.bytes_resident.items()}
with tiermem.gather(model.layers[0]):
    finite = bool(model.layers[0].up.weight.isfinite().all())
losses = [float(loss) for loss in lib.records["loss"]]
print(json.dumps(dict(peak=peak, written=written, resident=resident, finite=finite, losses=losses)))
"""


def large(directory: Path, **values: Any) -> dict[str, Any]:
    settings = {"width": WIDTH, "chunk_numel": None, "micro_batches": 1} | values
    return measured(LARGE, directory, **settings)


@pytest.mark.parametrize(
    ("dtype_name", "micro_batches", "device_mib", "host_mib"),
    [("bfloat16", 1, 16, 24), ("bfloat16", 3, 16, 24), ("float32", 1, 24, 24)],
    ids=["bf16", "bf16, accumulated", "fp32"],
)
def test_a_model_ten_times_its_budgets_trains_within_them(
    dtype_name: str, micro_batches: int, device_mib: int, host_mib: int, tmp_path: Path
) -> None:
    budgets = (device_mib + host_mib) * MIB
    state_bytes = 12 * BLOCK_NUMEL  # weight, residual and moments; or weight and moments
    depth = -(-10 * budgets // state_bytes)
    got = large(
        tmp_path,
        dtype_name=dtype_name,
        depth=depth,
        micro_batches=micro_batches,
        device_bytes=device_mib * MIB,
        host_bytes=host_mib * MIB,
    )
    assert depth * state_bytes >= 10 * budgets
    assert got["written"] >= 2 * depth * state_bytes, "it did not train out of the disk"
    assert got["finite"]
    assert len(got["losses"]) == 2 * micro_batches
    element_bytes = 2 if dtype_name == "bfloat16" else 4
    activations = depth * BATCH * WIDTH * element_bytes * 4  # input, up, tanh, sum of each layer
    bound = budgets + activations + CONSTANT_BYTES
    assert got["peak"] <= bound, f"peak {got['peak'] / MIB:.1f} MiB above the baseline, bound {bound / MIB:.1f} MiB"
    assert got["resident"]["HOST"] <= host_mib * MIB
    assert got["resident"]["DEVICE"] <= device_mib * MIB


def test_the_size_of_the_model_does_not_appear(tmp_path: Path) -> None:
    """Three times the depth, the same peak: 200 MB of weights and states more, and none of it in memory."""
    peaks = []
    for depth in (4, 12):
        settings = {"dtype_name": "bfloat16", "device_bytes": 16 * MIB, "host_bytes": 24 * MIB}
        peaks.append(large(tmp_path / str(depth), depth=depth, **settings)["peak"])
    assert peaks[1] - peaks[0] <= 8 * MIB, f"peaks of {peaks[0] / MIB:.1f} and {peaks[1] / MIB:.1f} MiB"


def test_an_ordinary_model_leaves_memory_when_it_is_offloaded(tmp_path: Path) -> None:
    """Its own tensors are gone, and what it needs is what was granted."""
    got = measured(
        """
before = baseline(torch.float32)
model = Deep(width, depth, torch.float32)
built = status_bytes("VmRSS") - before
lib = Tiered(ON_DISK, Path(directory) / "disk", memory={"device": "24MiB", "host": "16MiB"})
lib.offload(model)
gc.collect()
offloaded = status_bytes("VmRSS") - before
lib.close()
closed = status_bytes("VmRSS") - before
del model, lib
gc.collect()
print(json.dumps(dict(built=built, offloaded=offloaded, closed=closed, gone=status_bytes("VmRSS") - before)))
""",
        tmp_path,
        width=WIDTH,
        depth=16,
    )
    model_bytes = 16 * BLOCK_NUMEL * 4
    assert got["built"] >= model_bytes
    assert got["offloaded"] <= 40 * MIB + CONSTANT_BYTES < model_bytes
    assert got["closed"] <= model_bytes + CONSTANT_BYTES / 2, "close() keeps memory besides the plain weights"
    assert got["gone"] <= CONSTANT_BYTES / 2, "close() keeps memory"


def test_reading_writing_and_evaluating_stay_within_the_budgets(tmp_path: Path) -> None:
    got = measured(
        """
before = baseline(torch.float32)
with torch.device("meta"):
    model = Deep(width, depth, torch.float32)
lib = Tiered(ON_DISK, Path(directory) / "disk", memory={"device": "24MiB", "host": "16MiB"})
lib.offload(model)
for layer in model.layers:
    with tiermem.gather(layer, write=True):
        nn.init.ones_(layer.up.weight)
for layer in model.layers:
    with tiermem.gather(layer):
        assert (layer.up.weight == 1).all()
with torch.no_grad():
    model(*model.inputs(lib))
print(json.dumps(dict(peak=status_bytes("VmHWM") - before)))
""",
        tmp_path,
        width=WIDTH,
        depth=16,
    )
    assert got["peak"] <= 40 * MIB + CONSTANT_BYTES < 16 * BLOCK_NUMEL * 4


def test_five_hundred_steps_leave_memory_descriptors_threads_and_disk_flat(tmp_path: Path) -> None:
    got = measured(
        """
lib = Tiered(ON_DISK, Path(directory) / "disk", memory={"device": "1MiB", "host": "3MiB"})
model = lib.offload(Stack(width=64, depth=4).bfloat16())
optimizer = lib.AdamW(model.parameters(), lr=1e-4)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)

def usage():
    tiermem.synchronize(model)
    gc.collect()
    files = [path for path in Path(directory, "disk").rglob("*") if path.is_file()]
    return dict(rss=status_bytes("VmRSS"), files=open_files(), threads=thread_count(),
                objects=len(gc.get_objects()), disk=sum(path.stat().st_blocks * 512 for path in files))

seen = []
for number in range(1, 501):
    for _ in range(1 + number % 2):
        model(*model.inputs(lib)).float().square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if number % 25 == 0:
        with torch.no_grad():
            model(*model.inputs(lib))
        with tiermem.gather(model.blocks[1]):
            pass
    if number in (100, 500):
        seen.append(usage())
print(json.dumps(seen))
""",
        tmp_path,
    )
    early, late = got
    assert late["files"] == early["files"]
    assert late["threads"] == early["threads"]
    assert late["disk"] == early["disk"]
    assert late["objects"] - early["objects"] < 100, f"{late['objects'] - early['objects']} Python objects more"
    assert late["rss"] - early["rss"] <= 2 * MIB, f"{(late['rss'] - early['rss']) / MIB:.2f} MiB more"


@pytest.mark.parametrize("host_kib", [256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize("device_kib", [256, 512, 2048])
def test_pools_never_exceed_their_budgets(device_kib: int, host_kib: int, tmp_path: Path) -> None:
    """At any budget the model is refused, or trains with no more than that."""
    memory = {"device": device_kib * 1024, "host": host_kib * 1024}
    lib = Tiered(ON_DISK, tmp_path / "disk", memory=memory)
    try:
        model = lib.offload(Stack(width=64, depth=5))
    except ValueError as error:
        assert "bytes" in str(error)
        assert not list((tmp_path / "disk").iterdir())
        return
    optimizer = lib.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        train(lib, model, optimizer, steps=1, micro_batches=2, clip=0.5)
        report = tiermem.report(model)
        assert report.bytes_resident[tiermem.Tier.HOST] <= host_kib * 1024
        assert report.bytes_resident[tiermem.Tier.DEVICE] <= device_kib * 1024
    lib.close()
