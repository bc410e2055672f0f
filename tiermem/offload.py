"""The module surface: ``offload``, ``gather``, ``synchronize``, ``report``, ``close``."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tiermem.activations import Activations
from tiermem.device import Device, select_device
from tiermem.hooks import Installed
from tiermem.memory import Memory, parse_bytes
from tiermem.planes import Held, held_of
from tiermem.policy import Policy
from tiermem.process import MMAP_THRESHOLD_MAX, give_back_freed, keep_freed_tensors, return_freed_tensors
from tiermem.report import Report
from tiermem.runtime import Runtime
from tiermem.trace import register

M = TypeVar("M", bound=nn.Module)
_ATTRIBUTE = "_tiermem_surface"
_HOLES_MATTER_BYTES = 2 << 30
"""A budget is a promise, and on a CPU device autograd's tensors come from the same heap: below this it must not keep
their holes (some 200 MB). Giving them back costs page faults, a tenth of a small model's backward."""
_GRADIENTS_KEPT = 4
"""How many of the largest gradient the heap has room for: it shares its end with what else lives meanwhile. A 218 M
llama with a vocabulary of 32 Ki still mapped both of its large gradients with 2, and neither with 3."""


def offload(
    module: M,
    *,
    memory: Memory | None = None,
    policy: Policy | None = None,
    device: torch.device | str | Device | None = None,
) -> M:
    """Move the weights, gradients and optimizer state of ``module`` into memory tiers; train or infer with it as
    before.

    memory: budgets of the tiers; default: what is free, and no DISK tier.
    policy: choices; every field has a good default.
    device: the accelerator to compute on; default: the current one, else the CPU.

    Returns the same module object. Its parameters are the same objects too, so an optimizer may be built before or
    after. Outside their modules' forward they hold placeholders (NaN): use ``tiermem.gather`` to read them.
    Parameters on the meta device are taken over as zeros, to be filled with ``load_state_dict`` or under
    ``gather(..., write=True)``. Buffers are moved to the device and stay there.

    On a CPU device, where gradients and activations are process memory, the C library's heap is told what to do with
    them when they are freed (mallopt, for the whole process): with budgets of less than 2 GiB to give blocks of 1 MiB
    and more back at once; else, where a parameter has a gradient of more than 32 MiB, to keep room for it (four times
    the largest, 1 GiB at most) until ``close``.

    Errors: ``ValueError`` naming the parameter, budget or choice that does not work, and the remedy; ``OSError``
    naming the disk directory.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"tiermem.offload takes a torch.nn.Module, not {type(module).__name__}")
    if getattr(module, _ATTRIBUTE, None) is not None:
        raise ValueError(f"this {type(module).__name__} is offloaded already: tiermem.close() it first")
    on = select_device(device)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device.type != "meta" and buffer.device != on.torch_device:
                part._buffers[name] = buffer.to(on.torch_device)
    memory = memory or Memory()
    policy = policy or Policy()
    runtime = Runtime(module, memory, policy, on)
    if on.unified:
        _tune_heap(runtime, memory)
    register(runtime.timeline)
    object.__setattr__(module, _ATTRIBUTE, Surface(module, runtime))
    return module


def _tune_heap(runtime: Runtime, memory: Memory) -> None:
    if _granted_bytes(memory) < _HOLES_MATTER_BYTES:
        return_freed_tensors(1 << 20)
        return
    trained = (held for block in runtime.blocks for held in block.held if held.parameter.requires_grad)
    largest = max((held.numel * held.dtype.itemsize for held in trained), default=0)
    if largest > MMAP_THRESHOLD_MAX:
        keep_freed_tensors(_GRADIENTS_KEPT * largest)


def _granted_bytes(memory: Memory) -> float:
    """What the user has set as budgets, together."""
    granted = [parse_bytes(size) for size in (memory.device, memory.host) if size is not None]
    return sum(granted) if granted else math.inf


class Surface:
    """What ``offload`` hung on one module: hooks, checks, and the runtime behind them."""

    def __init__(self, module: nn.Module, runtime: Runtime) -> None:
        self.runtime = runtime
        try:
            self._activations = Activations(runtime)
        except BaseException:
            runtime.close()
            raise
        self._installed = Installed(module, runtime)
        self._handles: list[Any] = []
        self._guarded: list[nn.Module] = []
        self._handles.append(register_optimizer_step_pre_hook(_refuse_other_optimizers))
        for part in module.modules():
            held = {
                name: one for name, p in part._parameters.items() if p is not None and (one := held_of(p)) is not None
            }
            object.__setattr__(part, "_apply", _Guard(runtime, part))
            self._guarded.append(part)
            if held:
                saving = _Saving(runtime)
                loading = _Loading(runtime, {n: weakref.ref(h) for n, h in held.items()})
                self._handles += [
                    part.register_state_dict_post_hook(saving),
                    part.register_load_state_dict_pre_hook(loading.before),
                    part.register_load_state_dict_post_hook(loading.after),
                ]

    def remove(self) -> None:
        self._installed.remove()
        self._activations.remove()
        for handle in self._handles:
            handle.remove()
        for part in self._guarded:
            part.__dict__.pop("_apply", None)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.runtime.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.runtime.__reduce_ex__(protocol)


def _refuse_other_optimizers(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """torch's own optimizers would update placeholders."""
    if getattr(optimizer, "updates_held_parameters", False):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            held = held_of(parameter)
            if held is not None and parameter.grad is not None:
                raise RuntimeError(
                    f"{type(optimizer).__module__}.{type(optimizer).__name__} cannot update {held.name}, which "
                    "tiermem.offload holds: "
                    "use tiermem.AdamW or tiermem.Adam instead"
                )


