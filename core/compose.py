"""Composition: a deployment and what is installed become parts that are ready to be made.

The parent composes once. A child process is sent its `ModelSpec`, `PoolSpec` and `plugins` (plain data),
loads exactly those plugins at those versions, and has the same parts for its pool (`compose_pool`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from bien.core.deployment import (
    GATEWAY_KINDS,
    POOL_KINDS,
    REMOTE_KINDS,
    Deployment,
    GatewaySpec,
    ModelSpec,
    PoolSpec,
    RemoteSpec,
    Selection,
)
from bien.core.entry_points import PluginRef
from bien.core.errors import BienError, DeploymentError, PluginError, nearest
from bien.core.plugins import PluginManager
from bien.core.providers import Context, Provider
from bien.core.speculation.forced import check_forced
from bien.core.strict import decode


@dataclass(frozen=True, slots=True)
class Part:
    """One selected provider with its decoded parameters."""

    provider: Provider
    config: msgspec.Struct
    ref: PluginRef

    def make(self, ctx: Context) -> Any:
        """The object of the kind's protocol. The caller closes it.

        PluginError naming the plugin when its factory fails; memory that is lacking stays MemoryError.
        """
        what = f"{self.provider.kind} {self.provider.name!r} of plugin {self.ref}"
        try:
            made = self.provider.factory(self.config, ctx)
        except (BienError, MemoryError):
            raise
        except Exception as error:
            raise PluginError(f"{what} cannot be made: {type(error).__name__}: {error}") from error
        if made is None:
            raise PluginError(f"{what} cannot be made: its factory returned None")
        return made


@dataclass(frozen=True, slots=True)
class PoolComposition:
    """What one worker of a pool is made of. `parts` has a key per kind; `speculator` and `kv_store` are
    absent when the pool selects none."""

    model: ModelSpec
    spec: PoolSpec
    parts: dict[str, Part]
    plugins: tuple[PluginRef, ...]  # to load in a child: those of the parts, then the activated ones

    def make(self, kind: str, ctx: Context) -> Any:
        """The pool's object of this kind, or None where the pool selects none."""
        part = self.parts.get(kind)
        return None if part is None else part.make(ctx)


@dataclass(frozen=True, slots=True)
class Composition:
    """A deployment whose every plugin is found and whose every parameter is decoded."""

    deployment: Deployment
    pools: tuple[PoolComposition, ...]
    gateway: dict[str, Part]  # "router", "kv_index", and "parser" where one is selected
    remote: tuple[tuple[str, Part], ...] = ()  # pools of others' workers: name, and the engine

    @property
    def model(self) -> ModelSpec:
        return self.deployment.model

    @property
    def spec(self) -> GatewaySpec:
        """The gateway's."""
        return self.deployment.gateway

    def pool(self, name: str) -> PoolComposition:
        """DeploymentError when there is no pool of this name."""
        for pool in self.pools:
            if pool.spec.name == name:
                return pool
        raise DeploymentError(f"no pool {name!r}; {nearest(name, [p.spec.name for p in self.pools])}")

    def refs(self, pool: str) -> tuple[PluginRef, ...]:
        """The exact plugins that a worker of `pool` loads."""
        return self.pool(pool).plugins


def compose(deployment: Deployment, manager: PluginManager) -> Composition:
    """Find each selected provider and decode its parameters.

    DeploymentError names the full path (`pool[0].scheduler.token_bugdet`) and the nearest valid name;
    PluginError names plugins that are missing, duplicated or unusable.
    """
    manager.check()
    activated = [_activate(manager, i, name) for i, name in enumerate(deployment.plugins)]
    pools = tuple(
        _compose_pool(deployment.model, pool, manager, f"pool[{i}]", activated)
        for i, pool in enumerate(deployment.pool)
    )
    gateway = _select_all(deployment.gateway, GATEWAY_KINDS, manager, "gateway")
    remote = tuple(
        (spec.name, _select_all(spec, REMOTE_KINDS, manager, f"pool {spec.name!r}")["engine"])
        for spec in deployment.remote
    )
    return Composition(deployment, pools, gateway, remote)


def compose_pool(model: ModelSpec, spec: PoolSpec, plugins: Iterable[PluginRef]) -> PoolComposition:
    """In a child process: load exactly `plugins` and rebuild the pool that the parent composed.

    PluginError when a plugin is missing here or has another version.
    """
    refs = tuple(plugins)
    return _compose_pool(model, spec, PluginManager.load_refs(refs), f"pool {spec.name!r}", refs)


def _compose_pool(
    model: ModelSpec, pool: PoolSpec, manager: PluginManager, path: str, extra: Iterable[PluginRef]
) -> PoolComposition:
    parts = _select_all(pool, POOL_KINDS, manager, path)
    drafter = None if pool.speculator is None else pool.speculator.use
    # None where a checkpoint says it: that is read when the pool is built.
    drafts = getattr(parts["speculator"].config, "max_drafts", None) if drafter else None
    check_forced(pool.speculation, drafter, drafts, path)
    refs = dict.fromkeys([*(part.ref for part in parts.values()), *extra])
    return PoolComposition(model, pool, parts, tuple(refs))


def _select_all(
    spec: PoolSpec | GatewaySpec | RemoteSpec, kinds: tuple[str, ...], manager: PluginManager, path: str
) -> dict[str, Part]:
    chosen = {kind: getattr(spec, kind) for kind in kinds}
    return {kind: select(kind, s, manager, f"{path}.{kind}") for kind, s in chosen.items() if s is not None}


def select(kind: str, selection: Selection, manager: PluginManager, path: str) -> Part:
    """One provider with its parameters; `path` is where errors say that it is selected."""
    try:
        found = manager.find(kind, selection.use)
    except PluginError as error:
        raise PluginError(f"{path}.use: {error}", field=f"{path}.use") from None
    config = decode(selection.parameters, found.provider.config_type, path)
    return Part(found.provider, config, found.ref)


def _activate(manager: PluginManager, index: int, name: str) -> PluginRef:
    try:
        return manager.plugin(name)
    except PluginError as error:
        raise PluginError(f"plugins[{index}]: {error}", field=f"plugins[{index}]") from None
