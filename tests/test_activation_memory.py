"""What activations take, by formula, in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

from processes import run

DEPTH, LENGTH, WIDTH, INNER = 8, 128, 256, 2048
SLICE, BATCH = 8, 32
TOKEN_BYTES = 4 * WIDTH
INNER_BYTES = 4 * INNER
SLACK_BYTES = 8 << 20
"""Gradients of one layer (4 MiB), the optimizer's temporaries.

A slice of what goes between layers is 1 MiB, from where on the runtime has the C library map each tensor: smaller ones
would leave holes in its heap, now 20 MB of them, now none.
"""

CHILD = """
import json
from torch import nn
import tiermem
from processes import forget_peak, status_bytes
from tiermem.process import give_back_freed, return_freed_tensors

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
    def forward(self, hidden):
        return hidden + self.down(torch.nn.functional.gelu(self.up(self.norm(hidden))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.head = nn.Linear(width, 1)
    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)

return_freed_tensors()
model = Model()
memory = tiermem.Memory(device="64MiB", host="256MiB", disk=directory)
tiermem.offload(model, memory=memory, policy=tiermem.Policy(weights="host", states="host", **policy), device="cpu")
optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)

def step():
    inputs = torch.randn(batch, length, width)
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    tiermem.synchronize(model)

step()
step()
give_back_freed()
before = status_bytes("VmRSS")
forget_peak()
step()
print(json.dumps(status_bytes("VmHWM") - before))
"""


def peak_bytes(directory: Path, batch: int, **policy: object) -> int:
    """Above what a warm runtime holds between steps."""
    done = run(
        CHILD,
        directory=str(directory),
        depth=DEPTH,
        width=WIDTH,
        inner=INNER,
        length=LENGTH,
        batch=batch,
        policy=policy,
    )
    assert done.returncode == 0, done.stderr
    found: int = json.loads(done.stdout.splitlines()[-1])
    return found


def batch_bytes(batch: int) -> int:
    """What goes from one layer to the next."""
    return batch * LENGTH * TOKEN_BYTES


def working_bytes(batch: int) -> int:
    """One layer, run again and differentiated: three tensors of the inner width at a time (the activation's input and
    output, and the gradient of one of them), three of the outer."""
    return 3 * batch * LENGTH * INNER_BYTES + 3 * batch_bytes(batch)


def inputs_bytes(batch: int) -> int:
    """Of every layer, and the last one's output."""
    return (DEPTH + 1) * batch_bytes(batch)


def test_recomputation_needs_the_inputs_of_all_layers_and_the_working_set_of_one(tmp_path: Path) -> None:
    limit = working_bytes(SLICE) + inputs_bytes(SLICE) + SLACK_BYTES
    kept = 2 * DEPTH * SLICE * LENGTH * INNER_BYTES
    assert kept > limit, "the test would not tell the two apart"
    assert peak_bytes(tmp_path, SLICE, activations="recompute") <= limit


def test_a_layer_major_batch_needs_the_working_set_of_its_slices(tmp_path: Path) -> None:
    between = 3 * batch_bytes(BATCH)  # what is joined: an output, and two gradients between layers
    limit = working_bytes(SLICE) + inputs_bytes(BATCH) + between + SLACK_BYTES
    assert working_bytes(BATCH) > limit + batch_bytes(BATCH), "the test would not tell the two apart"
    assert peak_bytes(tmp_path, BATCH, micro_batch=SLICE) <= limit


def test_inputs_on_disk_leave_memory(tmp_path: Path) -> None:
    few = 4 + 3  # the latest two calls', the next one, one on its way; and between layers
    limit = working_bytes(SLICE) + few * batch_bytes(BATCH) + SLACK_BYTES
    assert inputs_bytes(BATCH) > few * batch_bytes(BATCH)
    assert peak_bytes(tmp_path, BATCH, micro_batch=SLICE, activations="disk") <= limit
