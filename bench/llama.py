"""Llamas of the sizes that the scripts here measure, with weights that depend on their names only."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import tiermem
from tiermem.checkpoint import parameters_on_meta

SIZES: dict[str, dict[str, int]] = {
    "218M": {
        "hidden_size": 1024,
        "intermediate_size": 2736,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 32768,
    },
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
    "10M": {  # small beside the activations of its batches
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 8192,
    },
    "tiny": {  # to try the scripts themselves
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 1000,
    },
}


def build(size: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A causal LM with activation checkpointing and its parameters on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES[size], max_position_embeddings=4096, tie_word_embeddings=False, use_cache=False)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with parameters_on_meta():
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    return model.train()


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give a model on the meta device real parameters, for the plain loop."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device=device))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def initialise(model: nn.Module, *, offloaded: bool) -> None:
    """The same values whatever the order and the device: a generator per parameter, seeded by its name."""
    for name, parameter in model.named_parameters():
        context: AbstractContextManager[Any] = tiermem.gather(parameter, write=True) if offloaded else nullcontext()
        with context, torch.no_grad():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                for rows in parameter.split(4096):  # bounds what the fp32 draw takes
                    rows.copy_(torch.empty(rows.shape, dtype=torch.float32).normal_(0, 0.02, generator=generator))


def batches(size: str, count: int, shape: tuple[int, int], device: torch.device) -> Iterable[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw() -> Iterator[torch.Tensor]:
        for _ in range(count):
            yield torch.randint(0, SIZES[size]["vocab_size"], shape, generator=generator).to(device)

    return draw()


class PlainAdamW:
    """What training in memory uses: bf16 weights, fp32 masters, torch's fused AdamW on them, clipping."""

    def __init__(self, model: nn.Module, lr: float, clip: float, *, fused: bool = True) -> None:
        self._weights = list(model.parameters())
        self._masters = [nn.Parameter(weight.detach().float()) for weight in self._weights]
        self._optimizer = torch.optim.AdamW(self._masters, lr=lr, fused=fused)
        self._clip = clip

    def set_rate(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def step(self) -> None:
        for weight, master in zip(self._weights, self._masters, strict=True):
            if weight.grad is not None:
                master.grad = weight.grad.float()
                weight.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        torch._foreach_copy_([weight.data for weight in self._weights], [master.data for master in self._masters])
