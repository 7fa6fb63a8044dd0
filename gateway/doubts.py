"""`Doubts`: workers that may be gone are asked, and nothing is placed there until they have answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from bien.core.errors import WorkerDiedError
from bien.core.worker.client import Answering
from bien.gateway.faults import FAULTS
from bien.gateway.metrics import Totals
from bien.gateway.roster import Member

log = logging.getLogger("bien.gateway")


class Doubts:
    def __init__(self, members: Mapping[str, Member], totals: Totals, over: Callable[[], None]) -> None:
        """`over`: called when one of them can be used again."""
        self._members = members
        self._totals = totals
        self._over = over
        self._asked: set[asyncio.Task[None]] = set()

    def doubt(self, worker: str) -> None:
        """One that cannot be asked is not doubted; one that never answers its client gives up."""
        member = self._members.get(worker)
        if member is None or member.doubted or not isinstance(member.client, Answering):
            return
        member.doubted = True
        log.warning("worker %s may be gone; nothing is sent there until it answers", worker)
        task = asyncio.get_running_loop().create_task(self._ask(member, member.client))
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    async def _ask(self, member: Member, client: Answering) -> None:
        try:
            await client.ping()
        except WorkerDiedError:
            return
        except FAULTS:
            self._totals.faults += 1
            log.exception("worker %s could not be asked", member.id)
        member.doubted = False
        self._over()

    def close(self) -> None:
        for task in self._asked:
            task.cancel()
