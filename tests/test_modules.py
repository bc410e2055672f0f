"""Modules as people write them: whatever a forward does with its parameters, the numbers are those of plain torch."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import Block, Decoder, Stack, next_token_loss
from reference import ON_DISK, SPREAD, Outcome, Plain, Tiered, train
from torch import Tensor, nn
from torch.nn import functional as F

Compare = Callable[..., Outcome]
Loss = Callable[[Plain | Tiered, nn.Module], Tensor]

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def trains_alike(
    compare: Compare,
    build: Callable[[], nn.Module],
    *,
    dtype: torch.dtype = torch.float32,
    loss_of: Loss | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
    **kwargs: Any,
) -> None:
    """Three clipped steps leave the reference's numbers, in the spread of placements."""

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(build().to(dtype))
        if prepare is not None:
            prepare(model)
        train(lib, model, lib.AdamW(model.parameters(), lr=1e-3), clip=0.5, loss_of=loss_of)

    compare(script, **kwargs)


class Body(Stack):
    """A stack whose way through its blocks is for the test to say."""

    def __init__(self, blocks: list[nn.Module] | None = None, width: int = 33) -> None:
        super().__init__(width, 3)
        if blocks is not None:
            self.blocks = nn.ModuleList(blocks)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.through(self.inlet(inputs)))

    def through(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


# --- sharing and reuse


@both_dtypes
def test_tied_embedding_and_head(compare: Compare, dtype: torch.dtype) -> None:
    trains_alike(compare, Decoder, dtype=dtype, loss_of=next_token_loss)


def test_weights_tied_between_blocks(compare: Compare) -> None:
    def build() -> nn.Module:
        model = Stack()
        model.blocks[2].up.weight = model.blocks[0].up.weight
        model.blocks[2].norm = model.blocks[1].norm
        return model

    trains_alike(compare, build)


@both_dtypes
def test_a_block_called_several_times_in_one_forward(compare: Compare, dtype: torch.dtype) -> None:
    class Looped(Body):
        def through(self, hidden: Tensor) -> Tensor:
            for number in (0, 1, 0, 0, 2, 1):
                hidden = self.blocks[number](hidden)
            return hidden

    trains_alike(compare, Looped, dtype=dtype)


def test_a_parameter_used_twice_in_one_forward(compare: Compare) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(33, 33) / 6)

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden @ self.weight + torch.tanh(hidden @ self.weight.T) * self.weight.diagonal()

    class Model(Body):
        def through(self, hidden: Tensor) -> Tensor:
            for block in self.blocks:
                hidden = block(hidden)
            return hidden

    trains_alike(compare, lambda: Model([Twice(), Twice()]))


def test_the_same_module_listed_twice(compare: Compare) -> None:
    def build() -> nn.Module:
        model = Stack()
        model.blocks.append(model.blocks[0])
        return model

    trains_alike(compare, build)


# --- parameters read elsewhere than in their own module's forward


@both_dtypes
def test_a_parameter_read_by_its_parent_inside_a_block(compare: Compare, dtype: torch.dtype) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(33, 33)
            self.called = nn.Linear(33, 33)

        def forward(self, hidden: Tensor) -> Tensor:
            hidden = F.linear(hidden, self.child.weight, self.child.bias)  # the child itself is never called
            return self.called(hidden) * self.called.bias + F.linear(hidden, self.called.weight)

    class Model(Body):
        def through(self, hidden: Tensor) -> Tensor:
            for block in self.blocks:
                hidden = block(hidden)
            return hidden

    trains_alike(compare, lambda: Model([Parent(), Block(33), Parent()]), dtype=dtype)


def test_a_parameter_read_by_the_module_that_owns_the_list_of_blocks(compare: Compare) -> None:
    """Before its block is called, after, and in between."""

    class Reader(Body):
        def through(self, hidden: Tensor) -> Tensor:
            hidden = hidden * self.blocks[0].norm.weight
            hidden = self.blocks[0](hidden) @ self.blocks[0].up.weight.T @ self.blocks[1].down.weight.T
            hidden = self.blocks[1](hidden)
            return self.blocks[2](hidden) + self.blocks[0].norm.bias

    trains_alike(compare, lambda: Reader(width=65))


