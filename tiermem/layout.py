"""Where every byte of a block lies: the only place where an offset is computed. Pure Python.

plane    one flat array of a block with one role.
section  a contiguous run of a plane whose parameters share one dtype and one trainability.
slice    a parameter's place: a section and an element offset in it.
chunk    a fixed number of elements of a section: the unit of disk I/O and of optimizer work.
segment  the part of a slice that lies in one chunk.
moment   a number per element that an optimizer keeps (Adam's exp_avg and exp_avg_sq), in the format that was asked for.
scale    what a run of a moment's codes is multiplied by, in a format that has codes. No run holds two parameters.
extent   the bytes of a chunk's optimizer state: ``[residual | moment 0 | moment 1 | ...]``, moments with their scales.
piece    4096 elements of a section: the unit of a gradient norm's partial sums, so that the sum of squares of a
         parameter does not depend on how its section is cut in chunks.

A section starts on a page and is padded to whole pages, so any chunk of it can be moved by direct I/O. Parameters
start on 64 bytes: the alignment of a torch allocation, hence the same code paths in the libraries that compute with
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

PAGE_BYTES = 4096
PARAMETER_ALIGNMENT_BYTES = 64
PIECE_NUMEL = 4096
SPLIT_KIND = "torch.bfloat16"
"""The kind whose fp32 masters are kept as a weight and a residual."""


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class MomentFormat:
    """How a moment rests.

    itemsize: bytes of an element.
    block_numel: elements that share an fp32 scale; 0: there are no scales.
    """

    itemsize: int
    block_numel: int = 0

    def scales_offset(self, numel: int) -> int:
        """Bytes from the start of a moment of ``numel`` elements to its scales."""
        return round_up(self.itemsize * numel, PARAMETER_ALIGNMENT_BYTES)

    def nbytes(self, numel: int) -> int:
        scales = 4 * -(-numel // self.block_numel) if self.block_numel else 0
        return self.scales_offset(numel) + round_up(scales, PARAMETER_ALIGNMENT_BYTES)


MOMENT_FORMATS = {"fp32": MomentFormat(4), "bf16": MomentFormat(2), "int8": MomentFormat(1, 128)}
MOMENTS_PLANNED = 2
"""Moments that chunks have room for until an optimizer says how many it keeps."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What the layout must know of one parameter.

    kind: sections gather parameters of one kind: a dtype, as torch prints it.
    """

    numel: int
    kind: str
    itemsize: int
    trainable: bool


@dataclass(frozen=True, slots=True)
class Slice:
    parameter: int
    section: int
    start: int  # elements, from the start of the section
    numel: int

    def pieces(self) -> tuple[int, int]:
        """Number of norm pieces, and elements in the first one (0 for an empty slice)."""
        if not self.numel:
            return 0, 0
        first = min(self.numel, PIECE_NUMEL - self.start % PIECE_NUMEL)
        return 1 + -(-(self.numel - first) // PIECE_NUMEL), first


@dataclass(frozen=True, slots=True)
class Segment:
    parameter: int
    chunk_start: int  # elements, from the start of the chunk
    slice_start: int  # elements, from the start of the parameter
    numel: int

    def pieces(self, whole: Slice) -> tuple[int, int]:
        """Index of this segment's first norm piece within its parameter, and elements in that piece."""
        position = whole.start + self.slice_start
        index = position // PIECE_NUMEL - whole.start // PIECE_NUMEL
        return index, min(self.numel, PIECE_NUMEL - position % PIECE_NUMEL)


@dataclass(frozen=True, slots=True)
class Section:
    kind: str
    itemsize: int
    trainable: bool
    split: bool
    numel: int  # with the padding between parameters
    weight_offset: int  # bytes, in the weight plane
    weight_bytes: int  # whole pages


