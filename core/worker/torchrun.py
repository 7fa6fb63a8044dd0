"""A worker whose ranks torchrun starts, on one machine or several:

    torchrun --nproc-per-node 2 -m bien.core.worker.torchrun deployment.toml --pool main --token-file token

Rank 0 is the worker: it prints where it listens (one JSON line, as a launched worker does) and serves until
it is told to end. The others wait for its plans. A pool's `devices` must be the number of ranks. With a
durable `kv_index` in the deployment the worker publishes itself there; else gateways need address and token.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from bien.core.child_log import log_to_parent
from bien.core.compose import Composition, compose
from bien.core.deployment import load_deployment
from bien.core.errors import BienError, DeploymentError, ResourceError
from bien.core.executors.link import Link, LinkClosed
from bien.core.executors.rank_messages import BlocksDown, BlocksUp, Down, Here, Up
from bien.core.executors.ranks import RemoteRank
from bien.core.parallel.communicator import Communicator
from bien.core.plugins import PluginManager
from bien.core.providers import Context
from bien.core.worker.published import join_token
from bien.core.worker.rank_launch import COLLECTIVE_SECONDS, HOST, RankStart
from bien.core.worker.start import WorkerStart, assign, line

LINK_SECONDS = 60.0  # until every rank must have come
LINKS = "bien/links"  # key of the store: where rank 0 waits for the others
log = logging.getLogger("bien.worker")


class TorchrunRanks:
    """See `Ranks`. The others read from torchrun's store where to come, and what to load."""

    def __init__(self, store: Any, start: WorkerStart, local: bool) -> None:
        """`local`: all ranks are on this machine."""
        self._store, self._start, self._local = store, start, local

    def open(self, world: int, threads: int) -> list[RemoteRank]:
        token, start = secrets.token_hex(16), self._start
        with socket.create_server((HOST if self._local else "", 0), backlog=2 * world) as listening:
            listening.settimeout(LINK_SECONDS)
            host = HOST if self._local else os.environ["MASTER_ADDR"]
            rank = RankStart(-1, -1, world, start.model, start.pool, start.plugins, threads)
            where = (host, listening.getsockname()[1], token, rank)
            self._store.set(LINKS, msgspec.json.encode(where))
            ends: dict[tuple[int, str], tuple[socket.socket, Here]] = {}
            while len(ends) < 2 * (world - 1):
                sock, here = self._accept(listening, world)
                if here is None or not secrets.compare_digest(here.token, token):
                    sock.close()
                    continue
                ends[here.rank, here.link] = (sock, here)
        remotes = []
        for rank_number in range(1, world):
            (steps, here), (blocks, _) = ends[rank_number, "steps"], ends[rank_number, "blocks"]
            up: Link[Up] = Link(steps, Up)
            remote = RemoteRank(rank_number, up, Link[BlocksUp](blocks, BlocksUp))
            remote.pid, remote.host = here.pid, here.host
            remotes.append(remote)
        return remotes

    def communicator(self, rank: int, world: int, device: str) -> Communicator:
        return meet(self._store, rank, world, device, self._local)

    def met(self) -> None:
        pass

    def _accept(self, listening: socket.socket, world: int) -> tuple[socket.socket, Here | None]:
        try:
            sock, _ = listening.accept()
        except TimeoutError:
            raise ResourceError(f"not all {world} ranks came within {LINK_SECONDS:g} seconds") from None
        link: Link[Here] = Link(sock, Here)
        sock.settimeout(LINK_SECONDS)
        try:
            return sock, link.receive()
        except LinkClosed:
            return sock, None


def meet(store: Any, rank: int, world: int, device: str, local: bool) -> Communicator:
    """The communicator of all ranks of a torchrun."""
    import torch
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    from bien.core.executors.process_group import ProcessGroup

    return ProcessGroup(
        PrefixStore("bien/group", store),
        rank,
        world,
        torch.device(device),
        seconds=COLLECTIVE_SECONDS,
        host=HOST if local else None,
    )


