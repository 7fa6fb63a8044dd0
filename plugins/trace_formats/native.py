"""The native trace format (`*.bien.jsonl`, `*.bien.jsonl.zst`): everything exact."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from bien.core.api import Context, NoParameters, Provider, hookimpl
from bien.traces.api import SCHEMA, Session, TraceMeta, head, read_header, read_native


class NativeReader:
    """See `bien.traces.native` for the layout."""

    name = "native"

    def __init__(self) -> None:
        self.meta = TraceMeta("native", 1)

    def matches(self, path: Path) -> bool:
        return path.is_file() and SCHEMA.split("/")[0].encode() in head(path, 256)

    def sessions(self, path: Path) -> Iterator[Session]:
        self.meta = read_header(path)
        yield from read_native(path)

    def close(self) -> None:
        pass


def _native(config: NoParameters, ctx: Context) -> NativeReader:
    return NativeReader()


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [Provider("trace_format", "native", _native, summary="bien's own trace format, exact")]
