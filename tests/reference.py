"""Plain PyTorch beside tiermem: one user's script, run by either.

A *script* is a user's whole program, ``script(lib) -> None``: it builds a model, offloads it, makes an optimizer and
trains. ``lib`` is `Plain` (torch alone: the reference) or `Tiered` (tiermem in one `Placement`), so that both sides run
the same lines. What the script leaves behind is an `Outcome`, and outcomes are compared.

For bf16 parameters the reference keeps an fp32 master of each: the gradient of every backward is added up in fp32,
clipping acts on those sums, AdamW works on the masters, and the weights are the masters rounded to bf16, to nearest
with ties away from zero.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

RTOL = 1e-5
ATOL = 1e-6

EPS = 1e-6
"""Of optimizers that are given none. With torch's 1e-8, Adam makes whole steps of gradients that are next to nothing,
and so of their rounding: plain torch then disagrees with itself by more than the tolerance when one bit differs."""

Script = Callable[["Plain | Tiered"], None]
Module = TypeVar("Module", bound=nn.Module)


@dataclass
class Outcome:
    """Everything a script leaves behind, by the parameter's name ("<number of the model>.<name>")."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    masters: dict[str, Tensor] = field(default_factory=dict)  # fp32; only of trained bf16 parameters
    exp_avg: dict[str, Tensor] = field(default_factory=dict)
    exp_avg_sq: dict[str, Tensor] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    records: dict[str, list[Tensor]] = field(default_factory=dict)  # what the script noted: losses, norms, outputs

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for plane in ("weights", "masters", "exp_avg", "exp_avg_sq"):
            for name, tensor in getattr(self, plane).items():
                yield f"{plane} {name}", tensor
        for name, count in self.steps.items():
            yield f"steps {name}", torch.tensor(count)
        for name, values in self.records.items():
            for number, value in enumerate(values):
                yield f"{name}[{number}]", value


def assert_close(subject: Outcome, reference: Outcome, *, equal_nan: bool = False) -> None:
    """Every weight, master, moment, step count and noted value agrees with the reference's to fp32 rounding.

    A weight whose master is split is a function of it, and checked exactly as that; two masters that agree may lie on
    different sides of the middle between two bf16 numbers, so such weights are not compared besides.
    """

    def close(a: Tensor, b: Tensor) -> bool:
        return torch.allclose(a.double(), b.double(), rtol=RTOL, atol=ATOL, equal_nan=equal_nan)

    for name, master in subject.masters.items():
        weight, expected = subject.weights[name], round_to_bf16(master)
        assert torch.equal(weight.isnan(), expected.isnan()), f"{name}: NaN is not where it is in its master"
        same = (weight == expected) | weight.isnan()
        assert same.all(), f"{name} is not its rounded master in {int((~same).sum())} elements"
    sides = []
    for outcome in (subject, reference):
        free = {name: weight for name, weight in outcome.weights.items() if name not in subject.masters}
        sides.append(dataclasses.replace(outcome, weights=free))
    _compare(*sides, close)


def assert_same_bits(subject: Outcome, reference: Outcome) -> None:
    """Every weight, master, moment, step count and noted value is the other's, bit for bit."""
    _compare(subject, reference, same_bits)


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def _compare(subject: Outcome, reference: Outcome, agree: Callable[[Tensor, Tensor], bool]) -> None:
    got, want = dict(subject.tensors()), dict(reference.tensors())
    assert got.keys() == want.keys(), f"only one side has {sorted(got.keys() ^ want.keys())}"
    wrong = []
    for name, expected in want.items():
        value = got[name]
        assert value.shape == expected.shape and value.dtype == expected.dtype, (
            f"{name}: {tuple(value.shape)} {value.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
        )
        if not agree(value, expected):
            difference = (value.double() - expected.double()).abs()
            wrong.append(f"{name} differs in {int((difference != 0).sum())} of {difference.numel()} elements, "
                         f"at most by {difference.max().item():.3g}")  # fmt: skip
    assert not wrong, "; ".join(wrong[:6]) + (f"; and {len(wrong) - 6} more" if len(wrong) > 6 else "")


