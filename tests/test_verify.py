from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tiermem import verify

CPU = torch.device("cpu")


def test_every_placement_passes(tmp_path: Path) -> None:
    checks = list(verify.compare(steps=3, disk=tmp_path, device=CPU))
    assert len(checks) == 12
    assert all(check.passed for check in checks)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_update_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: with a plain loop whose weight decay differs a little, no placement passes."""
    groups = verify._groups

    def other(parameters: dict[str, torch.nn.Parameter]) -> list[dict[str, object]]:
        changed = groups(parameters)
        if all(parameter.dtype == torch.float32 and parameter.is_leaf for parameter in parameters.values()):
            changed[0]["weight_decay"] = 0.11
        return changed

    setup = verify._Setup(torch.float32, CPU, 3, tmp_path, "auto")
    trained = verify._train_offloaded(setup, verify.tiermem.Tier.HOST, verify.tiermem.Tier.HOST)
    monkeypatch.setattr(verify, "_groups", other)
    assert not verify._agreement(verify._train_plain(setup), trained).within


def test_bf16_without_masters_is_seen(tmp_path: Path) -> None:
    setup = verify._Setup(torch.bfloat16, CPU, 3, tmp_path, "auto")
    watched = verify._train_offloaded(setup, verify.tiermem.Tier.HOST, verify.tiermem.Tier.HOST, watch=True)
    assert verify._follow(setup, watched).within
    for state in watched.states:
        for name, master in state.masters.items():
            state.masters[name] = master.bfloat16().float()
    assert not verify._follow(setup, watched).within


@pytest.mark.parametrize("within", [True, False])
def test_the_table_says_which_placement_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: bool) -> None:
    placement = verify.Placement(torch.float32, verify.tiermem.Tier.HOST, verify.tiermem.Tier.DISK)
    check = verify.Check(placement, [3.0, 2.0], verify.Agreement([3.0, 2.0], 0.5, within), same_bits=True)
    monkeypatch.setattr(verify, "compare", lambda **_: [check])
    output = io.StringIO()
    assert verify.run(Console(file=output, width=100), steps=2, disk=tmp_path, device="cpu") is within
    assert ("FAIL" in output.getvalue()) is not within
