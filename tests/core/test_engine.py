"""The engine against an oracle: any batch, chunk, prefix hit, preemption, overlap, draft or tier."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bien.core.clock import WallClock
from bien.core.errors import ContextLengthError, PluginFault, ResourceError, UserError
from bien.core.request import SamplingParams, TokenIds
from bien.core.speculation.draft import Draft, Scope
from bien.core.speculation.options import SpeculationSpec
from bien.core.speculation.speculator import SpeculatorCaps
from bien.core.testing.harness import Harness, toy_groups
from bien.core.testing.hash_executor import HashExecutor, oracle
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig
from bien.plugins.schedulers.priority import Priority, PriorityConfig

KINDS = ["full", "full+window", "full+state", "full+window+state+draft"]


def fcfs(budget: int = 16) -> Fcfs:
    return Fcfs(FcfsConfig(token_budget=budget))


def prompt_of(n: int, salt: int = 0) -> list[int]:
    return [random.Random(f"{salt}/{i}").randrange(50) for i in range(n)]


class Guesser:
    """A host drafter that is right with a given chance."""

    def __init__(self, groups: Any, chance: float, limit: int = 3) -> None:
        self.caps = SpeculatorCaps(place="host", max_drafts=limit)
        self._groups, self._chance = groups, chance
        self._tokens: dict[str, list[int]] = {}
        self._random = random.Random(1)
        self.accepted = 0

    def start(self, id: str, tokens: list[int], scope: Scope) -> None:
        assert id not in self._tokens
        self._tokens[id] = list(tokens)

    def extend(self, id: str, tokens: list[int]) -> None:
        self._tokens[id] += tokens

    def propose(self, id: str, limit: int) -> Draft:
        return Draft(guess(self._tokens[id], self._groups, self._chance, self._random)[:limit])

    def observe(self, id: str, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted
        self.accepted += accepted

    def end(self, id: str) -> None:
        del self._tokens[id]

    def close(self) -> None:
        pass


def guess(context: list[int], groups: Any, chance: float, rng: random.Random, limit: int = 3) -> list[int]:
    right = oracle(context, limit, groups)
    return [t if rng.random() < chance else (t + 1) % 50 for t in right][: rng.randrange(limit + 1)]


def grow(context: list[int], groups: Any, rng: random.Random, most: int = 7) -> Draft:
    """A tree with right and wrong branches, in any order that has parents first, and any confidences."""
    right, draft, good = oracle(context, 4, groups), Draft([], [], []), []
    assert draft.parents is not None
    assert draft.confidence is not None
    for _ in range(rng.randrange(most + 1)):
        parent = rng.randrange(-1, len(draft))
        depth, path = 0, parent
        while path >= 0:
            depth, path = depth + 1, draft.parents[path]
        known = (parent < 0 or good[parent]) and depth < len(right)
        token = right[depth] if known and rng.random() < 0.7 else rng.randrange(50)
        if (parent, token) not in zip(draft.parents, draft.tokens, strict=True):
            draft.tokens.append(token)
            draft.parents.append(parent)
            draft.confidence.append(rng.random())
            good.append(known and token == right[depth])
    return draft


class Grower(Guesser):
    """A host drafter of trees."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, 0.7)
        self.caps = SpeculatorCaps(place="host", max_drafts=7, topology="tree", confidence="own")

    def propose(self, id: str, limit: int) -> Draft:
        return grow(self._tokens[id], self._groups, self._random).cut(limit)


def drafting(kind: str, groups: Any, length: str = "fixed") -> dict[str, Any]:
    """Of a `Harness`."""
    rng = random.Random(3)
    made: dict[str, dict[str, Any]] = {
        "none": {},
        "host": {"speculator": Guesser(groups, 0.7)},
        "device": {"draft": lambda context: guess(context, groups, 0.7, rng), "device_drafts": 3},
        "host tree": {"speculator": Grower(groups)},
        "device tree": {"draft": lambda context: grow(context, groups, rng), "device_drafts": 7},
    }
    options = {"speculation": SpeculationSpec(length=length)}  # type: ignore[arg-type]
    return {**made[kind], "drafting": options}


