"""Offsets: nothing overlaps, nothing is lost, and norms do not depend on how a section is cut."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.layout import PAGE_BYTES, PIECE_NUMEL, ParameterSpec, lay_out

KINDS = [("torch.bfloat16", 2), ("torch.float32", 4), ("torch.float64", 8)]
SIZES = st.one_of(st.sampled_from([0, 1, 7, 199, 513, 4095, 4096, 4097, 100_003]), st.integers(0, 20_000))


@st.composite
def blocks(draw: st.DrawFn) -> list[ParameterSpec]:
    found = []
    for _ in range(draw(st.integers(1, 12))):
        kind, itemsize = draw(st.sampled_from(KINDS))
        found.append(ParameterSpec(draw(SIZES), kind, itemsize, draw(st.booleans())))
    return found


CHUNKS = st.sampled_from([4096, 8192, 1 << 16])


@settings(max_examples=150, deadline=None)
@given(blocks(), CHUNKS)
def test_parameters_do_not_overlap_and_are_aligned(specs: list[ParameterSpec], chunk_numel: int) -> None:
    layout = lay_out(specs, chunk_numel)
    ranges = sorted(
        (layout.weight_offset(index), layout.weight_offset(index) + spec.numel * spec.itemsize)
        for index, spec in enumerate(specs)
        if spec.numel
    )
    for (_, end), (start, _) in itertools.pairwise(ranges):
        assert end <= start
    assert all(start % 64 == 0 for start, _ in ranges)
    assert not ranges or ranges[-1][1] <= layout.weight_bytes
    assert layout.weight_bytes % PAGE_BYTES == 0


@settings(max_examples=150, deadline=None)
@given(blocks(), CHUNKS)
def test_segments_cover_every_parameter_once(specs: list[ParameterSpec], chunk_numel: int) -> None:
    layout = lay_out(specs, chunk_numel)
    covered: dict[int, int] = dict.fromkeys(range(len(specs)), 0)
    for chunk in layout.chunks:
        assert 0 < chunk.numel <= chunk_numel
        assert chunk.weight_offset % PAGE_BYTES == 0
        end = 0
        for segment in chunk.segments:
            place = layout.slices[segment.parameter]
            assert segment.chunk_start >= end
            assert chunk.start + segment.chunk_start == place.start + segment.slice_start
            assert segment.slice_start == covered[segment.parameter]
            covered[segment.parameter] += segment.numel
            end = segment.chunk_start + segment.numel
        assert end <= chunk.numel
    assert covered == {index: spec.numel for index, spec in enumerate(specs)}


@settings(max_examples=100, deadline=None)
@given(blocks(), CHUNKS)
def test_norm_pieces_are_the_same_for_any_chunk_size(specs: list[ParameterSpec], chunk_numel: int) -> None:
    def pieces(chunk: int) -> list[list[tuple[int, int]]]:
        layout = lay_out(specs, chunk)
        found: list[list[tuple[int, int]]] = [[] for _ in specs]
        for part in layout.chunks:
            for segment in part.segments:
                index, size = segment.pieces(layout.slices[segment.parameter])
                position, left = segment.slice_start, segment.numel
                while left:
                    found[segment.parameter].append((index, size))
                    position, left, index = position + size, left - size, index + 1
                    size = min(left, PIECE_NUMEL)
        for parameter, listed in enumerate(found):
            count, first = layout.slices[parameter].pieces()
            assert [index for index, _ in listed] == list(range(count))
            assert not listed or listed[0][1] == first
        return found

    assert pieces(chunk_numel) == pieces(1 << 20)


@settings(max_examples=100, deadline=None)
@given(blocks(), CHUNKS, st.booleans())
def test_gradient_planes_hold_the_trainable_sections_only(
    specs: list[ParameterSpec], chunk_numel: int, wide: bool
) -> None:
    layout = lay_out(specs, chunk_numel)
    plane = layout.gradient_plane(wide=wide)
    end = 0
    for index, section in enumerate(layout.sections):
        if not section.trainable:
            assert plane.section_offsets[index] is None
            continue
        start = plane.offset(index, 0)
        assert start >= end
        assert start % PAGE_BYTES == 0
        end = plane.offset(index, section.numel)
        assert end - start == section.numel * (4 if wide else section.itemsize)
    assert plane.nbytes >= end


def test_state_extents_cost_twelve_bytes_with_the_weight() -> None:
    layout = lay_out([ParameterSpec(1 << 22, "torch.bfloat16", 2, True)], 1 << 20)
    assert layout.weight_bytes + layout.state_bytes == 12 << 22
    layout = lay_out([ParameterSpec(1 << 22, "torch.float32", 4, True)], 1 << 20)
    assert layout.weight_bytes + layout.state_bytes == 12 << 22


def test_a_section_that_is_trained_later_keeps_its_places() -> None:
    specs = [ParameterSpec(5000, "torch.bfloat16", 2, False), ParameterSpec(77, "torch.bfloat16", 2, True)]
    before = lay_out(specs, 4096)
    after = before.with_trainable(before.slices[0].section)
    assert [before.weight_offset(i) for i in range(2)] == [after.weight_offset(i) for i in range(2)]
    assert all(chunk.trainable and chunk.split for chunk in after.chunks)
    assert after.state_bytes > before.state_bytes
