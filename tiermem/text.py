"""Text as token sequences for training, without holding text or tokens in memory.

A *piece* is up to ``PIECE_BYTES`` of one file. Pieces are tokenised in an order drawn from the seed until there are
enough tokens, and go into one memory-mapped file. A *sequence* is ``length + 1`` consecutive tokens of it: inputs and
next-token targets. Files, not pieces, are divided between training and held-out text, so no file is in both.
"""

from __future__ import annotations

import math
import os
import random
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 16 * 1024
STDLIB = "stdlib"  # the name that stands for the Python standard library's sources

_SKIPPED_DIRECTORIES = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
_SKIPPED_IN_STDLIB = _SKIPPED_DIRECTORIES | {"test", "tests"}  # some systems do not install them

Tokenize = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class TextFile:
    path: Path
    size_bytes: int


@dataclass(frozen=True)
class Corpus:
    """Files divided into training and held-out text.

    With a single file its last pieces are held out instead: ``held_out`` is then the same file, and
    ``shared_file`` says so.
    """

    training: list[TextFile]
    held_out: list[TextFile]
    shared_file: bool = False


def find_text(sources: Iterable[str | Path], glob: str = "*") -> list[TextFile]:
    """Files under ``sources`` (files, directories, or the name ``stdlib``), sorted by path.

    Directories are walked for names that match ``glob``; hidden files and directories, caches, installed packages,
    empty files and files that are not text (a zero byte near the start) are left out.

    Raises:
        FileNotFoundError: a source does not exist.
        ValueError: nothing was found.
    """
    found: dict[Path, TextFile] = {}
    named = [str(source) for source in sources]
    for source in named:
        if source == STDLIB:
            root, pattern, skipped = Path(sysconfig.get_paths()["stdlib"]), "*.py", _SKIPPED_IN_STDLIB
        else:
            root, pattern, skipped = Path(source).expanduser(), glob, _SKIPPED_DIRECTORIES
        if not root.exists():
            raise FileNotFoundError(f"no text at {root.absolute()}: no such file or directory")
        for path in _walk(root, pattern, skipped):
            size_bytes = path.stat().st_size
            if size_bytes and _looks_like_text(path):
                found.setdefault(path, TextFile(path, size_bytes))
    if not found:
        raise ValueError(f"no text files match {glob!r} in {', '.join(named)}")
    return [found[path] for path in sorted(found)]


def divide(files: Sequence[TextFile], seed: int, held_out_share: float = 0.05) -> Corpus:
    """Hold out ``held_out_share`` of the files (at least one), drawn by ``seed``."""
    if len(files) == 1:
        return Corpus(list(files), list(files), shared_file=True)
    order = list(files)
    random.Random(f"divide {seed}").shuffle(order)
    count = max(1, round(len(order) * held_out_share))
    return Corpus(training=order[count:], held_out=order[:count])


class Sequences:
    """Token sequences of one length in a memory-mapped file that vanishes with the object or the process."""

    def __init__(self, tokens: npt.NDArray[np.uint32], length: int) -> None:
        self.length = length
        self._tokens = tokens
        self._count = (len(tokens) - 1) // length

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """``length + 1`` tokens; the last is the first of the next sequence."""
        if not 0 <= index < self._count:
            raise IndexError(index)
        start = index * self.length
        return self._tokens[start : start + self.length + 1].astype(np.int64)

    def batch(self, indices: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Inputs and targets, each (len(indices), length)."""
        rows = np.stack([self[index] for index in indices])
        return rows[:, :-1], rows[:, 1:]


def tokenise(
    files: Sequence[TextFile],
    tokenize: Tokenize,
    *,
    length: int,
    count: int,
    seed: int,
    directory: Path,
    separator: int | None = None,
    file_share: float = 1.0,
    tail_of_file: bool | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Sequences:
    """Tokenise pieces of ``files`` in an order drawn from ``seed`` until there are ``count`` sequences or no more text.

    Args:
        separator: a token written after each piece.
        file_share: at most this share of the tokens comes from one file, so that held-out text is not one author's;
            more where there are too few files for that.
        tail_of_file: None: whole files; True: only the last twentieth of each; False: all but that.
        on_progress: called with (tokens so far, tokens wanted).

    Raises:
        ValueError: less text than one sequence.
    """
    wanted = count * length + 1
    per_file_max = math.ceil(wanted * max(file_share, 1 / len(files)))
    pieces = [
        (file, index)
        for file in files
        for index in range(-(-file.size_bytes // PIECE_BYTES))
        if tail_of_file is None or _in_tail(file, index) == tail_of_file
    ]
    random.Random(f"pieces {seed}").shuffle(pieces)
    from_file: dict[Path, int] = {}
    written = 0
    # Unlinked from the start: nothing remains after Ctrl-C or a crash.
    with tempfile.TemporaryFile(dir=directory, prefix="tiermem-tokens-") as target:
        for file, index in pieces:
            budget = min(wanted - written, per_file_max - from_file.get(file.path, 0))
            if budget <= 0:
                continue
            tokens = list(tokenize(_read_piece(file.path, index)))
            if separator is not None:
                tokens.append(separator)
            tokens = tokens[:budget]
            target.write(np.asarray(tokens, dtype=np.uint32).tobytes())
            written += len(tokens)
            from_file[file.path] = from_file.get(file.path, 0) + len(tokens)
            if on_progress is not None:
                on_progress(written, wanted)
            if written >= wanted:
                break
        target.flush()
        if written <= length:
            raise ValueError(
                f"{len(files)} text files hold {written} tokens, fewer than one sequence of {length} + 1: "
                f"give more text or a shorter --seq-len"
            )
        mapped = np.memmap(target, dtype=np.uint32, mode="r", shape=(written,))
    return Sequences(mapped, length)


def epochs(count: int, seed: int) -> Iterator[int]:
    """Indices of ``count`` sequences for ever, each epoch in a new order drawn from ``seed``."""
    epoch = 0
    while True:
        order = list(range(count))
        random.Random(f"epoch {seed} {epoch}").shuffle(order)
        yield from order
        epoch += 1


def _walk(root: Path, pattern: str, skipped: frozenset[str]) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = sorted(d for d in subdirectories if not d.startswith(".") and d not in skipped)
        for name in sorted(names):
            path = Path(directory, name)
            if not name.startswith(".") and path.match(pattern) and path.is_file() and os.access(path, os.R_OK):
                yield path


def _looks_like_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(8192)


def _in_tail(file: TextFile, index: int) -> bool:
    count = -(-file.size_bytes // PIECE_BYTES)
    return index >= count - max(1, count // 20)


def _read_piece(path: Path, index: int) -> str:
    """The text of one piece, cut at UTF-8 character boundaries, so that pieces put together are the file."""
    with path.open("rb") as file:
        file.seek(index * PIECE_BYTES)
        data = file.read(PIECE_BYTES + 3)
    start = 0
    if index:
        while start < 3 and start < len(data) and data[start] & 0xC0 == 0x80:
            start += 1
    end = min(PIECE_BYTES, len(data))
    while end < len(data) and data[end] & 0xC0 == 0x80:
        end += 1
    return data[start:end].decode("utf-8", errors="replace")
