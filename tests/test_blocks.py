"""How a model is cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tiermem.blocks import SMALL_BYTES, BlockSpec, find_blocks, modules_by_use

MIB = 1 << 20


class Layer(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


class Decoder(nn.Module):
    """Shaped like a causal LM: embedding, layers, norm; a tied head beside it."""

    def __init__(self, *, tied: bool = True, vocabulary: int = 4096) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed = nn.Embedding(vocabulary, 64)
        self.model.layers = nn.ModuleList(Layer() for _ in range(3))
        self.model.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, vocabulary, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        if tied:
            self.head.weight = self.model.embed.weight


def cut(module: nn.Module, blocks: list[object] | None = None, *, resident: int = MIB) -> dict[str, BlockSpec]:
    specs = find_blocks(module, blocks, block_bytes=16 * MIB, resident_bytes=resident)
    return {spec.name: spec for spec in specs}


def names(spec: BlockSpec) -> list[str]:
    return [name for name, _ in spec.parameters]


def test_layers_of_a_list_are_blocks_and_every_parameter_is_in_one() -> None:
    module = Decoder(tied=False)
    specs = cut(module)
    assert {"model.layers.0", "model.layers.1", "model.layers.2"} < set(specs)
    assert sorted(n for spec in specs.values() for n in names(spec)) == sorted(n for n, _ in module.named_parameters())


def test_large_leftovers_are_blocks_and_small_ones_are_resident() -> None:
    specs = cut(Decoder(tied=False))
    assert not specs["model.embed"].resident
    assert not specs["head"].resident
    assert specs["model.norm"].resident
    assert next(spec for spec in specs.values() if names(spec) == ["scale"]).resident


def test_residents_stay_within_their_cap() -> None:
    specs = cut(Decoder(), resident=100)
    assert not specs["model.norm"].resident
    assert sum(spec.nbytes for spec in specs.values() if spec.resident) <= 100
    assert all(spec.nbytes < SMALL_BYTES for spec in specs.values() if spec.resident)


def test_a_tied_parameter_is_in_one_block_and_both_modules_gather_it() -> None:
    module = Decoder()
    specs = find_blocks(module, None, block_bytes=16 * MIB, resident_bytes=MIB)
    owners = [spec for spec in specs if any(p is module.head.weight for _, p in spec.parameters)]
    assert [spec.name for spec in owners] == ["model.embed"]
    uses = {name: used for _, name, used in modules_by_use(module, specs)}
    assert specs.index(owners[0]) in uses["head"]
    assert specs.index(owners[0]) in uses["model.embed"]


def test_a_sequential_inside_a_layer_belongs_to_the_layer() -> None:
    spec = cut(Decoder())["model.layers.0"]
    assert "model.layers.0.inner.2.weight" in names(spec)


def test_a_list_in_a_list_is_descended_into() -> None:
    module = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))
    assert sorted(cut(module)) == ["0.0", "0.1", "1.0", "1.1"]


@pytest.mark.parametrize("by", [Layer, "model.layers.*", None])
def test_blocks_can_be_named(by: object) -> None:
    module = Decoder()
    entry = module.model.layers[1] if by is None else by
    specs = cut(module, [entry])
    assert names(specs["model.layers.1"])[0] == "model.layers.1.norm.weight"
    assert not any(name.startswith("model.layers.1.") for name in specs)


def test_a_subtree_that_is_too_large_for_one_block_is_cut_into_modules() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Module()
            self.body.first = nn.Linear(512, 512)
            self.body.second = nn.Linear(512, 512)

    whole = {spec.name for spec in find_blocks(Wide(), None, block_bytes=8 * MIB, resident_bytes=0)}
    parts = {spec.name for spec in find_blocks(Wide(), None, block_bytes=MIB + 65536, resident_bytes=0)}
    assert whole == {"body"}
    assert parts == {"body.first", "body.second"}


def test_a_name_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no.such"):
        cut(Decoder(), ["no.such"])
    with pytest.raises(ValueError, match="neither"):
        cut(Decoder(), [3])


def test_integer_parameters_are_left_alone() -> None:
    module = nn.Module()
    module.codes = nn.Parameter(torch.zeros(10, dtype=torch.int8), requires_grad=False)
    assert cut(module) == {}
