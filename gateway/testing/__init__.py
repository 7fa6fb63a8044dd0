"""For authors of routers, indexes, engines and parsers: conformance suites, a worker without an engine."""

from __future__ import annotations

from bien.gateway.testing.engine import EngineSuite
from bien.gateway.testing.fake_worker import FakeWorker, fake_info
from bien.gateway.testing.index import IndexSuite
from bien.gateway.testing.parser import ParserSuite
from bien.gateway.testing.router import RouterSuite

__all__ = ["EngineSuite", "FakeWorker", "IndexSuite", "ParserSuite", "RouterSuite", "fake_info"]
