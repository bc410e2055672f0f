"""``tiermem train``: fine-tune a Hugging Face causal language model on text, out of the tiers.

``run`` is the loop of any user of this package, with text, progress and a final account of bytes, seconds and memory
around it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem import checkpoint as checkpoints
from tiermem import pretrained, text
from tiermem.cache import cache_directory
from tiermem.losses import linear_cross_entropy
from tiermem.memory import format_bytes
from tiermem.process import peak_memory_bytes

LOSS_ROWS = 128
"""Logits are taken to fp32 this many tokens at a time: 24 MiB with a vocabulary of 49,152."""

HELD_OUT_FILE_SHARE = 1 / 16
IN_MEMORY_BYTES_PER_PARAMETER = 16
"""bf16 weight and gradient (4), fp32 master (4), two fp32 moments (8): what mixed-precision AdamW in memory holds."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What ``tiermem train`` was asked for. Sizes of text are in tokens."""

    model: str
    data: tuple[str, ...]
    glob: str = "*"
    sequence_length: int = 512
    batch_size: int = 1
    steps: int = 100
    lr: float = 2e-5
    weight_decay: float = 0.01
    warmup_steps: int | None = None  # None: a tenth of the steps
    clip: float = 1.0  # 0: no clipping
    grad_accum: int = 1
    eval_batches: int = 8
    seed: int = 0
    dtype: torch.dtype | None = None
    device: str | None = None
    memory: tiermem.Memory = field(default_factory=tiermem.Memory)
    policy: tiermem.Policy = field(default_factory=tiermem.Policy)
    save: Path | None = None
    trace: Path | None = None
    trace_steps: int = 10

    def __post_init__(self) -> None:
        for name in ("sequence_length", "batch_size", "steps", "grad_accum", "eval_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: expected at least 1")
        if not self.data:
            raise ValueError(f"no text to train on: --data takes files, directories, or {text.STDLIB!r}")

    @property
    def tokens_per_step(self) -> int:
        return self.sequence_length * self.batch_size * self.grad_accum


@dataclass(frozen=True)
class Account:
    """Peak process memory and what it was for, in bytes."""

    parameters: int  # numel
    libraries_bytes: int
    pools_bytes: int  # host memory that the runtime holds
    peak_bytes: int

    @property
    def activations_bytes(self) -> int:
        """Activations and temporary tensors: the rest."""
        return max(0, self.peak_bytes - self.libraries_bytes - self.pools_bytes)

    @property
    def in_memory_bytes(self) -> int:
        """What the same training would need with everything in memory."""
        resting_bytes = IN_MEMORY_BYTES_PER_PARAMETER * self.parameters
        return self.libraries_bytes + resting_bytes + self.activations_bytes


@dataclass(frozen=True)
class TrainResult:
    loss_before: float
    loss_after: float
    losses: list[float]  # one per step
    seconds: float
    tokens_per_second: float
    account: Account
    report: tiermem.Report


def run(options: TrainOptions, console: Console) -> TrainResult:
    """Train, print progress and the final report on ``console``, and save where asked.

    Raises:
        FileNotFoundError, ValueError: model, text or budgets that cannot be, before anything is trained.
    """
    torch.manual_seed(options.seed)
    directory = pretrained.locate(
        options.model, on_convert=lambda gguf: console.print(f"converting {gguf.name} to plain bf16 weights, once ...")
    )
    training, held_out = _read_text(options, directory, console)
    libraries_bytes = peak_memory_bytes()

    model = _build(options, directory, console)
    device = _compute_device(model, options)
    loss_of = Loss(model.eval(), _batch(held_out, [0], device)[0])
    before = _evaluate(model, held_out, loss_of, options, device)
    console.print(f"held-out loss before: [bold]{before:.3f}[/] ({len(held_out)} sequences)")

    start_report, start = tiermem.report(model), time.perf_counter()
    with tiermem.trace(options.trace, steps=options.trace_steps) if options.trace else nullcontext():
        losses = _train(model, training, loss_of, options, device, console)
    if options.trace is not None:
        console.print(f"trace: open {options.trace} in https://ui.perfetto.dev, or: tiermem report {options.trace}")
    tiermem.synchronize(model)
    seconds = time.perf_counter() - start
    end_report = tiermem.report(model)

    after = _evaluate(model, held_out, loss_of, options, device)
    console.print(f"held-out loss after:  [bold]{after:.3f}[/]")
    account = Account(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        libraries_bytes=libraries_bytes,
        pools_bytes=_host_bytes(end_report, device),
        peak_bytes=peak_memory_bytes(),
    )
    result = TrainResult(
        loss_before=before,
        loss_after=after,
        losses=losses,
        seconds=seconds,
        tokens_per_second=len(losses) * options.tokens_per_step / seconds,
        account=account,
        report=end_report,
    )
    _print_result(result, start_report, console)
    if options.save is not None:
        with console.status("saving"):
            pretrained.save(model, directory, options.save)
        console.print(f"saved to {options.save.absolute()}", markup=False)
    return result


