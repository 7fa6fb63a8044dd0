"""From a model's name or folder to its `Architecture`. Reads config.json, never a weight."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bien.core.architectures.base import Architecture, ArchitectureReader
from bien.core.architectures.builtin import config as known_config
from bien.core.architectures.builtin import known
from bien.core.architectures.deepseek import DeepseekReader
from bien.core.architectures.fields import ITEM_BYTES
from bien.core.architectures.gguf import GgufFile, find_gguf, gguf_config
from bien.core.architectures.glm4_moe import Glm4MoeReader
from bien.core.architectures.gpt_oss import GptOssReader
from bien.core.architectures.kimi_linear import KimiLinearReader
from bien.core.architectures.llama import LlamaReader
from bien.core.architectures.qwen3 import Qwen3MoeReader, Qwen3Reader
from bien.core.architectures.watched import Watched, plain, unread
from bien.core.errors import ModelError, UserError, nearest
from bien.core.text.gguf_vocab import end_tokens

_LATER = {"tiny_hybrid": "bien.core.architectures.tiny_hybrid:TinyHybridReader"}  # imported when asked for
_readers: dict[str, ArchitectureReader] = {}


def register(reader: ArchitectureReader) -> None:
    """Make a reader known for its model types (plugins of kind "architecture" come this way)."""
    for model_type in reader.model_types:
        _readers[model_type] = reader


register(LlamaReader())
register(Qwen3Reader())
register(Qwen3MoeReader())
register(DeepseekReader())
register(Glm4MoeReader())
register(KimiLinearReader())
register(GptOssReader())


def reader_for(model_type: str, model: str) -> ArchitectureReader:
    """The reader of `model_type`. ModelError with the known ones."""
    if model_type in _LATER and model_type not in _readers:
        module, _, attribute = _LATER[model_type].partition(":")
        register(getattr(importlib.import_module(module), attribute)())
    if model_type not in _readers:
        known = nearest(model_type, {*_readers, *_LATER})
        raise ModelError(f"model {model!r}: no reader for model_type {model_type!r}; {known}")
    return _readers[model_type]


def known_models() -> list[str]:
    """The known names, sorted, that there is a reader for."""
    names = {*_readers, *_LATER}
    return [name for name in known() if known_config(name)["model_type"] in names]


def read_architecture(
    name_or_folder: str | Path, block_tokens: int, dtype: str, max_context: int | None = None
) -> Architecture:
    """The architecture of a built-in name or a model folder, KV groups at `block_tokens` and `dtype`.

    ModelError: no such model, config.json unreadable, or a deciding field missing. UserError: a dtype,
    block size or `max_context` that cannot be.
    """
    model = str(name_or_folder)
    if dtype not in ITEM_BYTES:
        raise UserError(f"dtype {dtype!r} is unknown; {nearest(dtype, ITEM_BYTES)}", field="dtype")
    if block_tokens < 1:
        raise UserError(f"block_tokens is {block_tokens}; valid: 1 or more", field="block_tokens")
    config, generation = _configs(model)
    watched = Watched(config)
    kind = watched.get("model_type")
    if not isinstance(kind, str):
        raise ModelError(f"model {model!r}: config.json lacks 'model_type', which decides the architecture")
    reader = reader_for(kind, model)
    architecture = reader.read(watched, model=model, block_tokens=block_tokens, dtype=dtype)
    own = architecture.max_context
    if max_context is not None and not 0 < max_context <= own:
        raise UserError(
            f"max_context is {max_context}; valid for model {model!r}: 1 to {own}", field="max_context"
        )
    return msgspec.structs.replace(
        architecture,
        config=plain(architecture.config),
        max_context=max_context or own,
        eos_token_ids=_ids(generation.get("eos_token_id", architecture.config.get("eos_token_id")), model),
        unread=unread(config, watched.seen | {"eos_token_id", "text_config.eos_token_id"}),
    )


def _configs(model: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    if model in known():
        return known_config(model), {}
    source = find_gguf(model)
    if source is not None:
        file = GgufFile(source)
        return gguf_config(file), {"eos_token_id": end_tokens(file.fields)}
    folder = Path(model)
    path = folder / "config.json"
    if not path.is_file():
        what = "has no config.json" if folder.is_dir() else "is no folder and no built-in name"
        raise ModelError(
            f"model {model!r} {what}; give a model folder, or a name; {nearest(model, known_models())}"
        )
    generation = folder / "generation_config.json"
    return _json(path), _json(generation) if generation.is_file() else {}


def _json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; needs an object")
    return value


def _ids(value: Any, model: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ModelError(f"model {model!r}: eos_token_id = {value!r}; needs an id or a list of ids")
    return tuple(ids)
