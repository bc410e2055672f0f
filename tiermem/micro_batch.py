"""Layer-major batches: a function of a batch computes one slice of it at a time, in forward and again in backward.

batch      the leading dimension of the first tensor argument.
slice      at most ``size`` elements of the batch. Tensor arguments whose leading dimension is the batch are split;
           everything else is passed whole to every slice.
sum        a gradient summed over slices: in fp32, then rounded once to the parameter's dtype.

Forward runs the slices without autograd; only the arguments are saved. Backward runs each slice again, with the random
numbers of its forward, and differentiates it at once, so the working set is one slice's.

The slices' gradients are summed here, where they are made, and autograd sees one gradient per parameter. Let it see one
per slice, and each would cross the link to the host, into a gradient plane twice as wide; here they cost 4 bytes per
parameter of one layer, in fp32 on the device, and are rounded as often as those of the whole batch: once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tiermem.planes import Block

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def sums_bytes(modules: Sequence[nn.Module]) -> int:
    """Bytes that the sums of the largest of ``modules`` take."""
    return max((4 * sum(p.numel() for p in module.parameters() if p.requires_grad) for module in modules), default=0)


@dataclass(frozen=True)
class Splitter:
    """A function to run in slices.

    name: of the block, for errors. parameters: everything that needs a gradient and is not an argument.
    in_backward: a context around everything that backward does (the block's weights are held in it).
    """

    name: str
    function: Callable[..., Any]
    parameters: Sequence[nn.Parameter]
    size: int
    device: torch.device
    in_backward: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    split: Sequence[bool] | None = None
    """Which of the tensor arguments are split; ``None``: by their leading dimension."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)``, slice by slice.

        Errors: ``ValueError`` naming the argument or output that cannot be split or joined.
        """
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        lead = next((tensor for tensor in tensors if tensor.dim()), None)
        if lead is None or not lead.shape[0]:
            return self.function(*args, **kwargs)
        batch = int(lead.shape[0])
        split = [_is_split(t, lead, self) for t in tensors] if self.split is None else list(self.split)
        run = _Run(self, leaves, structure, split, [(s, min(s + self.size, batch)) for s in range(0, batch, self.size)])
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *self.parameters)):
            joined = _InSlices.apply(run, len(tensors), *tensors, *self.parameters)  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                joined = run.forward(tensors)
        return run.structured(joined, tensors)


def _is_split(tensor: torch.Tensor, lead: torch.Tensor, splitter: Splitter) -> bool:
    batch = lead.shape[0]
    if not tensor.dim() or tensor.shape[0] != batch:
        return False
    if batch > splitter.size and batch in lead.shape[1:] and tensor.shape != lead.shape:
        raise ValueError(
            f"{splitter.name}: the batch is {batch}, and so is another dimension of its input {tuple(lead.shape)}: "
            f"whether an argument of shape {tuple(tensor.shape)} is to be split cannot be told. "
            "Use another batch size or length, or no Policy(micro_batch=...)"
        )
    return True


def refuse_unsplittable(name: str, module: nn.Module) -> None:
    """Errors: ``ValueError`` naming what in ``module``, as it is now, computes over the whole batch."""
    for child_name, child in module.named_modules():
        where = f"{name}.{child_name}" if child_name else name
        if isinstance(child, _NormBase) and _uses_batch_statistics(child):
            raise ValueError(
                f"{where} ({type(child).__name__}) computes statistics of the whole batch, which "
                "Policy(micro_batch=...) would change: put it into eval mode, use another norm, or no micro_batch"
            )
        if getattr(child, "batch_first", True) is False:
            raise ValueError(
                f"{where} ({type(child).__name__}) has batch_first=False: its leading dimension is not the batch, "
                "which Policy(micro_batch=...) splits. Build it with batch_first=True, or use no micro_batch"
            )


def _uses_batch_statistics(norm: _NormBase) -> bool:
    if type(norm).__name__.startswith(("InstanceNorm", "LazyInstanceNorm")):
        return norm.training and bool(norm.track_running_stats)
    return norm.training or norm.running_mean is None


@dataclass(frozen=True)
class _Output:
    """What becomes of one leaf of the output. ``joined``: its index among the joined tensors; ``argument``: among the
    tensor arguments, returned as it came; else ``value``."""

    joined: int | None = None
    argument: int | None = None
    value: Any = None


@dataclass
class _Run:
    """One call: what forward leaves for backward."""

    splitter: Splitter
    leaves: list[Any]  # arguments; tensors are taken out
    structure: TreeSpec
    split: list[bool]  # of each tensor argument
    ranges: list[tuple[int, int]]
    outputs: list[_Output] = field(default_factory=list)
    output_structure: TreeSpec | None = None
    random: list[RandomState] = field(default_factory=list)
    autocast: AutocastState | None = None

    def __post_init__(self) -> None:
        self.leaves = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]

    def call(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """The leaves of the function's output for one slice's arguments."""
        remaining = iter(tensors)
        leaves = [next(remaining) if leaf is _TENSOR else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.structure)
        found, self.output_structure = tree_flatten(self.splitter.function(*args, **kwargs))
        return found

    def sliced(self, tensors: Sequence[torch.Tensor], start: int, stop: int) -> list[torch.Tensor]:
        if len(self.ranges) == 1:
            return list(tensors)
        return [t[start:stop] if split else t for t, split in zip(tensors, self.split, strict=True)]

    def forward(self, tensors: Sequence[torch.Tensor], *, for_backward: bool = False) -> list[torch.Tensor]:
        """The joined outputs."""
        device = self.splitter.device
        if for_backward:
            self.autocast = AutocastState.current(device.type)
        joined: list[torch.Tensor] = []
        for start, stop in self.ranges:
            if for_backward:
                self.random.append(RandomState.current(device))
            found = self.call(self.sliced(tensors, start, stop))
            if not self.outputs:
                self.outputs = self._classify(found, tensors, stop - start)
            self._join(found, joined, start, stop)
        return joined

    def _classify(self, found: list[Any], tensors: Sequence[torch.Tensor], count: int) -> list[_Output]:
        outputs: list[_Output] = []
        joined = 0
        for leaf in found:
            if not isinstance(leaf, torch.Tensor):
                if not isinstance(leaf, _PLAIN):
                    raise ValueError(
                        f"{self.splitter.name} returns a {type(leaf).__name__}, which Policy(micro_batch=...) cannot "
                        "join: return tensors, or tuples, lists and dicts of them"
                    )
                outputs.append(_Output(value=leaf))
                continue
            whole = [i for i, tensor in enumerate(tensors) if leaf is tensor]
            if whole:
                outputs.append(_Output(argument=whole[0]))
            elif leaf.dim() and leaf.shape[0] == count:
                outputs.append(_Output(joined=joined))
                joined += 1
            else:
                raise ValueError(
                    f"{self.splitter.name} returns a tensor of shape {tuple(leaf.shape)} for {count} elements of the "
                    "batch: what is not one value per element cannot be joined. Use no Policy(micro_batch=...)"
                )
        return outputs

    def _join(self, found: list[Any], joined: list[torch.Tensor], start: int, stop: int) -> None:
        batch = self.ranges[-1][1]
        for output, leaf in zip(self.outputs, found, strict=True):
            if output.joined is None:
                if output.argument is None and leaf != output.value:
                    raise ValueError(
                        f"{self.splitter.name} returns {output.value!r} for one slice of the batch and {leaf!r} for "
                        "another: Policy(micro_batch=...) cannot join them"
                    )
                continue
            if output.joined == len(joined):
                one = len(self.ranges) == 1
                joined.append(leaf if one else leaf.new_empty((batch, *leaf.shape[1:])))
            if len(self.ranges) > 1:
                if leaf.shape != (stop - start, *joined[output.joined].shape[1:]):
                    raise ValueError(
                        f"{self.splitter.name} returns a tensor of shape {tuple(leaf.shape)} for {stop - start} "
                        "elements of the batch, and another shape for others: they cannot be joined"
                    )
                joined[output.joined][start:stop] = leaf

    def structured(self, joined: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
        leaves = [
            joined[o.joined] if o.joined is not None else tensors[o.argument] if o.argument is not None else o.value
            for o in self.outputs
        ]
        assert self.output_structure is not None
        return tree_unflatten(leaves, self.output_structure)

    def backward(
        self, tensors: Sequence[torch.Tensor], needs: Sequence[bool], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Gradients of the tensor arguments and of the parameters. needs: which of the arguments want one."""
        parameters = [p for p in self.splitter.parameters if p.requires_grad]
        wholes = [
            torch.empty_like(t) if need and split and len(self.ranges) > 1 else None
            for t, need, split in zip(tensors, needs, self.split, strict=True)
        ]
        sums = [GradientSum() for _ in tensors]
        of_parameters = [GradientSum() for _ in parameters]
        with without_hooks(parameters):
            for index, (start, stop) in enumerate(self.ranges):
                found = self._differentiate(index, tensors, needs, gradients, parameters)
                for position, gradient in enumerate(found[: len(tensors)]):
                    whole = wholes[position]
                    if whole is not None:
                        part = whole[start:stop]
                        part.zero_() if gradient is None else part.copy_(gradient)
                    elif gradient is not None:
                        sums[position].add(gradient)
                for total, gradient in zip(of_parameters, found[len(tensors) :], strict=True):
                    if gradient is not None:
                        total.add(gradient)
                del found, gradient
        of_arguments = [w if w is not None else s.take(t.dtype) for w, s, t in zip(wholes, sums, tensors, strict=True)]
        by_parameter = dict(zip(parameters, of_parameters, strict=True))
        return [
            *of_arguments,
            *(by_parameter[p].take(p.dtype) if p in by_parameter else None for p in self.splitter.parameters),
        ]

    def _differentiate(
        self,
        index: int,
        tensors: Sequence[torch.Tensor],
        needs: Sequence[bool],
        gradients: Sequence[torch.Tensor | None],
        parameters: Sequence[nn.Parameter],
    ) -> list[torch.Tensor | None]:
        """One slice, run again: gradients of its arguments and of the parameters; ``None`` where there is none."""
        start, stop = self.ranges[index]
        inputs = [
            t.detach().requires_grad_(need) for t, need in zip(self.sliced(tensors, start, stop), needs, strict=True)
        ]
        assert self.autocast is not None
        with self.random[index].restored(), self.autocast.restored(), torch.enable_grad():
            found = self.call(inputs)
        results, wanted = [], []
        for output, leaf in zip(self.outputs, found, strict=True):
            gradient = gradients[output.joined] if output.joined is not None else None
            if gradient is not None and leaf.requires_grad:
                results.append(leaf)
                wanted.append(gradient if len(self.ranges) == 1 else gradient[start:stop])
        del found
        if not results:
            return [None] * (len(inputs) + len(parameters))
        if index == 0:
            _refuse_strangers(self.splitter.name, results, [*inputs, *parameters])
        targets = [t for t in inputs if t.requires_grad] + list(parameters)
        answers = iter(torch.autograd.grad(results, targets, wanted, allow_unused=True))
        return [next(answers) if t.requires_grad else None for t in (*inputs, *parameters)]


class _Marker:
    pass


_TENSOR = _Marker()


class _InSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, count: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors = inputs[:count]
        joined = run.forward(tensors, for_backward=True)
        ctx.run, ctx.count = run, count
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in joined if not (t.is_floating_point() or t.is_complex())))
        return tuple(joined)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        run: _Run = ctx.run
        with run.splitter.in_backward():
            found = run.backward(ctx.saved_tensors, ctx.needs_input_grad[2 : 2 + ctx.count], gradients)
        return (None, None, *found)


