"""The other ranks of a group, seen from rank 0. No torch."""

from __future__ import annotations

import logging
import queue
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any, Protocol

from bien.core.child_log import ChildLog
from bien.core.errors import CollectiveError, ExecutorDiedError
from bien.core.executors.link import Link, LinkClosed
from bien.core.executors.rank_messages import BlocksUp, Close, Done, Fault, Here, Up
from bien.core.parallel.communicator import Communicator
from bien.core.worker.start import Failed

END_SECONDS = 3.0  # that a rank gets to end by itself
log = logging.getLogger("bien.worker")


class Ranks(Protocol):
    """How the ranks beyond 0 are started and reached: by our own launcher, or by torchrun."""

    def open(self, world: int, threads: int) -> list[RemoteRank]:
        """Ranks 1 .. world-1, once each is there; `threads`: of each. What a rank fails with, it raises."""
        ...

    def communicator(self, rank: int, world: int, device: str) -> Communicator:
        """Waits for its peers."""
        ...

    def met(self) -> None:
        """All have found each other, or will not: what that took may go."""
        ...


class RemoteRank:
    """One of them. Two threads follow it: one what it says, one its stderr where that is ours."""

    def __init__(
        self,
        rank: int,
        steps: Link[Up],
        blocks: Link[BlocksUp],
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        """`process`: where it is a child of ours."""
        self.rank, self.steps, self.blocks, self.process = rank, steps, blocks, process
        self.pid, self.host = (process.pid if process else 0), ""
        self.heads = range(0)  # KV heads that it holds
        self.on_end: Callable[[RemoteRank], None] | None = None
        self.ended = threading.Event()  # set after what it said is complete
        self._failure: Failed | None = None
        self._answers: queue.SimpleQueue[Here | Done | Fault | None] = queue.SimpleQueue()
        self._said = ChildLog(log, f"rank {rank}")
        self._reading: threading.Thread | None = None
        if process is not None:
            self._reading = self._thread(self._read_errors, "errors")
        self._thread(self._read, "link")

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        return f"rank {self.rank} (pid {self.pid}{where})" if self.pid else f"rank {self.rank}"

    @property
    def is_witness(self) -> bool:
        """Whether it ended because another rank did."""
        return self._failure is not None and self._failure.code == CollectiveError.code

    def send(self, message: Any) -> None:
        """ExecutorDiedError when it has ended."""
        try:
            self.steps.send(message)
        except LinkClosed:
            self.ended.wait(END_SECONDS)
            raise ExecutorDiedError(self.obituary()) from None

    def answer(self) -> Here | Done:
        """The next thing that it says. Raises what it fails with; ExecutorDiedError when it has ended."""
        said = self._answers.get()
        if isinstance(said, Fault):
            raise said.failure.revive()
        if said is None:
            raise ExecutorDiedError(self.obituary())
        return said

    def loaded(self) -> range:
        """Wait until it has; the KV heads that it holds."""
        said = self.answer()
        return range(said.first, said.stop) if isinstance(said, Done) else range(0)

    def obituary(self) -> str:
        """How it ended, and its last words."""
        code = self.process.poll() if self.process is not None else None
        if code is None:
            how = "is gone"
        elif code >= 0:
            how = f"ended with {code}"
        else:
            known = -code in signal.Signals.__members__.values()
            how = f"was killed by signal {-code}" + (f" ({signal.Signals(-code).name})" if known else "")
        words = self._failure.message if self._failure is not None else self._said.last
        return f"{self} {how}" + (f"; its last words: {words}" if words else "")

    def close(self) -> None:
        """Ask it to end, and see to it that it does."""
        try:
            self.steps.send(Close())
        except LinkClosed:
            pass
        if not self.ended.wait(END_SECONDS):
            log.warning("%s did not end within %g seconds; killed", self, END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """At once. A rank that is no child of ours ends with its links."""
        self.steps.close()
        self.blocks.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stderr):
                if pipe is not None and (pipe is not self.process.stderr or self._drained()):
                    pipe.close()

    def _read(self) -> None:
        try:
            while True:
                said = self.steps.receive()
                if isinstance(said, Here):
                    self.pid, self.host = said.pid, said.host
                if isinstance(said, Fault):
                    self._failure = said.failure
                self._answers.put(said)
        except LinkClosed:
            pass
        if self.process is not None:
            self._reap(self.process)
        self._answers.put(None)
        self.ended.set()
        if self.on_end is not None:
            self.on_end(self)

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        # Its link has ended: so has it, or it does so now.
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._drained()

    def _drained(self) -> bool:
        if self._reading is not None:
            self._reading.join(1.0)  # a grandchild may hold the pipe open
            return not self._reading.is_alive()
        return True

    def _read_errors(self) -> None:
        assert self.process is not None
        assert self.process.stderr is not None
        for text in self.process.stderr:
            self._said.add(text)

    def _thread(self, work: Callable[[], Any], name: str) -> threading.Thread:
        thread = threading.Thread(target=work, name=f"bien-rank-{self.rank}-{name}", daemon=True)
        thread.start()
        return thread