def round_to_bf16(master: Tensor) -> Tensor:
    """`master` in bf16, rounded to nearest, ties away from zero; NaN stays NaN."""
    bits = (master.contiguous().view(torch.int32) + 0x8000) & ~0xFFFF
    return torch.where(master.isnan(), master, bits.view(torch.float32)).bfloat16()  # exact: the low half is zero


class _Masters:
    """Mixed into a torch optimizer: bf16 parameters are trained through fp32 masters, fp32 ones as they are."""

    def __init__(self, parameters: Any, lib: Plain, **hyper: Any) -> None:
        self.lib = lib
        super().__init__(parameters, **hyper)

    def add_param_group(self, group: dict[str, Any]) -> None:
        group = dict(group)
        parameters = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        group["params"] = [self._master(p) for p in parameters]
        super().add_param_group(group)  # type: ignore[misc]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        others = self.lib.next_roundings()
        trained = [p for group in self.param_groups for p in group["params"]]  # type: ignore[attr-defined]
        if self.lib.skip_nonfinite and not all(p.grad.isfinite().all() for p in trained if p.grad is not None):
            return loss
        super().step()  # type: ignore[misc]
        with torch.no_grad():
            for parameter, master in self.lib.masters.items():
                weight = round_to_bf16(master)
                parameter.copy_(_adopted(weight, master, others[parameter]) if parameter in others else weight)
        return loss

    def _master(self, parameter: Tensor) -> Tensor:
        if parameter.dtype != torch.bfloat16:
            return parameter
        masters = self.lib.masters
        if parameter not in masters:
            masters[parameter] = parameter.detach().float().requires_grad_(True)
            trainable = parameter.requires_grad
            parameter.requires_grad_(True)  # a hook can be registered on nothing else
            parameter.register_post_accumulate_grad_hook(self._collect)
            parameter.requires_grad_(trainable)
        return masters[parameter]

    def _collect(self, parameter: Tensor) -> None:
        master = self.lib.masters[parameter]
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad + gradient
        parameter.grad = None


def _adopted(weight: Tensor, master: Tensor, other: Tensor) -> Tensor:
    """`other` where it is the other neighbour of a master that lies, within the tolerance, in the middle of two."""
    middle = (weight.double() + other.double()) / 2
    undecided = (master.double() - middle).abs() <= ATOL + RTOL * master.double().abs()
    return torch.where(undecided, other, weight)


class MasterAdamW(_Masters, torch.optim.AdamW):
    pass


class MasterAdam(_Masters, torch.optim.Adam):
    pass


