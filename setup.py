"""Compiles csrc/ into tiermem/_native/libtiermem.so; everything else about the package is in pyproject.toml.

The library has a plain C interface and includes no Python or torch headers, so one build serves every Python and torch
version. Where it cannot be compiled the install goes on without it, and the numba kernels serve.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# -ffp-contract=off: a fused multiply-add rounds once where the formula rounds twice, and every instruction set must
# give the same bits, so the source says where there is one. The other two let loops with sqrt and with selects be
# vectorised; they change no result.
COMPILE_FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-pthread",
]

ROOT = Path(__file__).parent


class BuildNative(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            self.warn(
                f"the native kernels could not be compiled ({error}); tiermem will use the numba kernels, "
                "with the same results. With a C++17 compiler in the PATH, install again to get the native ones."
            )


class TagByPlatform(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "tiermem._native.libtiermem",
            sources=sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/*.cpp")),
            depends=sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/*.h")),
            extra_compile_args=COMPILE_FLAGS,
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": TagByPlatform},
)
