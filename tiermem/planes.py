"""What the runtime holds: parameters, blocks, and where each plane of a block rests.

held      a parameter whose values the runtime owns; the ``nn.Parameter`` itself points at a view of them while its
          block is gathered, and at a placeholder otherwise.
placeholder  ``full((1,), nan).expand(shape)``: right shape, dtype and device, 4 bytes; a write raises, a read gives
             NaN.
resident  a block whose home is the DEVICE: its parameters stay usable between uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from tiermem.device import DONE, Event
from tiermem.kernels.abi import BF16, F32
from tiermem.layout import BlockLayout, Chunk, ParameterSpec
from tiermem.policy import Tier

if TYPE_CHECKING:
    from tiermem.gradients import BlockGradients
    from tiermem.handles import GradientHandle
    from tiermem.runtime import Runtime
    from tiermem.slots import Slot
    from tiermem.store import Record
    from tiermem.update import Hyperparameters, Updater

TRAINABLE_CODES = {torch.bfloat16: BF16, torch.float32: F32}
"""Dtypes that can be trained, with the kernels' codes for them."""

_ATTRIBUTE = "_tiermem_held"


class Held:
    """One parameter held by a runtime: its place, its stand-in, and the number of updates it has had."""

    def __init__(self, parameter: nn.Parameter, name: str, index: int, dtype: torch.dtype) -> None:
        self.parameter = parameter
        self.name = name
        self.index = index  # in its block
        self.dtype = dtype  # of the weight plane
        self.original_dtype = parameter.dtype
        self.size = tuple(parameter.shape)
        self.stride = _dense_stride(parameter)
        self.numel = parameter.numel()
        self.block: Block = None  # type: ignore[assignment]  # set by the block that takes it
        self.runtime: Runtime = None  # type: ignore[assignment]  # set when the runtime is complete
        self.placeholder: torch.Tensor = None  # type: ignore[assignment]  # made by the block
        self.steps = 0  # updates applied or handed over
        self.updated = False  # an optimizer has state for it
        self.optimizer: Callable[[], Updater | None] = _nobody  # the optimizer that updates it, weakly
        self.applied: Hyperparameters | None = None  # of the update that began inside this step's backward
        self.hook: Any = None  # of the gradient's arrival; None while the parameter is frozen
        self.handle: GradientHandle | None = None
        self.gathers: list[torch.Tensor] = []  # what surrounding tiermem.gather() blocks show, innermost last
        self.partials = np.zeros(0)

    @property
    def split(self) -> bool:
        """The master is a weight and a residual."""
        return self.dtype is torch.bfloat16

    def view(self, plane: torch.Tensor) -> torch.Tensor:
        """The parameter's values in a weight plane of its block (uint8, on any device)."""
        offset = self.block.layout.weight_offset(self.index) // self.dtype.itemsize
        # Not plane.view(...).as_strided(...): that would keep a second tensor alive, and slots count who holds their
        # storage.
        return torch.empty(0, dtype=self.dtype, device=plane.device).set_(
            plane.untyped_storage(), offset, self.size, self.stride
        )

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` (same shape) as a 1-D tensor in the order in which the plane stores it; copies only if it must."""
        tensor = tensor.detach()
        if self.numel and tuple(tensor.stride()) != self.stride:
            tensor = torch.empty_strided(self.size, self.stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        return tensor.as_strided((self.numel,), (1,))

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """The inverse of ``flat``: a view in the parameter's shape."""
        return flat.as_strided(self.size, self.stride)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refuse_copy(self.name)

    def __deepcopy__(self, memo: Any) -> Any:
        raise refuse_copy(self.name)


def _nobody() -> None:
    return None


def _dense_stride(parameter: torch.Tensor) -> tuple[int, ...]:
    """The parameter's own strides if they enumerate numel elements without gaps, else those of a contiguous tensor."""
    expected = 1
    for size, stride in sorted(zip(parameter.shape, parameter.stride(), strict=True), key=lambda dim: (dim[1], dim[0])):
        if size == 1:
            continue
        if stride != expected:
            return tuple(torch.empty(parameter.shape, device="meta").stride())
        expected *= size
    return tuple(parameter.stride())


def refuse_copy(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} is offloaded: its values are not in this object, so it can be neither copied nor pickled. "
        "Use model.state_dict(), or copy before tiermem.offload(), or call tiermem.close(model) first"
    )


def held_of(parameter: torch.Tensor) -> Held | None:
    return getattr(parameter, _ATTRIBUTE, None)


def attach(held: Held) -> None:
    setattr(held.parameter, _ATTRIBUTE, held)


def detach(held: Held) -> None:
    delattr(held.parameter, _ATTRIBUTE)


class ChunkHome:
    """Where one chunk's extents rest. HOST bytes are tensors; DISK bytes are records of the store."""

    def __init__(self, layout: Chunk) -> None:
        self.layout = layout
        self.weight: Record | None = None  # DISK; in HOST the chunk is a range of the block's plane
        self.state: Record | torch.Tensor | None = None  # None: frozen
        self.gradient: Record | None = None  # DISK, in the parameters' dtype
        self.wide_gradient: Record | None = None  # DISK, fp32 sums; made when first needed
        self.gradient_is_wide = False


@dataclass(eq=False)
class Block:
    """Parameters that move together, and where their planes are."""

    index: int
    name: str
    held: list[Held]
    layout: BlockLayout
    home: Tier
    """Of the weight plane."""
    states_home: Tier | None = None
    host_states: frozenset[int] = frozenset()
    """Chunks whose states rest in HOST; the others' rest on DISK."""
    gradients_home: Tier | None = None
    plane: torch.Tensor | None = None
    """uint8 (weight_bytes,) in HOST; None: the weights rest on DISK."""
    device_plane: torch.Tensor | None = None
    """uint8 (weight_bytes,): a home on the DEVICE. On a unified device it is ``plane`` itself."""
    chunks: list[ChunkHome] = field(default_factory=list)
    gradients: BlockGradients = None  # type: ignore[assignment]

    slot: Slot | None = None
    gathered: bool = False
    """The parameters point at real values."""
    applied: bool = False
    """Its update has begun inside this step's backward (``Policy.update_in_backward``): its weights are those of the
    next step."""
    read_in_backward: bool = False
    """Something read a parameter by attribute during backward (a recompute): autograd may hold the parameters
    themselves."""
    touched: bool = False
    """Gathered since the last optimizer step: a gradient for it is no surprise."""
    holds: int = 0
    """Forwards that need the block gathered; without holds it may be released when its slot is wanted."""
    update: Future[None] | None = None
    """The update in flight: nothing may read weights or overwrite gradients before it is done."""
    uploaded: Event | None = None
    """The device plane holds the updated weights; ``None``: compute waits for it already."""
    last_copy: Event = DONE
    """The last copy from ``plane``; those before it have ended when it has."""

    def __post_init__(self) -> None:
        counts = [self.layout.slices[held.index].pieces()[0] for held in self.held]
        self.partials = np.zeros(sum(counts))
        """Sums of squares of the gradients, by norm piece; each parameter has its own range."""
        starts = np.cumsum([0, *counts])
        for held, start, count in zip(self.held, starts, counts, strict=False):
            held.block = self
            held.partials = self.partials[start : start + count]
        self.chunks = [ChunkHome(chunk) for chunk in self.layout.chunks]
        self._views: list[torch.Tensor] | None = None
        self._placeholders = bytearray()
        self._pristine = b""

    @property
    def evictable(self) -> bool:
        """Gathered, but needed by no running forward, nor by what autograd saved of a recompute in this backward."""
        saved = self.read_in_backward and self.gradients.expected > 0
        return self.gathered and not self.holds and not saved

    @property
    def resident(self) -> bool:
        return self.home is Tier.DEVICE

    @property
    def states_in_host(self) -> float:
        """Share of the state bytes that rest in HOST."""
        bytes_of = {chunk.layout.index: chunk.layout.state_bytes for chunk in self.chunks if chunk.layout.trainable}
        return sum(bytes_of[index] for index in self.host_states) / max(1, sum(bytes_of.values()))

    @property
    def numel(self) -> int:
        return sum(held.numel for held in self.held)

    def make_placeholders(self, device: torch.device) -> None:
        """One NaN for each parameter, in storages of their own that lie side by side: a write to any of them is seen
        at little cost."""
        size = 8
        self._placeholders = bytearray(size * len(self.held))
        for index, held in enumerate(self.held):
            if device.type == "cpu":
                scalar = torch.frombuffer(self._placeholders, dtype=held.dtype, offset=size * index, count=1)
            else:
                scalar = torch.empty(1, dtype=held.dtype, device=device)
            scalar.fill_(float("nan"))
            held.placeholder = (scalar if held.size else scalar.reshape(())).expand(held.size)
        self._pristine = bytes(self._placeholders)

    def check_placeholders(self) -> None:
        """Errors: ``RuntimeError`` naming a parameter that was written to while it was a placeholder."""
        if self._placeholders != self._pristine:
            now, then = self._placeholders, self._pristine
            written = [h.name for i, h in enumerate(self.held) if now[8 * i : 8 * i + 8] != then[8 * i : 8 * i + 8]]
            self._placeholders[:] = self._pristine
            raise RuntimeError(
                f"{', '.join(written)} was written to while it was not gathered, so the values are lost: write inside "
                "`with tiermem.gather(parameter, write=True)`"
            )

    def point(self, views: Sequence[torch.Tensor]) -> None:
        self.check_placeholders()
        for held, view in zip(self.held, views, strict=True):
            if not held.gathers:  # else the user's tensor holds the newer values
                held.parameter.data = view
        self.gathered = self.touched = True

    def unpoint(self) -> None:
        for held in self.held:
            if not held.gathers:
                held.parameter.data = held.placeholder
        self.gathered = False

    def views(self, plane: torch.Tensor) -> list[torch.Tensor]:
        with torch.inference_mode(False):  # views made in an inference forward could not be trained with later
            return [held.view(plane) for held in self.held]

    def resting_views(self) -> list[torch.Tensor]:
        """Views of the plane that needs no slot, made once."""
        if self._views is None:
            if self.device_plane is None:
                raise AssertionError(f"block {self.name} has no plane on the device")
            self._views = self.views(self.device_plane)
        return self._views

    def wait_update(self) -> None:
        """Return when no update of this block is in flight. Raises what it raised."""
        if self.update is not None:
            self.update.result()
            self.update = None


def specs_of(parameters: Sequence[nn.Parameter], dtypes: Sequence[torch.dtype]) -> list[ParameterSpec]:
    return [
        ParameterSpec(parameter.numel(), str(dtype), dtype.itemsize, parameter.requires_grad)
        for parameter, dtype in zip(parameters, dtypes, strict=True)
    ]
