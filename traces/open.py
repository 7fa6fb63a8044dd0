"""Opens trace paths with the first reader that knows their content."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bien.core.errors import BienError, TraceError
from bien.traces.model import Fidelity, Session, TraceMeta
from bien.traces.reader import TraceReader


class OpenTrace:
    """Several paths read as one trace, in the order given."""

    def __init__(self, parts: Sequence[tuple[Path, TraceReader]]) -> None:
        self._parts = parts

    @property
    def meta(self) -> TraceMeta:
        """The parts' formats and block sizes joined, their fidelity counts added up so far."""
        metas = [reader.meta for _, reader in self._parts]
        fidelity = Fidelity()
        for meta in metas:
            fidelity.fields.update(meta.fidelity.fields)
            fidelity.notes.extend(n for n in meta.fidelity.notes if n not in fidelity.notes)
            fidelity.derived_output_tokens += meta.fidelity.derived_output_tokens
            fidelity.output_tokens += meta.fidelity.output_tokens
        return TraceMeta(
            format="+".join(dict.fromkeys(m.format for m in metas)),
            block_tokens=max(m.block_tokens for m in metas),
            source=", ".join(path.name for path, _ in self._parts),
            fidelity=fidelity,
        )

    def sessions(self) -> Iterator[Session]:
        """All sessions; ids that occur again get a suffix, so that records stay apart."""
        seen: dict[str, int] = {}
        for path, reader in self._parts:
            for session in reader.sessions(path):
                seen[session.id] = again = seen.get(session.id, 0) + 1
                if again > 1:
                    local = session.scope == session.id
                    session.id = f"{session.id}#{again}"
                    session.scope = session.id if local else session.scope
                yield session

    def close(self) -> None:
        for _, reader in self._parts:
            reader.close()


def open_trace(paths: Sequence[Path], readers: Mapping[str, Callable[[], TraceReader]]) -> OpenTrace:
    """Pick a reader for each path by content. `readers` maps format names to factories.

    Raises:
        TraceError: a path is missing, empty or of no known format.
    """
    if not paths:
        raise TraceError("no trace given: name a file, a folder or an archive")
    return OpenTrace([(path, _reader_for(path, readers)) for path in paths])


def _reader_for(path: Path, readers: Mapping[str, Callable[[], TraceReader]]) -> TraceReader:
    if not path.exists():
        raise TraceError(f"no such trace: {path}")
    if not path.is_file() and not path.is_dir():  # it is read twice: for its format, then for its sessions
        raise TraceError(f"trace {path} is a pipe or device; write its content to a file and give that")
    if path.is_file() and not path.stat().st_size:
        raise TraceError(f"trace {path} is empty")
    failed = ""
    for name, make in readers.items():
        try:
            reader = make()
            if reader.matches(path):
                return reader
            reader.close()
        except BienError:
            raise
        except Exception as error:  # one reader's fault must not keep others from reading
            failed += f"; {name!r} failed: {type(error).__name__}: {error}"
    known = ", ".join(sorted(readers))
    raise TraceError(f"trace {path} is damaged or of an unknown format; known: {known}{failed}")