def test_a_parameter_gathered_inside_forward(compare: Compare) -> None:
    """The remedy that errors name works in the middle of a forward, and autograd still gets its weights back."""

    class Reader(Body):
        gather: Any

        def through(self, hidden: Tensor) -> Tensor:
            for number, block in enumerate(self.blocks):
                hidden = block(hidden)
                other = self.blocks[(number + 1) % 3].up.weight
                with type(self).gather(other):
                    hidden = hidden + torch.tanh(hidden @ other.T).mean(dim=1, keepdim=True)
            return hidden

    def script(lib: Plain | Tiered) -> None:
        Reader.gather = staticmethod(lib.gather)
        model = lib.offload(Reader(width=65))
        train(lib, model, lib.AdamW(model.parameters(), lr=1e-3), clip=0.5)

    compare(script)


def test_multihead_attention_and_encoder_layers(compare: Compare) -> None:
    """`nn.MultiheadAttention` reads its child's weight, and encoder layers read everyone's in eval mode.

    Without biases: the gradient of a key's bias is zero but for rounding, and Adam makes steps of that.
    """

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, bias=False) for _ in range(2)
            )
            self.attention = nn.MultiheadAttention(32, 2, batch_first=True, bias=False)

        def forward(self, hidden: Tensor) -> Tensor:
            for layer in self.layers:
                hidden = layer(hidden)
            return self.attention(hidden, hidden, hidden, need_weights=False)[0]

        def inputs(self, lib: Plain | Tiered) -> tuple[Tensor, ...]:
            return (lib.randn(3, 5, 32),)

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Encoder())
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            train(lib, model, optimizer, steps=1)
            model.eval()
            with torch.no_grad():
                lib.note("eval", model(*model.inputs(lib)))
            model.train()

    compare(script)


def test_parametrized_modules(compare: Compare) -> None:
    """The parametrisation, a child, reads parameters for the parent."""

    def build() -> nn.Module:
        model = Stack()
        for block in model.blocks:
            nn.utils.parametrizations.weight_norm(block.up)
        nn.utils.parametrizations.orthogonal(model.blocks[1].down)
        return model

    trains_alike(compare, build)


