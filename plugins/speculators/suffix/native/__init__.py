"""`NativeCorpus`: the corpus in C++ (corpus.hpp), reached by ctypes."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np

from bien.plugins.speculators.suffix.chances import CELLS, Chances
from bien.plugins.speculators.suffix.corpus import Found, Size, Tokens
from bien.plugins.speculators.suffix.native.library import library

MOST = 256  # nodes of a draft


class NativeCorpus:
    def __init__(self, limit: int) -> None:
        self._c = library()
        self._handle = self._c.new(limit)
        if not self._handle:
            raise MemoryError("no memory for a corpus of the suffix drafter")
        weakref.finalize(self, self._c.free, self._handle).atexit = False
        self.end = 0

    def append(self, tokens: Tokens, *, fresh: bool, repeated: int = 0) -> int:
        first = self._c.append(self._handle, tokens, len(tokens) // 4, fresh, repeated)
        if first < 0:
            raise MemoryError("no memory for the suffix drafter's corpus to grow")
        self.end = first + len(tokens) // 4
        return int(first)

    def equal(self, position: int, tokens: Tokens, start: int, count: int) -> int:
        return int(self._c.equal(self._handle, position, tokens, start, count))

    def propose(
        self,
        shared: NativeCorpus | None,
        seam: tuple[int, int],
        added: Tokens,
        limit: int,
        *,
        tree: bool,
        least: float,
        chances: Chances,
    ) -> Found:
        count = min(limit, MOST)
        out = np.empty((4, count), np.int32)
        at, step = out.ctypes.data, 4 * count
        made = self._c.propose(
            self._handle,
            None if shared is None else shared._handle,
            *seam,
            added,
            len(added) // 4,
            count,
            tree,
            least,
            chances.table.ctypes.data,
            at,
            at + step,
            at + 2 * step,
            at + 3 * step,
        )
        if made < 0:
            raise MemoryError("no memory for the suffix drafter's corpus to grow")
        self.end += len(added) // 4
        own = out[2, :made].view(np.float32)
        return Found(out[0, :made].tolist(), out[1, :made].tolist(), own.tolist(), out[3, :made].tolist())

    def size(self) -> Size:
        out = (ctypes.c_int64 * 2)()
        self._c.size(self._handle, out)
        return Size(*out)


assert CELLS == 32, "draft.cpp has a table of MATCHES x SHARES cells"
