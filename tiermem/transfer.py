"""Small steps that every pipeline on the background loop takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

import torch

from tiermem.store import Record


async def all_of(work: Sequence[Awaitable[Any]]) -> None:
    """Await every one, then raise the first error: nothing still uses a buffer that the caller gives back."""
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


async def swap_in_or_zero(record: Record, target: memoryview) -> None:
    """Disk to host; a record that was never written reads as zeros."""
    if record.valid:
        await record.swap_in(target)
    else:
        tensor_of(target).zero_()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a uint8 tensor (nbytes,) in host memory, without a copy."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]  # an ndarray is a buffer


def tensor_of(view: memoryview) -> torch.Tensor:
    """The bytes as a uint8 tensor (nbytes,) without a copy."""
    return torch.frombuffer(view, dtype=torch.uint8)
