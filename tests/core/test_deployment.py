"""Deployment files: what they mean, and where and how a wrong one is said to be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from bien.core.deployment import Deployment, Selection, load_deployment, parse_deployment
from bien.core.errors import DeploymentError

FULL = """
plugins = ["acme-observer"]

[model]
name = "smollm2-135m"
block_tokens = 32

[gateway]
port = 0
router = { use = "kv-aware", temperature = 0.5 }

[[pool]]
name = "prompts"
role = "both"
count = 2
scheduler = "fcfs"

[[pool]]
name = "tokens"

[pool.scheduler]
use = "fcfs"
token_budget = 512
"""


def wrong(raw: dict) -> DeploymentError:
    with pytest.raises(DeploymentError) as caught:
        parse_deployment(raw)
    return caught.value


def test_an_empty_file_is_the_default_deployment(tmp_path: Path):
    (tmp_path / "empty.toml").write_text("")
    assert load_deployment(tmp_path / "empty.toml") == Deployment()


def test_a_selection_keeps_its_parameters(tmp_path: Path):
    (tmp_path / "full.toml").write_text(FULL)
    deployment = load_deployment(tmp_path / "full.toml")
    assert deployment.gateway.router == Selection("kv-aware", {"temperature": 0.5})
    assert deployment.pool[0].scheduler == Selection("fcfs")
    assert deployment.pool[1].scheduler == Selection("fcfs", {"token_budget": 512})
    assert deployment.model.block_tokens == 32
    assert [(p.name, p.role, p.count) for p in deployment.pool] == [
        ("prompts", "both", 2),
        ("tokens", "both", 1),
    ]
    assert deployment.plugins == ("acme-observer",)


def test_kv_is_given_in_tokens_or_in_bytes():
    pool = parse_deployment({"pool": [{}, {"name": "b", "kv_memory": "1.5 GiB"}]}).pool
    assert [(p.kv_tokens, p.kv_memory) for p in pool] == [(32768, None), (None, 3 << 29)]
    host = parse_deployment({"host": {"memory": "12GB", "cores": 2}}).host
    assert (host.memory, host.cores, host.oversubscribe) == (12 * 10**9, 2, False)


def test_built_in_names_come_from_the_search_path(tmp_path: Path):
    (tmp_path / "small.toml").write_text("[model]\nblock_tokens = 64\n")
    assert load_deployment("small", [tmp_path]).model.block_tokens == 64
    with pytest.raises(DeploymentError, match="no built-in deployment 'smal'.*did you mean 'small'"):
        load_deployment("smal", [tmp_path])
    with pytest.raises(DeploymentError, match="no deployment file 'gone.toml'"):
        load_deployment("gone.toml", [tmp_path])


def test_damage_names_the_file_and_the_place(tmp_path: Path):
    path = tmp_path / "bad.toml"
    path.write_text("[model\n")
    with pytest.raises(DeploymentError, match=r"bad\.toml: cannot be read as TOML: .*line 1"):
        load_deployment(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DeploymentError, match=r"bad\.toml: cannot be read"):
        load_deployment(path)
    path.write_text("[[pool]]\ncuont = 2\n")
    with pytest.raises(DeploymentError, match=r"bad\.toml: pool\[0\]\.cuont: .*'count'") as caught:
        load_deployment(path)
    assert caught.value.field == "pool[0].cuont"


@pytest.mark.parametrize(
    ("raw", "path", "says"),
    [
        ({"gatway": {}}, "gatway", "did you mean 'gateway'?"),
        ({"model": {"blok_tokens": 16}}, "model.blok_tokens", "did you mean 'block_tokens'?"),
        ({"pool": [{}, {"cuont": 1}]}, "pool[1].cuont", "did you mean 'count'?"),
        (
            {"pool": [{"speculation": {"lenght": "budget"}}]},
            "pool[0].speculation.lenght",
            "did you mean 'length'?",
        ),
        (
            {"pool": [{"speculation": {"length": "best"}}]},
            "pool[0].speculation.length",
            "did you mean 'budget'?",
        ),
        (
            {"pool": [{"speculation": {"min_chance": 2}}]},
            "pool[0].speculation.min_chance",
            "got 2",
        ),
        ({"pool": [{"count": "two"}]}, "pool[0].count", "Expected int, got str"),
        ({"pool": [{"count": True}]}, "pool[0].count", "Expected int, got bool (True)"),
        ({"pool": [{"role": "prefil"}]}, "pool[0].role", "valid: both, decode, prefill"),
        ({"pool": {"count": 1}}, "pool", "write [[pool]]"),
        ({"pool": []}, "pool", "at least one [[pool]]"),
        ({"pool": [3]}, "pool[0]", "Expected object, got int"),
        ({"pool": [{"count": 0}]}, "pool[0].count", "0 is too small; the least is 1"),
        ({"pool": [{"count": 1025}]}, "pool[0].count", "1025 workers are too many; valid: 1 to 1024, in all"),
        ({"pool": [{"count": 1024}, {"name": "b"}]}, "pool", "1025 workers are too many; valid: 1 to 1024"),
        ({"pool": [{"threads": 0}]}, "pool[0].threads", "the least is 1"),
        ({"pool": [{"devices": -1}]}, "pool[0].devices", "the least is 1"),
        ({"pool": [{"slots": 0}]}, "pool[0].slots", "the least is 1"),
        ({"pool": [{"snapshots": -1}]}, "pool[0].snapshots", "the least is 0"),
        ({"pool": [{"snapshot_tokens": -1}]}, "pool[0].snapshot_tokens", "the least is 0"),
        ({"pool": [{"snapshot_tokens": 9}]}, "pool[0].snapshot_tokens", "valid: 0 or at least 16"),
        ({"pool": [{"kv_tokens": 8}]}, "pool[0].kv_tokens", "the least is 16 (one block"),
        ({"pool": [{"kv_memory": "2G"}]}, "pool[0].kv_memory", "'2G' is no size; valid: a number and a unit"),
        ({"pool": [{"kv_memory": 0}]}, "pool[0].kv_memory", "the least is 1"),
        (
            {"pool": [{"kv_memory": "1MiB", "kv_tokens": 64}]},
            "pool[0].kv_memory",
            "kv_tokens = 64 and kv_memory = 1,048,576 bytes are both given; valid: one of them",
        ),
        ({"host": {"memory": "12 gigabytes"}}, "host.memory", "'12 gigabytes' is no size"),
        ({"host": {"memory": True}}, "host.memory", "True is no size"),
        ({"host": {"memory": 0}}, "host.memory", "the least is 1"),
        ({"host": {"cores": 0}}, "host.cores", "the least is 1"),
        ({"host": {"core": 2}}, "host.core", "did you mean 'cores'?"),
        ({"pool": [{"name": ""}]}, "pool[0].name", "empty"),
        ({"pool": [{}, {}]}, "pool[1].name", "names must differ"),
        (
            {"pool": [{"role": "prefil"}]},
            "pool[0].role",
            "'prefil' is not a choice; valid: both, decode",
        ),
        ({"pool": [{"role": 3}]}, "pool[0].role", "3 is not a choice; valid: both, decode, prefill"),
        ({"pool": [{"role": ["both"]}]}, "pool[0].role", "['both'] is not a choice; valid: both, decode"),
        ({"pool": [{"role": "decode"}]}, "pool[0].role", "'decode' is not there yet"),
        ({"pool": [{"role": "decode"}, {"role": "prefill"}]}, "pool[0].role", "valid: both"),
        ({"pool": [{}, {"name": "b", "role": "prefill"}]}, "pool[1].role", "'prefill' is not there yet"),
        ({"model": {"name": ""}}, "model.name", "empty"),
        ({"model": {"block_tokens": 24}}, "model.block_tokens", "24 is not a power of two"),
        ({"model": {"block_tokens": 0}}, "model.block_tokens", "not a power of two"),
        ({"model": {"dtype": "float23"}}, "model.dtype", "did you mean 'float32'?"),
        ({"model": {"max_context": 0}}, "model.max_context", "the least is 1"),
        ({"gateway": {"port": 70000}}, "gateway.port", "0 (any free one) to 65535"),
        ({"gateway": {"max_inflight": 0}}, "gateway.max_inflight", "the least is 1"),
        ({"model": {"max_context": 1 << 63}}, "model.max_context", "is too large; the most is 1099511627776"),
        ({"pool": [{"kv_tokens": (1 << 40) + 1}]}, "pool[0].kv_tokens", "is too large; the most is"),
        ({"gateway": {"silence_seconds": -1}}, "gateway.silence_seconds", "-1 is no time; valid: 0 seconds"),
        ({"gateway": {"silence_seconds": float("nan")}}, "gateway.silence_seconds", "valid: 0 seconds"),
        ({"gateway": {"volatile_lines": ["a", "("]}}, "gateway.volatile_lines[1]", "no regular expression"),
        ({"gateway": {"drain_seconds": -0.5}}, "gateway.drain_seconds", "-0.5 is no time; valid: 0 seconds"),
        ({"gateway": {"drain_seconds": float("nan")}}, "gateway.drain_seconds", "valid: 0 seconds or more"),
        ({"gateway": {"drain_seconds": float("inf")}}, "gateway.drain_seconds", "valid: 0 seconds or more"),
        ({"gateway": {"router": 3}}, "gateway.router", "the name of a plugin"),
        ({"gateway": {"router": {"name": "x"}}}, "gateway.router.use", 'write `use = "name"`'),
        ({"gateway": {"router": {"use": 3}}}, "gateway.router.use", "got 3"),
        ({"plugins": [1]}, "plugins[0]", "Expected str, got int"),
    ],
)
def test_an_error_names_path_and_choices(raw: dict, path: str, says: str):
    error = wrong(raw)
    assert str(error).startswith(f"{path}: ")
    assert error.field == path
    assert says in str(error)
    assert "\n" not in str(error)
