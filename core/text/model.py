"""`TextModel`: the text side of a model folder: tokenizer and chat template. No torch, no weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bien.core.errors import UserError
from bien.core.request import TokenIds
from bien.core.text.control import ControlTokens
from bien.core.text.detokenize import Detokenizer
from bien.core.text.marks import NO_MARKS, Mark, Marks
from bien.core.text.output import OutputText
from bien.core.text.tails import Tails
from bien.core.text.template import ChatTemplate
from bien.core.text.tokenizer import Tokenizer

_MARKS = [chr(c) for c in range(0xFDD0, 0xFDF0)]  # Unicode noncharacters: no text should hold one
_OWN = ("content", "reasoning_content")


class TextModel:
    """Encoding blocks for up to a second on long prompts: call it in a thread."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> None:
        self.tokenizer = tokenizer
        self.template = template
        if template is not None:
            tokenizer.guard_also(template.literals)
        self.tails = Tails(tokenizer, literals=template.literals if template else None)

    @classmethod
    def load(cls, folder: Path | str) -> TextModel:
        """ModelError if the folder's tokenizer or template is missing or damaged."""
        return cls(Tokenizer.load(folder), ChatTemplate.load(folder))

    def encode_text(self, text: str) -> TokenIds:
        """Ids of a whole prompt that its author wrote himself, control tokens included."""
        return self.tokenizer.encode(text, add_special_tokens=True)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        extra: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        owner: str | None = None,
    ) -> TokenIds:
        """Ids of a rendered conversation. A control token inside a message is ordinary text.

        So is, in what is not the model's own turn, any added token that the template writes ("</think>").
        `tools` are described to the model, `extra` goes to the template. `owner`: parts of the text that it
        sent before are not encoded again (see `Tails`); None: all is. UserError if the model has no
        template or its template refuses.
        """
        if self.template is None:
            raise UserError(
                "this model has no chat template; valid: POST /v1/completions with a prompt", field="messages"
            )
        mark = next((m for m in _MARKS if not _holds([messages, extra, tools], m)), None)
        if mark is None:
            raise UserError("the messages hold every noncharacter U+FDD0..U+FDEF", field="messages")
        guards = self.tokenizer.guards
        guarded = [self._guard_message(m, mark) for m in messages]
        kept = _guard(extra or {}, mark, guards)
        text = self.template.render(guarded, kept, tools=_guard(tools, mark, guards))
        if owner is None:
            return self.tokenizer.encode_guarded(text, mark)
        return self.tails.encode_guarded(text, mark, owner)

    def output(
        self,
        prompt_tail: Sequence[int] = (),
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        marks: Marks = NO_MARKS,
    ) -> OutputText:
        """The text of one answer; `prompt_tail` are the last ids of its prompt."""
        return OutputText(Detokenizer(self.tokenizer, prompt_tail, marks), stops, min_tokens)

    def marks(self, names: Iterable[str], *, exact: bool) -> Marks:
        """Those of `names` that are tokens of their own, to be handed over: as marks, but, unless `exact`,
        those that have text as it, so that stop strings are found in it."""
        added, special = self.tokenizer.added, self.tokenizer.control.ids
        found = {added[name].id: name for name in names if name in added}
        return {i: Mark(name) if exact or i in special else name for i, name in found.items()}

    def spelled(self, ids: Sequence[int]) -> str:
        """Text of a few ids with all control tokens, by their names."""
        return b"".join(self.tokenizer.piece(i)[1] for i in ids).decode(errors="replace")

    def _guard_message(self, message: dict[str, Any], mark: str) -> dict[str, Any]:
        guards = self.tokenizer.guards
        # The model's own words, in which templates look for its marks ("</think>"): only what can never be
        # text is spelled out.
        own = _OWN if message["role"] == "assistant" else ()
        # Names of fields and roles are the protocol's words, checked by it; everything else is the client's.
        return {
            k: v if k == "role" else _guard(v, mark, self.tokenizer.control if k in own else guards)
            for k, v in message.items()
        }


def _guard(value: Any, mark: str, control: ControlTokens) -> Any:
    if isinstance(value, str):
        return control.guard(value, mark)
    if isinstance(value, list):
        return [_guard(v, mark, control) for v in value]
    if isinstance(value, dict):
        return {control.guard(k, mark, ends=False): _guard(v, mark, control) for k, v in value.items()}
    return value


def _holds(value: Any, text: str) -> bool:
    if isinstance(value, str):
        return text in value
    if isinstance(value, list):
        return any(_holds(v, text) for v in value)
    if isinstance(value, dict):
        return any(_holds(v, text) for v in value.values())
    return False
