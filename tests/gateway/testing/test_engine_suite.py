"""The suite of engines passes those that ship, and fails broken ones, each by the test meant for it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bien.core.errors import WorkerDiedError
from bien.core.plugins import PluginManager
from bien.core.providers import Context
from bien.core.request import GenerateRequest
from bien.core.strict import decode
from bien.core.testing.suites import failures
from bien.core.worker.client import WorkerClient
from bien.core.worker.messages import Output
from bien.gateway.remote import follow, wire
from bien.gateway.remote.answer import Answer, Cut
from bien.gateway.remote.blocks import BlockMap
from bien.gateway.remote.client import RemoteClient
from bien.gateway.remote.engine import Engine, RemoteEngine, endpoints
from bien.gateway.remote.follow import Follower
from bien.gateway.remote.server import Silent, Unreachable
from bien.gateway.testing import EngineSuite, engine_rig
from bien.gateway.testing.event_forms import FORMS, Form, recorded
from bien.plugins.engines.vllm import VllmDialect

RECORDED = Path(__file__).parents[1] / "remote" / "recorded"
TIMES = {"poll_seconds": 0.02, "look_seconds": 0.1, "silence_seconds": 0.4}


def make(name: str, ctx: Context, url: str, **parameters: Any) -> Engine:
    provider = PluginManager.load(only="").find("engine", name).provider
    config = decode(TIMES | {"urls": [url]} | parameters, provider.config_type, "engine")
    engine: Engine = provider.factory(config, ctx)
    return engine


class TestVllm(EngineSuite):
    def build(self, url: str, events: str | None, replay: str | None, ctx: Context) -> Engine:
        return make("vllm", ctx, url, events=[events], replay=[replay], grace_seconds=0.05)


@pytest.mark.slow  # the same but for what a body holds
class TestSglang(EngineSuite):
    """With salts, which are left out by default."""

    def build(self, url: str, events: str | None, replay: str | None, ctx: Context) -> Engine:
        return make("sglang", ctx, url, events=[events], replay=[replay], grace_seconds=0.05, salt=True)


class TestOpenAI(EngineSuite):
    events = salts = False

    def build(self, url: str, events: str | None, replay: str | None, ctx: Context) -> Engine:
        return make("openai", ctx, url)


@pytest.mark.parametrize("form", FORMS)
def test_what_ships_with_the_suite_is_what_was_recorded(form: Form) -> None:
    name = f"vllm-{form.replace(' ', '-')}"
    frames = json.loads((RECORDED / f"{name}.json").read_text())["frames"]
    assert [message.hex() for message in recorded(form)] == [frame[-1] for frame in frames]


# Broken ones.


class Planted(RemoteEngine):
    client: type[RemoteClient] = RemoteClient

    async def connect(self, id: str) -> WorkerClient:
        endpoint = self._endpoints[id]
        source = self._source(endpoint)
        watch = self._watches[id]
        return await self.client.connect(endpoint, self._dialect, self._clock, watch, source)


class SwallowsErrors(RemoteClient):
    def _over(self, rid: int, output: Output) -> None:
        super()._over(rid, msgspec.structs.replace(output, error="", error_code="", finish="stop"))


class NeverEnds(RemoteClient):
    def _over(self, rid: int, output: Output) -> None:
        super()._over(rid, msgspec.structs.replace(output, finish=None))


class DropsTheLastToken(RemoteClient):
    def _over(self, rid: int, output: Output) -> None:
        super()._over(rid, msgspec.structs.replace(output, count=0, tokens=b"", text=""))


class SaysCachedTwice(RemoteClient):
    def _over(self, rid: int, output: Output) -> None:
        self._send(Output(rid, cached=output.cached))
        super()._over(rid, output)


class AddsCachedTwice(RemoteClient):
    def _over(self, rid: int, output: Output) -> None:
        self._load._totals.cached_tokens += max(0, output.cached)
        super()._over(rid, output)


class MakesUpCached(RemoteClient):
    def _over(self, rid: int, output: Output) -> None:
        super()._over(rid, msgspec.structs.replace(output, cached=max(0, output.cached)))


class IgnoresAborts(RemoteClient):
    def abort(self, rid: int) -> None:
        if self._calls.pop(rid, None):
            self._load.remove(rid, self._clock.time())


class AnswersAfterAborts(RemoteClient):
    def abort(self, rid: int) -> None:
        super().abort(rid)
        self._send(Output(rid, finish="abort"))


class HoldsAnswersBack(RemoteClient):
    def _gained(self, output: Output, request: GenerateRequest, last: bool = False) -> None:
        held = self.__dict__.setdefault("held", {}).setdefault(output.rid, [])
        held.append(output)
        for one in held if last else ():
            super()._gained(one, request, one is output)


class RepeatsWhatHadBegun(RemoteClient):
    async def _generate(self, rid: int, request: GenerateRequest) -> None:
        body = self._server.dialect.body(self._name, request, self._endpoint.rank, self._salt(request))
        for _ in range(3):
            try:
                return await self._stream(body, Answer(rid), request)
            except (Unreachable, Silent, Cut):
                pass
        raise WorkerDiedError("cut")


class TakesACutForAnEnd(RemoteClient):
    async def _stream(self, body: dict[str, Any], answer: Answer, request: GenerateRequest) -> None:
        try:
            await super()._stream(body, answer, request)
        except (Unreachable, Cut):
            self._gained(Output(answer._rid, finish="stop"), request, last=True)


class DiesOfOneError(RemoteClient):
    def _over(self, rid: int, output: Output) -> None:
        super()._over(rid, output)
        if output.finish == "error":
            self._die("it said no")


class HasOneLife(RemoteClient):
    @classmethod
    async def connect(cls, *args: Any) -> RemoteClient:
        client = await super().connect(*args)
        client.info, client._boot = msgspec.structs.replace(client.info, generation="life.0"), "life"
        return client


class IgnoresRestarts(RemoteClient):
    def _renew(self) -> None:
        pass


class KeepsItsGeneration(RemoteClient):
    def _renew(self) -> None:
        self._seq = 0
        self._tell([])


class NeverDies(RemoteClient):
    def _die(self, reason: str) -> None:
        pass


class DiesTwice(RemoteClient):
    def _die(self, reason: str) -> None:
        super()._die(reason)
        if self._listener is not None:
            self._listener.on_death(self, reason)


class LeavesItsTasks(RemoteClient):
    async def close(self) -> None:
        alive, self._alive = self._alive, False
        if self._source is not None and alive:
            await self._source.close()


class TellsNoSalt(RemoteClient):
    def _salt(self, request: GenerateRequest) -> str:
        return ""


class HasOneSaltForAll(RemoteClient):
    def _salt(self, request: GenerateRequest) -> str:
        return "s" if super()._salt(request) else ""


class TellsWhoItIs(RemoteClient):
    def _salt(self, request: GenerateRequest) -> str:
        return f"{request.tenant}/{request.salt}".strip("/")


class MixesTenants(RemoteClient):
    def _key_of(self, salt: str) -> bytes | None:
        return self._endpoint.hash_key


class ForgetsSalts(RemoteClient):
    def _key_of(self, salt: str) -> bytes | None:
        return None if salt else self._endpoint.hash_key


class NeverHearsAgain(Follower):
    async def relearn(self) -> None:
        pass


class LosesEvents(Follower):
    def _forget(self, why: str) -> None:
        pass


class NeverAsks(Follower):
    async def _refill(self, start: int) -> None:
        pass


class MixesRanks(Follower):
    def _apply(self, payload: bytes, again: bool = False) -> None:
        raw = msgspec.msgpack.decode(payload)
        if isinstance(raw, list):
            raw[2] = None
        super()._apply(msgspec.msgpack.encode(raw), again)


class SkipsWhatItCannotRead(Follower):
    def _apply(self, payload: bytes, again: bool = False) -> None:
        try:
            wire.decode(payload)
        except wire.UndecodableError:
            return
        super()._apply(payload, again)


class GuessesParents(BlockMap):
    def store(self, event: wire.Stored) -> Any:
        known = event.parent is None or event.parent in self._blocks
        return super().store(event if known else event._replace(parent=None))


class ForgetsAdapters(BlockMap):
    def store(self, event: wire.Stored) -> Any:
        return super().store(event._replace(adapter=False))


class ForgetsRemovals(BlockMap):
    def remove(self, event: wire.Removed) -> Any:
        return []


def only_arrays(payload: bytes) -> wire.Message:
    if b"block_hashes" in payload:
        raise wire.UndecodableError("a map")
    return wire.decode(payload)


class NeverAlarms(Planted):
    @property
    def alarms(self) -> dict[str, dict[str, str]]:
        return {}


ANSWERS, CACHED = "test_answers_come_whole", "test_cached_tokens_are_reported_once"
ERROR, CUT = "test_an_error_in_the_stream_is_passed_on", "test_an_answer_that_is_cut_is_an_error"
ABORT, FORMS_ = "test_an_abort_frees_the_upstream", "test_events_of_every_form_are_understood"
AGAIN, LOST = (
    "test_a_sequence_that_begins_again_is_an_empty_cache",
    "test_what_was_missed_for_ever_counts_no_more",
)
TENANTS, SALTED = "test_tenants_have_salts_of_their_own", "test_salted_blocks_are_their_tenants"
FAULTS: list[tuple[Any, str, str]] = [
    (SwallowsErrors, ERROR, "ended as 'stop'"),
    (NeverEnds, ANSWERS, "has no end"),
    (DropsTheLastToken, ANSWERS, "wrote 1 tokens"),
    (SaysCachedTwice, CACHED, r"the outputs \[8, 8\]"),
    (IgnoresAborts, ABORT, "still computes it"),
    (HasOneLife, "test_another_life_is_another_generation", "in both lives"),
    (IgnoresRestarts, AGAIN, "count as cached there"),
    (NeverDies, "test_a_worker_that_is_not_healthy_is_dead", "not said to be dead"),
    (TellsNoSalt, TENANTS, "cache_salt is None"),
    (MixesTenants, "test_salts_of_strangers_are_nobodys", "count for who has none"),
    (LosesEvents, LOST, "still counts"),
    (SkipsWhatItCannotRead, "test_undecodable_messages_are_alarmed", "nobody is told"),
]
MORE: list[tuple[Any, str, str]] = [
    (SwallowsErrors, "test_refusals_are_passed_on", "ended as 'stop'"),
    (SwallowsErrors, "test_garbage_is_an_error", "ended as 'stop'"),
    (AddsCachedTwice, CACHED, "stats.cached_tokens is 48"),
    (MakesUpCached, "test_what_is_not_told_is_not_made_up", "unknown: -1"),
    (AnswersAfterAborts, ABORT, "outputs follow"),
    (
        HoldsAnswersBack,
        "test_tokens_are_passed_on_as_they_come",
        "had written all|nothing of it",
    ),
    (RepeatsWhatHadBegun, CUT, "two tokens came"),
    (TakesACutForAnEnd, CUT, "ended as 'stop'"),
    (TakesACutForAnEnd, "test_an_end_without_a_finish_is_an_error", "ended as 'stop'"),
    (DiesOfOneError, "test_one_bad_moment_is_no_death", ""),
    (KeepsItsGeneration, AGAIN, "count as cached there"),
    (NeverDies, "test_a_worker_that_goes_is_dead", "not said to be dead"),
    (NeverDies, "test_a_worker_that_hangs_is_dead", "not said to be dead"),
    (DiesTwice, "test_a_worker_that_goes_is_dead", "deaths: "),
    (LeavesItsTasks, "test_closing_leaves_nothing_behind", "still computes"),
    (HasOneSaltForAll, TENANTS, "share salts"),
    (TellsWhoItIs, TENANTS, "can be read"),
    (MixesTenants, SALTED, "of tenant 'alice'"),
    (ForgetsSalts, SALTED, "of tenant 'alice'"),
    (NeverHearsAgain, "test_a_salt_of_an_earlier_life_is_learnt", "of tenant 'alice'"),
    (NeverAsks, "test_missed_messages_are_asked_for", "count as cached there"),
    (NeverAsks, "test_what_was_cached_before_is_learnt", "count as cached there"),
    (MixesRanks, "test_other_ranks_do_not_mix", "rank 3's blocks"),
    (GuessesParents, "test_blocks_of_an_unknown_parent_are_not_guessed", "a block counts"),
    (ForgetsAdapters, FORMS_, "an adapter's blocks"),
    (ForgetsRemovals, FORMS_, "16 count as cached there"),
    (only_arrays, FORMS_, "count as cached there"),
    (NeverAlarms, "test_undecodable_messages_are_alarmed", "nobody is told"),
    (NeverAlarms, "test_unknown_events_are_alarmed", "nobody is told"),
    (NeverAlarms, "test_an_engine_that_is_silent_is_alarmed", "nobody is told"),
]


@pytest.mark.parametrize(
    ("broken", "test", "text"),
    [*FAULTS, *(pytest.param(*fault, marks=pytest.mark.slow) for fault in MORE)],
)
def test_a_broken_engine_is_told_so(
    broken: Any, test: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_rig, "PATIENCE", 0.4)
    kind = Planted
    if isinstance(broken, type):
        if issubclass(broken, RemoteClient):
            kind = type("Kind", (Planted,), {"client": broken})
        elif issubclass(broken, RemoteEngine):
            kind = broken
        else:
            monkeypatch.setattr(f"bien.gateway.remote.client.{broken.__base__.__name__}", broken)
    else:
        monkeypatch.setattr(follow, "decode", broken)

    class Suite(EngineSuite):
        def build(self, url: str, events: str | None, replay: str | None, ctx: Context) -> Engine:
            assert events and replay
            places = endpoints(
                ctx, [url], events=[events], replay=[replay], salt=True, grace_seconds=0.05, **TIMES
            )
            return kind(places, VllmDialect(), ctx)

    for name in [name for name in dir(Suite) if name.startswith("test_") and name != test]:
        setattr(Suite, name, lambda self: None)
    [found] = failures(Suite)
    assert re.search(f"^{test}: .*{text}", found), found
