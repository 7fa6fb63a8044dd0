"""`ChatTemplate`: a model folder's chat template, rendered in a sandbox as transformers renders it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bien.core.clock import WallClock
from bien.core.errors import ModelError, UserError

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Names that a template gets from the server; `chat_template_kwargs` may not set them."""


class ChatTemplate:
    """`epoch` gives the seconds since 1970 that `strftime_now` shows (None: the machine's)."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str] | None = None,
        *,
        epoch: Callable[[], float] | None = None,
    ) -> None:
        self._special_tokens = special_tokens or {}
        try:
            self._template = _compile(source, epoch or WallClock().epoch)
        except TemplateError as error:
            raise ModelError(f"chat template does not compile: {error}") from error

    @classmethod
    def load(cls, folder: Path | str) -> ChatTemplate | None:
        """From chat_template.jinja or tokenizer_config.json ("chat_template"); None if there is none.

        ModelError if a file is damaged.
        """
        folder = Path(folder)
        config = _read(folder / "tokenizer_config.json")
        path = folder / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
        if isinstance(source, list):  # [{"name": "default", "template": ...}, {"name": "tool_use", ...}]
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default")
        if source is None:
            return None
        return cls(source, _special_tokens(config))

    def render(self, messages: list[dict[str, Any]], extra: Mapping[str, Any] | None = None) -> str:
        """The prompt of a conversation, up to and including the head of the assistant's turn.

        `extra` are further variables of the template. UserError with the template's own message when it
        refuses the conversation.
        """
        extra = extra or {}
        taken = RESERVED & extra.keys()
        if taken:
            name = sorted(taken)[0]
            raise UserError(
                f"chat_template_kwargs may not set {name!r}; reserved: {', '.join(sorted(RESERVED))}",
                field="chat_template_kwargs",
            )
        values = {**self._special_tokens, "tools": None, "documents": None, **extra}
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **values)
        except Exception as error:  # a template may fail in any way that Python code can
            raise UserError(f"the chat template refuses these messages: {error}", field="messages") from error


class _Generation(Extension):
    """{% generation %}…{% endgeneration %} marks trained text; rendering passes it through."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str, epoch: Callable[[], float]) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.fromtimestamp(epoch()).strftime(form)
    return environment.from_string(source)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds a {type(config).__name__}; a JSON object is needed")
    return config


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and its like, as text: the file has a string or an object with `content`."""
    out = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                out[name] = text
    return out