def test_recurrent_modules(compare: Compare) -> None:
    """`nn.LSTM` keeps its parameters in a list of its own."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.LSTM(24, 24, num_layers=2, batch_first=True) for _ in range(2))

        def forward(self, hidden: Tensor) -> Tensor:
            for layer in self.layers:
                hidden, _ = layer(hidden)
            return hidden

        def inputs(self, lib: Plain | Tiered) -> tuple[Tensor, ...]:
            return (lib.randn(2, 6, 24),)

    trains_alike(compare, Recurrent)


def test_entered_by_another_method_than_forward(compare: Compare) -> None:
    class Model(Stack):
        def score(self, inputs: Tensor) -> Tensor:
            hidden = self.inlet(inputs)
            for block in reversed(self.blocks):
                hidden = block(hidden)
            return self.head(hidden)

    def loss(lib: Plain | Tiered, model: nn.Module) -> Tensor:
        return model.score(*model.inputs(lib)).square().mean()

    trains_alike(compare, Model, loss_of=loss)


# --- parameters that are not used, or not always


class Chosen(Body):
    """Goes through the blocks that `choice` names."""

    choice: tuple[int, ...] = (0, 1, 2)

    def through(self, hidden: Tensor) -> Tensor:
        for number in self.choice:
            hidden = self.blocks[number](hidden)
        return hidden


@both_dtypes
def test_a_block_that_no_forward_uses(compare: Compare, dtype: torch.dtype) -> None:
    def build() -> nn.Module:
        model = Chosen()
        model.choice = (0, 2)
        return model

    trains_alike(compare, build, dtype=dtype)


@both_dtypes
def test_blocks_used_alternately(compare: Compare, dtype: torch.dtype) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Chosen().to(dtype))
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        for choice in ((0, 1), (2, 1), (0, 1), (1,), (2, 0), (), (0, 1, 2)):
            model.choice = choice
            train(lib, model, optimizer, steps=1, clip=0.5)

    compare(script)


def test_the_order_of_blocks_changes_between_steps_and_between_micro_batches(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Chosen())
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        for step in range(4):
            for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1))[step:]:
                model.choice = order
                (model(*model.inputs(lib)).square().mean() / 4).backward()
            torch.nn.utils.clip_grad_norm_(lib.trained(model.parameters()), 0.5)
            optimizer.step()
            optimizer.zero_grad()

    compare(script)


def test_part_of_a_block_is_unused(compare: Compare) -> None:
    class Partial(Block):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.unused = nn.Linear(width, width)
            self.alone = nn.Parameter(torch.ones(width))

    class Model(Body):
        def through(self, hidden: Tensor) -> Tensor:
            for block in self.blocks:
                hidden = block(hidden)
            return hidden

    trains_alike(compare, lambda: Model([Partial(33), Partial(33)]))


def test_an_output_that_the_loss_ignores(compare: Compare) -> None:
    """The last block runs in forward, but no gradient ever comes to it."""

    class Model(Body):
        def through(self, hidden: Tensor) -> Tensor:
            hidden = self.blocks[1](self.blocks[0](hidden))
            self.ignored = self.blocks[2](hidden)
            return hidden

    trains_alike(compare, Model)


def test_a_gradient_that_is_zero_is_not_a_gradient_that_is_missing(compare: Compare) -> None:
    def loss(lib: Plain | Tiered, model: nn.Module) -> Tensor:
        output = model(*model.inputs(lib))
        return (output * torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])).square().mean()

    trains_alike(compare, Stack, loss_of=loss)


# --- inputs and outputs

Pair = namedtuple("Pair", ["hidden", "extra"])


@dataclass
class Output:
    hidden: Tensor
    extras: dict[str, Any]


class TupleBlock(Block):
    def forward(self, hidden: Tensor) -> tuple[Tensor, None, int]:
        return super().forward(hidden), None, 3


class DictBlock(Block):
    def forward(self, *, hidden: Tensor, scale: float) -> dict[str, Any]:
        return {"hidden": super().forward(hidden) * scale, "nested": [{"mean": hidden.mean()}]}


class DataclassBlock(Block):
    def forward(self, state: dict[str, list[Tensor]], flag: bool = False) -> Output:
        hidden = super().forward(state["hidden"][0])
        return Output(hidden, {"sum": hidden.sum(), "flag": flag})


class NamedTupleBlock(Block):
    def forward(self, output: Output) -> Pair:
        return Pair(super().forward(output.hidden), output.extras["sum"])


@both_dtypes
def test_tuples_dicts_dataclasses_and_named_tuples(compare: Compare, dtype: torch.dtype) -> None:
    class Structured(Body):
        def through(self, hidden: Tensor) -> Tensor:
            hidden, nothing, three = self.blocks[0](hidden)
            assert nothing is None and three == 3
            result = self.blocks[1](hidden=hidden, scale=0.5)
            output = self.blocks[2]({"hidden": [result["hidden"]]}, flag=True)
            assert type(output) is Output and output.extras["flag"] is True
            pair = self.blocks[3](output)
            assert type(pair) is Pair
            return pair.hidden + result["nested"][0]["mean"] + pair.extra / 100

    blocks = (TupleBlock, DictBlock, DataclassBlock, NamedTupleBlock)
    trains_alike(compare, lambda: Structured([block(33) for block in blocks]), dtype=dtype)


def test_a_block_whose_gradient_comes_through_a_dataclass_only(compare: Compare) -> None:
    class Model(Body):
        def through(self, hidden: Tensor) -> Tensor:
            return self.blocks[1]({"hidden": [self.blocks[0]({"hidden": [hidden.detach()]}).hidden]}).extras["sum"]

        def forward(self, inputs: Tensor) -> Tensor:
            return self.through(self.inlet(inputs)).reshape(1)

    trains_alike(compare, lambda: Model([DataclassBlock(33), DataclassBlock(33)]))


def test_inputs_that_need_no_gradient(compare: Compare) -> None:
    """No block has an input with a gradient: module backward hooks would come before their gradients."""

    class Model(Body):
        def through(self, hidden: Tensor) -> Tensor:
            return torch.stack([block(hidden.detach()) for block in self.blocks]).sum(0)

    trains_alike(compare, Model)


def test_inputs_that_need_a_gradient(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            inputs = lib.randn(6, 7).requires_grad_()
            model(inputs).square().mean().backward()
            lib.note("gradient of the input", inputs.grad)
            optimizer.step()
            optimizer.zero_grad()

    compare(script)


def test_an_output_that_is_a_view_of_a_weight(compare: Compare) -> None:
    """What leaves a block must not change when the weight's memory is used for another block."""

    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(40, 33))

        def forward(self, first: int) -> Tensor:
            return self.table[first : first + 6]

    class Model(Body):
        def through(self, hidden: Tensor) -> Tensor:
            early = self.blocks[0](3)
            late = [self.blocks[1](5), self.blocks[2](7)]
            return hidden * early + late[0] * late[1]

    trains_alike(compare, lambda: Model([Lookup() for _ in range(3)]))