def main(arguments: list[str] | None = None) -> int:
    """Exit code as of a launched worker."""
    options = _options(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun ends us with SIGTERM
    log_to_parent()
    try:
        from torch.distributed.rendezvous import rendezvous

        try:
            store, rank, world = next(iter(rendezvous("env://")))
        except ValueError as error:
            raise DeploymentError(f"this is for torchrun, which sets its environment: {error}") from None
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world)) == world
        if rank:
            return _follow(store, rank, world, local)
        return _lead(options, store, world, local)
    except BienError as error:
        print(f"bien: {error}", file=sys.stderr)
        return error.exit_code


def _lead(options: argparse.Namespace, store: Any, world: int, local: bool) -> int:
    from bien.core.build import build_worker
    from bien.core.worker.main import serve

    start = _start(options, world)
    ranks = TorchrunRanks(store, start, local)
    built = build_worker(start, lambda text: log.info("%s", text), ranks=ranks)
    return serve(start, built, lambda ready: print(line(ready).decode(), end="", flush=True))


def _follow(store: Any, rank: int, world: int, local: bool) -> int:
    from bien.core.worker.rank import serve_rank

    host, port, token, start = msgspec.json.decode(store.get(LINKS), type=tuple[str, int, str, RankStart])
    ends = [socket.create_connection((host, port), LINK_SECONDS) for _ in range(2)]
    steps: Link[Down] = Link(ends[0], Down)
    blocks: Link[BlocksDown] = Link(ends[1], BlocksDown)
    for link, name in ((steps, "steps"), (blocks, "blocks")):
        link.send(Here(rank, name, token, os.getpid(), socket.gethostname()))
    start = msgspec.structs.replace(start, rank=rank, local_rank=int(os.environ.get("LOCAL_RANK", rank)))
    return serve_rank(start, steps, blocks, lambda device: meet(store, rank, world, device, local))


def _start(options: argparse.Namespace, world: int) -> WorkerStart:
    composition = compose(load_deployment(options.deployment), PluginManager.load())
    pool = composition.pool(options.pool or composition.pools[0].spec.name).spec
    if pool.devices != world:
        raise DeploymentError(
            f"pool {pool.name!r} has devices = {pool.devices} and torchrun started {world} ranks; valid: the "
            f"same number, as with --nproc-per-node {pool.devices} on one machine",
            field="devices",
        )
    start = next(s for s in assign(composition) if s.pool == pool)
    nodes = world // int(os.environ.get("LOCAL_WORLD_SIZE", world))
    start = msgspec.structs.replace(
        start,
        id=options.id or start.id,
        host=options.host,
        port=options.port,
        threads=start.threads * max(1, nodes),  # of all ranks; assigned are those of this machine
    )
    return _known(start, composition, options.token_file)


def _known(start: WorkerStart, composition: Composition, token_file: Path | None) -> WorkerStart:
    # How gateways find it, or are let in.
    index = composition.gateway["kv_index"].make(Context())
    try:
        publication = getattr(index, "publication", None)
    finally:
        index.close()
    if publication is not None:
        token = join_token(composition.spec.secret, publication.namespace)
        start = msgspec.structs.replace(start, publication=publication, token=token)
    if token_file is not None:
        try:
            token = token_file.read_text().strip()
        except OSError as error:
            raise DeploymentError(
                f"--token-file {token_file}: {error.strerror}", field="token_file"
            ) from None
        start = msgspec.structs.replace(start, token=token)
    elif publication is None:
        raise DeploymentError(
            "nobody could join this worker: give --token-file, a file with the token that gateways must "
            "show, or a deployment with a durable kv_index",
            field="token_file",
        )
    return start


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="torchrun -m bien.core.worker.torchrun", description=__doc__)
    parser.add_argument("deployment", help="a deployment.toml, the same for every rank")
    parser.add_argument("--pool", help="its pool; default: the first")
    parser.add_argument("--id", help="of the worker; default: POOL-0")
    parser.add_argument("--host", default=HOST, help="address to listen at")
    parser.add_argument("--port", type=int, default=0, help="0: any free one, printed")
    parser.add_argument("--token-file", type=Path, help="what gateways must show")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
