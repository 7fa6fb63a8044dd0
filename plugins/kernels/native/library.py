"""The C functions of the shared library, with their signatures."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch  # noqa: F401  (its OpenMP library must be loaded before ours is)

from bien.core.api import ResourceError
from bien.plugins.kernels.native.compile import library

P, N, F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "bien_set_threads": (N,),
    "bien_pack_int8": (P, N, N, P),
    "bien_pack_int4": (P, N, N, P),
    "bien_linear_int8": (P, N, N, N, P, P, P, P, N),
    "bien_linear_int4": (P, N, N, N, N, P, P, P, P, N),
    "bien_attention": (P, P, N, P, P),
    "bien_attention_long": (P, P, N, P, P),
    "bien_rms_norm": (P, P, F, P, N, N),
    "bien_add_rms_norm": (P, P, P, F, P, P, N, N),
    "bien_silu_mul": (P, P, N, N),
    "bien_rope": (P, N, P, N, N, N),
    "bien_write_kv": (P, P, N, P, N, N),
}


class Library:
    """Functions as attributes, without their prefix. `quick` has those that take microseconds for few tokens:
    they keep the interpreter's lock, since giving it up may cost more than they take."""

    def __init__(self, path: str) -> None:
        try:
            free, held = ctypes.CDLL(path), ctypes.PyDLL(path)
        except OSError as error:
            raise ResourceError(f"the compiled kernels {path} cannot be loaded: {error}") from error
        self.quick = _Functions(held)
        self.free = _Functions(free)
        free.bien_attention_piece.restype = N
        self.attention_piece = int(free.bien_attention_piece())


class _Functions:
    def __init__(self, loaded: Any) -> None:
        for name, types in SIGNATURES.items():
            function = getattr(loaded, name)
            function.argtypes = types
            function.restype = ctypes.c_int if name.startswith("bien_attention") else None
            setattr(self, name.removeprefix("bien_"), function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the native library has no function {name!r}")


@cache
def native() -> Library:
    """The library, compiled and loaded once per process."""
    return Library(str(library()))
