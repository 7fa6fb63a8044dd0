"""Where third-party trace data lies, if it is here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def weka_data() -> Path:
    default = Path(__file__).parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("BIEN_SHARED_DATA", default)) / "weka"
    if not folder.is_dir():
        pytest.skip(f"no Weka traces at {folder}; set BIEN_SHARED_DATA")
    return folder
