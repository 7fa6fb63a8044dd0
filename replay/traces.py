"""Opens the traces that a command names, with the readers that are installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import resources
from itertools import islice
from pathlib import Path

import msgspec

from bien.core.errors import UserError
from bien.core.plugins import PluginManager
from bien.core.providers import Context, Provider
from bien.replay.display import Totals
from bien.replay.options import ReplayOptions
from bien.traces.open import OpenTrace, open_trace
from bien.traces.reader import TraceReader
from bien.traces.scale import SMALLEST, scale_session

SURVEY = 1000  # sessions; what goes beyond is not read twice


def sample_path() -> Path:
    """The trace that ships with bien."""
    return Path(str(resources.files("bien.traces") / "samples" / "agentic.bien.jsonl"))


def open_paths(paths: Sequence[Path], manager: PluginManager) -> OpenTrace:
    """The traces at `paths`, or the shipped sample if there are none. TraceError as `open_trace`."""
    readers = {
        i.provider.name: _maker(i.provider) for i in manager.installed if i.provider.kind == "trace_format"
    }
    return open_trace(list(paths) or [sample_path()], readers)


class Survey:
    """Reads ahead, up to 1,000 sessions: what will be replayed, and whether the files are whole."""

    def __init__(self, trace: OpenTrace, options: ReplayOptions) -> None:
        self._options = options
        self._ahead = islice(trace.sessions(), SURVEY)
        self._sizes: list[tuple[int, int]] = []  # longest turn, turns; as scaled
        self.timed = False  # whether the first session says when it starts

    def advance(self) -> bool:
        """Read one more of the sessions that `check` would read; False when that is done.

        Raises:
            TraceError: the trace is damaged.
        """
        count = len(self._sizes) + 1
        return count <= (self._options.sessions or SURVEY) and self._read(count)

    def check(self) -> None:
        """Read as many sessions as will be replayed at least.

        Raises:
            TraceError: the trace is damaged.
            UserError: it holds no session, or none with a turn.
        """
        self._read(self._options.sessions or SURVEY)
        if not any(turns for _, turns in self._sizes):
            raise UserError(f"the trace holds {'no turn' if self._sizes else 'no session'}")

    def settled(self, options: ReplayOptions) -> ReplayOptions:
        """The options with `open_loop` decided, after `check`."""
        if options.open_loop is None:
            return msgspec.structs.replace(options, open_loop=self.timed)
        return options

    def totals(self, window: int | None) -> Totals:
        """What fits into `window`; turns are 0 where the trace is too long to be read ahead.

        Raises:
            UserError: nothing fits.
        """
        limit = self._options.sessions
        self.check()
        while True:
            fits = [turns for longest, turns in self._sizes if window is None or longest <= window]
            if (limit is not None and len(fits) >= limit) or not self._read(len(self._sizes) + 1):
                break
        if len(self._sizes) == SURVEY and (limit is None or len(fits) < limit):
            return Totals(limit or 0)
        if not fits:
            raise UserError(self._nothing_fits(window or 0))
        return Totals(len(fits[:limit]), sum(fits[:limit]))

    def _read(self, count: int) -> bool:
        before = len(self._sizes)
        for session in islice(self._ahead, max(0, count - before)):
            scaled = scale_session(session, self._options.exponent)
            if not self._sizes:
                self.timed = session.start is not None
            self._sizes.append((scaled.longest, scaled.turns))
        return len(self._sizes) > before

    def _nothing_fits(self, window: int) -> str:
        shortest = min(longest for longest, _ in self._sizes)
        size = 1 << self._options.exponent
        while (shortest << self._options.exponent) / size > window:
            size *= 2
        scale = f", or --token-scale 1/{size} or smaller" if size <= SMALLEST else ""
        what = "the one session is" if len(self._sizes) == 1 else f"all {len(self._sizes)} sessions are"
        return (
            f"{what} longer than the window of {window} tokens (the shortest needs {shortest}); "
            f"valid: a model with a larger window{scale}"
        )


def _maker(provider: Provider) -> Callable[[], TraceReader]:
    def make() -> TraceReader:
        reader: TraceReader = provider.factory(provider.config_type(), Context())
        return reader

    return make
