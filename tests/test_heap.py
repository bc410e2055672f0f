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
for _ in range(6):
    before = faults()
    model(torch.arange(64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    counts.append(faults() - before)
tiermem.close(model)
print(json.dumps([counts[3:], faults_of_new_memory(rows * 512 * 4)]))
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
    assert max(steps) < anew // 5


def test_small_budgets_get_the_memory_back() -> None:
    steps, anew = _faults("1GiB")
    assert min(steps) > anew // 2


HEAP = """
import json
import torch
from tiermem.process import anonymous_memory_bytes, give_back_freed, keep_freed_tensors, return_freed_tensors

def resident_after_use():
    blocks = [torch.ones(numel) for _ in range(20)]
    del blocks
    return anonymous_memory_bytes()

return_freed_tensors(1 << 20)
resident_after_use()
before = resident_after_use()
keep_freed_tensors(256 << 20)
kept = resident_after_use()
return_freed_tensors(1 << 20)
returned = resident_after_use()
keep_freed_tensors(256 << 20)
resident_after_use()
give_back_freed()
given_back = anonymous_memory_bytes()
print(json.dumps([n - before for n in (kept, returned, given_back)]))
"""
NUMEL = 1 << 19
HEAP_BYTES = 20 * NUMEL * 4


def test_the_heap_does_what_it_was_told_last() -> None:
    done = run(HEAP, numel=NUMEL)
    assert done.returncode == 0, done.stderr
    kept, returned, given_back = json.loads(done.stdout)
    assert kept > 0.9 * HEAP_BYTES
    assert returned < 0.1 * HEAP_BYTES
    assert given_back < 0.1 * HEAP_BYTES
