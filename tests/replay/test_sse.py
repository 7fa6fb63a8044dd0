from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from bien.core.request import TokenIds
from bien.core.speculation.counts import DraftCounts, SourceCounts
from bien.gateway.protocols.acceptance import Speculation
from bien.gateway.protocols.ask import Ask, Usage
from bien.gateway.protocols.completions import CompletionAnswer
from bien.replay.targets.sse import TokenCounter

texts = st.text(max_size=8) | st.sampled_from(
    ['"token_ids":[1,2]', 'data: {"error"', '"usage":{', '"bien":{"rounds":9}', "\n\n", "]"]
)

COUNTS = DraftCounts(
    {"own": SourceCounts(2, 6, 4, [2, 2, 2], [2, 1, 1]), "prediction": SourceCounts(1, 2, 1, [1, 1], [1, 0])}
)


def answer(pieces: list[tuple[str, int]], **more: bool) -> bytes:
    ask = Ask("m", TokenIds(), 9, stream=True, include_usage=True, **more)
    out = CompletionAnswer(ask, "id", 1)
    total = sum(n for _, n in pieces)
    seen = 0
    data = b""
    for text, n in pieces:
        seen += n
        ids = TokenIds.of(range(n)).packed if ask.return_token_ids else None
        data += out.piece(0, text, ids, Usage.of(50, seen, 16))
    speculation = Speculation.of(COUNTS) if ask.return_token_ids else None
    usage = Usage.of(50, total, 16)
    return data + out.closing(0, "length", usage, speculation) + out.end(usage)


@given(st.lists(st.tuples(texts, st.integers(1, 4)), max_size=6), st.booleans(), st.integers(1, 400))
def test_counts_what_the_gateway_writes_however_it_is_cut(
    pieces: list[tuple[str, int]], ids: bool, size: int
) -> None:
    data = answer(pieces, return_token_ids=ids, continuous_usage=not ids)
    counter = TokenCounter()
    counted = sum(counter.feed(data[at : at + size]) for at in range(0, len(data), size))
    assert counted == sum(n for _, n in pieces)
    assert counter.finish() == 0
    assert counter.done and not counter.error and not counter.estimated
    assert (counter.usage.prompt_tokens, counter.usage.cached) == (50, 16)
    found = counter.speculation
    assert (found.drafted, found.accepted, found.rounds) == ((8, 5, 3) if ids else (-1, -1, -1))
    assert found.counts == (COUNTS if ids else None)


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def test_chunks_without_counts_are_settled_by_the_usage() -> None:
    counter = TokenCounter()
    chunk = event({"choices": [{"index": 0, "text": "ab", "finish_reason": None}]})
    assert counter.feed(chunk + chunk) == 2
    assert counter.estimated
    counter.feed(event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}))
    assert counter.finish() == 3
    assert counter.usage.cached == -1


def test_an_error_event_is_kept() -> None:
    counter = TokenCounter()
    counter.feed(event({"error": {"message": "worker died", "code": 502}}))
    assert counter.error == "worker died"
    assert not counter.done
