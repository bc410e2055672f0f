"""The compiled library of csrc/, which setup.py puts beside this file."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Final

ABI_VERSION: Final = 7  # csrc/abi.h has the same; raised with every change of a record or a function
PATH: Final = Path(__file__).with_name("libtiermem.so")


class NativeLibraryError(RuntimeError):
    """The compiled library is missing or cannot be used; the message says why."""


@cache
def library() -> ctypes.CDLL:
    """Loads the library once. Its calls run without the GIL.

    Raises NativeLibraryError where it was not built, does not load on this machine, or comes from other sources.
    """
    if not PATH.exists():
        raise NativeLibraryError(f"{PATH} does not exist: there was no C++ compiler when tiermem was installed")
    try:
        loaded = ctypes.CDLL(str(PATH))
        found = int(loaded.tm_abi_version())
    except (OSError, AttributeError) as error:
        raise NativeLibraryError(f"{PATH} cannot be loaded: {error}") from error
    if found != ABI_VERSION:
        raise NativeLibraryError(
            f"{PATH} was built from other sources (version {found}, {ABI_VERSION} is needed): install tiermem again"
        )
    return loaded
