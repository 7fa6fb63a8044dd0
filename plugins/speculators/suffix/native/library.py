"""The C functions of the corpus, with their signatures; compiled and loaded once per process."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from bien.core.api import LibrarySpec, ResourceError, compile_library

SECONDS = 60.0  # that the compiler gets; two are usual
P, B, N, D = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_double
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {  # result, arguments
    "new": (P, (N,)),
    "free": (None, (P,)),
    "append": (N, (P, B, N, N, N)),
    "equal": (N, (P, N, B, N, N)),
    "tail": (N, (P, P, N)),
    "propose": (N, (P, P, N, N, B, N, N, N, D, P, P, P, P, P)),
    "size": (None, (P, P)),
}


class Library:
    """Functions as attributes. They take microseconds and keep the interpreter's lock."""

    def __init__(self, path: Path) -> None:
        try:
            loaded = ctypes.PyDLL(str(path))
        except OSError as error:
            raise ResourceError(f"the compiled suffix drafter {path} cannot be loaded: {error}") from error
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(loaded, f"bien_suffix_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the suffix drafter's library has no function {name!r}")


@cache
def library() -> Library:
    """ResourceError or UserError where it cannot be had."""
    folder = Path(__file__).parent
    return Library(
        compile_library(
            LibrarySpec(
                name="suffix",
                folder="suffix",
                sources=sorted([*folder.glob("*.cpp"), *folder.glob("*.hpp")]),
                flags=("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden"),
                seconds=SECONDS,
                what="the suffix drafter's functions",
                instead='select corpus = "python" in its parameters',
                field="pool.speculator.corpus",
            )
        )
    )
