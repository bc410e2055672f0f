"""Small models with the shapes of real ones, for the promise tests."""

from __future__ import annotations

import torch
from reference import Plain, Tiered
from torch import Tensor, nn


class Block(nn.Module):
    """A residual two-layer perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


class Stack(nn.Module):
    """An inlet, `depth` blocks and a head."""

    def __init__(self, width: int = 33, depth: int = 3, *, bias: bool = True) -> None:
        super().__init__()
        self.inlet = nn.Linear(7, width, bias=bias)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 5, bias=bias)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.inlet(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def inputs(self, lib: Plain | Tiered) -> tuple[Tensor, ...]:
        return (lib.randn(6, 7, dtype=self.head.weight.dtype),)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(hidden).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.down(nn.functional.silu(self.up(self.norm(hidden))))


class Decoder(nn.Module):
    """A causal language model; `tied`: the head is the embedding."""

    def __init__(self, vocabulary: int = 101, width: int = 32, depth: int = 2, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.2)
        self.layers = nn.ModuleList(DecoderLayer(width, 4) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))

    def inputs(self, lib: Plain | Tiered) -> tuple[Tensor, ...]:
        return (lib.integers(self.embedding.num_embeddings, 2, 9),)


def next_token_loss(lib: Plain | Tiered, model: nn.Module) -> Tensor:
    (tokens,) = model.inputs(lib)
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Mixed(Decoder):
    """Every kind of section at once: bf16 trained and frozen, fp32 trained and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()
        for layer in self.layers:
            layer.norm.float()
            layer.attention.qkv.weight.requires_grad_(False)
            layer.register_buffer("shift", torch.zeros(()))
            layer.scale = nn.Parameter(torch.ones(32), requires_grad=False)
            layer.register_forward_hook(lambda module, _, output: output * module.scale.to(output.dtype))
            layer.norm.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
            layer.norm.register_forward_hook(lambda _, __, output: output.bfloat16())
