"""A stack in a process of its own, so that the gateway's work is not the client's.

Down: one `Order`, then an open stdin whose end stops the stack. Up: `Step`s, then `Up` or `Failed`,
then `Step`s again (a worker died, is back). JSON, one line per message.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable
from typing import NoReturn, Union

import msgspec

from bien.core.deployment import Deployment
from bien.core.errors import BienError, ResourceError
from bien.core.worker.messages import WorkerInfo
from bien.core.worker.start import Failed, line

STOP_SECONDS = 8.0
OnStep = Callable[[str, str, int, int], None]


class Order(msgspec.Struct, frozen=True):
    deployment: Deployment
    attach: bool = False  # find workers that run, start none
    canary: bool = False  # probe workers when they join


class Step(msgspec.Struct, tag="step"):
    who: str
    text: str
    done: int = 0
    total: int = 0  # 0: unknown


class Up(msgspec.Struct, tag="up"):
    url: str
    model: str
    accelerators: int
    workers: list[WorkerInfo]


_decoder: msgspec.json.Decoder[Union[Step, Up, Failed]] = msgspec.json.Decoder(Union[Step, Up, Failed])


class StackProcess:
    """The parent's side. Made by `start`; `stop` leaves nothing behind."""

    def __init__(self, process: Process) -> None:
        self.up: Up  # set before `start` returns
        self._process = process
        self._tail: deque[str] = deque(maxlen=20)
        self._errors = asyncio.create_task(self._read_errors())
        self._follow: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        deployment: Deployment,
        on_step: OnStep = lambda *_: None,
        *,
        attach: bool = False,
        canary: bool = False,
    ) -> StackProcess:
        """Arguments as of `Stack.start`. Returns when it serves. Raises the BienError that stopped it;
        nothing is left running then."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "bien.replay.stack_process"),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                start_new_session=True,  # a Ctrl-C at the terminal reaches the parent alone
            )
        except OSError as error:
            raise ResourceError(f"the gateway cannot be started: {error.strerror or error}") from None
        stack = cls(process)
        try:
            await stack._become_ready(Order(deployment, attach, canary), on_step)
        except BaseException:
            await stack.stop()
            raise
        return stack

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> str:
        """Wait for an end that nobody asked for; why, and its last words."""
        code = await self._process.wait()
        await asyncio.wait([self._errors], timeout=1.0)
        words = "; its last words: " + " | ".join(self._tail) if self._tail else ""
        return f"the gateway process ended with {code}{words}"

    async def stop(self) -> None:
        """End it and all that it started."""
        try:
            if self._process.returncode is None:
                self._signal(signal.SIGTERM)
                async with asyncio.timeout(STOP_SECONDS):
                    await self._process.wait()
        except TimeoutError:
            pass
        finally:
            # Its group holds what a cancelled download has left; its workers end with it.
            self._signal(signal.SIGKILL)
        await self._process.wait()
        for task in (self._errors, self._follow):
            if task is not None:
                task.cancel()

    async def _become_ready(self, order: Order, on_step: OnStep) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line(order))
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass  # it is dead already; its end says why
        async for text in self._process.stdout:
            match _decoder.decode(text):
                case Step() as step:
                    on_step(step.who, step.text, step.done, step.total)
                case Failed() as failed:
                    raise failed.revive()
                case Up() as up:
                    self.up = up
                    self._follow = asyncio.create_task(self._read_steps(on_step))
                    return
        raise BienError(await self.wait())

    async def _read_steps(self, on_step: OnStep) -> None:
        assert self._process.stdout is not None
        async for text in self._process.stdout:
            match _decoder.decode(text):
                case Step() as step:
                    on_step(step.who, step.text, step.done, step.total)

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        try:
            async for text in self._process.stderr:
                self._tail.append(text.decode(errors="replace").rstrip())
        except ValueError:  # a line beyond the stream's limit
            pass

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def main() -> NoReturn:
    """The child: serve until stdin ends or SIGTERM comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.dup(1)
    os.dup2(2, 1)  # whatever prints must not mix with messages

    def send(message: object) -> None:
        try:
            os.write(out, line(message))
        except OSError:  # the parent is gone; stdin says so too
            pass

    code = _run(send)
    sys.stderr.flush()
    # At once: a thread that still waits for a cancelled download must not keep the process.
    os._exit(code)


def _run(send: Callable[[object], None]) -> int:
    try:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(_serve(send))
    except asyncio.CancelledError:
        return 0
    except BienError as error:
        send(Failed.of(error))
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        send(Failed(BienError.code, f"the gateway failed: {type(error).__name__}: {error}"))
        return 1
    return 0


async def _serve(send: Callable[[object], None]) -> None:
    from bien.replay.stack import Stack

    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    order = msgspec.json.decode(await reader.readline(), type=Order)
    task = asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, _cancel, task)
    watch = asyncio.create_task(_cancel_at_end(reader, task))
    stack = await Stack.start(
        order.deployment, lambda *step: send(Step(*step)), attach=order.attach, canary=order.canary
    )
    try:
        send(Up(stack.url, stack.model_name, stack.accelerators, stack.workers))
        await watch
    finally:
        await stack.close()


async def _cancel_at_end(reader: asyncio.StreamReader, task: asyncio.Task[None]) -> None:
    await reader.read()
    _cancel(task)


def _cancel(task: asyncio.Task[None]) -> None:
    if not task.cancelling():  # SIGTERM and the end of stdin may both come: one would cut off the other's end
        task.cancel()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


if __name__ == "__main__":
    main()
