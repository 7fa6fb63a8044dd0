"""What the engine plugins are told, and what they refuse."""

from __future__ import annotations

import sys

import pytest

from bien.core.deployment import parse_deployment
from bien.core.errors import DeploymentError, ResourceError, UserError
from bien.core.plugins import PluginManager
from bien.core.providers import Context
from bien.core.strict import decode
from bien.gateway.remote.dialect import Readings
from bien.gateway.remote.load import parse_metrics
from bien.plugins.engines.sglang import SglangDialect

URL = "http://127.0.0.1:8000"


def make(name, **parameters):
    provider = PluginManager.load(only="").find("engine", name).provider
    config = decode({"urls": [URL], **parameters}, provider.config_type, "engine")
    return provider.factory(config, Context(pool="main", block_tokens=16))


@pytest.mark.parametrize("name", ["openai", "vllm", "sglang"])
async def test_workers_are_named_after_the_pool(name):
    engine = make(name, urls=[URL, "https://other/v1/"])
    assert engine.ids == ["main-0", "main-1"]
    assert [e.url for e in engine._endpoints.values()] == [URL, "https://other"]
    assert engine.alarms == {}
    await engine.close()


def test_one_address_may_be_written_as_such():
    engine = make("vllm", events="tcp://127.0.0.1:5557", replay="tcp://127.0.0.1:5558", dp_ranks=2)
    assert [e.replay for e in engine._endpoints.values()] == ["tcp://127.0.0.1:5558", "tcp://127.0.0.1:5559"]


@pytest.mark.parametrize(
    ("name", "parameters", "text"),
    [
        ("openai", {"urls": []}, "urls is empty"),
        ("openai", {"urls": ["127.0.0.1:8000"]}, "valid: http://HOST:PORT"),
        ("openai", {"api_key": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE"),
        ("openai", {"events": "tcp://h:1"}, "unknown key 'events'"),
        ("vllm", {"events": ["tcp://h:1", "tcp://h:2"]}, "2 addresses for 1 urls"),
        ("vllm", {"replay": "tcp://h:1"}, "replay is given and events is not"),
        ("vllm", {"events": "h:1"}, "valid: tcp://HOST:PORT"),
        ("vllm", {"groups": ["full", "window"]}, "'full' or 'window:TOKENS'"),
        ("sglang", {"grace_seconds": 0}, "grace_seconds"),
    ],
)
def test_what_makes_no_sense_is_refused(name, parameters, text):
    with pytest.raises(UserError, match=text.replace("(", r"\(")):
        make(name, **parameters)


def test_pyzmq_is_needed_for_events_only(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    make("vllm")
    with pytest.raises(ResourceError, match=r"bien\[remote\]"):
        make("vllm", events="tcp://127.0.0.1:5557")


def test_sglangs_figures():
    page = 'sglang:num_running_reqs{tp_rank="0"} 3.0\nsglang:num_queue_reqs 2.0\nsglang:token_usage 0.5\n'
    found = SglangDialect().readings(*parse_metrics(page + "sglang:max_total_num_tokens 4096.0\n# x\nbad\n"))
    assert found == Readings(3, 2, 0.5, 4096, 1)


def test_a_pool_of_an_engine_stands_among_the_others():
    engine = {"use": "vllm", "urls": [URL]}
    found = parse_deployment({"pool": [{"name": "theirs", "engine": engine}, {"name": "ours", "count": 2}]})
    assert [pool.name for pool in found.pool] == ["ours"]
    [remote] = found.remote
    assert (remote.name, remote.engine.use, remote.engine.parameters) == ("theirs", "vllm", {"urls": [URL]})
    assert parse_deployment({"pool": [{"engine": engine}]}).pool == ()


@pytest.mark.parametrize(
    ("raw", "field", "text"),
    [
        ({"pool": [{"engine": "vllm", "count": 2}]}, "pool[0].count", "valid: name, engine"),
        ({"pool": [{"engine": "vllm", "cuont": 2}]}, "pool[0].cuont", "unknown key"),
        ({"pool": [{"engine": {}}]}, "pool[0].engine.use", "missing"),
        ({"pool": [{"engine": "vllm"}, {"name": "main"}]}, "pool", "that no other pool has"),
        ({"remote": []}, "remote", r"write \[\[pool\]\] with an engine"),
        ({"pool": []}, "pool", "needs at least one"),
    ],
)
def test_errors_of_such_pools_name_the_place(raw, field, text):
    with pytest.raises(DeploymentError, match=text) as caught:
        parse_deployment(raw)
    assert caught.value.field == field