class _Guard:
    """Stands for ``module._apply``, which ``.to()``, ``.half()``, ``.cuda()`` go through. A move that changes nothing
    is allowed."""

    def __init__(self, runtime: Runtime, part: nn.Module) -> None:
        self._runtime = runtime
        self._part = weakref.ref(part)

    def __call__(self, function: Any, recurse: bool = True) -> Any:
        part = self._part()
        assert part is not None
        for dtype in sorted({held.dtype for block in self._runtime.blocks for held in block.held}, key=str):
            probe = torch.empty(0, dtype=dtype, device=self._runtime.device.torch_device)
            after = function(probe)
            if after is not probe or (after.device.type == "cpu" and after.is_shared()):
                raise RuntimeError(
                    f"{type(part).__name__} is offloaded: its parameters cannot be replaced ({after.dtype} on "
                    f"{after.device}). Convert the model before "
                    "tiermem.offload, or use Policy(compute_dtype=...) and offload(device=...), or call "
                    "tiermem.close(model) first"
                )
        return part

    def __deepcopy__(self, memo: Any) -> Any:
        return self._runtime.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._runtime.__reduce_ex__(protocol)


class _Saving:
    """state_dict post-hook: the real values. What rests in HOST is shown in place; what rests on DISK goes to an
    unnamed file there, mapped, so that saving a model larger than memory takes no memory."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        runtime = self._runtime
        runtime.check()
        for name, parameter in module._parameters.items():
            held = held_of(parameter) if parameter is not None else None
            if held is None or prefix + name not in state:
                continue
            held.block.wait_update()
            value = runtime.values.alias(held)
            if value is None:
                value = runtime.values.read(held, mapped_tensor(runtime, held, held.dtype))
            state[prefix + name] = value


def mapped_tensor(runtime: Runtime, held: Held, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor of the parameter's shape, in an unnamed file on the runtime's disk if it has one, else
    in memory."""
    if runtime.store is None or not held.numel:
        return torch.empty_strided(held.size, held.stride, dtype=dtype)
    with runtime.store.scratch_file() as path:
        flat = torch.from_file(str(path), shared=True, size=held.numel, dtype=dtype)
    return held.shaped(flat)


