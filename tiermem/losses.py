"""Losses that never hold what they need not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tiermem.micro_batch import Splitter, saving_nothing
from tiermem.planes import held_of

LOGITS_BYTES = {"cpu": 32 << 20}
LOGITS_BYTES_DEFAULT = 256 << 20
"""fp32 logits of one chunk: small enough for a CPU's memory, and on an accelerator large enough that reading the head's
weights again for each chunk does not show."""


def linear_cross_entropy(
    hidden: Tensor,
    head: nn.Module | Tensor,
    labels: Tensor,
    *,
    chunk: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Mean cross entropy in fp32 of the logits ``head(hidden)``, which are never there as a whole.

    ``chunk`` rows of logits exist at a time, in forward, and again in backward, where they are computed a second time.
    Gradients of the head's parameters are summed over chunks in fp32.

    hidden: (..., width). head: the module that makes logits (..., vocabulary) of it, or the weight (vocabulary, width)
    of a linear one. labels: (...), int64, already shifted; ``ignore_index`` counts for nothing, and if nothing else
    is there the loss is NaN, as torch's. chunk: rows; ``None``: 32 MiB of fp32 logits on a CPU, 256 MiB elsewhere.

    Returns a scalar, fp32. Errors: ``ValueError`` for shapes that do not fit, or a weight that tiermem holds: give its
    module, which knows when the weight is there.
    """
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels of shape {tuple(labels.shape)} do not fit hidden of shape {tuple(hidden.shape)}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}: expected at least 1")
    if isinstance(head, nn.Module):
        parameters = list(head.parameters())
    else:
        held = held_of(head)
        if held is not None:
            raise ValueError(f"{held.name} is held by tiermem: give linear_cross_entropy the module it belongs to")
        parameters = []
    rows = chunk or _rows(head, hidden)
    flat, wanted = hidden.flatten(0, -2), labels.flatten()
    arguments = (flat, wanted) if isinstance(head, nn.Module) else (flat, wanted, head)

    def losses(hidden: Tensor, labels: Tensor, weight: Tensor | None = None) -> Tensor:
        logits = head(hidden) if weight is None else F.linear(hidden, weight)  # type: ignore[operator]
        return F.cross_entropy(logits.float(), labels, ignore_index=ignore_index, reduction="none")

    splitter = Splitter(
        "linear_cross_entropy",
        losses,
        parameters,
        rows,
        hidden.device,
        in_backward=lambda: _in_backward(parameters),
        split=(True, True, False)[: len(arguments)],
    )
    each: Tensor = splitter(*arguments)
    return each.sum() / (wanted != ignore_index).sum()


def _rows(head: nn.Module | Tensor, hidden: Tensor) -> int:
    weight: Any = head if isinstance(head, Tensor) else getattr(head, "weight", None)
    vocabulary = int(weight.shape[0]) if isinstance(weight, Tensor) and weight.dim() == 2 else 1 << 17
    return max(16, LOGITS_BYTES.get(hidden.device.type, LOGITS_BYTES_DEFAULT) // (4 * vocabulary))


@contextlib.contextmanager
def _in_backward(parameters: list[nn.Parameter]) -> Iterator[None]:
    """The head's forward runs inside this backward: a runtime that holds it must know that it is one. Afterwards the
    head's block may leave the device: a tied one gets its gradient only at the end of backward."""
    held = [one for p in parameters if (one := held_of(p)) is not None]
    for runtime in {id(one.runtime): one.runtime for one in held}.values():
        runtime.check()
        runtime.enter_backward()
    with saving_nothing([one.block for one in held]):
        yield
