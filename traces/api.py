"""The door for trace-format plugins: what it exports is stable, the rest of this room is private."""

from __future__ import annotations

from bien.core.errors import TraceError
from bien.core.request import BlockRuns
from bien.traces.files import document_files, documents, head, left_out, open_stream
from bien.traces.model import Fidelity, Session, Stream, TraceMeta, Turn
from bien.traces.native import SCHEMA, NativeWriter, read_header, read_native, write_native
from bien.traces.reader import TraceReader

__all__ = [
    "SCHEMA",
    "BlockRuns",
    "Fidelity",
    "NativeWriter",
    "Session",
    "Stream",
    "TraceError",
    "TraceMeta",
    "TraceReader",
    "Turn",
    "document_files",
    "documents",
    "head",
    "left_out",
    "open_stream",
    "read_header",
    "read_native",
    "write_native",
]
