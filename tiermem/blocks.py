"""Cutting a module into blocks.

block      parameters that move together because they are used together.
root       the module whose forward uses a block; gathering hangs on its hooks.
resident   small leftover parameters that belong to no block worth moving: they stay on the device, in blocks of their
           own.

Rules, in order: what ``Policy.blocks`` names; the children of every outermost ModuleList, ModuleDict and Sequential;
then, among what is left, the largest subtrees that still fit a block, largest first; single modules otherwise. Every
parameter belongs to exactly one block: a tied parameter to the first module that holds it, and the others gather that
block too.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

SMALL_BYTES = 256 * 1024
"""A leftover module with fewer bytes of parameters than this is not worth a transfer of its own."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass
class BlockSpec:
    """A block to be: its root, the modules below it that it serves, the parameters (qualified name, parameter) that
    it owns."""

    name: str
    root: nn.Module
    modules: list[nn.Module]
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    resident: bool = False
    layer: bool = False
    """Found in a container, or named by ``Policy.blocks``; or the norm that follows the last of those, which would keep
    fp32 copies of the whole batch."""

    @property
    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for _, p in self.parameters)


def find_blocks(
    module: nn.Module, blocks: Sequence[Any] | None, *, block_bytes: int, resident_bytes: int
) -> list[BlockSpec]:
    """Cut ``module``. Its integer and boolean parameters are left out: they are never trained, and placeholders need
    NaN.

    block_bytes: a subtree that no rule names is one block if it is at most this large.
    resident_bytes: cap on all resident leftovers together; leftovers beyond it become blocks.
    Errors: ``ValueError`` for an entry of ``blocks`` that matches nothing.
    """
    roots = _named_roots(module, blocks) if blocks is not None else _container_children(module)
    stop = {id(root) for _, root in roots}
    owned: set[nn.Parameter] = set()
    specs: list[BlockSpec] = []

    def add(name: str, root: nn.Module, parts: list[tuple[str, nn.Module]]) -> None:
        spec = BlockSpec(name or type(root).__name__, root, [part for _, part in parts])
        for prefix, part in parts:
            for parameter_name, parameter in part._parameters.items():
                if parameter is not None and parameter not in owned and parameter.is_floating_point():
                    owned.add(parameter)
                    spec.parameters.append((f"{prefix}.{parameter_name}" if prefix else parameter_name, parameter))
        if spec.parameters:
            specs.append(spec)

    for name, root in roots:
        add(name, root, list(_subtree(root, name, stop)))
    named_count = len(specs)
    for spec in specs:
        spec.layer = True
    for name, root in _leftovers(module, owned, stop, block_bytes):
        add(name, root, list(_subtree(root, name, stop)))
    for name, part in module.named_modules():  # what stands directly in modules too large for one block
        add(name, part, [(name, part)])

    for spec in specs[named_count:]:
        spec.layer = named_count > 0 and _is_norm(spec.root)
    for spec in sorted(specs[named_count:], key=lambda spec: spec.nbytes):
        if spec.nbytes <= min(SMALL_BYTES, resident_bytes):
            resident_bytes -= spec.nbytes
            spec.resident = True
    position = {id(part): index for index, part in enumerate(module.modules())}
    return sorted(specs, key=lambda spec: position[id(spec.root)])


def _is_norm(module: nn.Module) -> bool:
    """A layer norm or the like, of any class; not one that computes over the batch."""
    leaf = next(module.children(), None) is None
    return leaf and not isinstance(module, _NormBase) and all(p.dim() == 1 for p in module.parameters())


def _named_roots(module: nn.Module, blocks: Sequence[Any]) -> list[tuple[str, nn.Module]]:
    roots: dict[int, tuple[str, nn.Module]] = {}
    for entry in blocks:
        if isinstance(entry, nn.Module):
            matched = [(n, m) for n, m in module.named_modules() if m is entry]
        elif isinstance(entry, type) and issubclass(entry, nn.Module):
            matched = [(n, m) for n, m in module.named_modules() if isinstance(m, entry)]
        elif isinstance(entry, str):
            matched = [(n, m) for n, m in module.named_modules() if _matches(n, entry)]
        else:
            raise ValueError(f"Policy(blocks=...): {entry!r} is neither a module, a module class nor a name pattern")
        if not matched:
            raise ValueError(f"Policy(blocks=...): {entry!r} matches no module of {type(module).__name__}")
        roots |= {id(m): (n, m) for n, m in matched}
    return list(roots.values())


def _matches(name: str, pattern: str) -> bool:
    """Component by component: ``layers.*`` is every layer, not what is inside of them."""
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))


def _container_children(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Children of the outermost containers. A container inside a container that is only a list has no forward: it is
    descended into."""
    found: dict[int, tuple[str, nn.Module]] = {}
    inside_list = isinstance(module, _CONTAINERS)
    for name, child in module.named_children():
        qualified = f"{prefix}.{name}" if prefix else name
        if inside_list and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            if any(True for _ in child.parameters()):
                found.setdefault(id(child), (qualified, child))
        else:
            for qualified_name, root in _container_children(child, qualified):
                found.setdefault(id(root), (qualified_name, root))
    return list(found.values())


def _subtree(root: nn.Module, name: str, stop: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """``root`` and what is below it, not entering other roots."""
    yield name, root
    for child_name, child in root.named_children():
        if id(child) not in stop:
            yield from _subtree(child, f"{name}.{child_name}" if name else child_name, stop)


def _leftovers(
    module: nn.Module, owned: set[nn.Parameter], stop: set[int], block_bytes: int
) -> list[tuple[str, nn.Module]]:
    """The largest subtrees below ``module`` that hold unowned parameters, fit a block and enclose no root; largest
    first."""
    found: list[tuple[int, str, nn.Module]] = []

    def visit(name: str, part: nn.Module) -> None:
        nbytes = sum(p.numel() * p.element_size() for p in part.parameters() if p not in owned)
        if not nbytes:
            return
        whole = not any(id(below) in stop for below in part.modules())
        forwardless = isinstance(part, (nn.ModuleList, nn.ModuleDict))
        if part is not module and whole and not forwardless and nbytes <= block_bytes:
            found.append((nbytes, name, part))
            return
        for child_name, child in part.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", module)
    return [(name, part) for _, name, part in sorted(found, key=lambda entry: -entry[0])]


def modules_by_use(module: nn.Module, specs: Sequence[BlockSpec]) -> list[tuple[nn.Module, str, list[int]]]:
    """Modules whose forward must gather, with their names and the indices of the blocks they use.

    A root uses its own block and the blocks of tied parameters in the modules it serves; any other module that
    directly holds a parameter (a tied head, say) uses that parameter's block.
    """
    owner = {parameter: index for index, spec in enumerate(specs) for _, parameter in spec.parameters}
    names = {id(part): name for name, part in module.named_modules()}
    uses: dict[int, tuple[nn.Module, str, list[int]]] = {}

    def use(part: nn.Module, holder: nn.Module) -> None:
        for parameter in holder._parameters.values():
            if parameter is not None and parameter in owner:
                _, _, used = uses.setdefault(id(part), (part, names[id(part)] or type(part).__name__, []))
                if owner[parameter] not in used:
                    used.append(owner[parameter])

    served = {id(part) for spec in specs for part in spec.modules}
    for spec in specs:
        for part in spec.modules:
            use(spec.root, part)
    for part in module.modules():
        if id(part) not in served:
            use(part, part)
    return list(uses.values())
