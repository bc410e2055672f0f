"""Handles: what ``p.grad`` is after backward.

handle     a tensor without data that answers norms and in-place scaling from what the runtime knows, so that
           ``torch.nn.utils.clip_grad_norm_`` costs nothing; any other operation fetches the real gradient, and stores
           again what it wrote. A view that somebody takes shows the real gradient until it is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tiermem.planes import Held

aten = torch.ops.aten


class GradientHandle(torch.Tensor):
    """Stands for one parameter's gradient. Shape, dtype and device are the parameter's; the data is the runtime's.

    ``factor`` multiplies the stored gradient; ``zeroed`` says that it counts as zero; ``shown`` is the real gradient,
    once somebody has taken a view of it: from then on it, and not what is stored, is the gradient.
    """

    held: Held
    factor: float
    zeroed: bool
    shown: torch.Tensor | None

    @staticmethod
    def __new__(cls, held: Held) -> GradientHandle:
        parameter = held.parameter
        handle = torch.Tensor._make_wrapper_subclass(
            cls, held.size, strides=held.stride, dtype=held.dtype, device=parameter.device
        )
        handle.held = held
        handle.factor = 1.0
        handle.zeroed = False
        handle.shown = None
        return handle

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradientHandle({self.held.name}, shape={self.held.size}, dtype={self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        _refuse_applied(func, args)
        known = _KNOWN.get(func)
        if known is not None and not _any_shown(args):
            result = known(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if any(isinstance(arg, (list, tuple)) and any(isinstance(a, GradientHandle) for a in arg) for arg in args):
            return _one_by_one(func, args, kwargs)
        return _on_real_gradients(func, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.held.runtime.gradients.fetch(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.held.runtime.gradients.fetch(self)


def _refuse_applied(func: Any, args: tuple[Any, ...]) -> None:
    """With updates inside backward there is no gradient any more that could be clipped, scaled or added to."""
    if func in (aten.detach.default, aten.alias.default):
        return
    for arg in args:
        for handle in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(handle, GradientHandle) and handle.held.runtime.eager:
                raise RuntimeError(
                    f"the gradient of {handle.held.name} has been used up by its update inside backward, as "
                    "Policy(update_in_backward=True) asks for: no clipping, no accumulation, "
                    "zero_grad(set_to_none=True). "
                    "Set update_in_backward=False, or get larger batches with Policy(micro_batch=...)"
                )


def _any_shown(args: tuple[Any, ...]) -> bool:
    handles = (
        a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else (arg,)) if isinstance(a, GradientHandle)
    )
    return any(handle.shown is not None for handle in handles)


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handle, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dims = args[2] if len(args) > 2 else kwargs.get("dim")
    if order != 2 or dims is not None or kwargs.get("keepdim"):
        return NotImplemented
    return torch.tensor(handle.held.runtime.gradients.norm(handle), dtype=torch.float32, device=handle.device)


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return [torch.linalg.vector_norm(tensor, order) for tensor in args[0]]


def _scale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handle, factor = args[0], args[1]
    if not isinstance(handle, GradientHandle) or isinstance(factor, GradientHandle):
        return NotImplemented
    if isinstance(factor, torch.Tensor) and factor.numel() != 1:
        return NotImplemented
    value = handle.held.runtime.gradients.scalar(factor)
    handle.held.runtime.gradients.current(handle).factor *= 1 / value if func in _DIVISIONS else value
    return handle


def _foreach_scale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    factors = args[1] if isinstance(args[1], (list, tuple)) else [args[1]] * len(args[0])
    for tensor, factor in zip(args[0], factors, strict=True):
        if func in _DIVISIONS:
            tensor.div_(factor)
        else:
            tensor.mul_(factor)
    return None


def _zero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handle = args[0].held.runtime.gradients.current(args[0])
    handle.zeroed, handle.factor = True, 1.0
    return handle


def _foreach_zero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for tensor in args[0]:
        tensor.zero_()
    return None


def _add(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """How autograd adds a further gradient to ``p.grad``."""
    handle, other = args[0], args[1]
    plain = (
        isinstance(handle, GradientHandle) and isinstance(other, torch.Tensor) and not isinstance(other, GradientHandle)
    )
    if not plain or kwargs.get("alpha", 1) != 1 or other.shape != handle.shape:
        return NotImplemented
    handle.held.runtime.gradients.add(handle, other)
    return handle


def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


_DIVISIONS = {aten.div_.Tensor, aten.div_.Scalar, aten._foreach_div_.Tensor, aten._foreach_div_.Scalar}
_KNOWN: dict[Any, Callable[..., Any]] = {
    aten.linalg_vector_norm.default: _norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.mul_.Tensor: _scale,
    aten.mul_.Scalar: _scale,
    aten.div_.Tensor: _scale,
    aten.div_.Scalar: _scale,
    aten._foreach_mul_.Tensor: _foreach_scale,
    aten._foreach_mul_.Scalar: _foreach_scale,
    aten._foreach_div_.Tensor: _foreach_scale,
    aten._foreach_div_.Scalar: _foreach_scale,
    aten.zero_.default: _zero,
    aten._foreach_zero_.default: _foreach_zero,
    aten.add_.Tensor: _add,
    aten.detach.default: _detach,
    aten.alias.default: _detach,
}


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A foreach operation on one tensor at a time, so that at most one real gradient is in memory."""
    count = next(len(arg) for arg in args if isinstance(arg, (list, tuple)))
    results: list[Any] = []
    for index in range(count):
        single = tuple([arg[index]] if isinstance(arg, (list, tuple)) and len(arg) == count else arg for arg in args)
        result = _on_real_gradients(func, single, kwargs)
        if result is not None:
            results += result
    return results or None


def _on_real_gradients(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fetch, operate, and store again what the operation wrote."""
    fetched: dict[int, tuple[GradientHandle, torch.Tensor]] = {}
    writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments]
    in_place = any(writes)
    views = any(
        returned.alias_info is not None and not returned.alias_info.is_write for returned in func._schema.returns
    )

    def real(value: Any) -> Any:
        if isinstance(value, GradientHandle) and (views or value.shown is not None):
            return value.held.runtime.gradients.show(value)
        if isinstance(value, GradientHandle):
            if id(value) not in fetched:
                tensor = value.held.runtime.gradients.fetch(value, summed=in_place)
                fetched[id(value)] = (value, tensor)
            return fetched[id(value)][1]
        if isinstance(value, (list, tuple)):
            return type(value)(real(item) for item in value)
        return value

    result = func(*real(args), **{name: real(value) for name, value in kwargs.items()})
    if not in_place:
        return result
    written = [arg for arg, write in zip(args, writes, strict=False) if write]
    for arg in written:
        for handle in arg if isinstance(arg, (list, tuple)) else [arg]:
            if isinstance(handle, GradientHandle) and id(handle) in fetched:
                handle.held.runtime.gradients.store(handle, fetched[id(handle)][1])
    return written[0] if len(written) == 1 and isinstance(written[0], torch.Tensor) else result
