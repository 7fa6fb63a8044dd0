"""Where what is made once per machine is kept: converted models, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """BIEN_CACHE, else bien/ in the user's cache folder."""
    own = os.environ.get("BIEN_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bien"