@dataclass(frozen=True, slots=True)
class Chunk:
    index: int
    section: int
    start: int  # elements, from the start of the section
    numel: int
    weight_offset: int  # bytes, in the weight plane
    weight_bytes: int  # whole pages
    split: bool
    trainable: bool
    segments: tuple[Segment, ...]

    format: MomentFormat
    moments: int

    def moment_offset(self, moment: int) -> int:
        """Bytes from the start of the extent; the residual, if there is one, stands at its start."""
        residual = round_up(2 * self.numel, PARAMETER_ALIGNMENT_BYTES) if self.split else 0
        return residual + moment * self.format.nbytes(self.numel)

    def scales_offset(self, moment: int) -> int:
        return self.moment_offset(moment) + self.format.scales_offset(self.numel)

    @property
    def state_bytes(self) -> int:
        """Bytes of the extent, whole pages."""
        return round_up(max(self.moment_offset(self.moments), 1), PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class GradientPlane:
    """Offsets of a block's gradients: trainable sections only, either in the parameters' dtype or wide (fp32 sums)."""

    section_offsets: tuple[int | None, ...]  # bytes; None: the section has no gradients
    itemsizes: tuple[int, ...]
    nbytes: int

    def offset(self, section: int, start: int) -> int:
        base = self.section_offsets[section]
        if base is None:
            raise AssertionError(f"section {section} has no gradient")
        return base + start * self.itemsizes[section]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    slices: tuple[Slice, ...]  # one per parameter, in the block's order
    sections: tuple[Section, ...]
    chunks: tuple[Chunk, ...]
    weight_bytes: int

    def weight_offset(self, parameter: int) -> int:
        """Bytes from the start of the weight plane to the parameter's first element."""
        place = self.slices[parameter]
        section = self.sections[place.section]
        return section.weight_offset + place.start * section.itemsize

    def with_trainable(self, section: int) -> BlockLayout:
        """The same places, with one more section that is trained."""
        old = self.sections[section]
        new = replace(old, trainable=True, split=old.kind == SPLIT_KIND)
        chunks = tuple(replace(c, trainable=True, split=new.split) if c.section == section else c for c in self.chunks)
        sections = tuple(new if index == section else s for index, s in enumerate(self.sections))
        return replace(self, sections=sections, chunks=chunks)

    def with_moments(self, moments: int) -> BlockLayout:
        """The same places, with extents of that many moments."""
        return replace(self, chunks=tuple(replace(chunk, moments=moments) for chunk in self.chunks))

    def gradient_plane(self, *, wide: bool) -> GradientPlane:
        offsets: list[int | None] = []
        itemsizes: list[int] = []
        end = 0
        for section in self.sections:
            itemsize = 4 if wide else section.itemsize
            itemsizes.append(itemsize)
            offsets.append(end if section.trainable else None)
            if section.trainable:
                end += round_up(section.numel * itemsize, PAGE_BYTES)
        return GradientPlane(tuple(offsets), tuple(itemsizes), end)

    @property
    def state_bytes(self) -> int:
        return sum(chunk.state_bytes for chunk in self.chunks if chunk.trainable)


def lay_out(
    parameters: Sequence[ParameterSpec], chunk_numel: int, moment_format: MomentFormat = MOMENT_FORMATS["fp32"]
) -> BlockLayout:
    """Place the parameters of one block. Cost: none in memory beyond 64 bytes per parameter and a page per section."""
    groups: dict[tuple[str, bool], list[int]] = {}
    for index, spec in enumerate(parameters):
        groups.setdefault((spec.kind, spec.trainable), []).append(index)
    slices: dict[int, Slice] = {}
    sections: list[Section] = []
    chunks: list[Chunk] = []
    plane_end = 0
    for (kind, trainable), members in groups.items():
        itemsize = parameters[members[0]].itemsize
        split = trainable and kind == SPLIT_KIND
        align = max(PARAMETER_ALIGNMENT_BYTES // itemsize, moment_format.block_numel, 1)
        end = 0
        for index in members:
            start = round_up(end, align)
            slices[index] = Slice(index, len(sections), start, parameters[index].numel)
            end = start + parameters[index].numel
        section = Section(kind, itemsize, trainable, split, end, plane_end, round_up(end * itemsize, PAGE_BYTES))
        chunks += _cut(section, len(sections), [slices[i] for i in members], chunk_numel, len(chunks), moment_format)
        sections.append(section)
        plane_end += section.weight_bytes
    return BlockLayout(tuple(slices[i] for i in range(len(parameters))), tuple(sections), tuple(chunks), plane_end)


def _cut(
    section: Section, index: int, members: list[Slice], chunk_numel: int, first_chunk: int, moment_format: MomentFormat
) -> list[Chunk]:
    chunks: list[Chunk] = []
    pending = 0  # the first slice that reaches into the chunk being made
    for start in range(0, section.numel, chunk_numel):
        stop = min(start + chunk_numel, section.numel)
        while pending < len(members) and members[pending].start + members[pending].numel <= start:
            pending += 1
        segments: list[Segment] = []
        for place in members[pending:]:
            if place.start >= stop:
                break
            low, high = max(place.start, start), min(place.start + place.numel, stop)
            if low < high:
                segments.append(Segment(place.parameter, low - start, low - place.start, high - low))
        chunks.append(
            Chunk(
                first_chunk + len(chunks),
                index,
                start,
                stop - start,
                section.weight_offset + start * section.itemsize,
                round_up((stop - start) * section.itemsize, PAGE_BYTES),
                section.split,
                section.trainable,
                tuple(segments),
                moment_format,
                MOMENTS_PLANNED,
            )
        )
    return chunks
