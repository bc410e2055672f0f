"""The command ``tiermem``. Each subcommand imports what it needs, so that ``--help`` need not wait for torch."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiermem.analysis import ModelTrace, StepReport

app = typer.Typer(
    help="Train PyTorch models larger than GPU and machine memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Home(enum.StrEnum):
    auto = "auto"
    device = "device"
    host = "host"
    disk = "disk"


class StatesHome(enum.StrEnum):
    auto = "auto"
    host = "host"
    disk = "disk"


class Activations(enum.StrEnum):
    keep = "keep"
    recompute = "recompute"
    host = "host"
    disk = "disk"


class Moments(enum.StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    int8 = "int8"


class Dtype(enum.StrEnum):
    auto = "auto"
    bfloat16 = "bfloat16"
    float32 = "float32"


class Kernels(enum.StrEnum):
    auto = "auto"
    native = "native"
    numba = "numba"


class Against(enum.StrEnum):
    fio = "fio"


@app.callback()
def _command() -> None:
    pass


@app.command()
def train(
    model: Annotated[str, typer.Option(help="A model directory (config.json and safetensors), or 'smollm2'.")],
    data: Annotated[
        list[str], typer.Option(help="Text: a file, a directory, or 'stdlib' (Python's own sources). May be repeated.")
    ],
    glob: Annotated[str, typer.Option(help="Which files of a directory are text to train on.")] = "*",
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per forward and backward.")] = 1,
    grad_accum: Annotated[int, typer.Option(min=1, help="Forwards and backwards per step.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 100,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-5,
    weight_decay: Annotated[float, typer.Option(help="Decoupled weight decay.")] = 0.01,
    warmup: Annotated[int | None, typer.Option(help="Steps of linear warm-up. [default: a tenth of --steps]")] = None,
    clip: Annotated[float, typer.Option(help="Largest gradient norm; 0: no clipping.")] = 1.0,
    eval_batches: Annotated[int, typer.Option(min=1, help="Held-out batches, before and after training.")] = 8,
    seed: Annotated[int, typer.Option(help="Draws the held-out files and the order of the text.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights; auto: the model's own.")] = Dtype.auto,
    activations: Annotated[
        Activations, typer.Option(help="Keep all, or recompute layers in backward from inputs that rest there.")
    ] = Activations.recompute,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences that a layer computes at a time. [default: the whole batch]")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where to compute. [default: the accelerator, else the CPU]")
    ] = None,
    device_memory: Annotated[str | None, typer.Option(help="Budget, like 20GiB. [default: what is free]")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Budget, like 64GiB. [default: what is free]")] = None,
    disk: Annotated[
        list[Path] | None, typer.Option(help="Directory on an NVMe mount. May be repeated. [default: no disk]")
    ] = None,
    disk_size: Annotated[str | None, typer.Option(help="Budget, like 500GiB. [default: what is free]")] = None,
    weights: Annotated[Home, typer.Option(help="Where weights rest.")] = Home.auto,
    states: Annotated[StatesHome, typer.Option(help="Where optimizer states rest.")] = StatesHome.auto,
    moments: Annotated[
        Moments, typer.Option(help="Format of AdamW's moments: fp32 is exact; 8, 4 or 2.06 bytes per parameter.")
    ] = Moments.fp32,
    disk_endurance: Annotated[
        str | None, typer.Option(help="What the drives are rated to be written, like 600TB, to report their wear.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the trained model here, for from_pretrained.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a timeline here, for 'tiermem report'.")] = None,
    trace_steps: Annotated[int, typer.Option(min=1, help="Steps that --trace records.")] = 10,
) -> None:
    """Fine-tune a causal language model on text, with weights and optimizer states where they fit."""
    console = _console()
    _require("transformers", "tiermem[hf]")
    try:
        import torch

        import tiermem
        from tiermem.train import TrainOptions, run

        options = TrainOptions(
            model=model,
            data=tuple(data),
            glob=glob,
            sequence_length=seq_len,
            batch_size=batch_size,
            steps=steps,
            lr=lr,
            weight_decay=weight_decay,
            warmup_steps=warmup,
            clip=clip,
            grad_accum=grad_accum,
            eval_batches=eval_batches,
            seed=seed,
            dtype=None if dtype is Dtype.auto else getattr(torch, dtype.value),
            device=device,
            memory=tiermem.Memory(
                device=device_memory,
                host=host_memory,
                disk=disk or None,
                disk_size=disk_size,
                disk_endurance=disk_endurance,
            ),
            policy=tiermem.Policy(
                weights=weights.value,
                states=states.value,
                activations=activations.value,
                micro_batch=micro_batch,
                moments=moments.value,
            ),
            save=save,
            trace=trace,
            trace_steps=trace_steps,
        )
        run(options, console)
    except (ValueError, OSError, RuntimeError) as error:
        _fail(error)


@app.command()
def verify(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 10,
    disk: Annotated[
        Path | None, typer.Option(help="Directory for what rests on disk. [default: the user's cache]")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where to compute. [default: the accelerator, else the CPU]")
    ] = None,
    kernels: Annotated[Kernels, typer.Option(help="Which update kernels.")] = Kernels.auto,
) -> None:
    """Train a small model with plain torch and with tiermem in every placement, and compare."""
    try:
        from tiermem.verify import run

        passed = run(_console(), steps=steps, disk=disk, device=device, kernels=kernels.value)
    except (ValueError, OSError, RuntimeError) as error:
        _fail(error)
    raise typer.Exit(0 if passed else 1)


@app.command()
def doctor(
    directories: Annotated[
        list[Path] | None, typer.Argument(metavar="[DIR]...", help="Directories that the DISK tier would use.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings as JSON.")] = False,
) -> None:
    """Say what this machine and these directories will do for training, and what to mend."""
    try:
        from tiermem.doctor import run

        sound = run(_console(), directories or [], as_json=as_json)
    except (ValueError, OSError, RuntimeError) as error:
        _fail(error)
    raise typer.Exit(0 if sound else 1)


@app.command()
def report(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help="What --trace or tiermem.trace wrote.")],
    step: Annotated[int | None, typer.Option(help="Only this step. [default: all; a typical one's picture]")] = None,
    png: Annotated[Path | None, typer.Option(help="Where the picture goes. [default: beside the trace]")] = None,
    picture: Annotated[bool, typer.Option(help="Draw one step; needs tiermem\\[plot].")] = True,
) -> None:
    """Say what bound each step of a trace, and draw one."""
    from tiermem import analysis

    try:
        found = []
        for model in analysis.load(path):
            reports = [one for one in analysis.analyse(model) if step in (None, one.step.number)]
            if reports:
                found.append((model, analysis.typical(reports)))
                print(analysis.describe(model, reports))
        if not found:
            raise ValueError(f"{path} has no {'whole step' if step is None else f'step {step}'}")
        if picture:
            _draw(found, png, path.with_suffix(".png"))
    except (ValueError, OSError, RuntimeError) as error:
        _fail(error)


def _draw(steps: Sequence[tuple[ModelTrace, StepReport]], wanted: Path | None, usual: Path) -> None:
    """One picture for each model. Without matplotlib that is an error only if a picture was asked for."""
    import importlib.util

    if wanted is None and importlib.util.find_spec("matplotlib") is None:
        print("\nno picture: it needs matplotlib: pip install 'tiermem[plot]'")
        return
    from tiermem.picture import draw

    target = wanted or usual
    for index, (model, report) in enumerate(steps):
        path = target.with_stem(f"{target.stem}-{index + 1}") if index else target
        draw(model, report, path)
        print(f"\npicture of step {report.step.number}: {path}")


bench = typer.Typer(help="Measure what training will rest on.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.callback()
def _bench() -> None:
    pass


@bench.command("io")
def bench_io(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Directories on the disks to measure.")],
    against: Annotated[Against | None, typer.Option(help="Also run this program at the best setting.")] = None,
    size: Annotated[str, typer.Option(help="Of the file that is written and read.")] = "4GiB",
    seconds: Annotated[float, typer.Option(help="Length of one measurement.")] = 0.5,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each setting.")] = 3,
    engine: Annotated[list[str] | None, typer.Option(help="Only these engines. May be repeated.")] = None,
    request: Annotated[list[str] | None, typer.Option(help="Only these request sizes. May be repeated.")] = None,
    depth: Annotated[list[int] | None, typer.Option(help="Only these depths. May be repeated.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all values here.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Write a PNG picture here.")] = None,
    profile: Annotated[bool, typer.Option(help="Keep the best setting, for io='auto' to read.")] = True,
) -> None:
    """Measure every engine, request size and depth, reading, writing and both, and keep the best setting."""
    try:
        from tiermem.bench_io import Options, run
        from tiermem.memory import parse_bytes

        defaults = Options()
        options = Options(
            engines=tuple(engine or defaults.engines),
            request_bytes=tuple(map(parse_bytes, request)) if request else defaults.request_bytes,
            depths=tuple(depth or defaults.depths),
            file_bytes=parse_bytes(size),
            seconds=seconds,
            repeats=repeats,
        )
        run(
            _console(),
            directories,
            options,
            against="fio" if against else None,
            json_path=json_path,
            plot_path=plot_path,
            keep_profile=profile,
        )
    except (ValueError, OSError, RuntimeError) as error:
        _fail(error)


@bench.command("adam")
def bench_adam(
    size: Annotated[int, typer.Option(min=1, help="Parameters, in millions: more than the caches hold.")] = 64,
    threads: Annotated[list[int] | None, typer.Option(help="Thread counts. [default: 1 and all cores]")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each, taking turns.")] = 9,
    others: Annotated[
        bool, typer.Option(help="Also torch's optimizers, and DeepSpeed's where it is installed.")
    ] = True,
    numba: Annotated[bool, typer.Option(help="Also the kernels that serve without a compiler.")] = True,
    everything: Annotated[
        bool, typer.Option("--all", help="Every instruction set with all chunks and formats.")
    ] = False,
    disk: Annotated[Path | None, typer.Option(help="Also with states on disk, in this directory.")] = None,
) -> None:
    """Measure the optimizer pass beside the limit that memory sets, formats of moments, and torch's own."""
    try:
        from tiermem.bench_adam import Options, run

        run(
            Options(
                numel=size << 20,
                threads=tuple(threads or ()),
                rounds=rounds,
                others=others,
                numba=numba,
                everything=everything,
                disk=disk,
            ),
            _console(),
        )
    except (ValueError, OSError, RuntimeError) as error:
        _fail(error)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit with its status; 130 after Ctrl-C."""
    try:
        app(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)


def _console() -> Console:
    """The terminal; a pipe or a file is wide enough for tables."""
    return Console(width=None if sys.stdout.isatty() else 120)


def _fail(error: BaseException) -> NoReturn:
    """One line for what the user can mend; the traceback stays with ``python -X dev``."""
    if sys.flags.dev_mode:
        raise error
    Console(stderr=True, soft_wrap=True).print(f"[bold red]tiermem:[/] {escape(str(error))}", highlight=False)
    raise typer.Exit(1)


def _require(module: str, extra: str) -> None:
    import importlib.util

    if importlib.util.find_spec(module) is None:
        _fail(RuntimeError(f"this command needs {module}: pip install '{extra}'"))
