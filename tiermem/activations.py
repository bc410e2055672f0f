"""Activation handling: what a layer keeps between its forward and its backward (``Policy(activations=...)``), and how
much of the batch it computes at a time (``Policy(micro_batch=...)``).

layer      a block whose root was found in a container or is named by ``Policy.blocks``, and a norm after the last one;
           not embeddings, heads and other leftovers. Of nested ones the outermost counts.

A layer's ``forward`` is replaced on the instance: ``__call__``, and with it every hook, stays outside of what is run
again. So a layer's weights are gathered once for its forward and once for its backward, before it is run again, however
many slices that takes.

Recomputation is torch's non-reentrant checkpoint, given every tensor of the arguments as an argument of its own, so
that hooks on saved tensors see all of them: it keeps random numbers and autocast, and backward sees the graph that it
would have seen without it, hence the same bits. In slices it is micro_batch.py's.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from tiermem.hooks import foreign_hooks
from tiermem.micro_batch import Splitter, refuse_unsplittable, saving_nothing
from tiermem.planes import Block, refuse_copy
from tiermem.saved_inputs import DiskShelf, HostShelf, Shelf

if TYPE_CHECKING:
    from tiermem.runtime import Runtime


class Activations:
    """The layers' forwards, as the policy asks for them, to be taken off again."""

    def __init__(self, runtime: Runtime) -> None:
        """Errors: ``ValueError`` naming what cannot be split, or that there is no DISK."""
        self._layers: list[Layer] = []
        policy = runtime.policy
        if policy.activations == "keep" and policy.micro_batch is None:
            return
        if policy.activations == "disk" and runtime.store is None:
            raise ValueError("Policy(activations='disk') needs a directory: Memory(disk=...)")
        shelf: Shelf | None = None
        if policy.activations == "disk":
            shelf = DiskShelf(runtime)
        elif policy.activations == "host" and not runtime.device.unified:
            shelf = HostShelf(runtime)  # where device memory is host memory, the inputs are in HOST already
        blocks = {id(root): [runtime.blocks[i] for i in indices] for root, _, indices in runtime.uses}
        for root, name in _outermost(runtime.layers):
            layer = Layer(runtime, root, name, blocks.get(id(root), []), shelf)
            if policy.micro_batch is not None:
                refuse_unsplittable(name, root)  # now; whether batch statistics are computed may change later
            self._layers.append(layer)
        for layer in self._layers:
            layer.install()

    def remove(self) -> None:
        for layer in self._layers:
            layer.remove()
        self._layers.clear()


def _outermost(roots: Sequence[tuple[nn.Module, str]]) -> list[tuple[nn.Module, str]]:
    inner = {id(below) for root, _ in roots for below in root.modules() if below is not root}
    return [(root, name) for root, name in roots if id(root) not in inner]


