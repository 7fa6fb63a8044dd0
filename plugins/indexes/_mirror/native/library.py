"""The C functions of the table, with their signatures; compiled and loaded once per process."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from bien.core.api import LibrarySpec, ResourceError, compile_library

SECONDS = 60.0  # that the compiler gets; two are usual
P, B, N, T = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_double
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {  # result, arguments
    "new": (P, ()),
    "free": (None, (P,)),
    "join": (N, (P, P, P, N)),
    "leave": (N, (P, N)),
    "clear": (N, (P, N)),
    "place": (N, (P, N, N, N)),
    "clear_place": (N, (P, N)),
    "stored": (N, (P, N, B, N)),
    "removed": (N, (P, N, B, N)),
    "predict": (N, (P, N, B, N, T)),
    "take_back": (N, (P, N, B, N)),
    "forget": (N, (P, N)),
    "confirm": (N, (P, N)),
    "reach": (N, (P, B, N, P, N, T, P, P)),
    "size": (None, (P, P)),
}


class Library:
    """Functions as attributes. They take microseconds and keep the interpreter's lock: to give it up would
    cost more, and let others wait for it in the middle of a decision."""

    def __init__(self, path: Path) -> None:
        try:
            loaded = ctypes.PyDLL(str(path))
        except OSError as error:
            raise ResourceError(f"the compiled index {path} cannot be loaded: {error}") from error
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(loaded, f"bien_index_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the index's library has no function {name!r}")


@cache
def library() -> Library:
    """ResourceError or UserError where it cannot be had."""
    folder = Path(__file__).parent
    return Library(
        compile_library(
            LibrarySpec(
                name="index",
                folder="index",
                sources=sorted([*folder.glob("*.cpp"), *folder.glob("*.hpp")]),
                flags=("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden"),
                seconds=SECONDS,
                what="the index's functions",
                instead='select table = "python" in its parameters',
                field="gateway.kv_index.table",
            )
        )
    )
