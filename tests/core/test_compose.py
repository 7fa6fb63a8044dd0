"""Composition: parameters decoded strictly, parts made, children given the exact plugin list."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from bien.core.compose import compose, compose_pool
from bien.core.deployment import POOL_KINDS, ModelSpec, PoolSpec, parse_deployment
from bien.core.entry_points import PluginRef
from bien.core.errors import DeploymentError, PluginError
from bien.core.plugins import PluginManager
from bien.core.providers import Context

ACME = """
from typing import Annotated, Literal
import msgspec
from bien.core.api import Context, NoParameters, Provider, hookimpl

class Window(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: int = 8

class Parameters(msgspec.Struct, forbid_unknown_fields=True):
    share: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.5
    counts: tuple[Annotated[int, msgspec.Meta(ge=1)], ...] = ()
    weights: dict[str, float] = {}
    token_budget: int = 2048
    order: Literal["first", "last"] = "first"
    window: Window = Window()

class Made:
    def __init__(self, config, ctx):
        self.config, self.ctx = config, ctx

@hookimpl
def bien_providers():
    kinds = "scheduler parallel quantizer kernels executor speculator kv_store router kv_index".split()
    yield from (Provider(kind, "acme", Made, Parameters) for kind in kinds)
"""

ALL = dict.fromkeys(POOL_KINDS, "acme")
GATEWAY = {"router": "acme", "kv_index": "acme"}


@pytest.fixture
def manager(install) -> PluginManager:
    install("acme-parts", ACME, version="3.1")
    return PluginManager.load("acme-parts")


def deployment(**pool):
    return parse_deployment({"gateway": GATEWAY, "pool": [{**ALL, **pool}]})


def test_every_kind_becomes_a_part(manager):
    composition = compose(deployment(), manager)
    assert set(composition.pools[0].parts) == set(POOL_KINDS)
    assert set(composition.gateway) == {"router", "kv_index"}
    ctx = Context()
    made = composition.pools[0].make("scheduler", ctx)
    assert made.ctx is ctx
    assert made.config.token_budget == 2048


def test_what_a_pool_does_not_select_is_absent(manager):
    pools = [{k: "acme" for k in POOL_KINDS if k not in ("speculator", "kv_store")}]
    pool = compose(parse_deployment({"gateway": GATEWAY, "pool": pools}), manager).pools[0]
    assert pool.make("speculator", Context()) is None
    assert "kv_store" not in pool.parts


def test_pools_may_differ(manager):
    pools = [
        {**ALL, "name": "a", "scheduler": {"use": "acme", "token_budget": 1}},
        {**ALL, "name": "b", "scheduler": {"use": "acme", "token_budget": 2}},
    ]
    composition = compose(parse_deployment({"gateway": GATEWAY, "pool": pools}), manager)
    budgets = [composition.pool(n).parts["scheduler"].config.token_budget for n in ("a", "b")]
    assert budgets == [1, 2]
    with pytest.raises(DeploymentError, match="no pool 'c'; valid: a, b"):
        composition.pool("c")


@pytest.mark.parametrize(
    ("parameters", "path", "says"),
    [
        ({"token_bugdet": 3}, "token_bugdet", "did you mean 'token_budget'?"),
        ({"token_budget": "many"}, "token_budget", "Expected int, got str ('many')"),
        ({"token_budget": 1.5}, "token_budget", "Expected int, got float (1.5)"),
        ({"share": 1e10}, "share", "Expected float <= 1000000000.0, got 10000000000.0"),
        ({"counts": [3, 0]}, "counts[1]", "Expected int >= 1, got 0"),
        ({"weights": {"a": "b"}}, "weights[...]", "Expected float, got str"),
        ({"order": "frist"}, "order", "valid: first, last; did you mean 'first'?"),
        ({"window": {"tokns": 1}}, "window.tokns", "did you mean 'tokens'?"),
        ({"window": {"tokens": None}}, "window.tokens", "Expected int, got null"),
        ({"window": 3}, "window", "Expected object, got int"),
    ],
)
def test_a_wrong_parameter_names_its_full_path(manager, parameters, path, says):
    with pytest.raises(DeploymentError) as caught:
        compose(deployment(scheduler={"use": "acme", **parameters}), manager)
    assert str(caught.value).startswith(f"pool[0].scheduler.{path}: ")
    assert says in str(caught.value)
    assert caught.value.field == f"pool[0].scheduler.{path}"


def test_an_unknown_plugin_names_its_place_and_the_nearest(manager):
    with pytest.raises(PluginError, match=r"^pool\[0\]\.executor\.use: no executor named 'acne'.*'acme'"):
        compose(deployment(executor="acne"), manager)
    with pytest.raises(PluginError, match=r"^gateway\.router\.use: "):
        compose(parse_deployment({"gateway": {"router": "x"}, "pool": [ALL]}), manager)
    with pytest.raises(PluginError, match=r"^plugins\[0\]: no plugin 'watcher' is installed"):
        compose(parse_deployment({"plugins": ["watcher"], "gateway": GATEWAY, "pool": [ALL]}), manager)


def test_duplicates_are_refused(manager, install, source):
    install("acme-again", source("scheduler", "acme"))
    with pytest.raises(PluginError, match=r"acme-again 1\.0.* and by acme-parts 3\.1"):
        compose(deployment(), PluginManager.load("acme-parts,acme-again"))


def test_a_child_is_given_the_exact_list(manager, install, source):
    install("acme-idle", source("scheduler", "idle"))
    composition = compose(deployment(), PluginManager.load("acme-parts,acme-idle"))
    assert composition.refs("main") == (PluginRef("acme-parts", "acme_parts", "acme-parts", "3.1"),)


def test_activated_plugins_reach_the_children(manager, install, source):
    install("acme-idle", source("observer", "idle"))
    chosen = parse_deployment({"plugins": ["acme-idle"], "gateway": GATEWAY, "pool": [ALL]})
    composition = compose(chosen, PluginManager.load("acme-parts,acme-idle"))
    assert [r.distribution for r in composition.refs("main")] == ["acme-parts", "acme-idle"]


CHILD = """
import sys, msgspec
from bien.core.compose import compose_pool
from bien.core.deployment import ModelSpec, PoolSpec
from bien.core.entry_points import PluginRef
from bien.core.providers import Context
Sent = tuple[ModelSpec, PoolSpec, list[PluginRef]]
model, spec, refs = msgspec.json.decode(sys.stdin.buffer.read(), type=Sent)
pool = compose_pool(model, spec, refs)
print(pool.make("scheduler", Context()).config.token_budget, sorted(m for m in sys.modules if "acme" in m))
"""


def test_another_process_rebuilds_the_pool_from_plain_data(manager, install, source, tmp_path):
    install("acme-idle", source("scheduler", "idle"))
    composition = compose(deployment(scheduler={"use": "acme", "token_budget": 7}), manager)
    pool = composition.pools[0]
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=msgspec.json.encode((pool.model, pool.spec, pool.plugins)),
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().strip() == "7 ['acme_parts']"


def test_a_child_with_another_version_refuses(manager):
    pool = compose(deployment(), manager).pools[0]
    old = [msgspec.structs.replace(r, version="3.0") for r in pool.plugins]
    with pytest.raises(PluginError, match=r"3\.1 of acme-parts is installed here, .* 3\.0"):
        compose_pool(pool.model, pool.spec, old)


def test_a_child_lacks_what_it_was_not_told_to_load(manager):
    spec = msgspec.structs.replace(PoolSpec(), name="p")
    with pytest.raises(PluginError, match=r"^pool 'p'\.scheduler\.use: no scheduler named 'fcfs'"):
        compose_pool(ModelSpec(), spec, [])


@pytest.mark.parametrize(
    ("make", "says"),
    [("1 / 0", "ZeroDivisionError: division by zero"), ("None", "its factory returned None")],
)
def test_a_factory_that_fails_names_its_plugin(install, make, says):
    install("acme-broken", ACME.replace("Made, Parameters", f"lambda config, ctx: {make}, Parameters"))
    composition = compose(deployment(), PluginManager.load("acme-broken"))
    with pytest.raises(PluginError, match=f"router 'acme' of plugin .*acme-broken.* cannot be made: {says}"):
        composition.gateway["router"].make(Context())