class Layer:
    """Stands for ``root.forward``."""

    def __init__(
        self, runtime: Runtime, root: nn.Module, name: str, blocks: Sequence[Block], shelf: Shelf | None
    ) -> None:
        self.name = name
        self._runtime = runtime
        self._root = weakref.ref(root)
        self._blocks = blocks
        self._shelf = shelf
        self._own: Callable[..., Any] | None = root.__dict__.get("forward")
        self._forward: Callable[..., Any] = root.forward
        self._parameters = list(root.parameters())
        self._norms = [m for m in root.modules() if isinstance(m, _NormBase) and m.track_running_stats]
        self._has_norms = any(isinstance(m, _NormBase) for m in root.modules())
        self._size = runtime.policy.micro_batch
        functools.update_wrapper(self, root.forward, updated=())

    def install(self) -> None:
        root = self._root()
        assert root is not None
        object.__setattr__(root, "forward", self)

    def remove(self) -> None:
        root = self._root()
        if root is None or root.__dict__.get("forward") is not self:
            return
        del root.__dict__["forward"]
        if self._own is not None:
            object.__setattr__(root, "forward", self._own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[i] for i in positions]
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *self._parameters))
        cache = next((leaf for leaf in leaves if _is_cache(leaf)), None)
        if not grad and (self._size is None or cache is not None):
            return self._forward(*args, **kwargs)
        if cache is not None:
            raise RuntimeError(
                f"{self.name} is given a {type(cache).__name__} that running it again in backward would change: set "
                "model.config.use_cache = False, or use Policy(activations='keep')"
            )
        versions = [tensor._version for tensor in tensors]
        with self._saving(tensors):
            if self._size is not None:
                self._refuse_unsplittable()
                device = self._runtime.device.torch_device
                splitter = Splitter(
                    self.name, self._run, self._parameters, self._size, device, in_backward=self._in_backward
                )
                output = splitter(*args, **kwargs)
            else:
                output = self._checkpointed(leaves, structure, positions, tensors)
        for tensor, version in zip(tensors, versions, strict=True):
            if grad and tensor._version != version:
                raise RuntimeError(
                    f"{self.name} changes an input of shape {tuple(tensor.shape)} in place, so it cannot be run again "
                    "in backward: clone it first, or use Policy(activations='keep')"
                )
        return output

    def _refuse_unsplittable(self) -> None:
        root = self._root()
        if root is not None and self._has_norms:
            refuse_unsplittable(self.name, root)

    def _saving(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Hooks around the runtime's (the model's own checkpointing, say) take care of what is saved themselves."""
        if self._shelf is None or not torch.is_grad_enabled() or foreign_hooks():
            return contextlib.nullcontext()
        return self._shelf.saving(self.name, tensors)

    def _checkpointed(
        self, leaves: Sequence[Any], structure: Any, positions: Sequence[int], tensors: Sequence[torch.Tensor]
    ) -> Any:
        others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

        def run(*given: torch.Tensor) -> Any:
            filled = list(others)
            for position, tensor in zip(positions, given, strict=True):
                filled[position] = tensor
            args, kwargs = tree_unflatten(filled, structure)
            return self._run(*args, **kwargs)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return contextlib.nullcontext(), _Again(self._norms)

        return checkpoint(run, *tensors, use_reentrant=False, context_fn=contexts)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward. One of transformers' layers that would checkpoint itself need not."""
        root = self._root()
        if root is None or getattr(root, "gradient_checkpointing", False) is not True:
            return self._forward(*args, **kwargs)
        before = root.__dict__.get("gradient_checkpointing")
        root.gradient_checkpointing = False  # type: ignore[assignment]
        try:
            return self._forward(*args, **kwargs)
        finally:
            if before is None:
                del root.__dict__["gradient_checkpointing"]
            else:
                root.gradient_checkpointing = before

    @contextlib.contextmanager
    def _in_backward(self) -> Iterator[None]:
        """The weights stay gathered from the first slice to the last."""
        gathering = self._runtime.gathering
        held: list[Block] = []
        try:
            for block in self._blocks:
                gathering.gather(block, hold=True)
                held.append(block)
            with saving_nothing(self._blocks):
                yield
        finally:
            for block in held:
                gathering.release(block, keep=True)

    def __deepcopy__(self, memo: Any) -> Any:
        raise refuse_copy(f"module {self.name}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refuse_copy(f"module {self.name}")


class _Again:
    """Around a second run, and a third: running statistics have counted the batch already."""

    def __init__(self, norms: Sequence[nn.Module]) -> None:
        self._norms = norms
        self._kept: list[tuple[nn.Module, dict[str, Any]]] = []

    def __enter__(self) -> None:
        self._kept = [(norm, dict(norm._buffers)) for norm in self._norms if norm.training]
        for norm, buffers in self._kept:
            norm._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})

    def __exit__(self, *_: object) -> None:
        for norm, buffers in self._kept:
            norm._buffers.update(buffers)
        self._kept = []


def _is_cache(leaf: Any) -> bool:
    """A transformers key and value cache: every forward writes to it."""
    return not isinstance(leaf, torch.Tensor) and callable(getattr(leaf, "get_seq_length", None))
