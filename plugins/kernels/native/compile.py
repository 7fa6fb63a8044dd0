"""The kernels' shared library, compiled once per machine, compiler and version of the sources."""

from __future__ import annotations

from pathlib import Path

from bien.core.api import LibrarySpec, UserError, compile_library, processor_flags

# Not linked with an OpenMP library: torch has loaded one, and two pools of threads would fight.
FLAGS = (
    "-O3",
    "-std=c++17",
    "-march=native",
    "-ffp-contract=off",
    "-fopenmp",
    "-fPIC",
    "-fvisibility=hidden",
)
NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512_vnni")
SECONDS = 300.0  # that the compiler gets for one file


def library() -> Path:
    """The library's file; compiled if it is not there. Several processes may ask at once.

    UserError where the processor lacks what the kernels need, or the sources do not compile; ResourceError
    without a compiler or room in the cache folder.
    """
    lacking = [flag for flag in NEEDED if flag not in processor_flags()]
    if lacking:
        raise UserError(
            f"kernels 'native' need a processor with {', '.join(NEEDED)}; this one lacks "
            f'{", ".join(lacking)}; valid here: kernels = "torch"',
            field="kernels",
        )
    return compile_library(
        LibrarySpec(
            name="native",
            folder="kernels",
            sources=sources(),
            flags=FLAGS,
            # -march=native: another processor may lack instructions that this one has.
            about=repr(sorted(processor_flags())),
            seconds=SECONDS,
            what="kernels 'native'",
            instead='select kernels = "torch"',
            field="kernels",
        )
    )


def sources() -> list[Path]:
    """The C++ files, headers among them."""
    folder = Path(__file__).parent
    return sorted([*folder.glob("*.cpp"), *folder.glob("*.hpp")])
