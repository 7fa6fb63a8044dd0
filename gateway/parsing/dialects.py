"""`Dialects`: which parser reads a model's answers, and how it is begun for each of them."""

from __future__ import annotations

from collections.abc import Sequence

from bien.core.text.marks import Marks
from bien.core.text.model import TextModel
from bien.core.text.template import ChatTemplate
from bien.gateway.parsing.parser import AnswerParser, Messages, Opening, Parser, Speller
from bien.gateway.parsing.reply import Reply
from bien.gateway.parsing.tools import Tools

TABLE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("kimi-k2", ("<|tool_call_argument_begin|>",)),
    ("kimi-k3", ("<|open|>", "<|sep|>")),
    ("deepseek", ("｜DSML｜",)),
    ("deepseek", ("<｜tool▁call▁begin｜>",)),
    ("glm", ("<arg_key>",)),
    ("qwen3-coder", ("<function=",)),
    ("hermes", ("<tool_call>",)),
    ("deepseek", ("<｜Assistant｜>",)),
    ("hermes", ("<|im_start|>",)),
)
"""A parser's name, and what a chat template of its models writes. The first row counts whose marks are all
there; a template of none is one of a model without tools."""


def dialect_of(template: ChatTemplate | None) -> str:
    """The parser of a model's answers, by its template: a name in `TABLE`, or "none"."""
    literals = template.literals if template is not None else ""
    return next((name for name, marks in TABLE if all(mark in literals for mark in marks)), "none")


class Dialect:
    """A parser over one model's vocabulary and template."""

    def __init__(self, parser: Parser, text: TextModel) -> None:
        added = text.tokenizer.added
        literals = text.template.literals if text.template is not None else ""
        self.parser = parser
        self._text = text
        self._exact = parser.exact and all(mark in added for mark in parser.marks)
        self._marks = text.marks(parser.marks, exact=self._exact)
        self._thinks = "<think>" in added or "think>" in literals

    @property
    def calls(self) -> bool:
        return self.parser.calls

    @property
    def marks(self) -> Marks:
        """What the detokeniser hands over."""
        return self._marks

    def spell(self, messages: Messages, tools: Messages | None) -> tuple[Messages, Messages | None]:
        """For a template that knows no tools: the conversation with tools, calls and results written into its
        messages, and no tools; the same again where the parser cannot do it."""
        if not isinstance(self.parser, Speller):
            return messages, tools
        return self.parser.spell(messages, tools), None

    def reply(self, tail: Sequence[int], tools: Tools, *, parallel: bool = True) -> Reply:
        """Reads the answer to a prompt that ends with `tail`."""

        def begin(ids: bool) -> AnswerParser:
            opening = Opening(self._text.spelled(tail), tools, self._thinks, exact=self._exact and ids)
            return self.parser.begin(opening)

        return Reply(begin, parallel=parallel)