def test_in_place_operations_on_activations(compare: Compare) -> None:
    class InPlace(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            return self.down(F.relu(self.up(self.norm(hidden)), inplace=True)).add_(hidden)

    class Model(Body):
        def through(self, hidden: Tensor) -> Tensor:
            for block in self.blocks:
                hidden = block(hidden)
            return hidden

    trains_alike(compare, lambda: Model([InPlace(33) for _ in range(3)]))


# --- shapes and layouts of parameters


@both_dtypes
def test_parameters_that_are_not_contiguous(compare: Compare, dtype: torch.dtype) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transposed = nn.Parameter(torch.randn(29, 33).t() / 6)
            self.strided = nn.Parameter(torch.randn(29, 66)[:, ::2] / 6)
            self.permuted = nn.Parameter(torch.randn(3, 33, 2).permute(2, 0, 1))

        def forward(self, hidden: Tensor) -> Tensor:
            hidden = hidden @ self.transposed.to(hidden.dtype) @ self.strided
            return hidden + torch.tanh(self.permuted).sum((0, 1))

    class Model(Body):
        def through(self, hidden: Tensor) -> Tensor:
            for block in self.blocks:
                hidden = block(hidden)
            return hidden

    def strides_stay(model: nn.Module) -> None:
        for block in model.blocks:
            assert block.transposed.shape == (33, 29) and block.permuted.shape == (2, 3, 33)

    trains_alike(compare, lambda: Model([Odd() for _ in range(3)]), dtype=dtype, prepare=strides_stay)


@both_dtypes
def test_channels_last_convolutions(compare: Compare, dtype: torch.dtype) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(3))
            self.norm = nn.BatchNorm2d(8)
            self.up = nn.ConvTranspose2d(8, 5, 2, stride=2)

        def forward(self, image: Tensor) -> Tensor:
            for layer in self.layers:
                image = torch.tanh(layer(image))
            return self.up(self.norm(image.square()))  # straight behind it, a norm would cancel the bias

        def inputs(self, lib: Plain | Tiered) -> tuple[Tensor, ...]:
            return (lib.randn(2, 3, 7, 7, dtype=self.up.weight.dtype).to(memory_format=torch.channels_last),)

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Net().to(dtype).to(memory_format=torch.channels_last))
        train(lib, model, lib.AdamW(model.parameters(), lr=1e-3))
        lib.note("running mean", model.norm.running_mean)

    compare(script)


@both_dtypes
def test_parameters_of_no_element_one_element_and_no_dimension(compare: Compare, dtype: torch.dtype) -> None:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.zeros(0, 33))
            self.one = nn.Parameter(torch.ones(1))
            self.scalar = nn.Parameter(torch.tensor(0.5))
            self.unused_none = nn.Parameter(torch.zeros(0))
            self.frozen_none = nn.Parameter(torch.zeros(3, 0), requires_grad=False)
            self.linear = nn.Linear(33, 33)

        def forward(self, hidden: Tensor) -> Tensor:
            extended = torch.cat([hidden, self.none.to(hidden.dtype)])
            return self.linear(extended) * self.one + self.scalar

    class Model(Body):
        def through(self, hidden: Tensor) -> Tensor:
            for block in self.blocks:
                hidden = block(hidden)
            return hidden

    trains_alike(compare, lambda: Model([Tiny() for _ in range(3)]), dtype=dtype)


