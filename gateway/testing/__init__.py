"""For authors of routers, indexes and engines: conformance suites, and a worker that needs no engine."""

from __future__ import annotations

from bien.gateway.testing.engine import EngineSuite
from bien.gateway.testing.fake_worker import FakeWorker, fake_info
from bien.gateway.testing.index import IndexSuite
from bien.gateway.testing.router import RouterSuite

__all__ = ["EngineSuite", "FakeWorker", "IndexSuite", "RouterSuite", "fake_info"]
