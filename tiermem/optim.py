"""The optimizers: ``torch.optim`` subclasses in full, whose updates of held parameters run in their model's runtime.

Parameters that no runtime holds are updated by torch's own code. Hyperparameters, param groups, closures, schedulers
and hooks are torch's. For held parameters ``state`` stays empty: moments and masters live in the tiers, and
``state_dict`` fetches them.

An optimizer is a formula of the kernels, the names that torch gives its moments, and the scalars of a step
(``_formula``, ``_moment_names``, ``_scalars``); all the rest is ``Offloaded``.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tiermem import moments
from tiermem.handles import GradientHandle
from tiermem.kernels.abi import (
    ADAGRAD,
    ADAM,
    ADAMW,
    AMSGRAD,
    AMSGRADW,
    LION,
    NON_NEGATIVE,
    SGD_MOMENTUM,
    SGD_NESTEROV,
)
from tiermem.kernels.abi import SGD as SGD_PLAIN
from tiermem.offload import mapped_tensor
from tiermem.planes import Held, held_of
from tiermem.runtime import Runtime
from tiermem.update import Hyperparameters

Group = dict[str, Any]


class Offloaded(torch.optim.Optimizer):
    """What all optimizers for offloaded models share: stepping, and states in torch's format.

    ``step()`` hands the updates of offloaded parameters to the background and returns: the next forward waits, block
    by block, for what it needs. ``state_dict()`` has torch's format and, for parameters computed in bf16, ``master``:
    the fp32 master weights. It loads into torch's optimizer and the other way round.

    Errors: ``ValueError`` for ``capturable`` or ``differentiable`` with offloaded parameters.
    """

    updates_held_parameters = True
    _torch_step: Callable[..., Any]
    """The step of parameters that no runtime holds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._runtimes: list[Runtime] = []
        super().__init__(*args, **kwargs)

    # What makes an optimizer.

    def _formula(self, group: Group) -> int:
        """The kernels' formula."""
        raise NotImplementedError

    def _moment_names(self, group: Group) -> tuple[str, ...]:
        """torch's names of the formula's moments."""
        raise NotImplementedError

    def _scalars(self, group: Group, steps: int) -> dict[str, float]:
        """Hyperparameters of update number ``steps``, in double precision: those that the formula reads."""
        raise NotImplementedError

    # Stepping.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. From now on this optimizer is asked for the hyperparameters of updates that begin inside
        backward."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            held = held_of(parameter)
            if held is not None:
                held.optimizer = weakref.ref(self)
                moments.reserve(held.runtime, len(self._moment_names(group)))

    def hyperparameters_of(self, held: Held, steps: int) -> Hyperparameters:
        """See ``tiermem.update.Updater``."""
        group = next(group for group in self.param_groups if any(p is held.parameter for p in group["params"]))
        return self._hyperparameters(group, steps, 1.0)

    def _hyperparameters(self, group: Group, steps: int, factor: float) -> Hyperparameters:
        return Hyperparameters(
            formula=self._formula(group),
            step=steps,
            grad_scale=-factor if group.get("maximize") else factor,
            **self._scalars(group, steps),
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, as in torch: updates every parameter that has a gradient.

        Errors: whatever went wrong in the background since the last call (``OSError`` with path, offset and bytes for
        a failed transfer).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_open()
        held_groups: dict[Runtime, list[tuple[Held, GradientHandle, Any]]] = {}
        plain: list[torch.Tensor] = []
        for group in self.param_groups:
            self._check_supported(group)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                held = held_of(parameter)
                if held is None:
                    plain.append(parameter)
                    continue
                if parameter in self.state:
                    self._import(held, self.state.pop(parameter), group)
                held_groups.setdefault(held.runtime, []).append((held, _handle(held), group))
        if self._skips(held_groups, plain):
            return loss
        for runtime, entries in held_groups.items():
            if runtime not in self._runtimes:
                self._runtimes.append(runtime)
            moments.reserve(runtime, max(len(self._moment_names(group)) for _, _, group in entries))
            runtime.step(entries, _Known(self._hyperparameters))
        if plain:
            # torch wraps a subclass's step with its hooks; the parent's own must not run them again.
            step = type(self)._torch_step
            getattr(step, "__wrapped__", step)(self) if getattr(step, "hooked", False) else step(self)
        return loss

    @staticmethod
    def _skips(held_groups: dict[Runtime, list[tuple[Held, GradientHandle, Any]]], plain: list[torch.Tensor]) -> bool:
        """A step is one decision: with a gradient that is not finite, nothing of it happens (unless the policy says
        so)."""
        culprits = [runtime.nonfinite(handle for _, handle, _ in entries) for runtime, entries in held_groups.items()]
        culprit = next((held.name for held in culprits if held is not None), None)
        skipping = [runtime for runtime in held_groups if runtime.policy.skip_nonfinite]
        if culprit is None and skipping and not all(bool(p.grad.isfinite().all()) for p in plain if p.grad is not None):
            culprit = "a parameter that is not offloaded"
        if culprit is None:
            return False
        for runtime in held_groups:
            runtime.skip(culprit)
        return True

    def _init_group(self, group: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """torch's code sees only the parameters that no runtime holds."""
        plain = [parameter for parameter in group["params"] if held_of(parameter) is None]
        return super()._init_group({**group, "params": plain}, *args, **kwargs)  # type: ignore[misc]

    def _check_open(self) -> None:
        for runtime in self._runtimes:
            if runtime.closed:
                raise RuntimeError(
                    "the model was closed with tiermem.close(), and with it the states of this optimizer: build a "
                    "new one, and load the "
                    "state_dict() taken before close() if training goes on"
                )

    @staticmethod
    def _check_supported(group: dict[str, Any]) -> None:
        for flag in ("capturable", "differentiable"):
            if group.get(flag) and any(held_of(parameter) is not None for parameter in group["params"]):
                raise ValueError(f"{flag}=True is not supported for offloaded parameters")

    def state_dict(self) -> dict[str, Any]:
        """torch's format, with the real states. Tensors of offloaded parameters are on the CPU: in memory, or in
        unnamed mapped files where the model has a DISK tier, so that a state larger than memory can be saved."""
        self._check_open()
        own = self.state
        merged: defaultdict[torch.Tensor, Any] = defaultdict(dict, own)
        for group in self.param_groups:
            for parameter in group["params"]:
                held = held_of(parameter)
                if held is not None and held.updated:
                    merged[parameter] = self._export(held, group)
        self.state = merged
        try:
            return super().state_dict()
        finally:
            self.state = own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch's format; ``master``, where present, sets the masters and with them the weights.

        Errors: ``ValueError`` as torch's, and for a state whose shape is not the parameter's.
        """
        groups = state_dict["param_groups"]
        ids = [identifier for group in groups for identifier in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        taken: list[tuple[Held, dict[str, Any] | None]] = []
        rest = dict(state_dict["state"])
        if len(ids) == len(parameters):
            for identifier, parameter in zip(ids, parameters, strict=True):
                held = held_of(parameter)
                if held is not None:
                    taken.append((held, rest.pop(identifier, None)))
        for held, state in taken:
            self._check_state(held, state or {})
        super().load_state_dict({**state_dict, "state": rest})
        group_of = {id(parameter): group for group in self.param_groups for parameter in group["params"]}
        for held, state in taken:
            if state:
                self._import(held, state, group_of[id(held.parameter)])
            elif held.updated:
                held.runtime.values.write_moments(held, (), ())
                held.steps, held.updated = 0, False

    @staticmethod
    def _check_state(held: Held, state: dict[str, Any]) -> None:
        for name, value in state.items():
            if name != "step" and isinstance(value, torch.Tensor) and tuple(value.shape) != held.size:
                raise ValueError(
                    f"the state {name!r} of {held.name} has shape {tuple(value.shape)}, the parameter {held.size}"
                )

    def _import(self, held: Held, state: dict[str, Any], group: Group) -> None:
        self._check_state(held, state)
        runtime, names = held.runtime, self._moment_names(group)
        moments.reserve(runtime, len(names))
        runtime.gathering.settle(held.block)
        runtime.make_trainable(held)
        runtime.values.write_moments(held, [state.get(name) for name in names], NON_NEGATIVE[self._formula(group)])
        if "master" in state:
            runtime.values.write_master(held, state["master"])
        # torch's SGD counts no steps: all that matters there is whether the first is over.
        held.steps = int(state["step"]) if "step" in state else 1
        held.updated = True
        if runtime not in self._runtimes:
            self._runtimes.append(runtime)

    def _export(self, held: Held, group: Group) -> dict[str, Any]:
        runtime = held.runtime
        runtime.check()
        values = runtime.values
        state: dict[str, Any] = {"step": torch.tensor(float(held.steps), dtype=torch.float32)}
        kinds = NON_NEGATIVE[self._formula(group)]
        for index, (name, non_negative) in enumerate(zip(self._moment_names(group), kinds, strict=True)):
            target = mapped_tensor(runtime, held, torch.float32)
            state[name] = values.read_moment(held, index, target, non_negative=non_negative)
        if held.split:
            state["master"] = values.read_master(held, mapped_tensor(runtime, held, torch.float32))
        return state


class Adam(Offloaded, torch.optim.Adam):
    """``torch.optim.Adam`` (Kingma and Ba, https://arxiv.org/abs/1412.6980) with the same arguments, for models
    offloaded with tiermem; the same bits as with ``fused=True``. See ``Offloaded``.

    ``amsgrad`` keeps a third moment, for which room is made when it is first asked for.
    """

    _torch_step = torch.optim.Adam.step

    def _formula(self, group: Group) -> int:
        if group["amsgrad"]:
            return AMSGRADW if group.get("decoupled_weight_decay") else AMSGRAD
        return ADAMW if group.get("decoupled_weight_decay") else ADAM

    def _moment_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if group["amsgrad"] else 2]

    def _scalars(self, group: Group, steps: int) -> dict[str, float]:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        return {
            "decay": 1 - lr * decay,
            "weight_decay": decay,
            "one_minus_beta1": 1 - beta1,
            "beta2": beta2,
            "one_minus_beta2": 1 - beta2,
            "step_size": lr / (1 - beta1**steps),
            "bias_correction2_sqrt": math.sqrt(1 - beta2**steps),
            "eps": float(group["eps"]),
        }


class AdamW(Adam, torch.optim.AdamW):
    """``torch.optim.AdamW`` (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101) for models offloaded with
    tiermem. See ``tiermem.Adam``."""


class SGD(Offloaded, torch.optim.SGD):
    """``torch.optim.SGD`` with the same arguments, for models offloaded with tiermem; the same bits as torch's.
    See ``Offloaded``.

    Without momentum there is no state but the masters. ``state_dict()`` also counts steps (``step``), which torch
    ignores.
    """

    _torch_step = torch.optim.SGD.step

    def _formula(self, group: Group) -> int:
        if not group["momentum"]:
            return SGD_PLAIN
        return SGD_NESTEROV if group["nesterov"] else SGD_MOMENTUM

    def _moment_names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def _scalars(self, group: Group, steps: int) -> dict[str, float]:
        momentum = float(group["momentum"])
        first = steps == 1  # the buffer is the gradient
        return {
            "weight_decay": float(group["weight_decay"]),
            "beta1": 0.0 if first else momentum,
            "one_minus_beta1": 1.0 if first else 1 - float(group["dampening"]),
            "beta2": momentum,
            "step_size": float(group["lr"]),
        }


class Adagrad(Offloaded, torch.optim.Adagrad):
    """``torch.optim.Adagrad`` (Duchi, Hazan and Singer, https://jmlr.org/papers/v12/duchi11a.html) with the same
    arguments, for models offloaded with tiermem. See ``Offloaded``."""

    _torch_step = torch.optim.Adagrad.step

    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        # torch would make the sums of all parameters here, in memory: it is shown one that is not there, and makes
        # those of parameters that no runtime holds when they are first stepped.
        groups = list(params)
        super().__init__(groups and [torch.zeros(0)], *args, **kwargs)
        self.param_groups.clear()
        self.state.clear()
        for group in groups if isinstance(groups[0], dict) else [{"params": groups}]:
            self.add_param_group(group)

    def _formula(self, group: Group) -> int:
        return ADAGRAD

    def _moment_names(self, group: Group) -> tuple[str, ...]:
        return ("sum",)

    def _scalars(self, group: Group, steps: int) -> dict[str, float]:
        return {
            "weight_decay": float(group["weight_decay"]),
            "step_size": float(group["lr"]) / (1 + (steps - 1) * float(group["lr_decay"])),
            "eps": float(group["eps"]),
            "initial_sum": float(group["initial_accumulator_value"]) if steps == 1 else 0.0,
        }


class _Lion(torch.optim.Optimizer):
    """Lion for parameters that no runtime holds: the formula of csrc/formulas.h in torch's operations."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not lr >= 0:
            raise ValueError(f"Invalid learning rate: {lr}")
        for index, beta in enumerate(betas):
            if not 0 <= beta < 1:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if not weight_decay >= 0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            lr = float(group["lr"])
            for parameter in group["params"]:
                if parameter.grad is None or held_of(parameter) is not None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                state["step"] += 1
                mean = state["exp_avg"]
                gradient = -parameter.grad if group["maximize"] else parameter.grad
                direction = (mean * beta1).add_(gradient, alpha=1 - beta1)
                parameter.mul_(1 - lr * group["weight_decay"]).add_(direction.sign_(), alpha=-lr)
                mean.mul_(beta2).add_(gradient, alpha=1 - beta2)
        return loss


class Lion(Offloaded, _Lion):
    """Lion (Chen et al., "Symbolic discovery of optimization algorithms", https://arxiv.org/abs/2302.06675, algorithm
    2), for models offloaded with tiermem: one moment, and steps that are signs. See ``Offloaded``.

    lr: a third to a tenth of AdamW's. weight_decay: as many times more, as it is multiplied by lr.
    """

    _torch_step = _Lion.step

    def _formula(self, group: Group) -> int:
        return LION

    def _moment_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg",)

    def _scalars(self, group: Group, steps: int) -> dict[str, float]:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        lr = float(group["lr"])
        return {
            "decay": 1 - lr * float(group["weight_decay"]),
            "beta1": beta1,
            "one_minus_beta1": 1 - beta1,
            "beta2": beta2,
            "one_minus_beta2": 1 - beta2,
            "step_size": lr,
        }


def _handle(held: Held) -> GradientHandle:
    """The handle in ``p.grad``; a gradient that the user put there is taken in."""
    gradient = held.parameter.grad
    if isinstance(gradient, GradientHandle) and gradient is held.handle:
        held.runtime.gradients.take_back(gradient)
        return gradient
    if gradient is None or isinstance(gradient, GradientHandle):
        raise RuntimeError(
            f"the gradient of {held.name} was replaced by a later backward: call backward again before step"
        )
    held.runtime.make_trainable(held)
    held.handle = GradientHandle(held)
    held.runtime.gradients.store(held.handle, gradient)
    held.parameter.grad = held.handle
    return held.handle


class _Known:
    """Hyperparameters of a step, computed once for all parameters that share them."""

    def __init__(self, compute: Callable[[Group, int, float], Hyperparameters]) -> None:
        self._compute = compute
        self._known: dict[tuple[int, int, float], Hyperparameters] = {}

    def __call__(self, held: Held, handle: GradientHandle, group: Group) -> Hyperparameters:
        key = (id(group), held.steps, handle.factor)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._compute(group, held.steps + 1, handle.factor)
        return known