def test_a_block_of_empty_parameters_only(compare: Compare) -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.zeros(0, 33))

        def forward(self, hidden: Tensor) -> Tensor:
            return torch.cat([hidden, self.none])

    class Model(Body):
        def through(self, hidden: Tensor) -> Tensor:
            for block in self.blocks:
                hidden = block(hidden)
            return hidden

    trains_alike(compare, lambda: Model([Empty(), Block(33), Empty()]))


@both_dtypes
def test_an_embedding_larger_than_any_buffer(compare: Compare, dtype: torch.dtype) -> None:
    """1.2 M elements beside 4096-element chunks; its states alone are several times the host budget.

    Not clipped: torch's fp32 norm of so many elements is wrong by more than the tolerance.
    """

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Decoder(vocabulary=38_011, tied=False).to(dtype))
        train(lib, model, lib.AdamW(model.parameters(), lr=1e-3), loss_of=next_token_loss)

    compare(script, SPREAD[2:3], memory={"device": "20MiB", "host": "4MiB"})


# --- dtypes and freezing


class Lora(nn.Module):
    """A frozen bf16 linear with a low-rank adapter in `dtype`."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = linear.bfloat16().requires_grad_(False)
        self.down = nn.Linear(linear.in_features, 4, bias=False, dtype=dtype)
        self.up = nn.Linear(4, linear.out_features, bias=False, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + self.up(self.down(hidden.to(self.down.weight.dtype))).to(hidden.dtype)


@both_dtypes
def test_adapters_on_a_frozen_bf16_model(compare: Compare, dtype: torch.dtype) -> None:
    def build() -> nn.Module:
        model = Decoder().bfloat16().requires_grad_(False)
        for layer in model.layers:
            layer.attention.qkv = Lora(layer.attention.qkv, dtype)
            layer.down = Lora(layer.down, dtype)
        return model

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(build())
        optimizer = lib.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        train(lib, model, optimizer, clip=0.5, micro_batches=2, loss_of=next_token_loss)

    compare(script)


def test_frozen_parameters_between_trained_ones(compare: Compare) -> None:
    def build() -> nn.Module:
        model = Stack(depth=4)
        model.blocks[1].requires_grad_(False)
        model.blocks[2].up.bias.requires_grad_(False)
        model.inlet.requires_grad_(False)
        return model

    trains_alike(compare, build)


def test_fp32_and_bf16_blocks_in_one_model(compare: Compare) -> None:
    class Model(Body):
        def through(self, hidden: Tensor) -> Tensor:
            for block in self.blocks:
                hidden = block(hidden.to(block.up.weight.dtype))
            return hidden.float()

    def build() -> nn.Module:
        model = Model()
        model.blocks[0].bfloat16()
        model.blocks[2].up.bfloat16()
        model.blocks[2].norm.bfloat16()
        model.blocks[2].down.bfloat16()
        return model

    trains_alike(compare, build)


def test_buffers_stay_with_the_model(compare: Compare) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(33)
            self.linear = nn.Linear(33, 33)
            self.register_buffer("mask", torch.tensor([True, False, True] * 11))

        def forward(self, hidden: Tensor) -> Tensor:
            return self.linear(self.norm(hidden.square())) * self.mask  # straight behind it, a norm would cancel biases

    class Model(Body):
        def through(self, hidden: Tensor) -> Tensor:
            for block in self.blocks:
                hidden = block(hidden)
            return hidden

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Model([Normed(), Normed()]))
        train(lib, model, lib.AdamW(model.parameters(), lr=1e-3))
        for name, buffer in model.named_buffers():
            lib.note(name, buffer)

    compare(script)


def test_autocast(compare: Compare) -> None:
    def loss(lib: Plain | Tiered, model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(*model.inputs(lib))
            output = output + model(*model.inputs(lib))
        return output.float().square().mean()

    trains_alike(compare, Stack, loss_of=loss)


# --- autograd


class SavedLinear(torch.autograd.Function):
    """Keeps its weight by `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, weight.t())
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight, transposed = ctx.saved_tensors
        assert torch.equal(weight.t(), transposed)
        return gradient @ weight, gradient.t() @ hidden


class AttributeLinear(torch.autograd.Function):
    """Keeps its weight as an attribute, which no saved-tensor hook can see."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.hidden, ctx.weight = hidden, weight
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient @ ctx.weight, gradient.t() @ ctx.hidden


@both_dtypes
@pytest.mark.parametrize("function", [SavedLinear, AttributeLinear], ids=["saved", "attribute"])
def test_custom_autograd_functions(
    compare: Compare, function: type[torch.autograd.Function], dtype: torch.dtype
) -> None:
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(33, 33) / 6)
            self.second = nn.Parameter(torch.randn(33, 33) / 6)

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + function.apply(torch.tanh(function.apply(hidden, self.first)), self.second)

    class Model(Body):
        def through(self, hidden: Tensor) -> Tensor:
            for block in self.blocks:
                hidden = block(hidden)
            return hidden

    trains_alike(compare, lambda: Model([Custom() for _ in range(4)]), dtype=dtype)


def test_users_own_saved_tensor_hooks(compare: Compare) -> None:
    def loss(lib: Plain | Tiered, model: nn.Module) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model(*model.inputs(lib)).square().mean()

    trains_alike(compare, Stack, loss_of=loss)


@both_dtypes
def test_users_own_hooks(compare: Compare, dtype: torch.dtype) -> None:
    """Registered before and after offload; they change inputs, outputs and gradients."""

    def register(lib: Plain | Tiered, model: nn.Module, scale: float) -> None:
        first, second, third = model.blocks
        first.register_forward_pre_hook(lambda module, inputs: (inputs[0] * scale,))
        first.register_forward_hook(lambda module, inputs, output: output * (1 + scale))
        second.register_forward_hook(lambda module, inputs, kwargs, output: output + scale, with_kwargs=True)
        second.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * scale,))
        third.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * (1 - scale / 2),))
        third.up.weight.register_hook(lambda gradient: gradient * scale)
        third.down.register_forward_hook(lambda module, inputs, output: lib.note("seen", output.mean()))
        model.head.register_full_backward_hook(lambda module, inputs, outputs: lib.note("seen", outputs[0].mean()))

    def script(lib: Plain | Tiered) -> None:
        model = Stack().to(dtype)
        register(lib, model, 0.5)
        lib.offload(model)
        register(lib, model, 0.75)
        train(lib, model, lib.AdamW(model.parameters(), lr=1e-3), clip=0.5)

    compare(script)


def test_users_hooks_of_a_block_see_its_weights(compare: Compare) -> None:
    """Inside a hook of a block that runs before ours in forward, and in its backward, the weights are there."""

    def script(lib: Plain | Tiered) -> None:
        model = Stack()
        for block in model.blocks:
            block.register_forward_hook(lambda module, _, output: output * module.up.weight.mean())
            block.down.register_full_backward_hook(lambda module, _, __: lib.note("weight", module.weight.sum()))
        lib.offload(model)
        train(lib, model, lib.AdamW(model.parameters(), lr=1e-3))

    compare(script)


@both_dtypes
def test_two_backwards_of_one_graph(compare: Compare, dtype: torch.dtype) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack().to(dtype))
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            output = model(*model.inputs(lib)).float()
            output.square().mean().backward(retain_graph=True)
            output.abs().mean().backward()
            lib.note("norm", torch.nn.utils.clip_grad_norm_(lib.trained(model.parameters()), 0.5))
            optimizer.step()
            optimizer.zero_grad()

    compare(script)


def test_the_same_backward_twice(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            loss = model(*model.inputs(lib)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    compare(script)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_several_forwards_before_their_backwards(compare: Compare, order: tuple[int, ...]) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            losses = [model(*model.inputs(lib)).square().mean() for _ in range(3)]
            for number in order:
                losses[number].backward()
            optimizer.step()
            optimizer.zero_grad()

    compare(script)


def test_one_backward_over_several_forwards(compare: Compare) -> None:
    def loss(lib: Plain | Tiered, model: nn.Module) -> Tensor:
        first, second = model(*model.inputs(lib)), model(*model.inputs(lib))
        return (first * second).mean() + first.square().mean()

    trains_alike(compare, Stack, loss_of=loss)


def test_gradients_by_autograd_grad(compare: Compare) -> None:
    """`torch.autograd.grad` of the parameters fills no `.grad`, and of the input gives what backward would."""

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            inputs = lib.randn(6, 7).requires_grad_()
            (gradient,) = torch.autograd.grad(model(inputs).square().mean(), inputs)
            lib.note("gradient of the input", gradient)
            parameters = [model.blocks[1].up.weight, model.head.bias]
            for gradient in torch.autograd.grad(model(inputs).square().mean(), parameters):
                lib.note("gradient", gradient)
            assert all(p.grad is None for p in model.parameters())
            train(lib, model, optimizer, steps=1)

    compare(script)


def test_a_penalty_on_the_gradient_of_the_input_is_exact_or_refused(compare: Compare) -> None:
    """Backward of a backward needs the weights a third time."""

    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            inputs = lib.randn(6, 7).requires_grad_()
            output = model(inputs)
            (slope,) = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
            (output.square().mean() + slope.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

    try:
        compare(script)
    except RuntimeError as error:
        assert "create_graph" in str(error) or "tiermem" in str(error)


def test_forwards_whose_graph_is_dropped(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = lib.offload(Stack())
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            for _ in range(3):
                lib.note("dropped", model(*model.inputs(lib)).sum())
            train(lib, model, optimizer, steps=1)

    compare(script)


# --- forwards that do not train

MODES = ["no_grad", "inference_mode", "eval", "eval with gradients"]


def evaluate(lib: Plain | Tiered, model: nn.Module, mode: str) -> None:
    inputs = model.inputs(lib)
    if mode == "no_grad":
        with torch.no_grad():
            lib.note("output", model(*inputs))
    elif mode == "inference_mode":
        with torch.inference_mode():
            output = model(*inputs).tolist()
        lib.note("output", torch.tensor(output))
    else:
        model.eval()
        with torch.set_grad_enabled(mode == "eval with gradients"):
            lib.note("output", model(*inputs))
        model.train()


@pytest.mark.parametrize("mode", MODES)
def test_forwards_without_training_before_between_and_after(compare: Compare, mode: str) -> None:
    def script(lib: Plain | Tiered) -> None:
        model = Stack()
        model.blocks.append(nn.Dropout(0.3))
        lib.offload(model)
        evaluate(lib, model, mode)
        optimizer = lib.AdamW(model.parameters(), lr=1e-3)
        evaluate(lib, model, mode)
        for _ in range(3):
            loss = model(*model.inputs(lib)).square().mean()
            evaluate(lib, model, mode)  # between forward and backward
            loss.backward()
            evaluate(lib, model, mode)  # between backward and step
            optimizer.step()
            evaluate(lib, model, mode)  # right behind the step, whose updates are still under way
            optimizer.zero_grad()
            evaluate(lib, model, mode)
            evaluate(lib, model, mode)
        evaluate(lib, model, mode)

    compare(script)


def test_no_grad_for_a_part_of_the_model(compare: Compare) -> None:
    class Model(Body):
        def through(self, hidden: Tensor) -> Tensor:
            with torch.no_grad():
                hidden = self.blocks[1](self.blocks[0](hidden))
            return self.blocks[2](hidden) + self.blocks[0](hidden)

    trains_alike(compare, Model)


# --- several models in one process


def test_a_trained_model_beside_a_frozen_reference(compare: Compare) -> None:
    """As in preference tuning: the reference model has the same weights and never changes."""

    def script(lib: Plain | Tiered) -> None:
        policy, frozen = Decoder().bfloat16(), Decoder().bfloat16()
        frozen.load_state_dict(policy.state_dict())
        frozen.requires_grad_(False).eval()
        lib.offload(policy)
        lib.offload(frozen)
        optimizer = lib.AdamW(policy.parameters(), lr=1e-3)
        for _ in range(3):
            (tokens,) = policy.inputs(lib)
            with torch.no_grad():
                anchor = frozen(tokens).float().log_softmax(-1)
            logits = policy(tokens).float().log_softmax(-1)
            picked, anchored = (t.gather(-1, tokens[..., None]) for t in (logits, anchor))
            loss = -F.logsigmoid(picked - anchored).mean()
            loss.backward()
            lib.note("loss", loss)
            lib.note("norm", torch.nn.utils.clip_grad_norm_(lib.trained(policy.parameters()), 1.0))
            optimizer.step()
            optimizer.zero_grad()

    compare(script)


def test_two_models_trained_against_each_other(compare: Compare) -> None:
    """One loss goes through both; each has an optimizer of its own and is frozen while the other trains."""

    class Judge(Stack):
        def inputs(self, lib: Plain | Tiered) -> tuple[Tensor, ...]:
            return (lib.randn(6, 5),)

    def script(lib: Plain | Tiered) -> None:
        maker, judge = Stack(), Judge()
        judge.inlet = nn.Linear(5, 33)
        lib.offload(maker)
        lib.offload(judge)
        optimizers = [lib.AdamW(maker.parameters(), lr=1e-3), lib.Adam(judge.parameters(), lr=1e-3)]
        for step in range(4):
            trained, other = (maker, judge) if step % 2 == 0 else (judge, maker)
            other.requires_grad_(False)
            sign = 1 if step % 2 == 0 else -1
            loss = sign * judge(maker(*maker.inputs(lib))).square().mean()
            if sign < 0:
                loss = loss + judge(*judge.inputs(lib)).square().mean()
            loss.backward()
            lib.note("loss", loss)
            torch.nn.utils.clip_grad_norm_(lib.trained(trained.parameters()), 0.5)
            optimizers[step % 2].step()
            optimizers[step % 2].zero_grad()
            other.requires_grad_(True)

    compare(script)


def test_one_optimizer_over_two_models(compare: Compare) -> None:
    def script(lib: Plain | Tiered) -> None:
        first, second = lib.offload(Stack()), lib.offload(Stack().bfloat16())
        optimizer = lib.AdamW([*first.parameters(), *second.parameters()], lr=1e-3)
        for _ in range(3):
            loss = first(*first.inputs(lib)).mean() + second(*second.inputs(lib)).float().square().mean()
            loss.backward()
            both = lib.trained([*first.parameters(), *second.parameters()])
            lib.note("norm", torch.nn.utils.clip_grad_norm_(both, 0.5))
            optimizer.step()
            optimizer.zero_grad()

    compare(script)


# --- Hugging Face


@both_dtypes
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
def test_a_llama_of_transformers(compare: Compare, dtype: torch.dtype, checkpointing: str | None) -> None:
    transformers = pytest.importorskip("transformers")

    def script(lib: Plain | Tiered) -> None:
        config = transformers.LlamaConfig(
            vocab_size=101,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=True,
            use_cache=False,
        )
        model = transformers.LlamaForCausalLM(config).to(dtype)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        lib.offload(model)
        optimizer = lib.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        model.train()
        for _ in range(3):
            for _ in range(2):
                tokens = lib.integers(101, 2, 12)
                loss = model(input_ids=tokens, labels=tokens).loss / 2
                loss.backward()
                lib.note("loss", loss)
            lib.note("norm", torch.nn.utils.clip_grad_norm_(lib.trained(model.parameters()), 1.0))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            lib.note("logits", model(input_ids=tokens).logits)

    compare(script)


def test_generation(compare: Compare) -> None:
    """`generate` runs hundreds of small forwards and caches keys and values between them."""
    transformers = pytest.importorskip("transformers")

    def script(lib: Plain | Tiered) -> None:
        config = transformers.LlamaConfig(
            vocab_size=101,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
        )
        model = lib.offload(transformers.LlamaForCausalLM(config))
        tokens = model.generate(lib.integers(101, 1, 4), max_new_tokens=12, do_sample=False, pad_token_id=0)
        lib.note("tokens", tokens)

    compare(script, [ON_DISK])
