"""On a CPU device: the C library's heap, from which autograd's gradients come."""

from __future__ import annotations

import json

from processes import run

import tiermem.process

STEPS = """
import json, resource
import numpy, tiermem
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from torch import nn

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def faults_of_new_memory(nbytes):
    before = faults()
    numpy.frombuffer(mmap(-1, nbytes, MAP_PRIVATE | MAP_ANONYMOUS), numpy.uint8).fill(1)
    return faults() - before

model = nn.Sequential(nn.Embedding(rows, 512), nn.Linear(512, 8))
model = tiermem.offload(model, memory=tiermem.Memory(host=host), device="cpu")
optimizer = tiermem.AdamW(model.parameters())
counts = []
for _ in range(12):
    before = faults()
    model(torch.arange(64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    counts.append(faults() - before)
tiermem.close(model)
print(json.dumps([counts[2:], faults_of_new_memory(rows * 512 * 4)]))
"""

ROWS = 20000
GRADIENT_BYTES = ROWS * 512 * 4


def _faults(host: str | None) -> tuple[list[int], int]:
    """Page faults of each later step, and those of as much new memory as the largest gradient takes.

    A kernel may map several pages at one fault, so only the second number says what a gradient mapped anew costs.
    """
    done = run(STEPS, rows=ROWS, host=host)
    assert done.returncode == 0, done.stderr
    steps, anew = json.loads(done.stdout)
    return steps, anew


def test_a_large_gradient_is_not_mapped_anew_in_every_step() -> None:
    assert GRADIENT_BYTES > tiermem.process.MMAP_THRESHOLD_MAX
    steps, anew = _faults(None)
    # The heap grows when an update still holds the last step's gradient: at some step, not at every one.
    assert sum(steps) < len(steps) * anew // 2


def test_small_budgets_get_the_memory_back() -> None:
    steps, anew = _faults("1GiB")
    assert min(steps) > anew // 2


HEAP = """
import json
import torch
from tiermem.process import anonymous_memory_bytes, give_back_freed, keep_freed_tensors, return_freed_tensors

def left_by(nbytes):
    before = anonymous_memory_bytes()
    block = torch.ones(nbytes // 4)
    del block
    return anonymous_memory_bytes() - before

return_freed_tensors(1 << 20)
left_by(nbytes)
keep_freed_tensors(256 << 20)
kept = left_by(nbytes)
return_freed_tensors(1 << 20)
returned = left_by(2 * nbytes)  # more than what is free in the heap
keep_freed_tensors(256 << 20)
left_by(3 * nbytes)
before = anonymous_memory_bytes()
give_back_freed()
print(json.dumps([kept, returned, before - anonymous_memory_bytes()]))
"""
HEAP_BYTES = 40 << 20


def test_the_heap_does_what_it_was_told_last() -> None:
    done = run(HEAP, nbytes=HEAP_BYTES)
    assert done.returncode == 0, done.stderr
    kept, returned, given_back = json.loads(done.stdout)
    assert kept > 0.9 * HEAP_BYTES
    assert returned < 0.1 * HEAP_BYTES
    assert given_back > 0.9 * 3 * HEAP_BYTES
