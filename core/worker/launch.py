"""Worker processes, seen from their parent: start, wait until ready, stop, start again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping

import msgspec

from bien.core.child_log import ChildLog
from bien.core.errors import BienError, ResourceError
from bien.core.worker.start import Failed, Progress, Ready, WorkerStart, line, read

READY_SECONDS = 300.0  # weights come from a cold disk
STOP_SECONDS = 5.0
OnProgress = Callable[[str, str], None]  # worker id, what it does now
log = logging.getLogger("bien.worker")


class WorkerProcess:
    """One running worker. Made by `launch` and `respawn`."""

    def __init__(self, start: WorkerStart, process: Process, env: Mapping[str, str]) -> None:
        self.start = start
        self.ready: Ready  # where it listens and who it is; set before `launch` returns
        self.env = env
        self._process = process
        self._said = ChildLog(log, start.id)
        self._errors = asyncio.create_task(self._read_errors())
        self._stopped = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def stopped(self) -> bool:
        """Whether its end was asked for, so that nobody needs to start it again."""
        return self._stopped

    async def wait(self) -> str:
        """Wait for its end, however that comes; why and with which last words it ended."""
        code = await self._process.wait()
        await asyncio.wait([self._errors], timeout=1.0)  # a grandchild may hold the pipe open
        return self._obituary(code)

    async def stop(self, grace: float = STOP_SECONDS) -> None:
        """SIGTERM, and SIGKILL after `grace` seconds. Returns when the process is gone."""
        self._stopped = True
        try:
            if self.alive:
                self._signal(signal.SIGTERM)
                async with asyncio.timeout(grace):
                    await self._process.wait()
        except TimeoutError:
            log.warning("worker %r did not stop within %g seconds; killed", self.start.id, grace)
        finally:
            # Also when the waiting was cancelled: nothing may be left running.
            if self.alive:
                self._signal(signal.SIGKILL)
        await self._process.wait()
        self._errors.cancel()

    async def respawn(self, on_progress: OnProgress | None = None) -> WorkerProcess:
        """Start it anew in a new process: same id and parts, next epoch, empty cache."""
        await self.stop()
        again = msgspec.structs.replace(self.start, epoch=self.start.epoch + 1)
        return (await launch([again], on_progress, env=self.env))[0]

    async def _become_ready(self, on_progress: OnProgress | None) -> None:
        """Send the start message and follow the child's lines. BienError when it fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line(self.start))
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass  # it is dead already; its end says why
        async for text in self._process.stdout:
            match self._read(text):
                case Progress(text=step):
                    if on_progress is not None:
                        on_progress(self.start.id, step)
                case Failed() as failed:
                    raise failed.revive()
                case Ready() as ready:
                    self.ready = ready
                    return
        raise self._early_end(await self.wait())

    def _read(self, text: bytes) -> Progress | Ready | Failed | None:
        try:
            return read(text)
        except msgspec.DecodeError:
            log.warning("worker %r says on stdout: %s", self.start.id, text.decode(errors="replace").rstrip())
            return None

    def _early_end(self, reason: str) -> BienError:
        if self._process.returncode == -signal.SIGKILL:
            return ResourceError(f"{reason} while it started: the system may lack memory for it")
        return BienError(f"{reason} while it started")

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        try:
            async for text in self._process.stderr:
                self._said.add(text)
        except ValueError:  # a line beyond the stream's limit: what follows is not worth a crash
            pass

    def _obituary(self, code: int) -> str:
        how = f"ended with {code}"
        if code < 0:
            how = f"was killed by signal {-code}"
            if -code in signal.Signals.__members__.values():
                how += f" ({signal.Signals(-code).name})"
        words = f"; its last words: {last}" if (last := self._said.last) else ""
        return f"worker {self.start.id!r} (pid {self.pid}) {how}{words}"

    def _signal(self, number: int) -> None:
        try:
            self._process.send_signal(number)
        except ProcessLookupError:
            pass


async def launch(
    starts: list[WorkerStart],
    on_progress: OnProgress | None = None,
    *,
    timeout: float = READY_SECONDS,
    env: Mapping[str, str] | None = None,
) -> list[WorkerProcess]:
    """Start workers side by side; returns when all are ready, in the order of `starts`.

    If one fails, or the caller is cancelled, all are stopped and the first failure is raised: the BienError
    that the child met, or a ResourceError when it was killed or not ready within `timeout` seconds.
    `env` is added to the environment of the processes.
    """
    workers: list[WorkerProcess] = []
    try:
        for start in starts:
            workers.append(await _spawn(start, env or {}))
        async with asyncio.timeout(timeout):
            await _all_ready(workers, on_progress)
    except TimeoutError:
        late = [w.start.id for w in workers if not hasattr(w, "ready")]
        await _stop_all(workers)
        raise ResourceError(f"workers {', '.join(late)} were not ready within {timeout:g} seconds") from None
    except BaseException:
        await _stop_all(workers)
        raise
    return workers


async def _all_ready(workers: list[WorkerProcess], on_progress: OnProgress | None) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker._become_ready(on_progress))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _stop_all(workers: list[WorkerProcess]) -> None:
    await asyncio.gather(*(worker.stop(grace=1.0) for worker in workers))


async def _spawn(start: WorkerStart, env: Mapping[str, str]) -> WorkerProcess:
    # The kernel's signal follows the *thread* that started the child; only the main one lives long enough.
    main = threading.current_thread() is threading.main_thread()
    start = msgspec.structs.replace(start, die_with_parent=start.die_with_parent and main)
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "bien.core.worker"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=environment(start.threads) | dict(env),
            start_new_session=True,  # a Ctrl-C at the terminal reaches the parent alone
        )
    except OSError as error:
        raise ResourceError(f"worker {start.id!r} cannot be started: {error.strerror or error}") from None
    return WorkerProcess(start, process, env)


def environment(threads: int) -> dict[str, str]:
    """Of a process that computes. Thread pools read these before any code of ours runs. Waiting must be
    passive: two spinning pools on the same cores stop each other. What the user has set stays, but for the
    number of threads."""
    fixed = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    passive = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        # But not at once: between two products of a step lie tens of microseconds, and to wake a thread that
        # sleeps takes longer than a product. About 0.15 ms, whoever else wants the core.
        "GOMP_SPINCOUNT": "3000",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return passive | dict(os.environ) | fixed
