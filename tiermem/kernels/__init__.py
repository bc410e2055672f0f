"""CPU kernels: the optimizer pass, sums of gradients, and the split of fp32 masters in two halves.

Two implementations give the same bits: `native` (csrc/, compiled) and `numba`. They read the records of `abi`.
Addresses are plain integers; the caller keeps the memory alive. Every call runs without the GIL on at most `threads`
threads, the calling one among them, and several may run at once.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from typing import Literal

from tiermem._native import NativeLibraryError
from tiermem.kernels.abi import AccumulateTask, UpdateTask

Choice = Literal["auto", "native", "numba"]


class Kernels(ABC):
    """One implementation of the kernels."""

    name: str
    passed_over: str | None = None  # why a faster implementation was not taken

    @abstractmethod
    def update(self, tasks: ctypes.Array[UpdateTask], count: int, threads: int) -> None:
        """Applies the optimizer to the first `count` tasks, in place."""

    @abstractmethod
    def accumulate(self, tasks: ctypes.Array[AccumulateTask], count: int, threads: int) -> None:
        """Adds gradients and takes their sums of squares, for the first `count` tasks."""

    @abstractmethod
    def split(self, master: int, weight: int, residual: int, numel: int, threads: int) -> None:
        """Writes fp32 masters as bf16 weights and 16-bit residuals. A NaN becomes the NaN 0x7fc0 with residual 0."""

    @abstractmethod
    def join(self, weight: int, residual: int, master: int, numel: int, threads: int) -> None:
        """Writes the fp32 masters whose halves are `weight` and `residual`: the inverse of split, bit for bit."""

    @abstractmethod
    def checksum(self, address: int, nbytes: int) -> int:
        """A 64-bit sum of the bytes that changes when any of them does; no defence against an adversary."""


def load(choice: Choice = "auto", *, isa: str | None = None) -> Kernels:
    """Loads the kernels of that name; `"auto"` takes the native ones where they were built and load.

    `isa` names the instruction set of the native kernels (`"x86-64"`, `"x86-64-v3"`, `"x86-64-v4"`, `"aarch64"`);
    by default it is the widest that the processor has.

    Raises RuntimeError where `"native"` was asked for and cannot be had, ValueError for an instruction set that this
    build or processor lacks.
    """
    from tiermem.kernels.native import NativeKernels

    if choice == "native":
        return NativeKernels(isa)
    if choice == "auto":
        try:
            return NativeKernels(isa)
        except NativeLibraryError as error:
            reason = str(error)
    elif choice == "numba":
        reason = None
    else:
        raise ValueError(f'kernels must be "auto", "native" or "numba", not {choice!r}')

    from tiermem.kernels.jit import NumbaKernels  # imports numba, which takes a second: only when it is needed

    kernels = NumbaKernels()
    kernels.passed_over = reason
    return kernels
