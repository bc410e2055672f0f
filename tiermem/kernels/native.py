"""The kernels of csrc/, called by ctypes."""

from __future__ import annotations

import ctypes

from tiermem._native import library
from tiermem.kernels import Kernels
from tiermem.kernels.abi import AccumulateTask, UpdateTask

_ADDRESS = ctypes.c_void_p
_NUMEL = ctypes.c_int64
_INT = ctypes.c_int32

_SIGNATURES = {  # argument types after the instruction set, and the result's
    "tm_update": ([_ADDRESS, _NUMEL, _INT], None),
    "tm_accumulate": ([_ADDRESS, _NUMEL, _INT], None),
    "tm_traffic": ([_ADDRESS, _NUMEL, _INT], None),
    "tm_split": ([_ADDRESS, _ADDRESS, _ADDRESS, _NUMEL, _INT], None),
    "tm_join": ([_ADDRESS, _ADDRESS, _ADDRESS, _NUMEL, _INT], None),
    "tm_checksum": ([_ADDRESS, _NUMEL], ctypes.c_uint64),
}


def isa_names() -> list[str]:
    """The instruction sets that the library has code for and this processor has, narrowest first."""
    loaded = library()
    loaded.tm_isa_name.restype = ctypes.c_char_p
    supported = [isa for isa in range(loaded.tm_isa_count()) if loaded.tm_isa_supported(isa)]
    return [loaded.tm_isa_name(isa).decode() for isa in supported]


class NativeKernels(Kernels):
    """Kernels compiled for one instruction set."""

    def __init__(self, isa: str | None = None) -> None:
        loaded = library()
        names = isa_names()
        if isa is None:
            isa = names[-1]
        if isa not in names:
            raise ValueError(f"no kernels for {isa!r} on this machine; there are {', '.join(names)}")
        self.name = f"native {isa}"
        self._isa = names.index(isa)
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.argtypes = [_INT, *arguments]
            function.restype = result
        self._library = loaded

    def update(self, tasks: ctypes.Array[UpdateTask], count: int, threads: int) -> None:
        self._library.tm_update(self._isa, ctypes.addressof(tasks), count, threads)

    def traffic(self, tasks: ctypes.Array[UpdateTask], count: int, threads: int) -> None:
        """Reads and writes what ``update`` would, and computes nothing: the limit it is measured against.

        Masters and gradients are all bf16 or all fp32, moments are two and fp32.
        """
        self._library.tm_traffic(self._isa, ctypes.addressof(tasks), count, threads)

    def accumulate(self, tasks: ctypes.Array[AccumulateTask], count: int, threads: int) -> None:
        self._library.tm_accumulate(self._isa, ctypes.addressof(tasks), count, threads)

    def split(self, master: int, weight: int, residual: int, numel: int, threads: int) -> None:
        self._library.tm_split(self._isa, master, weight, residual, numel, threads)

    def join(self, weight: int, residual: int, master: int, numel: int, threads: int) -> None:
        self._library.tm_join(self._isa, weight, residual, master, numel, threads)

    def checksum(self, address: int, nbytes: int) -> int:
        return int(self._library.tm_checksum(self._isa, address, nbytes))
