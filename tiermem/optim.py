"""The optimizers: ``torch.optim`` subclasses in full, whose updates of held parameters run in their model's runtime.

Parameters that no runtime holds are updated by torch's own code. Hyperparameters, param groups, closures, schedulers
and hooks are torch's. For held parameters ``state`` stays empty: moments and masters live in the tiers, and
``state_dict`` fetches them.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from tiermem.gradients import GradientHandle
from tiermem.kernels.abi import ADAM, ADAMW
from tiermem.offload import mapped_tensor
from tiermem.planes import Held, held_of
from tiermem.runtime import Runtime
from tiermem.update import Hyperparameters


class Adam(torch.optim.Adam):
    """``torch.optim.Adam`` (Kingma and Ba, https://arxiv.org/abs/1412.6980) with the same arguments, for models
    offloaded with tiermem.

    ``step()`` hands the updates of offloaded parameters to the background and returns: the next forward waits, block
    by block, for what it needs. ``state_dict()`` has torch's format (``step``, ``exp_avg``, ``exp_avg_sq``) and, for
    parameters computed in bf16, ``master``: the fp32 master weights. It loads into torch's optimizer and the other
    way round.

    Errors: ``ValueError`` for ``amsgrad``, ``capturable`` or ``differentiable`` with offloaded parameters.
    """

    updates_held_parameters = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._runtimes: list[Runtime] = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. From now on this optimizer is asked for the hyperparameters of updates that begin inside
        backward."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            held = held_of(parameter)
            if held is not None:
                held.optimizer = weakref.ref(self)

    def hyperparameters_of(self, held: Held, steps: int) -> Hyperparameters:
        """See ``tiermem.update.Updater``."""
        group = next(group for group in self.param_groups if any(p is held.parameter for p in group["params"]))
        return _hyperparameters(group, self._formula(group), steps, 1.0)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
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
                    self._import(held, self.state.pop(parameter))
                held_groups.setdefault(held.runtime, []).append((held, _handle(held), group))
        if self._skips(held_groups, plain):
            return loss
        for runtime, entries in held_groups.items():
            if runtime not in self._runtimes:
                self._runtimes.append(runtime)
            runtime.step(entries, _Scalars(self._formula))
        if plain:
            # torch wraps a subclass's step with its hooks; the parent's own must not run them again.
            step = torch.optim.Adam.step
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

    def _formula(self, group: dict[str, Any]) -> int:
        return ADAMW if group.get("decoupled_weight_decay") else ADAM

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
        for flag in ("amsgrad", "capturable", "differentiable"):
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
                    merged[parameter] = _export(held)
        self.state = merged
        try:
            return super().state_dict()
        finally:
            self.state = own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
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
        for held, state in taken:
            if state:
                self._import(held, state)
            elif held.updated:
                zeros = torch.zeros(held.size)
                held.runtime.values.write_moments(held, zeros, zeros)
                held.steps, held.updated = 0, False

    @staticmethod
    def _check_state(held: Held, state: dict[str, Any]) -> None:
        for name in ("exp_avg", "exp_avg_sq", "master"):
            if name in state and tuple(state[name].shape) != held.size:
                raise ValueError(
                    f"the state {name!r} of {held.name} has shape {tuple(state[name].shape)}, the parameter {held.size}"
                )

    def _import(self, held: Held, state: dict[str, Any]) -> None:
        self._check_state(held, state)
        runtime = held.runtime
        runtime.gathering.settle(held.block)
        runtime.make_trainable(held)
        runtime.values.write_moments(held, state["exp_avg"], state["exp_avg_sq"])
        if "master" in state:
            runtime.values.write_master(held, state["master"])
        held.steps = int(state["step"])
        held.updated = True
        if runtime not in self._runtimes:
            self._runtimes.append(runtime)


class AdamW(Adam, torch.optim.AdamW):
    """``torch.optim.AdamW`` (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101) for models offloaded with
    tiermem. See ``tiermem.Adam``."""


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


class _Scalars:
    """Hyperparameters of a step, computed in double precision once for all parameters that share them."""

    def __init__(self, formula: Callable[[dict[str, Any]], int]) -> None:
        self._formula = formula
        self._known: dict[tuple[int, int, float], Hyperparameters] = {}

    def __call__(self, held: Held, handle: GradientHandle, group: dict[str, Any]) -> Hyperparameters:
        key = (id(group), held.steps, handle.factor)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _hyperparameters(group, self._formula(group), held.steps + 1, handle.factor)
        return known


def _hyperparameters(group: dict[str, Any], formula: int, steps: int, factor: float) -> Hyperparameters:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    return Hyperparameters(
        formula=formula,
        maximize=bool(group["maximize"]),
        grad_scale=factor,
        decay=1 - lr * decay,
        weight_decay=decay,
        one_minus_beta1=1 - beta1,
        beta2=beta2,
        one_minus_beta2=1 - beta2,
        step_size=lr / (1 - beta1**steps),
        bias_correction2_sqrt=math.sqrt(1 - beta2**steps),
        eps=float(group["eps"]),
    )


def _export(held: Held) -> dict[str, Any]:
    runtime = held.runtime
    runtime.check()
    values = runtime.values
    state: dict[str, Any] = {"step": torch.tensor(float(held.steps), dtype=torch.float32)}
    state["exp_avg"] = values.read_moment(held, "exp_avg", mapped_tensor(runtime, held, torch.float32))
    state["exp_avg_sq"] = values.read_moment(held, "exp_avg_sq", mapped_tensor(runtime, held, torch.float32))
    if held.split:
        state["master"] = values.read_master(held, mapped_tensor(runtime, held, torch.float32))
    return state
