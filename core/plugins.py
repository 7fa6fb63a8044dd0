"""The plugin manager: loads entry points once and answers "who provides (kind, name)".

Pluggy runs the hooks; loading is done here, because pluggy drops a second entry point of one name
without a word and stops at the first import that fails. A plugin that cannot be used is set aside with
its problem, which is fatal only for who selects it. Installed is not activated.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import msgspec
import pluggy

from bien.core import hooks
from bien.core.entry_points import ENVIRONMENT, GROUP, PluginRef, locate, scan, way_out
from bien.core.errors import PluginError, nearest
from bien.core.providers import API, KINDS, Provider


class Problem(msgspec.Struct, frozen=True):
    """Why a plugin, or one of its providers, was set aside."""

    ref: PluginRef
    text: str
    kind: str = ""  # of a single provider, when known
    name: str = ""


@dataclass(frozen=True, slots=True)
class Installed:
    """A provider and the plugin that it came from."""

    provider: Provider
    ref: PluginRef


def _new_hooks() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    return manager


@dataclass(slots=True)
class PluginManager:
    """What is installed, after one load. Build it with `load` (parent) or `load_refs` (child)."""

    installed: list[Installed] = field(default_factory=list)
    loaded: list[PluginRef] = field(default_factory=list)  # plugins whose hooks ran
    left_out: list[PluginRef] = field(default_factory=list)  # not in BIEN_PLUGINS
    problems: list[Problem] = field(default_factory=list)
    _hooks: pluggy.PluginManager = field(default_factory=_new_hooks)

    @classmethod
    def load(
        cls, only: str | None = None, entry_points: Iterable[metadata.EntryPoint] | None = None
    ) -> PluginManager:
        """Load the built-in plugins and the third-party ones that `only` allows.

        `only` is a value of BIEN_PLUGINS (None: read the environment). Unset: all that is installed;
        "": built-ins only; else a comma-separated list of entry points or distributions. PluginError for
        a name in it that is not installed or that fails to load, and for two entry points of one name.
        """
        manager = cls()
        value = os.environ.get(ENVIRONMENT) if only is None else only
        names = None if value is None else {n.strip() for n in value.split(",") if n.strip()}
        points = metadata.entry_points(group=GROUP) if entry_points is None else entry_points
        found, manager.left_out = scan(points, names)
        for ref, point in found:
            manager._admit(ref, point)
        for name in sorted(names or ()):
            try:
                manager.plugin(name)
            except PluginError as error:
                raise PluginError(f"{ENVIRONMENT} names {name!r}: {error}") from None
        return manager

    @classmethod
    def load_refs(cls, refs: Iterable[PluginRef]) -> PluginManager:
        """Load exactly these plugins, as the process that composed the deployment did.

        PluginError when one is not installed here, has another version or module, or fails to load.
        """
        manager = cls()
        for ref in refs:
            manager._admit(ref, locate(ref))
        return manager

    def find(self, kind: str, name: str) -> Installed:
        """The one provider of (kind, name). PluginError when there is none, or more than one."""
        found = [i for i in self.installed if (i.provider.kind, i.provider.name) == (kind, name)]
        if len(found) == 1:
            return found[0]
        if found:
            raise PluginError(_duplicate(kind, name, [i.ref for i in found]))
        for problem in self.problems:
            if (problem.kind, problem.name) == (kind, name):
                raise PluginError(problem.text)
        text = f"no {kind} named {name!r} is installed; {nearest(name, self.names(kind))}"
        set_aside = [p.text for p in self.problems if not p.kind]
        if set_aside:
            text += ". It may be in a plugin that could not be used: " + "; ".join(set_aside)
        if self.left_out:
            text += f". {ENVIRONMENT} leaves out: {', '.join(map(str, self.left_out))}"
        raise PluginError(text)

    def names(self, kind: str) -> list[str]:
        """Names of the installed providers of a kind."""
        return sorted({i.provider.name for i in self.installed if i.provider.kind == kind})

    def plugin(self, name: str) -> PluginRef:
        """The usable plugin with this entry-point name, or from this distribution. PluginError if none."""
        for problem in self.problems:
            if problem.ref.known_as(name):
                raise PluginError(problem.text)
        for ref in self.loaded:
            if ref.known_as(name):
                return ref
        known = {n for r in self.loaded for n in (r.entry_point, r.distribution)}
        raise PluginError(f"no plugin {name!r} is installed; {nearest(name, known)}")

    def duplicates(self) -> list[str]:
        """One sentence for each (kind, name) that is provided more than once."""
        by_name: dict[tuple[str, str], list[PluginRef]] = {}
        for i in self.installed:
            by_name.setdefault((i.provider.kind, i.provider.name), []).append(i.ref)
        return [_duplicate(*key, refs) for key, refs in sorted(by_name.items()) if len(refs) > 1]

    def check(self) -> None:
        """PluginError unless every (kind, name) has one provider."""
        for text in self.duplicates():
            raise PluginError(text)

    def _admit(self, ref: PluginRef, point: metadata.EntryPoint) -> None:
        """Import one plugin, register it, run its hook; what goes wrong becomes a problem of it."""
        try:
            plugin = point.load()
        except (Exception, SystemExit) as error:
            return self._set_aside(ref, f"failed to import: {type(error).__name__}: {error}")
        try:
            self._hooks.register(plugin, name=ref.entry_point)
            self._hooks.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            if self._hooks.is_registered(plugin):
                self._hooks.unregister(plugin)
            text = str(error).splitlines()[-1].strip()
            return self._set_aside(ref, f"{text}; {nearest(_misspelt(plugin), _hook_names())}")
        impls = [i for i in self._hooks.hook.bien_providers.get_hookimpls() if i.plugin is plugin]
        if not impls:
            return self._set_aside(ref, f"marks no function with @hookimpl; {nearest('', _hook_names())}")
        try:
            offered: Any = impls[0].function()
            providers = list(offered)
        except (Exception, SystemExit) as error:
            return self._set_aside(ref, f"failed in bien_providers(): {type(error).__name__}: {error}")
        self.loaded.append(ref)
        for provider in providers:
            fault = _fault(provider)
            if fault is None:
                self.installed.append(Installed(provider, ref))
            else:
                self._set_aside(ref, fault, getattr(provider, "kind", ""), getattr(provider, "name", ""))

    def _set_aside(self, ref: PluginRef, text: str, kind: object = "", name: object = "") -> None:
        self.problems.append(Problem(ref, f"plugin {ref} {text}", str(kind), str(name)))


def _fault(provider: Any) -> str | None:
    if not isinstance(provider, Provider):
        return f"yields {provider!r} from bien_providers(), which is not a Provider"
    label = f"offers {provider.kind} {provider.name!r}"
    if provider.api != API:
        return f"{label} for plugin API {provider.api}, but this is bien with plugin API {API}"
    if provider.kind not in KINDS:
        return f"{label} of an unknown kind; {nearest(str(provider.kind), KINDS)}"
    if not isinstance(provider.name, str) or not provider.name:
        return f"{label}, whose name is not a non-empty string"
    if not callable(provider.factory):
        return f"{label}, whose factory is not callable: {provider.factory!r}"
    config = provider.config_type
    if not (isinstance(config, type) and issubclass(config, msgspec.Struct)):
        return f"{label}, whose config_type is not a msgspec.Struct: {config!r}"
    if not config.__struct_config__.forbid_unknown_fields:
        return f"{label}, whose config_type {config.__name__} lacks forbid_unknown_fields=True"
    return None


def _hook_names() -> list[str]:
    return [n for n, item in vars(hooks).items() if hasattr(item, f"{hooks.PROJECT}_spec")]


def _misspelt(plugin: object) -> str:
    marked = [n for n in dir(plugin) if hasattr(getattr(plugin, n, None), f"{hooks.PROJECT}_impl")]
    return next((n for n in marked if n not in _hook_names()), "")


def _duplicate(kind: str, name: str, refs: list[PluginRef]) -> str:
    return f"{kind} {name!r} is provided twice: by {' and by '.join(r.where for r in refs)}. {way_out(refs)}"