class SlowStore:
    """A host tier whose transfers end some polls later; a share of the loads fails."""

    def __init__(self, executor: HashExecutor, delay: int = 3, fail: float = 0.0) -> None:
        self._executor, self._delay, self._fail = executor, delay, fail
        self._kept: dict[tuple[int, bytes], Any] = {}
        self._random = random.Random(2)
        self.loads = 0

    def lookup(self, group: int, hashes: bytes) -> list[bool]:
        return [(group, hashes[i : i + 16]) in self._kept for i in range(0, len(hashes), 16)]

    def save(self, group: int, hashes: bytes, blocks: list[int]) -> Any:
        def act() -> None:
            for i, block in enumerate(blocks):
                key = group, hashes[16 * i : 16 * i + 16]
                self._kept[key] = self._executor.read(group, [block])

        return Later(self._delay, act)

    def load(self, group: int, hashes: bytes, blocks: list[int]) -> Any:
        self.loads += 1
        failed = self._random.random() < self._fail

        def act() -> None:
            for i, block in enumerate(blocks):
                if not failed:
                    self._executor.write(group, [block], self._kept[group, hashes[16 * i : 16 * i + 16]])

        return Later(self._delay, act, failed)

    def pin(self, group: int, hashes: bytes, ttl: float) -> None: ...
    def evict(self, group: int, hashes: bytes) -> None: ...
    def take_events(self) -> list[Any]:
        return []

    usage = (0, 0)

    def close(self) -> None: ...


class Later:
    def __init__(self, polls: int, act: Callable[[], None], failed: bool = False) -> None:
        self._polls, self._act, self._failed, self._done = polls, act, failed, False

    def done(self) -> bool:
        self._polls -= 1
        if self._polls <= 0 and not self._done:
            self._act()
            self._done = True
        return self._done

    def failed(self) -> bool:
        return self._failed


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_batches_and_chunks_give_the_oracles_text(kinds: str, depth: int) -> None:
    h = Harness(fcfs(), groups=toy_groups(kinds), depth=depth)
    prompts = {f"r{i}": prompt_of(5 + 9 * i, i) for i in range(6)}
    for id, prompt in prompts.items():
        h.submit(id, prompt, 10)
    h.run()
    for id, prompt in prompts.items():
        assert len(h.tokens[id]) == 10 and h.finish[id] == "length"
        h.expect(id, prompt)


