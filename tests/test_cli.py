from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_llama import write_model, write_text

from tiermem import cli


def tiermem(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tiermem", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_train_as_a_command(tmp_path: Path) -> None:
    model, data = write_model(tmp_path / "model"), write_text(tmp_path / "text")
    (tmp_path / "disk").mkdir()
    done = tiermem(
        *("train", "--model", str(model), "--data", str(data), "--seq-len", "32", "--steps", "3", "--device", "cpu"),
        *("--weights", "disk", "--states", "disk", "--disk", str(tmp_path / "disk"), "--eval-batches", "2"),
        *("--host-memory", "64MiB", "--device-memory", "64MiB", "--save", str(tmp_path / "saved")),
        cache=tmp_path / "cache",
    )
    assert done.returncode == 0, done.stderr
    assert "peak process memory" in done.stdout
    assert (tmp_path / "saved" / "model.safetensors").is_file()
    assert list((tmp_path / "disk").iterdir()) == []
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nowhere", "--data", "{data}"], ["nowhere", "config.json", "smollm2"]),
        (["--model", "{model}", "--data", "nothing-here"], ["nothing-here"]),
        (["--model", "{model}", "--data", "{data}", "--host-memory", "much"], ["much", "20GiB"]),
        (
            ["--model", "{model}", "--data", "{data}", "--weights", "disk", "--disk", "{tmp}/absent"],
            ["{tmp}/absent"],
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = {"model": write_model(tmp_path / "model"), "data": write_text(tmp_path / "text"), "tmp": tmp_path}
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", *(argument.format(**names) for argument in arguments)])
    assert stopped.value.code == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert all(word.format(**names) in error for word in words)


def test_help_names_the_commands(tmp_path: Path) -> None:
    done = tiermem("--help", cache=tmp_path)
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("train", "verify", "doctor", "bench"))


def test_ctrl_c_ends_with_130_and_leaves_no_file(tmp_path: Path) -> None:
    model, data, disk = write_model(tmp_path / "model"), write_text(tmp_path / "text"), tmp_path / "disk"
    disk.mkdir()
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    arguments = (
        f"train --model {model} --data {data} --seq-len 32 --steps 100000 --device cpu --weights disk --states disk"
    )
    arguments += f" --disk {disk} --host-memory 64MiB --device-memory 64MiB --eval-batches 1"
    command = [sys.executable, "-u", "-m", "tiermem", *arguments.split()]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if line.startswith("step 1/"):
                break
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        errors = process.stderr.read()
        assert process.wait(timeout=30) == 130, errors
    assert "Traceback" not in errors
    assert list(disk.iterdir()) == []
