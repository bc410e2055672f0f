"""tiermem trains models larger than the GPU's memory, and larger than the machine's memory, on one GPU or a few.

model = tiermem.offload(model, memory=tiermem.Memory(device="20GiB", host="64GiB", disk="/mnt/nvme"))
optimizer = tiermem.AdamW(model.parameters(), lr=3e-4)
"""

from tiermem import losses
from tiermem.memory import Memory
from tiermem.offload import close, gather, offload, report, synchronize
from tiermem.optim import SGD, Adagrad, Adam, AdamW, Lion
from tiermem.policy import Policy, Tier
from tiermem.report import BlockReport, Report
from tiermem.trace import trace

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "BlockReport",
    "Lion",
    "Memory",
    "Policy",
    "Report",
    "Tier",
    "close",
    "gather",
    "losses",
    "offload",
    "report",
    "synchronize",
    "trace",
]
