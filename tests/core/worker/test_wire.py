"""Framing, parts and mapping: no sockets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bien.core.errors import BienError, ContextLengthError, UserError
from bien.core.kv.events import KVEvent
from bien.core.logprobs import TokenLogprobs
from bien.core.report import SequenceOutput, StepReport
from bien.core.request import BlockRuns, GenerateRequest, Prompt, SamplingParams, TokenIds
from bien.core.worker.mapping import FrameMaker, RequestMap, error_output
from bien.core.worker.messages import (
    PART_BYTES,
    PROTOCOL,
    Abort,
    Challenge,
    Hello,
    Join,
    Output,
    PromptPart,
    Proof,
    Shutdown,
    Snapshot,
    SnapshotRequest,
    StepFrame,
    Submit,
    WorkerInfo,
    WorkerStats,
)
from bien.core.worker.parts import Assembler, PartQueue, check_packing, split
from bien.core.worker.wire import MAX_JOIN, WireError, frame, from_worker_reader, to_worker_reader

TO_WORKER = [
    Join(PROTOCOL, "nonce"),
    Proof("proof"),
    Submit(1, GenerateRequest("a", TokenIds.of([1, 2]), SamplingParams(max_tokens=3), tenant="t")),
    Submit(2, GenerateRequest("b", BlockRuns.of([(5, 9)]), forced=BlockRuns.of([(14, 2)]))),
    PromptPart(2, b"1234"),
    Abort(1),
    SnapshotRequest(),
    Shutdown("why"),
]
FROM_WORKER = [
    Challenge(PROTOCOL, "nonce", "proof"),
    Hello(PROTOCOL, WorkerInfo("w", "g", "fp")),
    StepFrame([Output(1, 2, b"\1\0\0\0\2\0\0\0", "stop")], None, WorkerStats(running=1), 2.5),
    StepFrame([Output(1, 1, b"\1\0\0\0", logprobs=TokenLogprobs(b"abcd", 1, b"efgh", b"ijkl"))]),
    Snapshot("g", 7, [KVEvent("stored", hashes=bytes(32))]),
    Shutdown("why"),
]


@given(st.lists(st.integers(1, 40), min_size=1))
def test_frames_survive_any_cut(cuts: list[int]) -> None:
    data = b"".join(map(frame, TO_WORKER))
    reader = to_worker_reader()
    found = []
    at = i = 0
    while at < len(data):
        step = cuts[i % len(cuts)]
        found += reader.feed(data[at : at + step])
        at, i = at + step, i + 1
    assert found == TO_WORKER


def test_frames_from_workers() -> None:
    assert from_worker_reader().feed(b"".join(map(frame, FROM_WORKER))) == FROM_WORKER


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ((MAX_JOIN + 1).to_bytes(4, "little"), f"at most {MAX_JOIN}"),
        (frame(["nonsense", 1]), "Invalid value 'nonsense'"),
        (frame(Output(1)), "not decodable"),
        (b"\x02\0\0\0\xc1\xc1", "not decodable"),
        (frame(["abort", "one"]), "Expected `int`"),
    ],
)
def test_what_is_no_frame_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(WireError, match=says):
        to_worker_reader().feed(data)


def test_added_fields_have_defaults() -> None:
    assert to_worker_reader().feed(frame(["join", PROTOCOL])) == [Join(PROTOCOL, "")]


@pytest.mark.parametrize("prompt", [TokenIds.of(range(50_000)), BlockRuns(bytes(16 * 20_000), 70_000)])
def test_large_prompts_go_in_parts_and_come_back_whole(prompt: Prompt) -> None:
    request = GenerateRequest("a", prompt, tenant="t", hashes=b"h" * 16)
    submit, rest = split(7, request)
    assert len(submit.request.prompt) == (0 if isinstance(prompt, TokenIds) else 70_000)
    assert request.prompt is prompt, "the caller's request stays as it was"
    queue, assembler = PartQueue(), Assembler()
    queue.add(7, rest)
    assembler.start(submit)
    parts = []
    while queue:
        parts.append(queue.pop())
    assert max(len(p.data) for p in parts) == PART_BYTES
    *waiting, whole = [assembler.add(p) for p in parts]
    assert waiting == [None] * (len(parts) - 1)
    assert whole == request
    assert 7 not in assembler


def test_small_prompts_go_at_once() -> None:
    request = GenerateRequest("a", TokenIds.of([1]))
    assert split(1, request) == (Submit(1, request), b"")


def test_parts_take_turns_and_dropped_ones_vanish() -> None:
    queue = PartQueue()
    for rid in (1, 2, 3):
        queue.add(rid, bytes(3 * PART_BYTES))
    order = [queue.pop().rid for _ in range(4)]
    queue.drop(2)
    while queue:
        order.append(queue.pop().rid)
    assert order == [1, 2, 3, 1, 3, 1, 3]


def test_assembler_refuses_what_was_not_announced() -> None:
    assembler = Assembler()
    with pytest.raises(WireError, match="valid: 1 to"):
        assembler.start(Submit(1, GenerateRequest("a", TokenIds()), 1 << 40))
    assembler.start(Submit(1, GenerateRequest("a", TokenIds()), 4))
    assert assembler.add(PromptPart(9, b"x")) is None
    with pytest.raises(WireError, match="more prompt bytes than the 4"):
        assembler.add(PromptPart(1, b"12345"))


def test_malformed_packing() -> None:
    for prompt in (TokenIds(b"12345"), BlockRuns(b"12345678", 1)):
        with pytest.raises(UserError, match=f"prompt of {len(prompt.packed)} bytes; valid: multiples of"):
            check_packing(prompt)
    check_packing(TokenIds(b"1234"))
    check_packing(BlockRuns())


def test_map_knows_whose_request_is_whose() -> None:
    requests = RequestMap()
    request = GenerateRequest("same", TokenIds.of([1]))
    one, two = requests.add(1, 5, request), requests.add(2, 5, request)
    assert request.id == "same"
    assert one.id != two.id
    with pytest.raises(UserError, match="rid 5 is in use"):
        requests.add(1, 5, request)
    outputs = [SequenceOutput(two.id, 1, b"1234", "stop", cached=3), SequenceOutput(one.id, 2, b"12345678")]
    found = requests.outputs([*outputs, SequenceOutput("gone", 1, b"")])
    scored = SequenceOutput(one.id, 1, b"1234", logprobs=TokenLogprobs(b"abcd"))
    assert requests.outputs([scored])[1][0].logprobs == TokenLogprobs(b"abcd")
    assert found == {2: [Output(5, 1, b"1234", "stop", 3)], 1: [Output(5, 2, b"12345678")]}
    assert requests.owner(two.id) is None, "finished"
    assert requests.drop(1) == [one.id]
    assert requests.outputs([SequenceOutput(one.id, 1, b"")]) == {}
    assert requests.remove(1, 5) is None
    assert len(requests) == 0
    assert requests.add(1, 5, request).id not in (one.id, two.id)


def test_frames_number_events_and_reach_everybody() -> None:
    requests, maker = RequestMap(), FrameMaker("w", "g")
    mine = requests.add(1, 0, GenerateRequest("a", TokenIds.of([1])))
    stats = WorkerStats(running=1)
    event = KVEvent("stored", hashes=bytes(16))
    frames = maker.frames(StepReport([SequenceOutput(mine.id, 1, b"")], [event]), stats, [1, 2], requests)
    assert frames[1].batch == frames[2].batch
    assert frames[1].batch is not None
    assert (frames[1].batch.generation, frames[1].batch.seq) == ("g", 1)
    assert [len(frames[c].outputs) for c in (1, 2)] == [1, 0]
    assert maker.frames(StepReport(), stats, [1], requests)[1].batch is None
    assert maker.snapshot([event]) == Snapshot("g", 1, [event])


def test_errors_keep_their_code() -> None:
    assert error_output(1, ContextLengthError("too long")).error_code == "context_length_exceeded"
    assert error_output(1, KeyError("x")).error_code == "internal_error"
    assert "KeyError: 'x'" in error_output(1, KeyError("x")).error
    requests = RequestMap()
    mine = requests.add(1, 0, GenerateRequest("a", TokenIds.of([1])))
    broken = SequenceOutput(mine.id, 0, b"", "error", error="planned twice", error_code="plugin_fault")
    [output] = requests.outputs([broken])[1]
    assert (output.error, output.error_code) == ("planned twice", "plugin_fault")


def test_errors_keep_their_field() -> None:
    assert error_output(1, ContextLengthError("too long", field="max_tokens")).error_field == "max_tokens"
    assert error_output(1, ContextLengthError("too long")).error_field == ""
    assert error_output(1, BienError("broken")).error_field == ""
