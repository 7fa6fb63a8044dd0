"""`Leases`: the workers that are alive. What is known of a life is not sent again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from bien.gateway.api import DecodingError, Keys, Lease, ask, fps_key, read_lease, read_seqs, seq_fields
from bien.plugins.indexes.redis.link import Link

Command = tuple[str, str, Sequence[Any]]  # name, key, arguments


class Leases:
    def __init__(self, link: Link, namespace: str, on_undecodable: Callable[[Exception], None]) -> None:
        self._link = link
        self._namespace = namespace
        self._undecodable = on_undecodable
        self._known: dict[str, Lease] = {}  # by key
        self._listed: dict[
            str, list[str]
        ] = {}  # workers by fingerprint, as of the last time that all were read

    async def all(self) -> list[Lease]:
        """Of any fingerprint. Raises what the link's commands raise, as does `read`. Mostly nothing has
        changed since the last time: then it is one round trip."""
        keys = {fp: Keys(self._namespace, fp) for fp in self._listed}
        names = [keys[fp].lease(id) for fp, ids in self._listed.items() for id in ids]
        commands: list[Command] = [("zrange", fps_key(self._namespace), (0, -1))]
        commands += [("zrange", of.workers, (0, -1)) for of in keys.values()]
        fps, *rest = await self._pipelined(commands + [("hmget", n, self._head(n)) for n in names])
        listed = {fp: _text(ids) for fp, ids in zip(keys, rest, strict=False)}
        new = [fp for fp in _text(fps) if fp not in listed]
        more: list[Command] = [("zrange", Keys(self._namespace, fp).workers, (0, -1)) for fp in new]
        listed |= dict(zip(new, map(_text, await self._pipelined(more)), strict=True))
        self._listed = {fp: listed[fp] for fp in _text(fps)}
        heads = dict(zip(names, rest[len(keys) :], strict=True))
        wanted = [Keys(self._namespace, fp).lease(id) for fp, ids in self._listed.items() for id in ids]
        return [lease for lease in await self._read(wanted, heads) if lease is not None]

    async def read(self, names: list[str]) -> list[Lease | None]:
        """By their keys. None: there is none, or nobody can read it."""
        return await self._read(names, {})

    async def _read(self, names: list[str], heads: dict[str, Any]) -> list[Lease | None]:
        if len(self._known) > 2 * len(names) + 64:
            self._known = {name: self._known[name] for name in names if name in self._known}
        more = [name for name in names if name not in heads]
        told = await self._pipelined([("hmget", name, self._head(name)) for name in more])
        heads |= dict(zip(more, told, strict=True))
        unknown = [name for name in names if self._is_new(name, heads[name])]
        whole = await self._pipelined([("hgetall", name, ()) for name in unknown])
        for name, fields in zip(unknown, whole, strict=True):
            self._known.pop(name, None)
            if fields:
                self._tell(name, lambda fields=fields: read_lease(fields))  # type: ignore[misc]
        return [self._as_of(name, heads[name]) for name in names]

    def _head(self, name: str) -> list[str]:
        known = self._known.get(name)
        return ["generation", *(() if known is None else seq_fields(known.info))]

    def _is_new(self, name: str, head: Any) -> bool:
        if head is None or head[0] is None:
            return False
        known = self._known.get(name)
        return known is None or known.info.generation.encode() != head[0]

    def _as_of(self, name: str, head: Any) -> Lease | None:
        known = self._known.get(name)
        if head is None or known is None or known.info.generation.encode() != head[0]:
            return None  # it has ended, or another life began just now
        if len(head) == 1:  # it has been read just now
            return known
        return self._tell(name, lambda: msgspec.structs.replace(known, seqs=read_seqs(head[1:])))

    def _tell(self, name: str, read: Callable[[], Lease]) -> Lease | None:
        try:
            lease = self._known[name] = read()
        except Exception as error:  # whatever it is, the others are read
            self._known.pop(name, None)
            self._undecodable(DecodingError(f"{name}: {error}"))
            return None
        return lease

    async def _pipelined(self, commands: Sequence[Command]) -> list[Any]:
        """Answers; None for a key that holds something else."""
        if not commands:
            return []
        pipe: Any = self._link.client.pipeline(transaction=False)
        for command, key, arguments in commands:
            getattr(pipe, command)(key, *arguments)
        answers = await ask(pipe.execute(raise_on_error=False))
        for i, answer in enumerate(answers):
            if isinstance(answer, Exception):
                if not str(answer).startswith("WRONGTYPE"):
                    raise answer
                self._undecodable(DecodingError(f"{commands[i][1]}: {answer}"))
                answers[i] = None
        return list(answers)


def _text(answer: list[bytes] | None) -> list[str]:
    return [part.decode(errors="replace") for part in answer or ()]
