"""What is where, what was moved, what was waited for."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tiermem.memory import format_bytes
from tiermem.policy import Tier
from tiermem.timeline import MAIN, Timeline


@dataclass
class Counters:
    """Counted while a runtime lives."""

    bytes_copied_in: int = 0
    bytes_copied_out: int = 0
    seconds_waited: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("gather", "gradient", "update", "disk"), 0.0)
    )
    steps: int = 0
    steps_skipped: int = 0

    @contextmanager
    def waiting(self, what: str, timeline: Timeline, block: str) -> Iterator[None]:
        """The main thread waits inside, for something of ``block``."""
        start = time.perf_counter()
        timeline.pause()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.seconds_waited[what] += end - start
            timeline.add(MAIN, block, what, start, end)
            timeline.resume()


@dataclass(frozen=True)
class BlockReport:
    """Where one block's planes rest. ``None``: the block has none (frozen). Where ``states`` is DISK,
    ``states_in_host`` is the share of their bytes that stays in HOST all the same."""

    name: str
    numel: int
    weights: Tier
    states: Tier | None
    grads: Tier | None
    states_in_host: float = 0.0


@dataclass(frozen=True)
class Report:
    """A runtime's placement and traffic since it began.

    bytes_resident: bytes taken of each tier's budget. seconds_waited: of the main thread, by what it waited for.
    fallbacks: what is slower than it could be, and why.
    """

    blocks: list[BlockReport]
    bytes_resident: dict[Tier, int]
    bytes_read: int
    bytes_written: int
    bytes_copied_in: int
    bytes_copied_out: int
    seconds_waited: dict[str, float]
    steps: int
    steps_skipped: int
    engine: str | None
    kernels: str
    fallbacks: list[str]
    disk_endurance_bytes: int | None = None
    """Bytes that the drive is rated for, if ``Memory(disk_endurance=...)`` says so."""

    @property
    def bytes_written_per_step(self) -> float:
        return self.bytes_written / max(1, self.steps)

    def wear(self) -> str:
        """Writes per step and, where the drive's rating is known, the share of its life used and how long it will
        last."""
        text = (
            f"{format_bytes(self.bytes_written_per_step)} written per step, {format_bytes(self.bytes_written)} in all"
        )
        if self.disk_endurance_bytes and self.bytes_written:
            used = 100 * self.bytes_written / self.disk_endurance_bytes
            last = self.disk_endurance_bytes / self.bytes_written_per_step if self.steps else math.inf
            rated = format_bytes(self.disk_endurance_bytes)
            text += f": {used:.2g} % of its rated {rated}, which lasts {last:,.0f} steps"
        return text

    def __str__(self) -> str:
        lines = [f"{'parameters in':<14}{'weights':>14}{'states':>14}{'gradients':>14}"]
        for tier in Tier:
            row = [
                sum(block.numel for block in self.blocks if getattr(block, plane) is tier)
                for plane in ("weights", "states", "grads")
            ]
            lines.append(f"{tier.name:<14}" + "".join(f"{count:>14,}" for count in row))
        for tier, nbytes in self.bytes_resident.items():
            lines.append(f"{tier.name} holds {format_bytes(nbytes)}")
        lines.append(
            f"disk: {format_bytes(self.bytes_read)} read, {format_bytes(self.bytes_written)} written "
            f"({self.engine or 'unused'})"
        )
        if self.bytes_written:
            lines.append(f"disk wear: {self.wear()}")
        lines.append(
            f"device: {format_bytes(self.bytes_copied_in)} copied in, {format_bytes(self.bytes_copied_out)} copied out"
        )
        waits = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in self.seconds_waited.items())
        lines.append(f"waited: {waits}")
        skipped = f", {self.steps_skipped} skipped for non-finite gradients" if self.steps_skipped else ""
        lines.append(f"steps: {self.steps}{skipped}; kernels: {self.kernels}")
        return "\n".join(lines + self.fallbacks)
