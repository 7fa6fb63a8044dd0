"""Opens trace paths with the first reader that knows their content."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bien.core.errors import BienError, TraceError
from bien.traces.files import document_files, left_out
from bien.traces.model import Fidelity, Session, TraceMeta
from bien.traces.reader import TraceReader


class OpenTrace:
    """Several paths read as one trace, in the order given."""

    def __init__(
        self, parts: Sequence[tuple[Path, TraceReader]], source: str = "", notes: Sequence[str] = ()
    ) -> None:
        """`source` names what was asked for; `notes` are about what is in no part."""
        self._parts = parts
        self._source = source
        self._notes = notes

    @property
    def meta(self) -> TraceMeta:
        """The parts' formats and block sizes joined, their fidelity counts added up so far."""
        metas = [reader.meta for _, reader in self._parts]
        fidelity = Fidelity(notes=list(self._notes))
        for meta in metas:
            fidelity.fields.update(meta.fidelity.fields)
            fidelity.notes.extend(n for n in meta.fidelity.notes if n not in fidelity.notes)
            fidelity.derived_output_tokens += meta.fidelity.derived_output_tokens
            fidelity.output_tokens += meta.fidelity.output_tokens
        return TraceMeta(
            format="+".join(dict.fromkeys(m.format for m in metas)),
            block_tokens=max(m.block_tokens for m in metas),
            source=self._source,
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
    parts: list[tuple[Path, TraceReader]] = []
    notes: list[str] = []
    for path in paths:
        _check(path)
        reader, failed = _reader_for(path, readers)
        if reader is not None:
            parts.append((path, reader))
            continue
        # A folder whose format no reader knows as a whole may hold files that they know one by one.
        files = document_files(path) if path.is_dir() else []
        known = [(file, found) for file in files if (found := _reader_for(file, readers)[0]) is not None]
        if not known:
            formats = ", ".join(sorted(readers))
            raise TraceError(f"trace {path} is damaged or of an unknown format; known: {formats}{failed}")
        parts += known
        if others := set(files) - {file for file, _ in known}:
            notes.append(left_out(sorted(str(file.relative_to(path)) for file in others)))
    return OpenTrace(parts, ", ".join(path.name for path in paths), notes)


def _check(path: Path) -> None:
    if not path.exists():
        raise TraceError(f"no such trace: {path}")
    if not path.is_file() and not path.is_dir():  # it is read twice: for its format, then for its sessions
        raise TraceError(f"trace {path} is a pipe or device; write its content to a file and give that")
    if path.is_file() and not path.stat().st_size:
        raise TraceError(f"trace {path} is empty")


def _reader_for(
    path: Path, readers: Mapping[str, Callable[[], TraceReader]]
) -> tuple[TraceReader | None, str]:
    """The first reader that knows the content, and what was wrong with those that failed on it."""
    failed = ""
    for name, make in readers.items():
        try:
            reader = make()
            if reader.matches(path):
                return reader, failed
            reader.close()
        except BienError:
            raise
        except Exception as error:  # one reader's fault must not keep others from reading
            failed += f"; {name!r} failed: {type(error).__name__}: {error}"
    return None, failed
