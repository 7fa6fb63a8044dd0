"""Entry points of the group "bien": who is installed, by exact name and version, without importing it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata

import msgspec

from bien.core.errors import PluginError, nearest

GROUP = "bien"
BUILT_IN = "bien"  # distribution of the built-in plugins
ENVIRONMENT = "BIEN_PLUGINS"


class PluginRef(msgspec.Struct, frozen=True, order=True):
    """One entry point of one installed distribution, exact enough to load it again in another process."""

    entry_point: str
    module: str
    distribution: str
    version: str

    @property
    def built_in(self) -> bool:
        return normal(self.distribution) == BUILT_IN

    def known_as(self, name: str) -> bool:
        """Whether `name` is this entry point or its distribution."""
        return name == self.entry_point or normal(name) == normal(self.distribution)

    def __str__(self) -> str:
        return f"{self.entry_point!r} of {self.distribution} {self.version}"

    @property
    def where(self) -> str:
        return f"{self.distribution} {self.version} (entry point {self.entry_point!r}, module {self.module})"


Found = tuple[PluginRef, metadata.EntryPoint]


def scan(points: Iterable[metadata.EntryPoint], only: set[str] | None) -> tuple[list[Found], list[PluginRef]]:
    """What to load, in name order, and what `only` leaves out (None: nothing).

    PluginError when two distributions define one entry-point name: pluggy would drop the second.
    """
    chosen: dict[str, Found] = {}
    left_out: list[PluginRef] = []
    for point in sorted(points, key=lambda p: (p.name, p.value)):
        ref = _ref(point)
        if only is not None and not ref.built_in and not any(map(ref.known_as, only)):
            left_out.append(ref)
            continue
        other = chosen.get(ref.entry_point)
        if other is not None and other[0] != ref:
            raise PluginError(
                f"entry point {ref.entry_point!r} (group {GROUP!r}) is defined twice: by "
                f"{other[0].where} and by {ref.where}. {way_out([other[0], ref])}"
            )
        chosen[ref.entry_point] = (ref, point)
    return list(chosen.values()), left_out


def locate(ref: PluginRef) -> metadata.EntryPoint:
    """The installed entry point that `ref` names. PluginError when anything about it differs."""
    try:
        dist = metadata.distribution(ref.distribution)
    except metadata.PackageNotFoundError:
        raise PluginError(f"plugin {ref}: distribution {ref.distribution} is not installed here") from None
    if dist.version != ref.version:
        raise PluginError(
            f"plugin {ref}: version {dist.version} of {ref.distribution} is installed here, but the "
            f"deployment was composed with {ref.version}"
        )
    points = {p.name: p for p in dist.entry_points if p.group == GROUP}
    if ref.entry_point not in points:
        raise PluginError(f"plugin {ref} has no such entry point here; {nearest(ref.entry_point, points)}")
    if points[ref.entry_point].value != ref.module:
        raise PluginError(f"plugin {ref} is {points[ref.entry_point].value} here, not {ref.module}")
    return points[ref.entry_point]


def way_out(refs: list[PluginRef]) -> str:
    """What a user does about two plugins that exclude each other."""
    third = [r for r in refs if not r.built_in] or refs
    return (
        f"Uninstall one (pip uninstall {third[-1].distribution}), or leave it out: set {ENVIRONMENT} to a "
        f'comma-separated list of the third-party plugins to load ("" = built-in ones only)'
    )


def normal(name: str) -> str:
    """A distribution's name as packaging tools compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _ref(point: metadata.EntryPoint) -> PluginRef:
    dist = point.dist
    name, version = (dist.name, dist.version) if dist else ("(unknown)", "(unknown)")
    return PluginRef(point.name, point.value, name, version)
