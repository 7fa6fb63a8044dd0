"""A plan is the same behind the wire."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bien.core.executors.link import pack
from bien.core.executors.plan_wire import Entry, StepMessage, Verdict, decode, encode
from bien.core.executors.rank_messages import Down
from bien.core.plan import ExecutorPlan, NewSequence, StateCopy, TableUpdate, i32
from bien.core.request import BlockRuns, SamplingParams, TokenIds

SMALL = st.integers(0, 2**31 - 1)


def ints(size: int | None = None) -> st.SearchStrategy[Any]:
    shape: Any = st.integers(0, 5) if size is None else size
    return arrays.arrays(np.int32, shape, elements=st.integers(-(2**31), 2**31 - 1))


PROMPTS = st.one_of(
    st.lists(st.integers(0, 2**32 - 1), max_size=8).map(TokenIds.of),
    st.lists(st.tuples(SMALL, st.integers(1, 9)), max_size=4).map(BlockRuns.of),
)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=SMALL,
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(0, 2**64 - 1),
    stop_token_ids=st.lists(SMALL, max_size=3).map(tuple),
    logit_bias=st.lists(st.tuples(SMALL, st.floats(-100, 100)), max_size=3).map(tuple),
    logprobs=st.integers(-1, 20),
    prompt_logprobs=st.integers(-1, 20),
)
NEW = st.builds(
    NewSequence,
    slot=SMALL,
    tokens=PROMPTS,
    prompt_tokens=SMALL,
    sampling=SAMPLING,
    seed=st.integers(0, 2**64 - 1),
    forced=st.none() | PROMPTS,
    max_drafts=SMALL,
    ends=st.lists(SMALL, max_size=3).map(tuple),
)
COPIES = st.lists(st.builds(StateCopy, SMALL, SMALL, SMALL, SMALL, SMALL), max_size=3)


@st.composite
def plans(draw: st.DrawFn) -> ExecutorPlan:
    rows = draw(st.integers(0, 4))
    return ExecutorPlan(
        draw(st.integers(0, 2**40)),
        *(draw(ints(rows)) for _ in range(5)),
        new=draw(st.lists(NEW, max_size=2)),
        released=draw(ints()),
        tables=[
            TableUpdate(*(draw(ints(n)) for _ in range(3)))
            for n in draw(st.lists(st.integers(0, 4), max_size=3))
        ],
        restores=draw(COPIES),
        snapshots=draw(COPIES),
        draft_tokens=draw(ints()),
        device_drafts=draw(st.booleans()),
        hosted=draw(ints()),
        parents=draw(ints()),
    )


def flat(value: Any) -> Any:
    """For comparison: arrays with dtype and shape, dataclasses by field."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, list):
        return [flat(v) for v in value]
    if type(value).__name__ in ("ExecutorPlan", "NewSequence", "TableUpdate", "StateCopy", "Verdict"):
        return {f.name: flat(getattr(value, f.name)) for f in fields(value)}
    return value


@given(plan=plans(), verdict=st.none() | st.builds(Verdict, ints(), ints()))
def test_round_trip(plan: ExecutorPlan, verdict: Verdict | None) -> None:
    message = msgspec.msgpack.decode(pack(encode(plan, verdict))[8:], type=Down)
    assert isinstance(message, StepMessage)
    there, said = decode(message)
    assert flat(there) == flat(plan)
    assert flat(said) == flat(verdict)


def test_every_field_of_a_new_sequence_travels() -> None:
    assert list(Entry.__struct_fields__) == [f.name for f in fields(NewSequence)]


def test_a_decode_step_is_small() -> None:
    rows = 64
    column = np.arange(rows, dtype=np.int32)
    plan = ExecutorPlan(10**6, column, column, column, i32([0] * rows), column)
    assert len(pack(encode(plan, Verdict(column, column)))) < rows * 7 * 4 + 100
