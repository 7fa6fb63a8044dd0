"""`Watched`: a config that notes which of its fields a reader asks for, so that the others can be listed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Fields that publishers' configs have and that say nothing of what a loaded model computes: training,
# bookkeeping, ids of tokens that tokenizers know better, and `quantization_config`, which loading reads.
SILENT = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "aux_loss_alpha",
        "bos_token_id",
        "dtype",
        "ep_size",
        "hidden_dropout",
        "initial_context_length",
        "initializer_range",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "quantization_config",
        "return_dict",
        "router_aux_loss_coef",
        "seq_aux",
        "torch_dtype",
        "transformers_version",
        "unsloth_fixed",
        "use_cache",
    }
)


class Watched(dict[str, Any]):
    """Copies that go on noting are made by `merged`; others are plain dicts. Nested objects are watched when
    they are asked for."""

    def __init__(self, fields: Mapping[str, Any], seen: set[str] | None = None, path: str = "") -> None:
        """`path` stands before the names in `seen`: "text_config."."""
        super().__init__(fields)
        self.seen, self._path = set[str]() if seen is None else seen, path

    def __getitem__(self, name: str) -> Any:
        self.seen.add(self._path + name)
        value = super().__getitem__(name)
        if isinstance(value, dict) and not isinstance(value, Watched):
            value = Watched(value, self.seen, f"{self._path}{name}.")
        return value

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def with_changes(self, changes: Mapping[str, Any]) -> Watched:
        return Watched(dict(self) | dict(changes), self.seen, self._path)


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """`config` with `changes` in front, watched if it is."""
    return config.with_changes(changes) if isinstance(config, Watched) else {**config, **changes}


def plain(value: Any) -> Any:
    """The same without anything watched in it, at any depth."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def unread(config: Mapping[str, Any], seen: set[str]) -> tuple[str, ...]:
    """The paths of fields that were not asked for, are not null and might mean something, sorted."""
    return tuple(sorted(_unread(config, seen, "")))


def _unread(config: Mapping[str, Any], seen: set[str], path: str) -> Iterator[str]:
    for name, value in config.items():
        if path + name in seen:
            if isinstance(value, dict):
                yield from _unread(value, seen, f"{path}{name}.")
        elif value is not None and name not in SILENT:
            yield path + name
