"""linear_cross_entropy: torch's loss and gradients, without the logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiermem
from tiermem.losses import linear_cross_entropy

WIDTH, VOCABULARY = 16, 101


def full(hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).float().flatten(0, -2), labels.flatten())


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_those_of_the_full_logits(chunk: int | None, bias: bool) -> None:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
    hidden = torch.randn(3, 13, WIDTH, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (3, 13))
    labels[0, 4:9] = -100
    expected = full(hidden, head, labels)
    gradients = torch.autograd.grad(expected / 3, [hidden, *head.parameters()])
    found = linear_cross_entropy(hidden, head, labels, chunk=chunk)
    assert torch.allclose(found, expected, rtol=1e-6)
    for one, other in zip(torch.autograd.grad(found / 3, [hidden, *head.parameters()]), gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


def test_a_weight_may_stand_for_a_linear_head() -> None:
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    hidden, labels = torch.randn(VOCABULARY, WIDTH), torch.randint(0, VOCABULARY, (VOCABULARY,))
    expected = F.cross_entropy(hidden @ weight.T, labels)
    found = linear_cross_entropy(hidden, weight, labels, chunk=8)  # as many rows as the vocabulary: still not split
    assert torch.allclose(found, expected)
    (one,) = torch.autograd.grad(found, weight)
    assert torch.allclose(one, torch.autograd.grad(expected, weight)[0], rtol=1e-5, atol=1e-7)


def test_the_logits_are_never_there_as_a_whole() -> None:
    rows: list[int] = []

    class Head(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            rows.append(hidden.shape[0])
            return super().forward(hidden)

    hidden, labels = torch.randn(20, WIDTH, requires_grad=True), torch.randint(0, VOCABULARY, (20,))
    loss = linear_cross_entropy(hidden, Head(WIDTH, VOCABULARY), labels, chunk=8)
    assert rows == [8, 8, 4]
    loss.backward()
    assert rows == [8, 8, 4] * 2
    with torch.no_grad():
        assert torch.isfinite(linear_cross_entropy(hidden, Head(WIDTH, VOCABULARY), labels))


class Model(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return hidden


@pytest.mark.parametrize("update_in_backward", [False, True])
@pytest.mark.parametrize("weights", ["host", "disk"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_tiermem_holds_trains_as_in_plain_torch(
    tied: bool, weights: str, update_in_backward: bool, tmp_path: object
) -> None:
    def run(offloaded: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = Model(tied=tied)
        if offloaded:
            policy = tiermem.Policy(
                weights=weights,  # type: ignore[arg-type]
                states=weights,  # type: ignore[arg-type]
                chunk_numel=4096,
                update_in_backward=update_in_backward,
            )
            memory = tiermem.Memory(device="16KiB", host="16MiB", disk=tmp_path)  # type: ignore[arg-type]
            tiermem.offload(model, memory=memory, policy=policy, device="cpu")
            optimizer: torch.optim.Optimizer = tiermem.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
        losses = []
        for _ in range(3):
            tokens = torch.randint(0, VOCABULARY, (4, 9))
            hidden, labels = model(tokens[:, :-1]), tokens[:, 1:]
            loss = (
                linear_cross_entropy(hidden, model.head, labels, chunk=5)
                if offloaded
                else full(hidden, model.head, labels)
            )
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        if offloaded:
            tiermem.close(model)
        return [*losses, *(p.detach() for p in model.parameters())]

    for one, other in zip(run(True), run(False), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_wrong_arguments_are_named() -> None:
    model = Model(tied=False)
    hidden, labels = torch.randn(4, WIDTH), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="do not fit hidden"):
        linear_cross_entropy(hidden, model.head, labels[:3])
    with pytest.raises(ValueError, match="chunk is 0"):
        linear_cross_entropy(hidden, model.head, labels, chunk=0)
    tiermem.offload(model, device="cpu")
    with pytest.raises(ValueError, match="head.weight is held by tiermem"):
        linear_cross_entropy(hidden, model.head.weight, labels)
    tiermem.close(model)