class _Script:
    """What `Plain` and `Tiered` share: noting values, and the data."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.records: dict[str, list[Tensor]] = {}
        self.generator = torch.Generator().manual_seed(2024)

    def note(self, name: str, value: Tensor | float) -> None:
        """Keep `value`; both sides must note the same."""
        value = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value)
        self.records.setdefault(name, []).append(value)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def integers(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=self.generator)


class Plain(_Script):
    """torch alone."""

    is_reference = True

    def __init__(self, *, skip_nonfinite: bool = False, roundings: Sequence[dict[str, Tensor]] | None = None) -> None:
        super().__init__()
        self.masters: dict[Tensor, Tensor] = {}
        self.skip_nonfinite = skip_nonfinite
        self._roundings = None if roundings is None else iter(roundings)

    def next_roundings(self) -> dict[Tensor, Tensor]:
        """The bf16 weights of the other side after the step that begins here, if they are to be followed."""
        if self._roundings is None:
            return {}
        step = next(self._roundings)
        return {parameter: step[name] for parameter, name in _names(self.models).items() if name in step}

    def offload(self, module: Module) -> Module:
        self.models.append(module)
        return module

    def AdamW(self, parameters: Any, **hyper: Any) -> torch.optim.Optimizer:
        return self._optimizer(MasterAdamW, torch.optim.AdamW, parameters, hyper)

    def Adam(self, parameters: Any, **hyper: Any) -> torch.optim.Optimizer:
        return self._optimizer(MasterAdam, torch.optim.Adam, parameters, hyper)

    def trained(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """The tensors whose ``.grad`` is the gradient of `parameters`."""
        return [self.masters.get(p, p) for p in parameters]

    def zero_grad(self, module: nn.Module, set_to_none: bool = True) -> None:
        """``module.zero_grad()``."""
        module.zero_grad(set_to_none)
        for parameter in module.parameters():
            master = self.masters.get(parameter)
            if master is not None and master.grad is not None:
                master.grad = None if set_to_none else torch.zeros_like(master)

    @contextlib.contextmanager
    def gather(self, what: nn.Module | Tensor | Iterable[Tensor], write: bool = False) -> Iterator[None]:
        """The weights can be read anyway; what was written becomes the master too."""
        yield
        if write:
            self.weights_changed(_parameters_of(what))

    def weights_changed(self, parameters: Iterable[Tensor]) -> None:
        """`parameters` were written from outside: where a weight is another than before, it is the master."""
        for parameter in parameters:
            master = self.masters.get(parameter)
            if master is not None:
                same = round_to_bf16(master.detach()) == parameter.detach()
                master.data.copy_(torch.where(same, master.detach(), parameter.detach().float()))

    def synchronize(self, module: nn.Module) -> None:
        pass

    def outcome(self) -> Outcome:
        result = Outcome(records=self.records)
        names = _names(self.models)
        of_master = {master: parameter for parameter, master in self.masters.items()}
        for parameter, name in names.items():
            result.weights[name] = parameter.detach().clone()
        for optimizer in self.optimizers:
            for trained, state in optimizer.state.items():
                parameter = of_master.get(trained, trained)
                name = names[parameter]
                result.exp_avg[name] = state["exp_avg"].clone()
                result.exp_avg_sq[name] = state["exp_avg_sq"].clone()
                result.steps[name] = float(state["step"])
                if trained is not parameter:
                    result.masters[name] = trained.detach().clone()
        return result

    def close(self) -> None:
        pass

    def _optimizer(self, with_masters: type, plain: type, parameters: Any, hyper: dict[str, Any]) -> Any:
        split = any(p.dtype == torch.bfloat16 for model in self.models for p in model.parameters())
        if split or self.skip_nonfinite:
            built = with_masters(parameters, self, **{"eps": EPS} | hyper)
        else:
            built = plain(parameters, **{"eps": EPS} | hyper)
        self.optimizers.append(built)
        return built


@dataclass(frozen=True)
class Placement:
    """Where bytes rest, and what moves and updates them."""

    weights: str = "auto"
    states: str = "auto"
    chunk_numel: int | None = None
    engine: str = "auto"
    kernels: str = "auto"
    threads: int | None = None
    tight: bool = False
    """The least device budget that the model is accepted with, so that blocks take each other's slots all the time."""

    def __str__(self) -> str:
        chunk = "default" if self.chunk_numel is None else str(self.chunk_numel)
        tight = "-tight" if self.tight else ""
        return f"{self.weights}-{self.states}-{chunk}-{self.engine}-{self.kernels}-{self.threads}{tight}"


def every_placement() -> list[Placement]:
    """The full product; the engine varies only where something is on disk."""
    found = []
    for weights, states, chunk, kernels, threads in itertools.product(
        ("device", "host", "disk"), ("host", "disk"), (4096, None), ("native", "numba"), (1, 2)
    ):
        for engine in ("threads", "aiofiles") if "disk" in (weights, states) else ("auto",):
            found.append(Placement(weights, states, chunk, engine, kernels, threads))
    return found


# One of each kind: what differs most from its neighbours. Most parity tests run in these four.
SPREAD = (
    Placement("device", "host", None, "auto", "auto", 2),
    Placement("host", "host", 4096, "auto", "numba", 1),
    Placement("disk", "disk", 4096, "threads", "auto", 2, tight=True),
    Placement("host", "disk", None, "aiofiles", "auto", 1),
)
ON_DISK = SPREAD[2]