@pytest.mark.parametrize("kinds", KINDS)
def test_a_second_turn_finds_its_prefix(kinds: str) -> None:
    h = Harness(fcfs(), groups=toy_groups(kinds))
    first = prompt_of(30)
    h.submit("a", first, 10)
    h.run()
    second = first + h.tokens["a"] + prompt_of(5, 9)
    h.submit("b", second, 6)
    h.run()
    h.expect("b", second)
    # 40 tokens were confirmed, the KV of 39 of them: nine full blocks.
    assert h.cached["b"] == 36
    h.submit("c", second, 6)
    h.run()
    h.expect("c", second)
    assert h.cached["c"] >= 40


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_recomputes(kinds: str, depth: int) -> None:
    h = Harness(fcfs(), groups=toy_groups(kinds), blocks=24, depth=depth)
    prompts = {f"r{i}": prompt_of(16, i) for i in range(4)}
    for id, prompt in prompts.items():
        h.submit(id, prompt, 40)
    h.run()
    assert h.engine.stats().preemptions > 0
    for id, prompt in prompts.items():
        h.expect(id, prompt)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("chance", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("place", ["host", "device"])
def test_drafts_change_nothing_but_the_number_of_steps(kinds: str, chance: float, place: str) -> None:
    groups = toy_groups(kinds)
    rng = random.Random(3)
    host = Guesser(groups, chance) if place == "host" else None
    h = Harness(
        fcfs(32),
        groups=groups,
        depth=2,
        speculator=host,
        draft=(lambda c: guess(c, groups, chance, rng)) if place == "device" else None,
        device_drafts=3 if place == "device" else 0,
    )
    prompts = {f"r{i}": prompt_of(7 + 5 * i, i) for i in range(4)}
    for id, prompt in prompts.items():
        h.submit(id, prompt, 24)
    h.run()
    for id, prompt in prompts.items():
        assert len(h.tokens[id]) == 24
        h.expect(id, prompt)
    stats = h.engine.stats()
    assert stats.drafted > 0
    assert (stats.accepted > 0) is (chance > 0)
    again = prompts["r0"] + h.tokens["r0"]
    h.submit("again", again, 4)
    h.run()
    h.expect("again", again)
    assert h.cached["again"] == (len(again) - 1) // 4 * 4


def test_a_request_may_opt_out_of_drafts() -> None:
    groups = toy_groups()
    h = Harness(fcfs(), groups=groups, speculator=Guesser(groups, 1.0))
    h.submit("a", prompt_of(9), sampling=SamplingParams(8, temperature=0.0, seed=0, speculate=False))
    h.run()
    h.expect("a", prompt_of(9))
    assert h.engine.stats().drafted == 0


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("fail", [0.0, 0.5, 1.0])
def test_blocks_come_back_from_a_lower_tier(kinds: str, fail: float) -> None:
    made: list[SlowStore] = []

    def store(executor: HashExecutor) -> SlowStore:
        made.append(SlowStore(executor, fail=fail))
        return made[0]

    h = Harness(fcfs(), groups=toy_groups(kinds), blocks=20, store=store)
    prompts = [prompt_of(40, i) for i in range(4)]
    for turn in range(2):
        for i, prompt in enumerate(prompts):
            h.submit(f"{turn}/{i}", prompt, 6)
            h.run()
            h.expect(f"{turn}/{i}", prompt)
    assert made[0].loads > 0
    if fail == 0.0:
        assert all(h.cached[f"1/{i}"] == 36 for i in range(4)), h.cached


def test_forced_tokens_replace_sampled_ones() -> None:
    h = Harness(fcfs(), depth=2)
    forced = [7, 7, 8, 9]
    h.submit("a", prompt_of(6), 4, forced=TokenIds.of(forced))
    h.run()
    assert h.tokens["a"] == forced


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_stop_token_ends_late_steps_without_a_trace(depth: int) -> None:
    prompt = prompt_of(11)
    text = oracle(prompt, 20, toy_groups())
    stop = text[6]
    at = text.index(stop)
    h = Harness(fcfs(), depth=depth, eos=(stop,))
    h.submit("a", prompt, sampling=SamplingParams(20, temperature=0.0, seed=0))
    h.run()
    assert h.tokens["a"] == text[: at + 1] and h.finish["a"] == "stop"
    h.submit("b", prompt + text[: at + 1] + prompt_of(7, 3), 5)
    h.run()
    h.expect("b", prompt + text[: at + 1] + prompt_of(7, 3))


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("kinds", KINDS)
def test_behind_a_stop_token_nothing_is_cached(kinds: str, size: int) -> None:
    """Nor is its own position, though it was an accepted draft: as much as without drafts."""
    groups = toy_groups(kinds, size)
    prompt = prompt_of(11)
    text = oracle(prompt, 20, groups)
    found: dict[str, list[int]] = {}
    for kind in ("none", "host", "device", "host tree", "device tree"):
        found[kind] = []
        for stop in sorted(set(text[2:12])):
            h = Harness(fcfs(), groups=groups, blocks=128, eos=(stop,), **drafting(kind, groups))
            h.submit("a", prompt, sampling=SamplingParams(20, temperature=0.0, seed=0))
            h.run()
            said = text[: text.index(stop) + 1]
            assert h.tokens["a"] == said and h.finish["a"] == "stop"
            h.submit("b", prompt + said + prompt_of(7, 3), 5)
            h.run()
            h.expect("b", prompt + said + prompt_of(7, 3))
            found[kind].append(h.cached["b"])
    for kind, cached in found.items():
        assert cached == found["none"], kind


def test_what_waits_is_queued_as_far_as_its_gateway_predicts_no_cache() -> None:
    h = Harness(fcfs(budget=8), slots=1)
    h.submit("a", prompt_of(20), 2)
    h.step()
    assert h.engine.stats().queued_tokens == 12  # what runs counts exactly
    h.submit("b", prompt_of(20), 2, predicted_cached_tokens=16)
    h.submit("c", prompt_of(9, 1), 2)
    assert h.engine.stats().queued_tokens == 12 + 4 + 9
    h.run()
    assert h.engine.stats().queued_tokens == 0


def test_abort_frees_everything_at_once() -> None:
    h = Harness(fcfs(), depth=2)
    for i in range(4):
        h.submit(f"r{i}", prompt_of(20, i), 50)
    for _ in range(4):
        h.step()
    for i in range(4):
        h.engine.abort(f"r{i}")
    assert h.cache.usage(0)[0] == 0
    h.run()
    assert not h.finish


def test_what_can_never_run_is_refused() -> None:
    h = Harness(fcfs(), blocks=10, max_context=100)
    with pytest.raises(ContextLengthError, match="context window of 100"):
        h.submit("a", prompt_of(95), 10)
    with pytest.raises(ContextLengthError, match="pool 'full' holds 40"):
        h.submit("b", prompt_of(50), 10)
    with pytest.raises(UserError, match="max_tokens is 0"):
        h.submit("c", prompt_of(5), 0)
    h.submit("d", prompt_of(5), 3)
    with pytest.raises(UserError, match="already running"):
        h.submit("d", prompt_of(5), 3)
    h.run()


@pytest.mark.parametrize("drafts", ["none", "host", "device", "device tree"])
@pytest.mark.parametrize("kinds", [*KINDS, "state", "window", "window+state"])
@settings(max_examples=25)
@example(blocks=5, prompt=20, output=12, size=2, depth=2)  # a window leaves no room for all drafts
@given(
    blocks=st.integers(1, 12),
    prompt=st.integers(1, 60),
    output=st.integers(1, 12),
    size=st.sampled_from([2, 4]),
    depth=st.integers(1, 3),
)
def test_what_is_not_refused_runs_alone(
    kinds: str, drafts: str, blocks: int, prompt: int, output: int, size: int, depth: int
) -> None:
    """A request is refused when it comes, with the numbers, or it ends, without being preempted."""
    groups = toy_groups(kinds, block_tokens=size)
    h = Harness(fcfs(), groups=groups, blocks=blocks, depth=depth, **drafting(drafts, groups))
    try:
        h.submit("a", prompt_of(prompt), output)
    except ContextLengthError as error:
        assert str(error).startswith(f"the request needs KV for {prompt + output} tokens; pool ")
        assert f"holds {blocks * size} " in str(error)
        assert -(-(prompt + output) // size) > blocks
        return
    h.run()
    h.expect("a", prompt_of(prompt))
    assert len(h.tokens["a"]) == output and h.engine.stats().preemptions == 0


@pytest.mark.parametrize("kinds", ["window", "full+window"])
@pytest.mark.parametrize("depth", [1, 2])
def test_windows_alone_share_a_small_pool(kinds: str, depth: int) -> None:
    """Prompts are cut to what windows have blocks for, and others are in their way for a while only."""
    h = Harness(fcfs(budget=64), groups=toy_groups(kinds), blocks=16 if kinds != "window" else 5, depth=depth)
    prompts = [prompt_of(n, n) for n in (50, 3, 17, 40)]
    for i, prompt in enumerate(prompts):
        h.submit(f"r{i}", prompt, 9)
    h.run(limit=1000)
    for i, prompt in enumerate(prompts):
        h.expect(f"r{i}", prompt)


@pytest.mark.parametrize("make", [lambda: fcfs(), lambda: Priority(PriorityConfig())])
def test_who_was_lost_elsewhere_keeps_his_age(make: Any) -> None:
    h = Harness(make(), slots=1)
    h.submit("runs", prompt_of(5), 9)
    h.step()
    h.submit("young", prompt_of(6), 2)
    h.submit("old", prompt_of(7), 2, age=100.0)
    h.run()
    assert list(h.finish) == ["runs", "old", "young"]


def test_a_scheduler_that_breaks_its_contract_ends_requests_not_the_engine() -> None:
    class Broken(Fcfs):
        def plan(self, view: Any) -> Any:
            plan = super().plan(view)
            plan.items += plan.items
            return plan

    h = Harness(Broken(FcfsConfig()))
    h.submit("a", prompt_of(5), 3)
    assert h.engine.begin() is None
    [output] = h.engine.flush().outputs
    assert (output.finish, output.error_code) == ("error", "plugin_fault")
    assert "scheduler Broken planned 'a' twice" in output.error
    h.run()


@pytest.mark.parametrize(
    ("error", "code"),
    [(ResourceError("no memory"), "no_resources"), (RuntimeError("boom"), "internal_error")],
)
def test_a_failed_step_ends_its_requests_with_the_error_s_code(error: Exception, code: str) -> None:
    h = Harness(fcfs())
    h.submit("a", prompt_of(5), 3)
    plan = h.engine.begin()
    assert plan is not None
    [output] = h.engine.fail(plan.step, error).outputs
    assert (output.finish, output.error, output.error_code) == ("error", f"step failed: {error}", code)
    h.run()


@pytest.mark.parametrize("method", ["add", "plan", "note", "remove", "close"])
def test_a_scheduler_that_raises_ends_requests_at_most(method: str) -> None:
    def fail(*arguments: Any) -> Any:
        raise RuntimeError("boom")

    scheduler = fcfs()
    setattr(scheduler, method, fail)
    h = Harness(scheduler)
    if method == "add":
        with pytest.raises(PluginFault, match="boom"):
            h.submit("a", prompt_of(5), 3)
        return
    h.submit("a", prompt_of(5), 3)
    h.run()
    assert h.finish == {"a": "error" if method == "plan" else "length"}
    h.engine.close()


def test_a_scheduler_that_returns_no_plan_ends_requests_at_most() -> None:
    scheduler = fcfs()
    scheduler.plan = lambda view: None  # type: ignore[method-assign, assignment, return-value]
    h = Harness(scheduler)
    h.submit("a", prompt_of(5), 3)
    assert h.engine.begin() is None
    [output] = h.engine.flush().outputs
    assert (output.error_code, output.error) == (
        "plugin_fault",
        "scheduler Fcfs planned None; valid: a StepPlan",
    )
    h.run()


@pytest.mark.parametrize("method", ["start", "extend", "propose", "observe", "end"])
def test_a_drafter_that_fails_is_left_out(method: str) -> None:
    groups = toy_groups()

    class Failing(Guesser):
        pass

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("boom")

    setattr(Failing, method, fail)
    h = Harness(fcfs(), groups=groups, speculator=Failing(groups, 0.5))
    for i in range(3):
        h.submit(f"r{i}", prompt_of(9, i), 12)
    h.run()
    for i in range(3):
        h.expect(f"r{i}", prompt_of(9, i))


@pytest.mark.parametrize(
    "draft",
    [
        Draft([1] * 20),
        Draft([-1]),
        Draft([1 << 33]),
        Draft(["1"]),  # type: ignore[list-item]
        [1],
        None,
        Draft(None),  # type: ignore[arg-type]
        Draft([1, 2], [-1, -1]),  # caps say "chain"
        Draft([1], None, [1.5]),
        Draft([1], None, [float("nan")]),
        Draft([1, 2], None, [1.0]),
        Draft([1], source=[1]),  # type: ignore[arg-type]
        Draft([1], source=5),  # type: ignore[arg-type]
        Draft([1], source="x" * 65),
    ],
    ids=repr,
)
def test_drafts_that_cannot_be_verified_are_refused(draft: Any) -> None:
    class Wild(Guesser):
        def propose(self, id: str, limit: int) -> Draft:
            wild: Draft = draft
            return wild

    groups = toy_groups()
    h = Harness(fcfs(), groups=groups, speculator=Wild(groups, 0.5))
    h.submit("a", prompt_of(9), 12)
    h.run()
    h.expect("a", prompt_of(9))
    assert h.engine.stats().drafted == 0


@pytest.mark.parametrize("what", ["load", "save"])
def test_a_transfer_that_never_ends_gives_its_store_up(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bien.core.tier.PATIENCE", 0.05)

    class Stuck(SlowStore):
        pass

    def never(self: SlowStore, *arguments: Any) -> Any:
        return Later(1 << 60, lambda: None)

    setattr(Stuck, what, never)
    h = Harness(fcfs(), blocks=36, store=lambda executor: Stuck(executor))
    for turn in range(2):
        for i in range(4):
            h.submit(f"{turn}/{i}", prompt_of(40, i), 6)
            h.run()
            h.expect(f"{turn}/{i}", prompt_of(40, i))
            if what == "save":
                WallClock().block(0.03)
    assert len(h.finish) == 8
    h.engine.close()


@pytest.mark.parametrize("method", ["lookup", "save", "load", "take_events", "done", "failed"])
def test_a_store_that_fails_is_left_out(method: str) -> None:
    def fail(*arguments: Any) -> Any:
        raise RuntimeError("boom")

    class Failing(SlowStore):
        def load(self, group: int, hashes: bytes, blocks: list[int]) -> Any:
            transfer = super().load(group, hashes, blocks)
            if method in ("done", "failed"):
                setattr(transfer, method, fail)
            return transfer

    if method not in ("done", "failed"):
        setattr(Failing, method, fail)
    h = Harness(fcfs(), blocks=36, store=lambda executor: Failing(executor))
    for turn in range(2):
        for i in range(4):
            h.submit(f"{turn}/{i}", prompt_of(40, i), 6)
            h.run()
            h.expect(f"{turn}/{i}", prompt_of(40, i))


class Scenario:
    """Random traffic over one engine: sessions that extend themselves, with aborts."""

    def __init__(
        self,
        seed: int,
        kinds: str,
        blocks: int,
        depth: int,
        budget: int,
        drafter: str = "none",
        length: str = "fixed",
        store: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        groups = toy_groups(kinds)
        self.h = Harness(
            fcfs(budget),
            groups=groups,
            blocks=blocks,
            depth=depth,
            slots=self.rng.randint(1, 5),
            store=(lambda e: SlowStore(e, 2, 0.2)) if store else None,
            **drafting(drafter, groups, length),
        )
        self.sessions = [prompt_of(self.rng.randint(1, 12), i % 2) for i in range(4)]
        self.live: dict[str, tuple[int, list[int]]] = {}

    def run(self, rounds: int) -> None:
        for n in range(rounds):
            busy = {s for s, _ in self.live.values()}
            for s in range(len(self.sessions)):
                if s not in busy and self.rng.random() < 0.4 and len(self.sessions[s]) < 60:
                    id = f"{n}/{s}"
                    count = self.rng.randint(1, 9)
                    self.h.submit(id, self.sessions[s], count, prediction=self._prediction(s, count))
                    self.live[id] = (s, self.sessions[s])
            if self.live and self.rng.random() < 0.08:
                gone = self.rng.choice(sorted(self.live))
                self.h.engine.abort(gone)
                del self.live[gone]
            self.h.step()
            self.h.engine.check_integrity()
            self._harvest()
        self.h.run()
        self._harvest()
        assert not self.live

    def _prediction(self, s: int, count: int) -> TokenIds | None:
        if self.rng.random() < 0.7:
            return None
        right = oracle(self.sessions[s], count, self.h.groups)
        at = self.rng.randrange(count)
        return TokenIds.of(right[:at] + [self.rng.randrange(50)] + right[at + self.rng.randrange(2) :])

    def _harvest(self) -> None:
        for id in [i for i in self.live if i in self.h.finish]:
            s, prompt = self.live.pop(id)
            assert self.h.finish[id] == "length"
            self.h.expect(id, prompt)
            more = prompt_of(self.rng.randint(1, 6), self.rng.randint(0, 99))
            self.sessions[s] = prompt + self.h.tokens[id] + more


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    kinds=st.sampled_from(KINDS),
    blocks=st.integers(22, 60),
    depth=st.integers(1, 3),
    budget=st.integers(1, 24),
    drafter=st.sampled_from(["none", "host", "device", "host tree", "device tree"]),
    length=st.sampled_from(["fixed", "confidence", "budget"]),
    store=st.booleans(),
)
def test_random_traffic(
    seed: int, kinds: str, blocks: int, depth: int, budget: int, drafter: str, length: str, store: bool
) -> None:
    Scenario(seed, kinds, blocks, depth, budget, drafter, length, store).run(40)


@pytest.mark.parametrize("size", [1, 4, 16, 32])
@pytest.mark.parametrize("kinds", KINDS)
def test_cached_tokens_are_those_without_drafts(kinds: str, size: int) -> None:
    """Over three turns of sessions that share a beginning: drafts take no block from the next turn."""
    groups = toy_groups(kinds, size, every=max(8, size))
    found = {}
    for kind in ("none", "host", "device", "host tree", "device tree"):
        h = Harness(fcfs(), groups=groups, blocks=1024 // size, **drafting(kind, groups))
        prompts = [prompt_of(30) + prompt_of(9, i) for i in range(2)]
        for turn in range(3):
            for i, prompt in enumerate(prompts):
                h.submit(f"{turn}/{i}", prompt, 13 + i)
            h.run()
            for i, prompt in enumerate(prompts):
                h.expect(f"{turn}/{i}", prompt)
                prompts[i] = prompt + h.tokens[f"{turn}/{i}"] + prompt_of(5, 10 * turn + i)
        found[kind] = h.cached
        assert (h.engine.stats().accepted > 0) is (kind != "none")
    assert min(found["none"][f"2/{i}"] for i in range(2)) > 40
    for kind, cached in found.items():
        assert cached == found["none"], kind
