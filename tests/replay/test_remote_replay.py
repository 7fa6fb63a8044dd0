"""`bien replay --deployment` before servers of others: from the command line to result.json."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bien.core.deployment import Deployment, GatewaySpec, ModelSpec, RemoteSpec, Selection
from bien.core.errors import UserError
from bien.core.plugins import PluginManager
from bien.core.testing.toy import write_toy
from bien.core.text.model import TextModel
from bien.gateway.testing.stand_in import StandIn
from bien.replay.chaos.engine import ChaosEngine, Habits
from bien.replay.ladder import climb
from bien.replay.options import ReplayOptions
from bien.replay.result import Result, read_result
from bien.replay.turns_file import read_turns, turns_path
from bien.traces.model import TraceMeta
from bien.traces.native import write_native
from tests.replay.fakes import session

BIEN = "import bien.replay.cli as cli; cli.COMMANDS = ('replay',); cli.main()"
HERE = "http://127.0.0.1"


@pytest.fixture
def run() -> Iterator[Callable[..., Any]]:
    """Runs a coroutine on a loop in another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    write_toy(tmp_path / "toy")
    return tmp_path / "toy"


def replay(folder: Path, toy: Path, engine: str, sessions: int = 4, **more: str) -> Result:
    trace = folder / "t.bien.jsonl"
    turns = [session(f"s{i}", (0, 64, 8), (0.01, 40, 8), (0.01, 40, 8)) for i in range(sessions)]
    write_native(trace, TraceMeta("native", 16), turns)
    lines = [f'[model]\nname = "{toy}"', '[gateway]\nport = 0\nrouter = "kv-aware"', f"[[pool]]\n{engine}"]
    (folder / "d.toml").write_text("\n".join(lines))
    arguments = ["replay", str(trace), "--deployment", str(folder / "d.toml"), "--concurrency", "2"]
    done = subprocess.run(
        [sys.executable, "-c", BIEN, *arguments], cwd=folder, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_result(folder / "result.json")


def test_engines_with_events(run: Callable[..., Any], toy: Path, tmp_path: Path) -> None:
    text = TextModel.load(toy)

    async def start() -> list[ChaosEngine]:
        found = []
        for n in range(2):
            sockets = tmp_path / f"{n}"
            engine = ChaosEngine(n, text, f"ipc://{sockets}.e", f"ipc://{sockets}.r", "toy")
            engine.habits = Habits(token_ms=0.0)
            found.append(await engine.start())
        return found

    engines = run(start())
    places = {
        "use": "vllm",
        "urls": [engine.url for engine in engines],
        "events": [engine.addresses[0] for engine in engines],
        "replay": [engine.addresses[1] for engine in engines],
        "max_context": 2048,
    }
    table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in places.items())
    try:
        result = replay(tmp_path, toy, f'name = "theirs"\ndevices = 4\nengine = {{ {table} }}')
    finally:
        for engine in engines:
            run(engine.close())
    assert result.validity.valid, result.validity.reasons
    assert (result.turns.count, result.turns.errors, result.tokens.output) == (12, 0, 96)
    asked = [body for engine in engines for body in engine.asked]
    assert all(body["ignore_eos"] and body["max_tokens"] == 8 for body in asked)
    assert not result.card.forced_tokens, "their own words, not the recorded ones"
    found = sum(served.cached for engine in engines for served in engine.served)
    assert result.tokens.cached_input == found > 0
    assert result.router.parity == 1.0, "their events say what they find"
    assert result.cache.achieved == found / result.tokens.logical_input and result.cache.loss
    assert result.cache.ideal == result.cache.achieved, "what they wrote themselves is in no later prompt"
    assert result.cache.loss.unknown == 0.0, "which worker it was is known"
    whole = result.throughput
    assert whole.per_accelerator.output == pytest.approx(whole.output / 8), "two servers of four"
    path = tmp_path / "result.json"
    assert {turn.worker for turn in read_turns(turns_path(path), path)} == {"theirs-0", "theirs-1"}


@pytest.mark.slow  # the same way, with other words
def test_an_engine_that_says_nothing_but_text(run: Callable[..., Any], toy: Path, tmp_path: Path) -> None:
    server = run(StandIn(ids=False, cached=False).start())
    try:
        result = replay(
            tmp_path, toy, f'name = "theirs"\nengine = {{ use = "openai", urls = ["{server.url}"] }}'
        )
    finally:
        run(server.close())
    assert result.validity.valid, result.validity.reasons
    assert (result.turns.count, result.turns.errors, result.tokens.output) == (12, 0, 96)
    assert not any("ignore_eos" in body for body in server.asked), "it takes no such thing"
    assert (result.router.parity, result.cache.achieved) == (None, None), "nobody knows"


def test_a_ladder_is_one_of_own_workers(toy: Path, tmp_path: Path) -> None:
    engine = Selection("openai", {"urls": [f"{HERE}:9"]})
    deployment = Deployment(ModelSpec(str(toy)), GatewaySpec(), (), remote=(RemoteSpec(engine, "theirs"),))
    manager = PluginManager.load()
    with pytest.raises(UserError, match="pool 'theirs'"):
        next(climb([1, 2], deployment, ReplayOptions(), None, tmp_path / "r.json", manager, None, print))