class GradientSum:
    """A gradient summed over slices: what is narrower than fp32 is summed in fp32. A single one stays as it is."""

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None
        self._own = False  # else the tensor may be shared with whoever made it

    def add(self, gradient: torch.Tensor) -> None:
        if self._total is None:
            self._total = gradient
            return
        if not self._own:
            wide = gradient.dtype if gradient.dtype in (torch.float64, torch.complex128) else torch.float32
            if gradient.is_complex() or self._total.dtype == wide:
                self._total = self._total + gradient
                self._own = True
                return
            self._total = self._total.to(wide)
            self._own = True
        self._total.add_(gradient)

    def take(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The sum, given up."""
        total, self._total = self._total, None
        return None if total is None else total.to(dtype)


@contextlib.contextmanager
def without_hooks(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Hooks that a user put on a parameter are for its whole gradient, which autograd sees later."""
    hooked = [(p, p._backward_hooks) for p in parameters if p._backward_hooks]
    for parameter, _ in hooked:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hooks in hooked:
            parameter._backward_hooks = hooks


@contextlib.contextmanager
def saving_nothing(blocks: Sequence[Block]) -> Iterator[None]:
    """A part of backward that reads the blocks' parameters, after which autograd holds no more of them than before."""
    before = [block.read_in_backward for block in blocks]
    try:
        yield
    finally:
        for block, read in zip(blocks, before, strict=True):
            block.read_in_backward = read


def _refuse_strangers(name: str, results: Sequence[torch.Tensor], known: Sequence[torch.Tensor]) -> None:
    """Errors: ``RuntimeError`` when a slice depends on a tensor that needs a gradient and is neither an argument nor a
    parameter: its gradient would be lost without a word."""
    own = {id(tensor) for tensor in known}
    waiting = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in own:
            raise RuntimeError(
                f"{name} computes with a tensor of shape {tuple(leaf.shape)} that needs a gradient and is neither its "
                "argument nor a parameter below it: Policy(micro_batch=...) would lose that gradient. Pass it as an "
                "argument"
            )
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


@dataclass(frozen=True)
class RandomState:
    """The random number generators that a forward draws from."""

    device: torch.device
    cpu: torch.Tensor
    accelerator: torch.Tensor | None

    @classmethod
    def current(cls, device: torch.device) -> RandomState:
        state = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(device, torch.get_rng_state(), state)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        before = RandomState.current(self.device)
        self._set()
        try:
            yield
        finally:
            before._set()

    def _set(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.get_device_module(self.device).set_rng_state(self.accelerator, self.device)


@dataclass(frozen=True)
class AutocastState:
    """What autocast was, for the CPU and for the device."""

    states: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool

    @classmethod
    def current(cls, device_type: str) -> AutocastState:
        kinds = dict.fromkeys(("cpu", device_type))
        return cls(
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
            torch.is_autocast_cache_enabled(),
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self.states:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cache))
            yield
