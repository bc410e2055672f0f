"""Activation checkpointing, of both kinds: the recompute runs `forward` without module hooks, and finds its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Block, Decoder, Stack, next_token_loss
from reference import SPREAD, Outcome, Plain, Tiered, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

Compare = Callable[..., Outcome]

both_kinds = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])

Way = Callable[[nn.ModuleList, Tensor, bool], Tensor]


def each_block(blocks: nn.ModuleList, hidden: Tensor, reentrant: bool) -> Tensor:
    for block in blocks:
        hidden = checkpoint(block, hidden, use_reentrant=reentrant)
    return hidden


def each_forward(blocks: nn.ModuleList, hidden: Tensor, reentrant: bool) -> Tensor:
    """As transformers did: no module hook fires, neither now nor in the recompute."""
    for block in blocks:
        hidden = checkpoint(block.forward, hidden, use_reentrant=reentrant)
    return hidden


def each_second_block(blocks: nn.ModuleList, hidden: Tensor, reentrant: bool) -> Tensor:
    for number, block in enumerate(blocks):
        hidden = checkpoint(block, hidden, use_reentrant=reentrant) if number % 2 else block(hidden)
    return hidden


def a_lambda_over_several_blocks(blocks: nn.ModuleList, hidden: Tensor, reentrant: bool) -> Tensor:
    hidden = checkpoint(lambda x: blocks[1](blocks[0](x)), hidden, use_reentrant=reentrant)
    return checkpoint(lambda x: blocks[3](blocks[2](x)) + x, hidden, use_reentrant=reentrant)


def a_lambda_that_calls_a_block_twice(blocks: nn.ModuleList, hidden: Tensor, reentrant: bool) -> Tensor:
    hidden = checkpoint(lambda x: blocks[0](blocks[1](blocks[0](x))), hidden, use_reentrant=reentrant)
    return blocks[3](blocks[2](hidden))


def segments(blocks: nn.ModuleList, hidden: Tensor, reentrant: bool) -> Tensor:
    return checkpoint_sequential(list(blocks), 2, hidden, use_reentrant=reentrant)


def nested(blocks: nn.ModuleList, hidden: Tensor, reentrant: bool) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return checkpoint(blocks[1], blocks[0](x), use_reentrant=False)

    return blocks[3](blocks[2](checkpoint(inner, hidden, use_reentrant=reentrant)))


def the_same_block_in_two_checkpoints(blocks: nn.ModuleList, hidden: Tensor, reentrant: bool) -> Tensor:
    for number in (0, 1, 0, 2):
        hidden = checkpoint(blocks[number], hidden, use_reentrant=reentrant)
    return hidden


WAYS = [
    each_block,
    each_forward,
    each_second_block,
    a_lambda_over_several_blocks,
    a_lambda_that_calls_a_block_twice,
    segments,
    nested,
    the_same_block_in_two_checkpoints,
]


ROOMY = {"device": "64MiB"}


class Model(Stack):
    def __init__(self, way: Way, reentrant: bool) -> None:
        super().__init__(depth=4)
        self.way = way
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.way(self.blocks, self.inlet(inputs), self.reentrant))


@both_dtypes
@both_kinds
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_checkpointed_training(compare: Compare, way: Way, reentrant: bool, dtype: torch.dtype) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Model(way, reentrant).to(dtype))
        train(lib, model, lib.AdamW(model.parameters(), lr=1e-3), clip=0.5, micro_batches=2)

    compare(script, SPREAD[::2], memory=ROOMY)
    try:
        compare(script, SPREAD[2:3])
    except RuntimeError as error:  # one recompute may need several blocks at once
        assert "no weight slot is free" in str(error)
        assert "Memory(device=...)" in str(error)


@both_kinds
def test_inputs_without_a_gradient_and_a_frozen_inlet(compare: Compare, reentrant: bool) -> None:
    """The first checkpoint has no input that needs a gradient, except for a dummy where the kind requires one."""

    class FirstBlocks(Stack):
        def forward(self, inputs: Tensor, dummy: Tensor) -> Tensor:
            hidden = self.inlet(inputs)
            hidden = checkpoint(lambda x, d: self.blocks[0](x), hidden, dummy, use_reentrant=reentrant)
            for block in self.blocks[1:]:
                hidden = checkpoint(block, hidden, use_reentrant=reentrant)
            return self.head(hidden)

        def inputs(self, lib: Plain | Tiered) -> tuple[Tensor, ...]:
            return (*super().inputs(lib), torch.zeros(1, requires_grad=True))

    def script(lib: Plain | Tiered) -> None:
        model = FirstBlocks()
        model.inlet.requires_grad_(False)
        lib.offload(model)
        train(lib, model, lib.AdamW(model.parameters(), lr=1e-3), clip=0.5)

    compare(script)


@both_kinds
def test_dropout_is_drawn_again_in_the_recompute(compare: Compare, reentrant: bool) -> None:
    class Dropping(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(hidden), 0.3, self.training)

    def script(lib: Plain | Tiered) -> None:
        model = Model(each_block, reentrant)
        model.blocks = nn.ModuleList(Dropping(33) for _ in range(4))
        lib.offload(model)
        train(lib, model, lib.AdamW(model.parameters(), lr=1e-3))

    compare(script)


@both_kinds
def test_tied_weights_inside_and_outside_of_checkpoints(compare: Compare, reentrant: bool) -> None:
    class Checkpointed(Decoder):
        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.embedding(tokens)
            for layer in self.layers:
                hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
            return checkpoint(lambda x: self.head(self.norm(x)), hidden, use_reentrant=reentrant)

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Checkpointed())
        train(lib, model, lib.AdamW(model.parameters(), lr=1e-3), clip=0.5, loss_of=next_token_loss)

    compare(script, memory=ROOMY)


def test_keyword_arguments_of_a_checkpoint(compare: Compare) -> None:
    """A weight given by keyword is not seen by saved-tensor hooks outside of the checkpoint."""

    class Keyword(Stack):
        def forward(self, inputs: Tensor) -> Tensor:
            def mix(hidden: Tensor, *, block: nn.Module, weight: Tensor) -> Tensor:
                return block(hidden) * weight.mean()

            hidden = self.inlet(inputs)
            for block in self.blocks:
                hidden = checkpoint(mix, hidden, block=block, weight=self.head.weight, use_reentrant=False)
            return self.head(hidden)

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Keyword())
        train(lib, model, lib.AdamW(model.parameters(), lr=1e-3))

    compare(script)


def test_two_backwards_of_a_checkpointed_graph(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Model(each_block, False))
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            output = model(*model.inputs(lib))
            output.square().mean().backward(retain_graph=True)
            output.abs().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    compare(script)


def test_selective_checkpointing(compare: Compare) -> None:
    """Matrix products are kept, the rest is recomputed."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def keep(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operator in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def selective(blocks: nn.ModuleList, hidden: Tensor, reentrant: bool) -> Tensor:
        for block in blocks:
            hidden = checkpoint(
                block, hidden, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(keep)
            )
        return hidden

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Model(selective, False))
        train(lib, model, lib.AdamW(model.parameters(), lr=1e-3))

    compare(script)
