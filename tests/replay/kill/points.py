"""The points at which a worker is killed, and how a test asks for it.

Ten of them cut a request's life wherever what the worker, the connection and the gateway know of it is
different; the last three hit the replacement of a worker that has died, when requests wait for it.
A worker dies by its own SIGKILL on the very line: no handler runs, no byte that is not in the kernel leaves.
Shipped code knows nothing of this; the hooks are in worker.py, which replaces a worker's builder.
"""

from __future__ import annotations

import os
import signal
from enum import Enum
from pathlib import Path

FOLDER = "BIEN_TEST_KILL"  # environment of the workers: where orders lie
ALWAYS = "always-"  # sessions that begin so kill whoever reaches the point, again and again


class Point(Enum):
    # The worker has no request yet, only parts of its prompt; the gateway is still writing others.
    HALF_SENT = "half-sent"
    # It is the server's, and not yet the engine's.
    RECEIVED = "received"
    # The scheduler has it and no slot: nothing was computed.
    WAITING = "waiting"
    # It holds a slot and blocks that a transfer thread writes to.
    LOADING = "loading"
    # Some chunks of its prompt are cached and announced, one is being computed.
    PREFILL = "prefill"
    # Its first token is known in the worker, and nowhere else.
    SAMPLED = "sampled"
    # Its first token has left: the client may have seen it, or not.
    STREAMING = "streaming"
    # In the middle of its output, a step with drafts to verify is being computed.
    DECODING = "decoding"
    # The worker has freed it and is about to say so.
    FINISHING = "finishing"
    # Its client has gone and the gateway has said so; the engine has not heard yet.
    ABORTING = "aborting"
    # The process that is to replace a dead one dies while it is built.
    STARTING = "starting"
    # It listens, and dies when the gateway connects.
    JOINING = "joining"
    # It has joined and got requests, and dies while the index asks for its snapshot.
    SNAPSHOT = "snapshot"


OF_A_REQUEST = tuple(Point)[:10]
OF_A_REPLACEMENT = tuple(Point)[10:]


def order(folder: Path, point: Point, session: str = "") -> Path:
    """The next worker to reach the point with a request of this session dies. The file is gone then."""
    path = folder / f"{point.value}.{session}"
    path.touch()
    return path


def reach(point: Point, session: str = "") -> None:
    """In a worker: die if that was ordered."""
    path = Path(os.environ[FOLDER]) / f"{point.value}.{session}"
    if session.startswith(ALWAYS):
        if not path.exists():
            return
    else:
        try:
            path.unlink()  # one worker only: a request that is placed again lives
        except FileNotFoundError:
            return
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
