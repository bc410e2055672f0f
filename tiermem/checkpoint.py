"""Safetensors files into an offloaded model and out of it, a block at a time.

A model is built with its parameters on the meta device (``parameters_on_meta``), offloaded, filled from its files
(``load``) and written to files (``save``). Nothing larger than a block and ``SLICE_BYTES`` is in memory at any time.
"""

from __future__ import annotations

import itertools
import json
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

import tiermem

SLICE_BYTES = 32 * 1024**2
SHARD_BYTES = 5 * 1000**3
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside get parameters on the meta device, with real shape and dtype, and real buffers.

    Buffers stay real because some, such as rotary frequencies, are computed in constructors and are in no file.
    A parameter's own ``torch.empty`` is never touched, so it costs address space only.
    """

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    # torch's hook is typed as returning nothing, and documented as returning the replacement.
    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


@dataclass
class Loaded:
    """What ``load`` read."""

    parameters: int = 0
    buffers: int = 0
    bytes_read: int = 0
    unused: list[str] = field(default_factory=list)
    """Names in the files that the model does not have."""


def load(module: nn.Module, source: Path, *, on_progress: Callable[[int, int], None] | None = None) -> Loaded:
    """Fill the parameters and persistent buffers of an offloaded ``module`` from ``source``.

    Values are converted to the dtype of each parameter. Tied parameters are read once, under whichever of their names
    the files have.

    Args:
        source: a safetensors file, or a directory with ``model.safetensors`` or with shards and their index.
        on_progress: called with (parameters filled, parameters in all).

    Raises:
        FileNotFoundError: no such files.
        ValueError: parameters that the files lack, or whose shape differs, each named; nothing has been changed then.
    """
    with ExitStack() as stack:
        files = _Files(source, stack)
        plan = _match(module, files)
        loaded = Loaded(unused=sorted(set(files.names) - plan.used))
        for group in _by_block(plan.parameters).values():
            with tiermem.gather([parameter for _, parameter, _ in group], write=True), torch.no_grad():
                for _, parameter, key in group:
                    loaded.bytes_read += files.copy(key, parameter)
                    loaded.parameters += 1
            if on_progress is not None:
                on_progress(loaded.parameters, len(plan.parameters))
        with torch.no_grad():
            for _, buffer, key in plan.buffers:
                loaded.bytes_read += files.copy(key, buffer)
                loaded.buffers += 1
    return loaded


def save(module: nn.Module, directory: Path, *, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write the parameters and persistent buffers of ``module`` to ``directory``, as ``from_pretrained`` reads them.

    One ``model.safetensors``, or shards of at most ``shard_bytes`` (or one tensor) with their index. A tied parameter
    is written once, under its first name. Each file gets its name when it is whole; weight files of an earlier save
    that are not overwritten are removed. Unlike ``state_dict``, this needs no room for a second copy of the weights.

    Raises:
        OSError: the directory cannot be written.
        ValueError: a dtype that safetensors does not have.
    """
    directory.mkdir(parents=True, exist_ok=True)
    persistent = _persistent_buffers(module)
    tensors: list[tuple[str, torch.Tensor]] = [
        *module.named_parameters(),
        *((name, buffer) for name, buffer in module.named_buffers() if name in persistent),
    ]
    for name, tensor in tensors:
        if tensor.dtype not in _DTYPE_NAMES:
            raise ValueError(f"{name} is {tensor.dtype}, which safetensors cannot hold")
    # The widest first: the format has no gaps, and so every tensor is aligned to its own elements.
    tensors.sort(key=lambda entry: -entry[1].element_size())
    shards = _shards(tensors, shard_bytes)
    total = len(shards)
    names = [SINGLE_NAME] if total == 1 else [f"model-{n:05}-of-{total:05}.safetensors" for n in range(1, total + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_whole(directory / name, partial(_write_shard, shard=shard))
    kept = set(names)
    if total > 1:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key, _ in shard}
        index = {"metadata": {"total_size": sum(_nbytes(t) for _, t in tensors)}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        _write_whole(directory / INDEX_NAME, lambda file: file.write(text.encode()))
        kept.add(INDEX_NAME)
    for path in directory.iterdir():
        if _WEIGHT_FILE.fullmatch(path.name) and path.name not in kept:
            path.unlink()
    return [directory / name for name in names]


def _shards(tensors: list[tuple[str, torch.Tensor]], shard_bytes: int) -> list[list[tuple[str, torch.Tensor]]]:
    shards: list[list[tuple[str, torch.Tensor]]] = [[]]
    used = 0
    for entry in tensors:
        if shards[-1] and used + _nbytes(entry[1]) > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += _nbytes(entry[1])
    return shards


def _write_shard(file: BinaryIO, shard: list[tuple[str, torch.Tensor]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in shard:
        start, end = end, end + _nbytes(tensor)
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(struct.pack("<Q", len(encoded)) + encoded)
    for _, group in itertools.groupby(shard, key=lambda entry: _block_of(entry[0])):
        entries = list(group)
        with tiermem.gather([tensor for _, tensor in entries if isinstance(tensor, nn.Parameter)]), torch.no_grad():
            for _, tensor in entries:
                flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                file.write(flat.numpy().data)


def _write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            write(file)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Files:
    """The tensors of a checkpoint by name. Files are read with pread: a map would count as this process's memory."""

    def __init__(self, source: Path, stack: ExitStack) -> None:
        self._stack = stack
        self._open: dict[Path, Any] = {}
        self._file_of = _locate(source)

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._handle(name).get_slice(name).get_shape())

    def copy(self, name: str, target: torch.Tensor) -> int:
        """Copy the whole tensor into ``target``; returns the bytes read."""
        handle = self._handle(name)
        if target.numel() * target.element_size() <= SLICE_BYTES or target.dim() == 0:
            value = handle.get_tensor(name)
            target.copy_(value)
            return int(value.nbytes)
        source = handle.get_slice(name)
        row_bytes = max(1, target[0].numel()) * 4  # a file's element is rarely wider than four bytes
        rows, nbytes = max(1, SLICE_BYTES // row_bytes), 0
        for start in range(0, target.shape[0], rows):
            end = min(start + rows, target.shape[0])
            value = source[start:end]
            target[start:end].copy_(value)
            nbytes += value.nbytes
        return nbytes

    def _handle(self, name: str) -> Any:
        path = self._file_of[name]
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(path, "pt", backend="pread"))
        return self._open[path]


@dataclass
class _Plan:
    parameters: list[tuple[str, nn.Parameter, str]]  # (name in the model, parameter, name in the files)
    buffers: list[tuple[str, torch.Tensor, str]]
    used: set[str]


def _locate(source: Path) -> dict[str, Path]:
    """The file of each tensor name."""
    source = source.absolute()
    if source.is_file():
        return _names_in(source)
    index, single = source / INDEX_NAME, source / SINGLE_NAME
    if index.is_file():
        located = {}
        for name, file_name in json.loads(index.read_text())["weight_map"].items():
            if Path(file_name).name != file_name:
                raise ValueError(f"{index}: the file {file_name!r} of {name!r} is not in the same directory")
            located[name] = source / file_name
        for path in sorted(set(located.values())):
            if not path.is_file():
                raise FileNotFoundError(f"{path}: named by {INDEX_NAME} but missing")
        return located
    if single.is_file():
        return _names_in(single)
    raise FileNotFoundError(f"{source}: neither {SINGLE_NAME} nor {INDEX_NAME} is there")


def _names_in(path: Path) -> dict[str, Path]:
    with safe_open(path, "pt", backend="pread") as file:
        return dict.fromkeys(file.keys(), path)


def _match(module: nn.Module, files: _Files) -> _Plan:
    """Names in the files for everything in the model; raises for what is missing or of another shape."""
    prefix = _prefix(module, files)
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    plan = _Plan([], [], set())
    missing, differing = [], []
    for parameter, names in names_of.items():
        keys = [key for key in (prefix(name) for name in names) if key in files]
        plan.used.update(keys)
        if not keys:
            missing.append(names[0])
        elif files.shape(keys[0]) != parameter.shape:
            differing.append(f"{names[0]}: {tuple(parameter.shape)}, in the file {tuple(files.shape(keys[0]))}")
        else:
            plan.parameters.append((names[0], parameter, keys[0]))
    persistent = _persistent_buffers(module)
    for name, buffer in module.named_buffers():
        key = prefix(name)
        if name in persistent and key in files:
            plan.used.add(key)
            plan.buffers.append((name, buffer, key))
    if missing:
        raise ValueError(f"{len(missing)} parameters are not in the files: {_some(missing)}")
    if differing:
        raise ValueError(f"{len(differing)} parameters have another shape: {_some(differing)}")
    return plan


def _prefix(module: nn.Module, files: _Files) -> Callable[[str], str]:
    """How a name in the model reads in the files, which may hold the base model alone or with a prefix."""
    names = [name for name, _ in module.named_parameters()]
    if not names or any(name in files for name in names):
        return lambda name: name
    base = f"{getattr(module, 'base_model_prefix', '') or 'model'}."
    if any(name.removeprefix(base) in files for name in names):
        return lambda name: name.removeprefix(base)
    if any(base + name in files for name in names):
        return lambda name: base + name
    return lambda name: name


def _persistent_buffers(module: nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules()
        for name in child._buffers
        if name not in child._non_persistent_buffers_set
    }


def _by_block(
    parameters: list[tuple[str, nn.Parameter, str]],
) -> dict[str, list[tuple[str, nn.Parameter, str]]]:
    groups: dict[str, list[tuple[str, nn.Parameter, str]]] = {}
    for entry in parameters:
        groups.setdefault(_block_of(entry[0]), []).append(entry)
    return groups


def _block_of(name: str) -> str:
    """The numbered module a parameter is in, so that a layer is gathered once; others by themselves."""
    match = re.match(r"(.+?\.\d+)\.", name)
    return match[1] if match else name


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
