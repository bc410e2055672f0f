"""``tiermem verify``: the numbers of plain PyTorch in every placement, shown on this machine.

A small language model is trained by a plain torch loop and by tiermem with weights and states in each tier, with
gradient accumulation, clipping, a learning-rate schedule and two parameter groups. Every parameter must agree, and no
placement may differ from another by a bit.

fp32 is compared after all steps. bf16 is compared with a loop that keeps fp32 masters, step by step: at each step the
plain loop starts from the state that tiermem had there. For where a master is half way between two bf16 values, its
last bit decides which one the weight becomes, and from there two runs part, also two of plain torch whose optimizers
add in another order (``fused`` and not).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import tiermem
from tiermem.cache import cache_directory

RTOL, ATOL = 1e-5, 1e-6
"""fp32 rounding of the same formula in another order; one bf16 rounding would be 400 times more."""

MICRO_BATCHES = 2
CLIP_NORM = 0.5
VOCABULARY, WIDTH, HIDDEN, LAYERS, HEADS = 97, 48, 131, 4, 4  # sizes that divide by nothing useful
CHUNK_NUMEL = 4096  # the smallest: every block has several chunks


@dataclass(frozen=True)
class Placement:
    dtype: torch.dtype
    weights: tiermem.Tier
    states: tiermem.Tier


@dataclass(frozen=True)
class State:
    """One moment of a training, by name. A parameter in fp32 is its own master."""

    weights: dict[str, torch.Tensor]
    masters: dict[str, torch.Tensor]  # fp32
    exp_avg: dict[str, torch.Tensor]
    exp_avg_sq: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    states: list[State]  # after the last step, or after each step


@dataclass(frozen=True)
class Agreement:
    """How plain torch compares: the largest difference of any master, and whether all are within the tolerance."""

    losses: list[float]
    largest_difference: float
    within: bool


@dataclass(frozen=True)
class Check:
    placement: Placement
    losses: list[float]
    plain: Agreement
    same_bits: bool  # as the first placement of this dtype

    @property
    def passed(self) -> bool:
        return self.same_bits and self.plain.within


def run(
    console: Console, *, steps: int = 10, disk: Path | None = None, device: str | None = None, kernels: str = "auto"
) -> bool:
    """Print the table; True when every placement passed. ``disk``: directory for the DISK rows; None: the cache."""
    where = torch.device(device) if device is not None else _default_device()
    table = Table(
        title=f"plain torch and tiermem, {steps} steps on {where}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
    )
    for column in ("dtype", "weights", "states", "loss", "plain torch", "difference", "bits", ""):
        table.add_column(column, no_wrap=True)
    checks = []
    with _directory(disk) as directory, console.status("verifying"):
        for check in compare(steps=steps, disk=directory, device=where, kernels=kernels):
            checks.append(check)
            table.add_row(
                str(check.placement.dtype).removeprefix("torch."),
                check.placement.weights.name,
                check.placement.states.name,
                f"{check.losses[-1]:.5f}",
                f"{check.plain.losses[-1]:.5f}",
                f"{check.plain.largest_difference:.1e}",
                "same" if check.same_bits else "[red]differ[/]",
                "[green]pass[/]" if check.passed else "[bold red]FAIL[/]",
            )
    console.print(table)
    failed = sum(not check.passed for check in checks)
    console.print(
        f"loss began at {checks[0].losses[0]:.3f}; difference: the largest of any parameter (fp32 master), allowed "
        f"{RTOL:g} of its value + {ATOL:g}; bits: losses, parameters and moments against the first row of the dtype"
    )
    if failed:
        console.print(f"[bold red]{failed} of {len(checks)} placements failed[/]")
    else:
        console.print(f"[green]all {len(checks)} placements passed[/]")
    return not failed


def compare(*, steps: int, disk: Path, device: torch.device, kernels: str = "auto") -> Iterator[Check]:
    """One check for each dtype and placement."""
    placements = [(weights, states) for weights in tiermem.Tier for states in (tiermem.Tier.HOST, tiermem.Tier.DISK)]
    for dtype in (torch.float32, torch.bfloat16):
        setup = _Setup(dtype, device, steps, disk, kernels)
        if dtype == torch.float32:
            plain, first = _train_plain(setup), None
        else:
            first = _train_offloaded(setup, *placements[0], watch=True)
            followed = _follow(setup, first)
        for weights, states in placements:
            trained = _train_offloaded(setup, weights, states)
            first = first or trained
            agreement = _agreement(plain, trained) if dtype == torch.float32 else followed
            yield Check(Placement(dtype, weights, states), trained.losses, agreement, _same_bits(first, trained))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.attention_norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return torch.add(x, self.down(F.gelu(self.up(self.mlp_norm(x)))))


class _Model(nn.Module):
    """A causal LM with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.1)  # the head is the same tensor: keep logits small
        self.layers = nn.ModuleList(_Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _make(dtype: torch.dtype, device: torch.device) -> _Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _Model().to(dtype).to(device)


def _batches(steps: int, device: torch.device) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    # Squared, so that some tokens are common and there is something to learn.
    draws = torch.rand(steps, MICRO_BATCHES, 3, 18, generator=generator).square()
    return [list(micro) for micro in (draws * VOCABULARY).long().to(device)]


def _groups(parameters: dict[str, nn.Parameter]) -> list[dict[str, object]]:
    """Matrices with weight decay, vectors without and with their own learning rate."""
    return [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / MICRO_BATCHES


def _schedule(step: int) -> float:
    return 1.0 / (1 + step / 8)


@dataclass(frozen=True)
class _Setup:
    dtype: torch.dtype
    device: torch.device
    steps: int
    disk: Path
    kernels: str


class _Plain:
    """The loop without tiermem: gradients summed in fp32, torch.optim.AdamW on fp32 masters, weights rounded."""

    def __init__(self, setup: _Setup) -> None:
        self._model = _make(setup.dtype, setup.device)
        self._weights = dict(self._model.named_parameters())
        self._masters = {name: nn.Parameter(w.detach().float().clone()) for name, w in self._weights.items()}
        self._optimizer = torch.optim.AdamW(_groups(self._masters), lr=1e-3, foreach=False)
        self._scheduler = LambdaLR(self._optimizer, _schedule)

    def step(self, micro_batches: list[torch.Tensor]) -> float:
        total = 0.0
        for tokens in micro_batches:
            loss = _loss(self._model, tokens)
            loss.backward()
            total += loss.item()
            for name, weight in self._weights.items():
                if weight.grad is not None:
                    previous, grad = self._masters[name].grad, weight.grad.float()
                    self._masters[name].grad = grad if previous is None else previous + grad
                    weight.grad = None
        nn.utils.clip_grad_norm_(self._masters.values(), CLIP_NORM)
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(self._masters[name] if weight.dtype == torch.float32 else _rounded(self._masters[name]))
        return total

    def state(self) -> State:
        moments = {name: self._optimizer.state[master] for name, master in self._masters.items()}
        return State(
            _copies(self._weights),
            _copies(self._masters),
            _copies({name: moment["exp_avg"] for name, moment in moments.items()}),
            _copies({name: moment["exp_avg_sq"] for name, moment in moments.items()}),
        )

    def set_state(self, state: State) -> None:
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(state.masters[name])
                self._weights[name].copy_(state.weights[name])
                self._optimizer.state[master]["exp_avg"].copy_(state.exp_avg[name])
                self._optimizer.state[master]["exp_avg_sq"].copy_(state.exp_avg_sq[name])


def _train_plain(setup: _Setup) -> Trained:
    plain = _Plain(setup)
    losses = [plain.step(micro_batches) for micro_batches in _batches(setup.steps, setup.device)]
    return Trained(losses, [plain.state()])


def _follow(setup: _Setup, watched: Trained) -> Agreement:
    """Each step of the plain loop, from the state that the watched run had before it."""
    plain = _Plain(setup)
    agreements = []
    for index, micro_batches in enumerate(_batches(setup.steps, setup.device)):
        if index:
            plain.set_state(watched.states[index - 1])
        loss = plain.step(micro_batches)
        subject = watched.states[index]
        agreement = _agreement(Trained([loss], [plain.state()]), Trained([watched.losses[index]], [subject]))
        rounded = all(torch.equal(_rounded(master), subject.weights[name]) for name, master in subject.masters.items())
        agreements.append(Agreement([loss], agreement.largest_difference, agreement.within and rounded))
    return Agreement(
        [loss for agreement in agreements for loss in agreement.losses],
        max(agreement.largest_difference for agreement in agreements),
        all(agreement.within for agreement in agreements),
    )


def _agreement(plain: Trained, subject: Trained) -> Agreement:
    want, got = plain.states[-1].masters, subject.states[-1].masters
    losses_agree = torch.allclose(torch.tensor(plain.losses), torch.tensor(subject.losses), rtol=RTOL, atol=ATOL)
    return Agreement(
        plain.losses,
        max((want[name] - got[name]).abs().max().item() for name in want),
        losses_agree and all(torch.allclose(got[name], want[name], rtol=RTOL, atol=ATOL) for name in want),
    )


def _train_offloaded(setup: _Setup, weights: tiermem.Tier, states: tiermem.Tier, *, watch: bool = False) -> Trained:
    """``watch``: keep the state after each step, which makes every step wait for its update."""
    memory = tiermem.Memory(device="256MiB", host="256MiB", disk=setup.disk)
    policy = tiermem.Policy(
        weights=weights,
        states=states,
        chunk_numel=CHUNK_NUMEL,
        kernels=setup.kernels,  # type: ignore[arg-type]
    )
    model = _make(setup.dtype, setup.device)
    model = tiermem.offload(model, memory=memory, policy=policy, device=setup.device)
    try:
        parameters = dict(model.named_parameters())
        optimizer = tiermem.AdamW(_groups(parameters), lr=1e-3)
        scheduler = LambdaLR(optimizer, _schedule)
        losses, kept = [], []
        for micro_batches in _batches(setup.steps, setup.device):
            total = 0.0
            for tokens in micro_batches:
                loss = _loss(model, tokens)
                loss.backward()
                total += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(total)
            if watch:
                kept.append(_offloaded_state(model, optimizer))
        return Trained(losses, kept or [_offloaded_state(model, optimizer)])
    finally:
        tiermem.close(model)


def _offloaded_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    parameters = dict(model.named_parameters())
    with tiermem.gather(model):
        weights = _copies(parameters)
    name_of = {parameter: name for name, parameter in parameters.items()}
    order = [name_of[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    states = {order[index]: state for index, state in optimizer.state_dict()["state"].items()}
    return State(
        weights,
        _copies({name: state.get("master", weights[name]) for name, state in states.items()}),
        _copies({name: state["exp_avg"] for name, state in states.items()}),
        _copies({name: state["exp_avg_sq"] for name, state in states.items()}),
    )


def _rounded(master: torch.Tensor) -> torch.Tensor:
    """``master`` in bf16, ties away from zero: the rounding that splits a master exactly in two halves."""
    bits = master.view(torch.int32)
    return ((bits + 0x8000) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _same_bits(one: Trained, other: Trained) -> bool:
    """Losses and the last state, whatever was kept of the states before."""
    mine, theirs = one.states[-1], other.states[-1]
    return one.losses == other.losses and all(
        torch.equal(tensor, getattr(theirs, plane)[name])
        for plane in ("weights", "masters", "exp_avg", "exp_avg_sq")
        for name, tensor in getattr(mine, plane).items()
    )


def _default_device() -> torch.device:
    return torch.accelerator.current_accelerator() or torch.device("cpu")


@contextmanager
def _directory(disk: Path | None) -> Iterator[Path]:
    if disk is not None:
        yield disk
        return
    with tempfile.TemporaryDirectory(dir=cache_directory(), prefix="verify-") as directory:
        yield Path(directory)
