"""Hatch build hook: an editable install gets the rooms as `build/dev/bien/<room>` links.

Wheels map the rooms to `bien/<room>` by hatchling's `sources` table; an editable install cannot (a path
file may only drop a prefix), so it puts `build/dev` on the path, where the links spell the namespace.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOMS = ("core", "plugins", "gateway", "traces", "replay")


class DevLinks(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            return
        namespace = Path(self.root, "build", "dev", "bien")
        namespace.mkdir(parents=True, exist_ok=True)
        for room in ROOMS:
            link = namespace / room
            if not link.exists():
                link.unlink(missing_ok=True)  # a dangling link
                link.symlink_to(Path("..", "..", "..", room), target_is_directory=True)
