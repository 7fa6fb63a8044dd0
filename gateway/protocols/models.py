"""/v1/models: what is served here, and the refusal of everything else."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from bien.core.errors import UserError


class ModelNotFound(UserError):
    status = 404
    code = "model_not_found"


class Models:
    """The one model of a gateway, as model objects of OpenAI's API and of Anthropic's."""

    def __init__(
        self, name: str, created: int, max_context: int, vocab_size: int = 0, refuses: Iterable[str] = ()
    ) -> None:
        """`vocab_size` (0: not said) and `refuses`, fields that requests may not use, are ours alone."""
        self.name = name
        self._object: dict[str, object] = {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "bien",
            "max_model_len": max_context,
        }
        if vocab_size:
            self._object["vocab_size"] = vocab_size
        if refused := sorted(refuses):
            self._object["refuses"] = refused

        self._anthropic = {
            "type": "model",
            "id": name,
            "display_name": name,
            "lifecycle": "active",
            "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
            "max_input_tokens": max_context,
            "max_tokens": max_context,
        }

    def check(self, name: str, field: str | None = "model") -> None:
        if name != self.name:
            raise ModelNotFound(f"the model {name!r} is not served here; valid: {self.name!r}", field=field)

    def one(self, name: str) -> dict[str, object]:
        self.check(name)
        return self._object

    def all(self) -> dict[str, object]:
        return {"object": "list", "data": [self._object]}

    def one_anthropic(self, name: str) -> dict[str, object]:
        self.check(name)
        return self._anthropic

    def all_anthropic(self) -> dict[str, object]:
        return {"data": [self._anthropic], "has_more": False, "first_id": self.name, "last_id": self.name}
