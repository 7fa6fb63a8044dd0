"""What the parts of the suite of engines share: what an author gives."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from bien.core.providers import Context
from bien.gateway.remote.engine import Engine
from bien.gateway.testing.engine_rig import EngineRig, opened
from bien.gateway.testing.stand_in import StandIn

LONG = 900  # tokens of an answer that nobody waits for


class EngineTests:
    events = True
    """Whether it follows KV events; else it may claim as cached what was sent there."""

    salts = True
    """Whether it tells the server by a salt whose request it is."""

    salt_field = "cache_salt"
    """Where, in the body of a generation."""

    def build(self, url: str, events: str | None, replay: str | None, ctx: Context) -> Engine:
        """A fresh engine with one worker, the server at `url`; not connected. `events` and `replay`: its
        addresses of KV events, None where the suite has none."""
        raise NotImplementedError(
            "a suite needs `def build(self, url, events, replay, ctx): return <your engine>`"
        )

    def server(self) -> StandIn:
        """A fresh server of the kind that the engine speaks to, not started."""
        return StandIn()

    def slow_server(self) -> StandIn:
        """One that writes longer than anybody waits, and never pauses."""
        server = self.server()
        server.pace = 0.005
        return server

    def opened(self, server: StandIn | None = None) -> AbstractAsyncContextManager[EngineRig]:
        """For tests of your own too."""
        return opened(self.build, server or self.server(), self.events)
