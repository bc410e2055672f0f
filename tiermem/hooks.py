"""When a block is gathered and released: what stands around the forwards of the model's modules.

unit       a module whose forward gathers blocks; the model itself is one, with or without blocks of its own.
access     a parameter read by attribute outside its own unit (by a parent module, say): its block is gathered softly,
           until the slot is wanted.

Forward    before: gather, prefetch what follows; after: release, and arrange to be called when a gradient reaches the
           outputs.
Backward   that call gathers again, before anything of the module is differentiated or recomputed. Tensors that
           autograd saved and that view a weight were packed as (block, offset, size, stride) and are unpacked by
           gathering, so no weight stays behind for backward.

The post-accumulate hooks of gradients.py release a block when its last gradient has come. ``full_backward_hook`` is
not used: it can fire before the gradients exist.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from tiermem.planes import Block, held_of, refuse_copy
from tiermem.policy import Tier
from tiermem.runtime import Runtime

_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
_top_hooks: Callable[[bool], tuple[Any, Any] | None] = torch._C._autograd._top_saved_tensors_default_hooks


@dataclass(frozen=True, slots=True)
class _Packed:
    """A saved view of a block's weights. ``outer``: what the hooks around ours made of a stand-in, if there were
    any."""

    block: Block
    dtype: torch.dtype
    offset: int  # elements of dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    outer: Any


class SavedTensors:
    """Keeps views of weights out of autograd's graph. Composes with hooks around it (activation checkpointing,
    save_on_cpu)."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._planes: dict[int, Block] = {}  # by address: blocks computed on in place
        self._placeholders: dict[int, str] = {}  # by address: parameter names
        for block in runtime.blocks:
            if block.device_plane is not None and block.device_plane.numel():
                self._planes[block.device_plane.untyped_storage().data_ptr()] = block
            for held in block.held:
                self._placeholders[held.placeholder.untyped_storage().data_ptr()] = held.name

    def push(self) -> bool:
        """Put these hooks on top, unless they are. Returns whether ``pop`` is owed."""
        outer = _top_hooks(True)
        if self._is_own(outer):
            return False
        layer = _Layer(self, outer)
        torch._C._autograd._push_saved_tensors_default_hooks(layer.pack, layer.unpack)
        return True

    def pop_leftovers(self) -> None:
        """Take off what an interrupted forward left on top."""
        while self._is_own(_top_hooks(True)):
            self.pop()

    def _is_own(self, hooks: tuple[Any, Any] | None) -> bool:
        layer = getattr(hooks[0], "__self__", None) if hooks is not None else None
        return isinstance(layer, _Layer) and layer.saved is self

    @staticmethod
    def pop() -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()

    def view(self, packed: _Packed) -> torch.Tensor:
        """The saved view again, of the block's weights as they are gathered now."""
        runtime = self._runtime
        block = packed.block
        if not block.gathered:
            runtime.check()
            if torch._C._current_graph_task_id() >= 0:
                runtime.enter_backward()
            runtime.gathering.gather(block, hold=False)
        plane = runtime.gathering.plane_for_unpack(block)
        return plane.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block whose weights ``tensor`` views, if any. Errors: ``RuntimeError`` for a placeholder."""
        if tensor.layout is not torch.strided:
            return None
        address = tensor.untyped_storage().data_ptr()
        slot = self._runtime.gathering.slots.by_address.get(address)
        if slot is not None:
            return slot.block
        block = self._planes.get(address)
        if block is None and address in self._placeholders and tensor.numel() and not tensor.is_meta:
            name = self._placeholders[address]
            raise RuntimeError(
                f"{name} was read while its block is not gathered, so it is a placeholder full of NaN: read it in "
                "its own module's forward, or "
                "inside `with tiermem.gather(...)`"
            )
        return block


class _Layer:
    """One push of the hooks, with what was on top before."""

    def __init__(self, saved: SavedTensors, outer: tuple[Any, Any] | None) -> None:
        self.saved = saved
        self._outer_pack: Callable[[Any], Any] | None
        self._outer_unpack: Callable[[Any], Any] | None
        self._outer_pack, self._outer_unpack = outer if outer is not None else (None, None)
        self.nested = outer is not None

    def pack(self, tensor: torch.Tensor) -> Any:
        block = self.saved.block_of(tensor)
        if block is None:
            return tensor if self._outer_pack is None else self._outer_pack(tensor)
        outer = None
        if self._outer_pack is not None:
            # The hooks around ours count on every tensor; they get one that looks the same and holds nothing.
            outer = self._outer_pack(torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape))
        return _Packed(
            block, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.size()), tuple(tensor.stride()), outer
        )

    def unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Packed):
            return packed if self._outer_unpack is None else self._outer_unpack(packed)  # type: ignore[no-any-return]
        if self._outer_unpack is not None:
            self._outer_unpack(packed.outer)
        return self.saved.view(packed)


def foreign_hooks() -> bool:
    """Saved-tensor hooks that are not the runtime's surround the innermost running forward."""
    top = _top_hooks(True)
    if top is None:
        return False
    layer = getattr(top[0], "__self__", None)
    return not isinstance(layer, _Layer) or layer.nested