class Loss:
    """Mean cross entropy in fp32 of a model's predictions of ``targets`` (batch, length).

    Where the logits are the head's output as it comes, they are never there as a whole: the loss is taken in the
    head's place, by ``tiermem.losses.linear_cross_entropy``. Where the model changes them (caps or scales), their fp32
    copy exists for ``LOSS_ROWS`` tokens at a time.
    """

    def __init__(self, model: Any, inputs: torch.Tensor) -> None:
        """Runs the model on ``inputs`` (batch, length), to see what it does with its head's output."""
        self._model = model
        self._head: torch.nn.Module | None = model.get_output_embeddings()
        if self._head is None:
            return
        outputs: list[torch.Tensor] = []
        handle = self._head.register_forward_hook(lambda module, args, output: outputs.append(output))
        try:
            with torch.no_grad():
                logits = model(input_ids=inputs, use_cache=False).logits
        finally:
            handle.remove()
        if len(outputs) != 1 or not torch.equal(outputs[0], logits):
            self._head = None

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self._head is None:
            return next_token_loss(self._model(input_ids=inputs, use_cache=False).logits, targets)
        with _loss_of_head(self._head, targets) as found:
            self._model(input_ids=inputs, use_cache=False)
        return found[0]


@contextmanager
def _loss_of_head(head: torch.nn.Module, targets: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """The next forward of ``head`` takes the loss of its logits and returns its input in their place."""
    own = head.__dict__.get("forward")
    found: list[torch.Tensor] = []

    def restore() -> None:
        head.__dict__.pop("forward", None)
        if own is not None:
            object.__setattr__(head, "forward", own)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        restore()
        found.append(linear_cross_entropy(hidden, head, targets))
        return hidden

    object.__setattr__(head, "forward", forward)
    try:
        yield found
    finally:
        restore()


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in fp32 of ``logits`` (batch, length, vocabulary) for ``targets`` (batch, length).

    The fp32 copy of the logits exists for ``LOSS_ROWS`` tokens at a time, in forward and again in backward.
    """
    # split, not slices: the backward of split writes one gradient, that of a slice a full-sized one each.
    rows = logits.flatten(0, -2).split(LOSS_ROWS)
    wanted = targets.flatten().split(LOSS_ROWS)
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    for row, target in zip(rows, wanted, strict=True):
        if logits.requires_grad:
            total = total + checkpoint(_summed_loss, row, target, use_reentrant=False)
        else:
            total = total + _summed_loss(row, target)
    return total / targets.numel()


def _summed_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def learning_rate_factor(step: int, steps: int, warmup_steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


def _compute_device(model: torch.nn.Module, options: TrainOptions) -> torch.device:
    """Where the model computes."""
    if options.device is not None:
        return torch.device(options.device)
    return next(model.parameters()).device


def _read_text(options: TrainOptions, directory: Path, console: Console) -> tuple[text.Sequences, text.Sequences]:
    files = text.find_text(options.data, options.glob)
    corpus = text.divide(files, options.seed)
    tokenizer = pretrained.tokenizer(directory)

    def encode(piece: str) -> list[int]:
        tokens: list[int] = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        return tokens

    def sequences(held_out: bool) -> text.Sequences:
        batches = options.eval_batches if held_out else options.steps * options.grad_accum
        return text.tokenise(
            corpus.held_out if held_out else corpus.training,
            encode,
            length=options.sequence_length,
            count=batches * options.batch_size,
            seed=options.seed,
            directory=cache_directory(),
            separator=tokenizer.eos_token_id,
            file_share=HELD_OUT_FILE_SHARE if held_out and not corpus.shared_file else 1.0,
            tail_of_file=held_out if corpus.shared_file else None,
        )

    with console.status("tokenising"):
        training, held_out = sequences(held_out=False), sequences(held_out=True)
    console.print(
        f"text: {len(corpus.training)} files to train on ({format_bytes(sum(f.size_bytes for f in corpus.training))}), "
        + ("the end of the file held out" if corpus.shared_file else f"{len(corpus.held_out)} held out")
    )
    return training, held_out


def _build(options: TrainOptions, directory: Path, console: Console) -> Any:
    """The model of ``directory``, offloaded and filled from its files."""
    model = pretrained.build(directory, options.dtype)
    model = tiermem.offload(model, memory=options.memory, policy=options.policy, device=options.device)
    with console.status("loading weights") as status:
        checkpoints.load(
            model, directory, on_progress=lambda done, count: status.update(f"loading weights {done}/{count}")
        )
    count = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"model: {directory.name}, {count / 1e6:.1f} M parameters", markup=False)
    return model


def _batch(sequences: text.Sequences, indices: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = sequences.batch(indices)
    return torch.from_numpy(inputs.copy()).to(device), torch.from_numpy(targets.copy()).to(device)


def _evaluate(
    model: Any, sequences: text.Sequences, loss_of: Loss, options: TrainOptions, device: torch.device
) -> float:
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(sequences), options.batch_size):
            indices = list(range(start, min(start + options.batch_size, len(sequences))))
            inputs, targets = _batch(sequences, indices, device)
            total += loss_of(inputs, targets).item() * len(indices)
            count += len(indices)
    return total / count


def _train(
    model: Any,
    sequences: text.Sequences,
    loss_of: Loss,
    options: TrainOptions,
    device: torch.device,
    console: Console,
) -> list[float]:
    model.train()
    warmup_steps = options.steps // 10 if options.warmup_steps is None else options.warmup_steps
    optimizer = tiermem.AdamW(model.parameters(), lr=options.lr, weight_decay=options.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, options.steps, warmup_steps)
    )
    order = text.epochs(len(sequences), options.seed)
    losses: list[float] = []
    with _Monitor(model, options, console).shown() as monitor:
        for _ in range(options.steps):
            step_loss = 0.0
            for _ in range(options.grad_accum):
                inputs, targets = _batch(sequences, [next(order) for _ in range(options.batch_size)], device)
                loss = loss_of(inputs, targets) / options.grad_accum
                loss.backward()
                step_loss += loss.item()
            if options.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(step_loss)
            monitor.update(step_loss)
    return losses


class _Monitor:
    """Loss, tokens per second and time waited: a progress bar on a terminal, else a line now and then."""

    def __init__(self, model: Any, options: TrainOptions, console: Console) -> None:
        self._model = model
        self._options = options
        self._console = console
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:.0f} tokens/s  waited {task.fields[waited]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=options.steps, loss=math.nan, rate=0.0, waited="")
        self._line_every = max(1, options.steps // 20)
        self._done = 0
        self._last_time = time.perf_counter()
        self._last_waited = self._waited()

    @contextmanager
    def shown(self) -> Iterator[_Monitor]:
        with self._progress:
            yield self

    def update(self, loss: float) -> None:
        now, waited = time.perf_counter(), self._waited()
        seconds = now - self._last_time
        parts = {name: waited[name] - self._last_waited.get(name, 0.0) for name in waited}
        self._last_time, self._last_waited = now, waited
        self._done += 1
        rate = self._options.tokens_per_step / seconds
        shown = f"{sum(parts.values()):.2f} s of {seconds:.2f} s"
        self._progress.update(self._task, advance=1, loss=loss, rate=rate, waited=shown)
        if not self._console.is_terminal and (self._done % self._line_every == 0 or self._done == 1):
            self._console.print(
                f"step {self._done}/{self._options.steps}  loss {loss:.3f}  {rate:.0f} tokens/s  waited {shown}"
            )

    def _waited(self) -> dict[str, float]:
        # Without waiting for the updates in flight, which are meant to run beside the next forward.
        return tiermem.report(self._model, wait=False).seconds_waited


def _host_bytes(report: tiermem.Report, device: torch.device) -> int:
    """Process memory that the runtime holds; on a CPU device that includes the device's share."""
    resident = report.bytes_resident
    host_bytes = resident.get(tiermem.Tier.HOST, 0)
    return host_bytes + (resident.get(tiermem.Tier.DEVICE, 0) if device.type == "cpu" else 0)


def _print_result(result: TrainResult, start: tiermem.Report, console: Console) -> None:
    steps = len(result.losses)
    report, account = result.report, result.account
    table = Table(title="tiermem train", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()

    def per_step(name: str) -> str:
        return format_bytes((getattr(report, name) - getattr(start, name)) / steps)

    table.add_row("held-out loss", f"{result.loss_before:.3f} -> {result.loss_after:.3f}")
    table.add_row("speed", f"{result.seconds / steps:.2f} s per step, {result.tokens_per_second:.0f} tokens/s")
    waited = {
        name: (seconds - start.seconds_waited.get(name, 0.0)) / steps for name, seconds in report.seconds_waited.items()
    }
    table.add_row("waited per step", ", ".join(f"{name} {seconds:.2f} s" for name, seconds in waited.items()))
    table.add_row(
        "bytes at rest", ", ".join(f"{tier.value} {format_bytes(n)}" for tier, n in report.bytes_resident.items())
    )
    table.add_row("disk per step", f"read {per_step('bytes_read')}, written {per_step('bytes_written')}")
    table.add_row("device per step", f"in {per_step('bytes_copied_in')}, out {per_step('bytes_copied_out')}")
    if report.bytes_written:
        table.add_row("disk wear", report.wear())
    table.add_row("engine, kernels", f"{report.engine or 'no disk'}, {report.kernels}")
    for fallback in report.fallbacks:
        table.add_row("fallback", escape(fallback))
    if report.steps_skipped:
        table.add_row("steps skipped", f"{report.steps_skipped} (gradients were not finite)")
    table.add_row(
        "peak process memory",
        f"[bold]{_gigabytes(account.peak_bytes)}[/] = libraries {_gigabytes(account.libraries_bytes)} + tiermem "
        f"{_gigabytes(account.pools_bytes)} + activations {_gigabytes(account.activations_bytes)}",
    )
    table.add_row(
        "the same in memory",
        f"{_gigabytes(account.in_memory_bytes)}, of it {IN_MEMORY_BYTES_PER_PARAMETER} bytes for each of "
        f"{account.parameters / 1e6:.1f} M parameters: "
        f"{_gigabytes(IN_MEMORY_BYTES_PER_PARAMETER * account.parameters)}",
    )
    console.print()
    console.print(table)


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB"
