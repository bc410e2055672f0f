"""On a CPU device: the C library's heap, from which autograd's gradients come."""

from __future__ import annotations

import json

from processes import run

import tiermem.process

STEPS = """
import json, resource
import tiermem
from torch import nn

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

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
print(json.dumps(counts))
"""

ROWS = 20000
GRADIENT_BYTES = ROWS * 512 * 4
PAGES = GRADIENT_BYTES // 4096


def _faults(host: str | None) -> list[int]:
    done = run(STEPS, rows=ROWS, host=host)
    assert done.returncode == 0, done.stderr
    counts: list[int] = json.loads(done.stdout)
    return counts


def test_a_large_gradient_is_not_mapped_anew_in_every_step() -> None:
    assert GRADIENT_BYTES > tiermem.process.MMAP_THRESHOLD_MAX
    assert max(_faults(None)[3:]) < PAGES // 10


def test_small_budgets_get_the_memory_back() -> None:
    assert min(_faults("1GiB")[3:]) >= PAGES
