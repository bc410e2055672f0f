"""Choices, frozen: what a user may ask of the runtime, each with a good default."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tiermem.layout import MOMENT_FORMATS

if TYPE_CHECKING:
    import torch

    from tiermem.io.engine import Engine

CHUNK_ALIGNMENT = 4096
"""A chunk holds a multiple of this many elements, so its planes are whole pages and no norm piece is cut."""


class Tier(enum.Enum):
    """Where bytes rest between uses."""

    DEVICE = "device"
    """Accelerator memory."""
    HOST = "host"
    """Page-locked CPU memory."""
    DISK = "disk"
    """Files on NVMe mounts."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a model is trained out of the tiers. Every field has a default that is right for most models.

    weights: home of the weight planes: a ``Tier``, its name, or ``"auto"`` (as many blocks as fit in the fastest tier).
    states: home of the optimizer states (residual and moments): HOST, DISK or ``"auto"``.
    compute_dtype: ``None`` computes in each parameter's own dtype; ``torch.bfloat16`` on an fp32 model computes in
        bf16, casts floating-point inputs of the blocks, and keeps the fp32 values as masters. Frozen fp32 parameters
        have no master: they are rounded for good.
    moments: format of the optimizer's moments: ``"fp32"`` is exact; ``"bf16"`` and ``"int8"`` take 4 and 2 bytes per
        parameter instead of 8, rounded by chance (the same chance in every run and placement).
    blocks: how the model is cut: ``None`` (children of ModuleList and Sequential, then by size), or a sequence of
        module classes, name patterns (``"model.layers.*"``; ``*`` stands for one component) and modules.
    verify_disk: check a checksum of every extent that comes back from disk. ``None``: where at least 8 cores make it
        cost under 3 % (0.055 CPU seconds per GiB moved, measured).
    io: I/O engine: ``"auto"``, a name, or an ``Engine``.
    skip_nonfinite: a step whose gradients are not finite changes nothing and is counted. ``False``: torch's behaviour.
    chunk_numel: elements per chunk, a multiple of 4096; ``None``: chosen from the host budget, at most 1 Mi. It never
        changes a result.
    update_in_backward: the user's promise that every backward is followed by one ``step()``, with the hyperparameters
        of that moment and without clipping or accumulation. Each block's update then starts inside backward, as soon as
        its gradient is complete, and no gradient rests anywhere. A broken promise is an error, never a wrong number.
        Gradients that are not finite go where torch lets them go: when they are seen, other blocks are updated already.
    activations: what a layer (a block found in a container or named by ``blocks``) keeps for its backward. ``"keep"``:
        what autograd saves. ``"recompute"``: its inputs; backward runs it again, with the same random numbers.
        ``"host"``, ``"disk"``: as ``"recompute"``, and the inputs that need a gradient move to HOST or DISK, and come
        back before they are needed. The same bits in all four.
    micro_batch: a layer is recomputed whatever ``activations`` is, and computes this many elements of the batch at a
        time, in forward and again in backward, so that its working set is theirs. Gradients agree with those of the
        whole batch to rounding; random numbers are drawn slice by slice. See micro_batch.py for what is split.
    threads: CPU threads of the kernels; ``None``: the cores this process may use.
    kernels: ``"auto"``, ``"native"`` (C++) or ``"numba"``; same results bit for bit.
    """

    weights: Tier | Literal["device", "host", "disk", "auto"] = "auto"
    states: Tier | Literal["host", "disk", "auto"] = "auto"
    compute_dtype: torch.dtype | None = None
    moments: Literal["fp32", "bf16", "int8"] = "fp32"
    blocks: Sequence[Any] | None = None
    verify_disk: bool | None = None
    io: str | Engine = "auto"
    skip_nonfinite: bool = True
    update_in_backward: bool = False
    activations: Literal["keep", "recompute", "host", "disk"] = "keep"
    micro_batch: int | None = None
    chunk_numel: int | None = None
    threads: int | None = None
    kernels: Literal["auto", "native", "numba"] = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", _home("weights", self.weights, tuple(Tier)))
        object.__setattr__(self, "states", _home("states", self.states, (Tier.HOST, Tier.DISK)))
        if self.moments not in MOMENT_FORMATS:
            known = ", ".join(map(repr, MOMENT_FORMATS))
            raise ValueError(f"Policy(moments={self.moments!r}): known formats are {known}")
        if self.kernels not in ("auto", "native", "numba"):
            raise ValueError(f"Policy(kernels={self.kernels!r}): expected 'auto', 'native' or 'numba'")
        if self.chunk_numel is not None and (self.chunk_numel <= 0 or self.chunk_numel % CHUNK_ALIGNMENT):
            raise ValueError(
                f"Policy(chunk_numel={self.chunk_numel}): expected a positive multiple of {CHUNK_ALIGNMENT}"
            )
        if self.activations not in ("keep", "recompute", "host", "disk"):
            raise ValueError(
                f"Policy(activations={self.activations!r}): expected 'keep', 'recompute', 'host' or 'disk'"
            )
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ValueError(f"Policy(micro_batch={self.micro_batch}): expected at least 1")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"Policy(threads={self.threads}): expected at least 1")


def _home(field: str, value: Tier | str, allowed: tuple[Tier, ...]) -> Tier | str:
    if value == "auto":
        return value
    try:
        tier = Tier(value)
    except ValueError:
        tier = None
    if tier not in allowed:
        names = ", ".join(repr(t.value) for t in allowed)
        raise ValueError(f"Policy({field}={value!r}): expected {names} or 'auto'")
    return tier
