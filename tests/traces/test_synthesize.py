from __future__ import annotations

from importlib import resources
from pathlib import Path

from bien.traces.native import read_native
from bien.traces.stats import measure
from bien.traces.synthesize import SynthesisParameters, synthesize, write_sample

SAMPLE = Path(str(resources.files("bien.traces") / "samples" / "agentic.bien.jsonl"))


def test_the_shipped_sample_is_made_by_this_module(tmp_path: Path) -> None:
    write_sample(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == SAMPLE.read_bytes()


def test_the_sample_fits_a_small_model_on_two_cores() -> None:
    sessions = list(read_native(SAMPLE))
    stats = measure(sessions, 16)
    assert stats.turns >= 30 and 4 <= stats.sessions <= 6
    assert sum(len(s.streams) > 1 for s in sessions) >= 2
    assert stats.longest <= 8192
    uncached = stats.input_tokens - stats.hit
    # Two workers of one thread: 250 prompt tokens and 15 output tokens a second each, half of it lost.
    assert uncached / 250 + stats.output_tokens / 15 < 150
    assert all(t.gap <= 2 for s in sessions for x in s.streams for t in x.turns)


def test_sessions_share_the_system_prompt_only() -> None:
    p = SynthesisParameters(sessions=2, agent_every=5)
    one, two = synthesize(p)
    first = one.streams[0].turns[0].input
    other = two.streams[0].turns[0].input
    assert one.scope == two.scope
    assert first.slice(0, p.system_tokens) == other.slice(0, p.system_tokens)
    assert first.slice(p.system_tokens, p.system_tokens + 1) != other.slice(
        p.system_tokens, p.system_tokens + 1
    )


def test_each_turn_continues_the_one_before() -> None:
    for session in synthesize(SynthesisParameters(sessions=4)):
        for stream in session.streams:
            for turn, following in zip(stream.turns, stream.turns[1:], strict=False):
                whole = turn.input.join(turn.output)
                assert following.input.slice(0, len(whole)) == whole


def test_joins_and_spawns_agree() -> None:
    agents = 0
    for session in synthesize(SynthesisParameters(sessions=6)):
        root = session.streams[0]
        for agent in session.streams[1:]:
            agents += 1
            assert agent.spawned_after is not None and agent.joined_before == agent.spawned_after + 1
            assert agent.id in root.turns[agent.joined_before].joins
    assert agents >= 3
