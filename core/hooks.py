"""Hook specifications (pluggy project "bien"). Hooks run at composition only, never in the hot loop."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from bien.core.providers import Provider

PROJECT = "bien"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def bien_providers() -> Iterable[Provider]:  # type: ignore[empty-body]
    """Return the providers of this plugin. Importing the plugin must stay light: import torch inside the
    factory. Installed is not activated: a deployment selects providers by (kind, name)."""