class Tiered(_Script):
    """tiermem in one placement."""

    is_reference = False

    def __init__(
        self,
        placement: Placement,
        directory: Path,
        *,
        memory: dict[str, Any] | None = None,
        policy: dict[str, Any] | None = None,
        roundings: list[dict[str, Tensor]] | None = None,
    ) -> None:
        super().__init__()
        import tiermem

        self._roundings = roundings

        self.tiermem = tiermem
        self.placement = placement
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._tight = placement.tight and "device" not in (memory or {})
        self._memory = {"device": "64MiB", "host": "256MiB", "disk": directory} | (memory or {})
        self._policy = {
            "weights": placement.weights,
            "states": placement.states,
            "chunk_numel": placement.chunk_numel,
            "io": placement.engine,
            "kernels": placement.kernels,
            "threads": placement.threads,
        } | (policy or {})

    def memory(self) -> Any:
        return self.tiermem.Memory(**self._memory)

    def policy(self) -> Any:
        return self.tiermem.Policy(**self._policy)

    def offload(self, module: Module) -> Module:
        if self._tight:
            self._memory["device"] = max((p.numel() * p.element_size() for p in module.parameters()), default=0)
        while True:
            try:
                offloaded = self.tiermem.offload(module, memory=self.memory(), policy=self.policy(), device="cpu")
                break
            except ValueError as error:
                if not self._tight or "device memory" not in str(error):
                    raise
                self._memory["device"] += self._memory["device"] // 4 + 4096
        assert offloaded is module
        self.models.append(module)
        return module

    def AdamW(self, parameters: Any, **hyper: Any) -> torch.optim.Optimizer:
        return self._optimizer(self.tiermem.AdamW(parameters, **{"eps": EPS} | hyper))

    def Adam(self, parameters: Any, **hyper: Any) -> torch.optim.Optimizer:
        return self._optimizer(self.tiermem.Adam(parameters, **{"eps": EPS} | hyper))

    def _optimizer(self, built: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self.optimizers.append(built)
        if self._roundings is not None:
            built.register_step_post_hook(self._keep_roundings)
        return built

    def _keep_roundings(self, *_: Any) -> None:
        kept = {}
        for model in self.models:
            with self.tiermem.gather(model):
                kept |= {p: p.detach().clone() for p in model.parameters() if p.dtype == torch.bfloat16}
        names = _names(self.models)
        self._roundings.append({names[parameter]: weight for parameter, weight in kept.items()})

    def trained(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        return list(parameters)

    def zero_grad(self, module: nn.Module, set_to_none: bool = True) -> None:
        module.zero_grad(set_to_none)

    def gather(self, what: nn.Module | Tensor | Iterable[Tensor], write: bool = False) -> Any:
        return self.tiermem.gather(what, write=write)

    def weights_changed(self, parameters: Iterable[Tensor]) -> None:
        pass

    def synchronize(self, module: nn.Module) -> None:
        self.tiermem.synchronize(module)

    def outcome(self) -> Outcome:
        result = Outcome(records=self.records)
        names = _names(self.models)
        for optimizer in self.optimizers:
            saved = optimizer.state_dict()["state"]
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for number, state in saved.items():
                name = names[parameters[number]]
                result.exp_avg[name] = state["exp_avg"].clone()
                result.exp_avg_sq[name] = state["exp_avg_sq"].clone()
                result.steps[name] = float(state["step"])
                if "master" in state:
                    result.masters[name] = state["master"].clone()
        for model in self.models:
            with self.tiermem.gather(model):
                for parameter in model.parameters():
                    result.weights[names[parameter]] = parameter.detach().clone()
        return result

    def close(self) -> None:
        for model in self.models:
            self.tiermem.close(model)


def _names(models: Sequence[nn.Module]) -> dict[Tensor, str]:
    names: dict[Tensor, str] = {}
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            names.setdefault(parameter, f"{number}.{name}")
    return names


def _parameters_of(what: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(what, nn.Module):
        return list(what.parameters())
    return [what] if isinstance(what, Tensor) else list(what)


def run_plain(
    script: Script,
    *,
    seed: int = 7,
    skip_nonfinite: bool = False,
    roundings: Sequence[dict[str, Tensor]] | None = None,
) -> Outcome:
    torch.manual_seed(seed)
    lib = Plain(skip_nonfinite=skip_nonfinite, roundings=roundings)
    script(lib)
    return lib.outcome()


def run_tiered(
    script: Script,
    placement: Placement,
    directory: Path,
    *,
    seed: int = 7,
    memory: dict[str, Any] | None = None,
    policy: dict[str, Any] | None = None,
    roundings: list[dict[str, Tensor]] | None = None,
) -> Outcome:
    """Run `script` offloaded; what `tiermem.close` leaves must be the weights that were gathered.

    roundings: where the bf16 weights after every step are kept, by name.
    """
    torch.manual_seed(seed)
    lib = Tiered(placement, directory, memory=memory, policy=policy, roundings=roundings)
    try:
        script(lib)
        result = lib.outcome()
        names = _names(lib.models)
        lib.close()
        for parameter, name in names.items():
            weight = result.weights[name]
            expected = weight if parameter.dtype == weight.dtype else result.masters[name]  # `Policy.compute_dtype`
            assert same_bits(parameter.detach(), expected), f"{name} changed when its model was closed"
        assert not list(directory.iterdir()), "close() left files behind"
        return result
    except BaseException as error:
        error.add_note(f"in placement {placement}")
        with contextlib.suppress(Exception):
            lib.close()
        raise


def assert_parity(
    result: Outcome,
    script: Script,
    directory: Path,
    *,
    reference: Outcome | None = None,
    placement: Placement = SPREAD[0],
    equal_nan: bool = False,
    skip_nonfinite: bool = False,
    memory: dict[str, Any] | None = None,
    policy: dict[str, Any] | None = None,
) -> None:
    """`result` is what plain torch makes of `script`, `reference` if it was run already.

    In bf16, a master that lies in the middle of two bf16 numbers may be rounded up by one side and down by the other,
    rightly, and what is computed with such weights afterwards differs by more than fp32 rounding. So where the sides
    disagree, plain torch runs again and rounds those elements, and only those, as tiermem did.
    """
    if reference is None:
        reference = run_plain(script, skip_nonfinite=skip_nonfinite)
    try:
        assert_close(result, reference, equal_nan=equal_nan)
    except AssertionError:
        if not result.masters:
            raise
        kept: list[dict[str, Tensor]] = []
        again = run_tiered(script, placement, directory, memory=memory, policy=policy, roundings=kept)
        assert_same_bits(again, result)
        reference = run_plain(script, skip_nonfinite=skip_nonfinite, roundings=kept)
        assert_close(result, reference, equal_nan=equal_nan)


def compare(
    script: Script,
    directory: Path,
    placements: Iterable[Placement] = SPREAD,
    *,
    equal_nan: bool = False,
    skip_nonfinite: bool = False,
    memory: dict[str, Any] | None = None,
    policy: dict[str, Any] | None = None,
) -> Outcome:
    """`script` in every placement leaves what plain torch leaves, and the same bits in all of them."""
    reference = run_plain(script, skip_nonfinite=skip_nonfinite)
    if not equal_nan:
        bad = [name for name, tensor in reference.tensors() if not tensor.isfinite().all()]
        assert not bad, f"the script proves nothing: plain torch has no numbers in {bad[:3]}"
    options: dict[str, Any] = {"memory": memory, "policy": policy}
    first: Outcome | None = None
    for number, placement in enumerate(placements):
        result = run_tiered(script, placement, directory / str(number), **options)
        try:
            if first is None:
                first = result
                assert_parity(
                    result,
                    script,
                    directory / "again",
                    reference=reference,
                    placement=placement,
                    equal_nan=equal_nan,
                    skip_nonfinite=skip_nonfinite,
                    **options,
                )
            assert_same_bits(result, first)
        except AssertionError as error:
            error.add_note(f"in placement {placement}")
            raise
    return reference


def train(
    lib: Plain | Tiered,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = 3,
    micro_batches: int = 1,
    clip: float | None = None,
    scheduler: Any = None,
    loss_of: Callable[[Plain | Tiered, nn.Module], Tensor] | None = None,
) -> None:
    """A user's training loop; notes losses and norms."""
    loss_of = loss_of or square_loss
    for _ in range(steps):
        for _ in range(micro_batches):
            loss = loss_of(lib, model) / micro_batches
            loss.backward()
            lib.note("loss", loss)
        if clip is not None:
            lib.note("norm", torch.nn.utils.clip_grad_norm_(lib.trained(model.parameters()), clip))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()


def square_loss(lib: Plain | Tiered, model: nn.Module) -> Tensor:
    """How far the model is from a random target; the model draws its own inputs."""
    output = model(*model.inputs(lib))
    return (output.float() - lib.randn(*output.shape)).square().mean()