class _Loading:
    """Lets ``load_state_dict`` work on placeholders: real tensors stand in while a module loads, and their values are
    taken over afterwards."""

    def __init__(self, runtime: Runtime, held: dict[str, weakref.ref[Held]]) -> None:
        self._runtime = runtime
        self._held = held
        self._loaded: list[Held] = []

    def before(
        self,
        module: nn.Module,
        state: Any,
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing: Any,
        unexpected: Any,
        errors: Any,
    ) -> None:
        self._runtime.check()
        for name, parameter in module._parameters.items():
            held = held_of(parameter) if parameter is not None else None
            value = state.get(prefix + name)
            if (
                held is None
                or parameter is None
                or not isinstance(value, torch.Tensor)
                or tuple(value.shape) != held.size
            ):
                continue
            if local_metadata.get("assign_to_params_buffers"):
                raise RuntimeError(
                    f"load_state_dict(assign=True) would replace {held.name}, which is offloaded: load with "
                    "assign=False"
                )
            # fp32 values keep their low halves as residuals: they are copied into an fp32 tensor, not rounded on the
            # way.
            dtype = torch.float32 if held.split and value.dtype is torch.float32 else held.dtype
            parameter.data = torch.empty_strided(held.size, held.stride, dtype=dtype, device=parameter.device)
            self._loaded.append(held)

    def after(self, module: nn.Module, incompatible: Any) -> None:
        for held in self._loaded:
            values = held.parameter.data
            held.block.wait_update()
            _put_back(held)
            _take_over(held, values)
        self._loaded.clear()


def _take_over(held: Held, values: torch.Tensor) -> None:
    """New values in the dtype of the weights replace those that differ; in another (fp32) they are the masters."""
    if values.dtype is held.dtype:
        held.runtime.values.write(held, values)
    else:
        held.runtime.values.write_master(held, values)


def _put_back(held: Held) -> None:
    """The parameter shows again what it showed before somebody set its data."""
    block = held.block
    if held.gathers:
        held.parameter.data = held.gathers[-1]
    elif not block.gathered:
        held.parameter.data = held.placeholder
    elif block.slot is not None:
        held.parameter.data = block.slot.views(block)[held.index]
    else:
        held.parameter.data = block.resting_views()[held.index]


def _runtime_of(module: nn.Module) -> Runtime:
    surface = getattr(module, _ATTRIBUTE, None)
    if surface is None:
        raise ValueError(
            f"this {type(module).__name__} is not offloaded: pass the module that tiermem.offload returned"
        )
    return surface.runtime  # type: ignore[no-any-return]


@contextlib.contextmanager
def gather(target: nn.Module | nn.Parameter | Iterable[nn.Parameter], write: bool = False) -> Iterator[None]:
    """Inside, the parameters hold their real values, outside forward too.

    target: a module (all its parameters), a parameter, or several.
    write: changes made inside become the new values. A changed value is its own fp32 master; an unchanged one keeps
    the master it had. Cost: memory for the gathered parameters (twice with ``write``), until the end of the block.
    Updates in flight for them are waited for.
    """
    if isinstance(target, nn.Module):
        parameters = list(target.parameters())
    elif isinstance(target, torch.Tensor):
        parameters = [cast(nn.Parameter, target)]
    else:
        parameters = list(target)
    held = [one for parameter in parameters if (one := held_of(parameter)) is not None]
    for one in held:
        one.runtime.check()
        one.runtime.gathering.settle(one.block)
        values = one.runtime.values.read(one)
        one.gathers.append(values.to(one.runtime.device.torch_device))
        one.parameter.data = one.gathers[-1]
    try:
        yield
    finally:
        written = [(one, one.parameter.data) for one in held]
        for one, values in written:
            one.gathers.pop()
            _put_back(one)
            if write:
                _take_over(one, values)
                for outer in one.gathers:
                    outer.copy_(values)


def synchronize(module: nn.Module) -> None:
    """Return when no update, transfer or write of ``module`` is in flight. Raises what any of them raised."""
    _runtime_of(module).synchronize()


def report(module: nn.Module, *, wait: bool = True) -> Report:
    """What is where, bytes moved and time waited since ``offload``.

    wait: for what is in flight, so that everything is counted. ``False`` reads the counters as they are and disturbs
    nothing.
    """
    runtime = _runtime_of(module)
    if wait and runtime.error is None:
        runtime.synchronize()
    return runtime.report()


def close(module: nn.Module) -> None:
    """End the runtime and give every byte back: ``module`` is a plain PyTorch module with the current weights (fp32
    masters where ``compute_dtype`` split them). Optimizer states go with the runtime: take ``optimizer.state_dict()``
    first if they matter. Works after errors too."""
    surface: Surface | None = getattr(module, _ATTRIBUTE, None)
    if surface is None:
        return
    surface.remove()
    surface.runtime.close()
    object.__delattr__(module, _ATTRIBUTE)
    if surface.runtime.device.unified:
        give_back_freed()
