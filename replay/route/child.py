"""A process that simulates variants: `python -m bien.replay.route.child`, started by crew.py."""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import BinaryIO

import msgspec

from bien.core.errors import BienError
from bien.core.plugins import PluginManager
from bien.replay.route.stack import Bench
from bien.replay.route.wire import LENGTH, Done, Failed, FromChild, Progress, Task, ToChild, Trace, frame


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a plugin prints is no frame
    try:
        _serve(source, sink)
    except BrokenPipeError:  # the parent has gone
        os._exit(0)


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    decoder = msgspec.msgpack.Decoder(ToChild)
    bench: Bench | None = None

    def tell(message: FromChild) -> None:
        sink.write(frame(message))
        sink.flush()

    while head := source.read(LENGTH.size):
        message = decoder.decode(source.read(*LENGTH.unpack(head)))
        if isinstance(message, Trace):
            bench = Bench(message.sessions, PluginManager.load())
            gc.freeze()  # a trace is looked at by no collection any more
            continue
        assert isinstance(message, Task) and bench is not None
        try:
            tell(Done(bench.run(message.variant, lambda turns: tell(Progress(turns)))))
        except BienError as error:
            tell(Failed(error.code, str(error)))
        except Exception as error:  # of a plugin, in words: the parent goes down with it
            tell(Failed("", f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main()
