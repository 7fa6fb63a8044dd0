"""Conformance suite of engines: servers of others as workers. Subclass it in your tests and give `build`:

class TestMine(EngineSuite):
    def build(self, url, events, replay, ctx):
        return RemoteEngine(endpoints(ctx, [url], ...), MyDialect(), ctx)

By itself the upstream is an OpenAI-compatible server (`StandIn`) with vLLM's events over ZeroMQ; `server`
gives another one. Say in `build` that health is looked at each 0.02 s, that a look may take 0.1 s and an
answer be silent for 0.4 s, and that alarms are due after 0.05 s, as far as your engine has such options.
"""

from __future__ import annotations

from bien.gateway.testing.engine_answers import AnswerTests
from bien.gateway.testing.engine_events import EventTests
from bien.gateway.testing.engine_life import LifeTests


class EngineSuite(AnswerTests, LifeTests, EventTests):
    """What every engine must do, whatever it speaks to its servers."""
