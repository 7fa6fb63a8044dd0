"""The small JSON files of a model folder's text side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bien.core.errors import ModelError


def read_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; {} without the file. ModelError if it is damaged."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds a {type(found).__name__}; a JSON object is needed")
    return found


def token_text(value: Any) -> str | None:
    """A token as tokenizer_config.json has it: a string, or an object with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
