"""What is asked of a server stays within what it has room for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bien.core.errors import UserError
from bien.replay.calibrate.probes import Reach
from bien.replay.calibrate.remote_plan import WINDOW, remote_plan

REACHES = st.builds(
    Reach,
    sessions=st.integers(1, 300),
    context=st.integers(100, 200_000),
    cache=st.integers(100, 1_000_000),
    tokens=st.integers(1, 1_000_000),
)


@given(reach=REACHES, chunk=st.integers(1, 20_000), spare=st.integers(4, 64))
def test_probes_fit(reach: Reach, chunk: int, spare: int) -> None:
    try:
        plan = remote_plan(reach, chunk, spare)
    except UserError as error:
        assert "too small to calibrate" in str(error)
        assert reach.context < 3000 + 32 * reach.sessions or reach.cache < 6000 + 32 * reach.sessions
        return
    assert plan.rounds >= 2 and plan.lone and plan.together
    for lone in plan.lone:
        assert all(lone.prompt + more < min(reach.context, reach.cache) for more in lone.more)
        assert all(more <= chunk for more in lone.more)
    for together in plan.together:
        longest = together.batch.prompt * (1.3 if together.batch.sessions > 1 else 1)
        assert together.batch.sessions <= reach.sessions
        assert longest + together.answer <= reach.context
        assert together.answer > WINDOW + 2 * spare
        # They are one step each, beside the batch.
        assert all(n + together.batch.sessions <= chunk for n in together.newcomers)


def test_the_budget_holds_about() -> None:
    for tokens in (10_000, 40_000, 200_000):
        plan = remote_plan(Reach(16, 4096, 100_000, tokens), 2048, 8)
        cost = plan.rounds * (sum(p.cost for p in plan.lone) + sum(p.cost for p in plan.together))
        assert 0.4 * tokens < cost < 2 * tokens
    assert remote_plan(Reach(16, 4096, 100_000, 1_000_000), 2048, 8).rounds == 4
    assert {t.batch.sessions for t in plan.together} == {1, 2, 4, 8, 16}