class Unit:
    """Stands around the forward of one module.

    It replaces ``module.forward`` on the instance and not by module hooks: a recompute that calls ``forward`` and not
    the module passes through it too, and whatever ends the forward, Ctrl-C included, ends what was begun here.
    """

    def __init__(self, runtime: Runtime, saved: SavedTensors, name: str, blocks: Sequence[Block]) -> None:
        self._runtime = runtime
        self._saved = saved
        self.name = name
        self.blocks = list(blocks)
        self._label = f"tiermem::gather {name}"
        self._cast_dtype = runtime.policy.compute_dtype if blocks else None

    def surround(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def surrounded(*args: Any, **kwargs: Any) -> Any:
            return self._run(forward, args, kwargs)

        return surrounded

    def _run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        runtime = self._runtime
        runtime.check()
        depth = runtime.forward_depth
        if not depth:
            self._begin_outermost()
        if self._cast_dtype is not None:
            args, kwargs = self._cast(args), self._cast(kwargs)
        runtime.timeline.pause()
        held: list[Block] = []
        pushed = False
        try:
            runtime.forward_depth = depth + 1
            pushed = self._saved.push()
            if self.blocks:
                if _profiling():
                    with torch.profiler.record_function(self._label):
                        self._gather(held)
                else:
                    self._gather(held)
            if runtime.timeline.on:
                runtime.timeline.enter(self.name, "recompute" if runtime.in_backward else "forward")
            output = forward(*args, **kwargs)
            if self.blocks:
                output = self._detached_from_slots(output)
        finally:
            runtime.timeline.leave()
            runtime.forward_depth = depth
            if pushed:
                self._saved.pop()
            for block in held:
                runtime.gathering.release(block, keep=runtime.in_backward)
            if not depth and not runtime.in_backward:
                runtime.gathering.release_soft()
        if torch.is_grad_enabled():
            if self.blocks:
                for tensor in _tensors(output):
                    if tensor.requires_grad:
                        tensor.register_hook(self.before_backward)
            if not depth and not runtime.in_backward and runtime.timeline.on:
                runtime.timeline.enter("loss", "forward")
        return output

    def _begin_outermost(self) -> None:
        runtime = self._runtime
        runtime.reset_phase()
        if runtime.in_backward:
            return  # a recompute
        if runtime.unstepped:
            raise RuntimeError(
                "a forward between backward and step(): Policy(update_in_backward=True) has begun to change the weights"
            )
        runtime.timeline.clear()
        self._saved.pop_leftovers()
        runtime.gathering.begin(training=torch.is_grad_enabled())

    def _gather(self, held: list[Block]) -> None:
        runtime = self._runtime
        grad = torch.is_grad_enabled()
        for block in self.blocks:
            if grad:
                runtime.watch_trainable(block)
            runtime.gathering.gather(block, hold=True)
            held.append(block)

    def _cast(self, values: Any) -> Any:
        """Floating-point inputs in the compute dtype, as FSDP2's MixedPrecisionPolicy does."""
        dtype = self._cast_dtype

        def cast(value: Any) -> Any:
            foreign = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype
            return value.to(dtype) if foreign else value

        return tree_map(cast, values)

    def _detached_from_slots(self, output: Any) -> Any:
        """An output that views a weight (a module that returns its parameter) must outlive the slot: it becomes a
        copy."""
        by_address = self._runtime.gathering.slots.by_address
        if not by_address:
            return output

        def copy(tensor: Any) -> Any:
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.layout is torch.strided
                and tensor.untyped_storage().data_ptr() in by_address
            ):
                return tensor.clone()
            return tensor

        if not any(
            tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in by_address
            for tensor in _tensors(output)
        ):
            return output
        if dataclasses.is_dataclass(output) and not isinstance(output, (type, dict)):
            changes = {f.name: tree_map(copy, getattr(output, f.name)) for f in dataclasses.fields(output)}
            return dataclasses.replace(output, **changes)
        return tree_map(copy, output)

    def before_backward(self, gradient: torch.Tensor) -> None:
        """A gradient has reached an output: the module is about to be differentiated, or run again."""
        runtime = self._runtime
        runtime.check()
        runtime.enter_backward()
        runtime.timeline.pause()
        for block in self.blocks:
            runtime.gradients.begin_backward(block)
            if _profiling():
                with torch.profiler.record_function(self._label):
                    runtime.gathering.gather(block, hold=False)
            else:
                runtime.gathering.gather(block, hold=False)
        runtime.timeline.replace(self.name, "backward")

    def __deepcopy__(self, memo: Any) -> Any:
        raise refuse_copy(f"module {self.name}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refuse_copy(f"module {self.name}")


def _tensors(output: Any) -> list[torch.Tensor]:
    """Tensors in a module's output: itself, or in tuples, lists, dicts and dataclasses."""
    if isinstance(output, torch.Tensor):
        return [output]
    if output is None:
        return []
    if dataclasses.is_dataclass(output) and not isinstance(output, (type, dict)):
        return [tensor for f in dataclasses.fields(output) for tensor in _tensors(getattr(output, f.name))]
    leaves, _ = tree_flatten(output)
    found = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif leaf is not output and dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += _tensors(leaf)
    return found


class ParameterAccess(dict[str, Any]):
    """A module's ``_parameters``: reading one by attribute makes sure that it is there to be read."""

    def __init__(self, parameters: dict[str, Any], runtime: Runtime) -> None:
        super().__init__(parameters)
        self._runtime = runtime

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if parameter is not None:
            held = held_of(parameter)
            if held is not None and (not held.block.gathered or self._runtime.in_backward):
                self._read(held.block)
        return parameter

    def _read(self, block: Block) -> None:
        runtime = self._runtime
        block.read_in_backward = runtime.in_backward
        if runtime.unstepped and not runtime.in_backward:
            return  # updates have begun inside backward: neither the old nor the new weights are the model's
        if block.home is Tier.DEVICE or runtime.forward_depth or runtime.in_backward:
            runtime.check()
            runtime.gathering.gather(block, hold=False)

    def __deepcopy__(self, memo: Any) -> Any:
        raise refuse_copy(f"a module with parameter {next(iter(self), '')!r}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refuse_copy(f"a module with parameter {next(iter(self), '')!r}")


class Installed:
    """Everything that was put on a model, to be taken off again, last first."""

    def __init__(self, module: nn.Module, runtime: Runtime) -> None:
        self._forwards: list[
            tuple[nn.Module, Any]
        ] = []  # with what the instance's ``forward`` was before, if it had one
        self._dicts: list[nn.Module] = []
        saved = SavedTensors(runtime)
        uses = {id(part): (part, name, [runtime.blocks[i] for i in indices]) for part, name, indices in runtime.uses}
        uses.setdefault(id(module), (module, type(module).__name__, []))
        for part, name, blocks in uses.values():
            unit = Unit(runtime, saved, name, blocks)
            self._forwards.append((part, part.__dict__.get("forward")))
            object.__setattr__(part, "forward", unit.surround(part.forward))
        for part in module.modules():
            if any(parameter is not None and held_of(parameter) is not None for parameter in part._parameters.values()):
                part._parameters = ParameterAccess(part._parameters, runtime)
                self._dicts.append(part)

    def remove(self) -> None:
        for part, before in reversed(self._forwards):
            if before is None:
                object.__delattr__(part, "forward")
            else:
                object.__setattr__(part, "forward", before)
        for part in self._dicts:
            part._parameters = dict(part._parameters)
        self._forwards.clear()
        self._dicts.clear()
