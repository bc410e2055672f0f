from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tiermem import text


def characters(piece: str) -> list[int]:
    return [ord(character) for character in piece]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    (root / "sub").mkdir(parents=True)
    (root / ".hidden").mkdir()
    for index in range(40):
        (root / "sub" / f"file{index:02}.txt").write_text(f"{index:02} " * 3000)
    (root / "empty.txt").write_text("")
    (root / "binary.txt").write_bytes(b"abc\0def")
    (root / ".hidden" / "secret.txt").write_text("secret" * 100)
    return root


def test_find_text_skips_hidden_empty_and_binary_files(corpus: Path) -> None:
    files = text.find_text([corpus])
    assert len(files) == 40
    assert [file.path for file in files] == sorted(file.path for file in files)


def test_find_text_finds_the_standard_library() -> None:
    names = {file.path.name for file in text.find_text([text.STDLIB])}
    assert {"argparse.py", "textwrap.py"} <= names


def test_find_text_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "nothing")):
        text.find_text([tmp_path / "nothing"])
    with pytest.raises(ValueError, match="no text files"):
        text.find_text([tmp_path])


def test_no_file_is_both_training_and_held_out(corpus: Path) -> None:
    files = text.find_text([corpus])
    divided = text.divide(files, seed=3)
    assert len(divided.held_out) == 2
    assert not {f.path for f in divided.training} & {f.path for f in divided.held_out}
    assert divided == text.divide(files, seed=3)
    assert divided != text.divide(files, seed=4)


def test_a_single_file_is_divided_by_its_tail(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("a" * (10 * text.PIECE_BYTES) + "b" * 100)
    divided = text.divide(text.find_text([path]), seed=0)
    assert divided.shared_file
    head = text.tokenise(
        divided.training, characters, length=64, count=10**4, seed=0, directory=tmp_path, tail_of_file=False
    )
    tail = text.tokenise(
        divided.held_out, characters, length=64, count=1, seed=0, directory=tmp_path, tail_of_file=True
    )
    assert {int(t) for index in range(len(head)) for t in head[index]} == {ord("a")}
    assert set(tail[0].tolist()) == {ord("b")}


@pytest.mark.parametrize("offset", range(5))
def test_pieces_put_together_are_the_file_whatever_the_characters(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "multibyte.txt"
    content = "x" * offset + "aé漢😀" * text.PIECE_BYTES
    path.write_text(content, encoding="utf-8")
    count = -(-path.stat().st_size // text.PIECE_BYTES)
    assert "".join(text._read_piece(path, index) for index in range(count)) == content


def test_the_same_seed_gives_the_same_sequences_and_leaves_no_file(corpus: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    files = text.find_text([corpus])

    def make(seed: int) -> text.Sequences:
        return text.tokenise(files, characters, length=33, count=50, seed=seed, directory=work, separator=7)

    first, again, other = make(1), make(1), make(2)
    assert len(first) == 50
    assert all(np.array_equal(first[i], again[i]) for i in range(50))
    assert not all(np.array_equal(first[i], other[i]) for i in range(50))
    assert list(work.iterdir()) == []


def test_targets_are_the_next_tokens(corpus: Path, tmp_path: Path) -> None:
    sequences = text.tokenise(text.find_text([corpus]), characters, length=16, count=4, seed=0, directory=tmp_path)
    inputs, targets = sequences.batch([0, 3])
    assert inputs.shape == targets.shape == (2, 16)
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])


def test_a_share_bounds_what_comes_from_one_file(corpus: Path, tmp_path: Path) -> None:
    files = text.find_text([corpus])[:10]
    sequences = text.tokenise(files, characters, length=100, count=16, seed=0, directory=tmp_path, file_share=1 / 8)
    assert len(sequences) == 16
    tokens = {chr(token) for index in range(16) for token in sequences[index]}
    assert len(tokens & set("0123456789")) >= 8  # file N holds "0N 0N ..."


def test_few_files_share_all_of_it(corpus: Path, tmp_path: Path) -> None:
    files = text.find_text([corpus])[:2]
    sequences = text.tokenise(files, characters, length=100, count=9, seed=0, directory=tmp_path, file_share=1 / 16)
    assert len(sequences) == 9


def test_too_little_text_says_so(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("short")
    with pytest.raises(ValueError, match="5 tokens, fewer than one sequence of 512"):
        text.tokenise(text.find_text([path]), characters, length=512, count=1, seed=0, directory=tmp_path)


def test_every_sequence_comes_once_per_epoch() -> None:
    order = text.epochs(7, seed=1)
    first, second = [next(order) for _ in range(7)], [next(order) for _ in range(7)]
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
