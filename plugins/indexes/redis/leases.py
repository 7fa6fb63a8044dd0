"""`Leases`: the workers that are alive. What is known of a life is not sent again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from bien.gateway.api import DecodingError, Keys, Lease, ask, fps_key, read_lease, read_seqs, seq_fields
from bien.plugins.indexes.redis.link import Link


class Leases:
    def __init__(self, link: Link, namespace: str, on_undecodable: Callable[[Exception], None]) -> None:
        self._link = link
        self._namespace = namespace
        self._undecodable = on_undecodable
        self._known: dict[str, Lease] = {}  # by key

    async def all(self) -> list[Lease]:
        """Of any fingerprint. Raises what the link's commands raise, as does `read`."""
        client = self._link.client
        names: list[str] = []
        for fp in await ask(client.zrange(fps_key(self._namespace), 0, -1)):
            keys = Keys(self._namespace, fp.decode(errors="replace"))
            ids = await ask(client.zrange(keys.workers, 0, -1))
            names += [keys.lease(id.decode(errors="replace")) for id in ids]
        return [lease for lease in await self.read(names) if lease is not None]

    async def read(self, names: list[str]) -> list[Lease | None]:
        """By their keys. None: there is none, or nobody can read it."""
        if len(self._known) > 2 * len(names) + 64:
            self._known = {name: self._known[name] for name in names if name in self._known}
        heads = await self._pipelined("hmget", {name: self._head(name) for name in names})
        unknown = [name for name, head in zip(names, heads, strict=True) if self._is_new(name, head)]
        for name, fields in zip(
            unknown, await self._pipelined("hgetall", dict.fromkeys(unknown, ())), strict=True
        ):
            self._known.pop(name, None)
            if fields:
                self._tell(name, lambda fields=fields: read_lease(fields))  # type: ignore[misc]
        return [self._as_of(name, head) for name, head in zip(names, heads, strict=True)]

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
        except (DecodingError, ValueError, TypeError) as error:
            self._undecodable(error)
            return None
        return lease

    async def _pipelined(self, command: str, of: dict[str, Sequence[str]]) -> list[Any]:
        """Answers, by key with its fields; None for one that holds something else."""
        if not of:
            return []
        pipe: Any = self._link.client.pipeline(transaction=False)
        for name, fields in of.items():
            getattr(pipe, command)(name, *fields)
        answers = await ask(pipe.execute(raise_on_error=False))
        for i, answer in enumerate(answers):
            if isinstance(answer, Exception):
                if not str(answer).startswith("WRONGTYPE"):
                    raise answer
                self._undecodable(answer)
                answers[i] = None
        return list(answers)
