"""`ChatTemplate`: a model folder's chat template, rendered in a sandbox as transformers renders it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from bien.core.clock import WallClock
from bien.core.errors import ModelError, UserError
from bien.core.text.files import read_object, token_text
from bien.core.text.sandbox import Sandbox, metered

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Names that a template gets from the server; `chat_template_kwargs` may not set them."""


Templates = dict[str, str]
"""Sources by name: "default", and "tool_use" where tools have their own; other names are not asked for."""

_ESCAPED = re.compile(r"(?<!\\)((?:\\\\)*)\\u(fd[de][0-9a-f])")


class ChatTemplate:
    """`source` is one template or several by name, of which "tool_use" is taken where there are tools.
    `epoch` gives the seconds since 1970 that `strftime_now` shows (None: the machine's)."""

    def __init__(
        self,
        source: str | Templates,
        special_tokens: dict[str, str] | None = None,
        *,
        epoch: Callable[[], float] | None = None,
    ) -> None:
        self._special_tokens = special_tokens or {}
        sources = {"default": source} if isinstance(source, str) else source
        environment = _environment(epoch or WallClock().epoch)
        try:
            self._templates = {name: environment.from_string(text) for name, text in sources.items()}
            self.literals = "\0".join(_literals(environment, text) for text in sources.values())
            self.variables = _variables(environment, sources.values())
        except TemplateError as error:
            raise ModelError(f"chat template does not compile: {error}") from error

    @classmethod
    def load(cls, folder: Path | str) -> ChatTemplate | None:
        """From chat_template.jinja (and additional_chat_templates/NAME.jinja) or tokenizer_config.json
        ("chat_template"); None if there is none.

        ModelError if a file is damaged.
        """
        folder = Path(folder)
        config = read_object(folder / "tokenizer_config.json")
        sources = _sources(config.get("chat_template"), folder / "tokenizer_config.json")
        if (path := folder / "chat_template.jinja").is_file():
            sources = {"default": path.read_text(encoding="utf-8")}
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            sources[path.stem] = path.read_text(encoding="utf-8")
        return cls(sources, _special_tokens(config)) if sources else None

    def render(
        self,
        messages: list[dict[str, Any]],
        extra: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
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
        values = {
            **self._special_tokens,
            "documents": None,
            **extra,
            "tools": tools,
            "messages": [_with_reasoning(m) for m in messages],
        }
        template = self._template(tools)
        try:
            with metered():
                return "".join(template.generate(add_generation_prompt=True, **values))
        except Exception as error:  # a template may fail in any way that Python code can
            raise UserError(f"the chat template refuses these messages: {error}", field="messages") from error

    def _template(self, tools: list[dict[str, Any]] | None) -> Template:
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise UserError(
                f"this model has chat templates {', '.join(sorted(self._templates))}, and none for a "
                "conversation without tools",
                field="messages",
            )
        return self._templates[name]


class _Generation(Extension):
    """{% generation %}…{% endgeneration %} marks trained text; rendering passes it through."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(epoch: Callable[[], float]) -> Sandbox:
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.add_filter("tojson", _tojson)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.fromtimestamp(epoch()).strftime(form)
    return environment


def _literals(environment: Sandbox, source: str) -> str:
    """What the template itself can write: its text and the strings in its expressions."""
    tree = environment.parse(source)
    strings = [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    return "\0".join([*(node.data for node in tree.find_all(nodes.TemplateData)), *strings])


def _variables(environment: Sandbox, sources: Iterable[str]) -> frozenset[str]:
    """The names that templates ask for."""
    found = (meta.find_undeclared_variables(environment.parse(source)) for source in sources)
    return frozenset().union(*found) - environment.globals.keys()


def _sources(found: Any, path: Path) -> Templates:
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    try:  # [{"name": "default", "template": ...}, {"name": "tool_use", ...}]
        return {str(entry["name"]): str(entry["template"]) for entry in found}
    except (TypeError, KeyError) as error:
        raise ModelError(f"{path}: chat_template is no text and no list of named templates") from error


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """gpt-oss templates read an answer's reasoning as `thinking`, the others as `reasoning_content`."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {"thinking": reasoning, **message}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    # Noncharacters mark what a client wrote; they are taken out again, if they stay what they are.
    return _ESCAPED.sub(lambda m: m[1] + chr(int(m[2], 16)), text) if ensure_ascii else text


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and its like, as text: the file has a string or an object with `content`."""
    out = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = token_text(value)
            if text is not None:
                out[name] = text
    return out
