"""Harmony, of gpt-oss: messages with a channel and a recipient.

    <|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{"a": 1}<|call|>

`analysis` is reasoning, and so is what is said to recipients that are no functions; `final` and `commentary`
without a recipient are text. As in OpenAI's own reader only the tokens themselves are marks; where an engine
gives text only, spelling has to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from bien.core.api import Context, NoParameters, Provider, hookimpl
from bien.gateway.api import Ended, Opening, Script, Steps
from bien.plugins.parsers._dialect import Dialect

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = frozenset({START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS})
_ALL = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
_ROLE = re.compile(
    r"\s*(?:a(?:s(?:s(?:i(?:s(?:t(?:a(?:n(?:t)?)?)?)?)?)?)?)?)?\s*(?:t(?:o(?:=[^\s<]{0,256})?)?)?\s*"
)
_HEAD = re.compile(r"[^<\n]{0,512}")
_TO = re.compile(r"(?:^|\s)to=(\S+)")
_TAIL = re.compile(r"<\|channel\|>([^<]*)<\|message\|>$")


class Harmony(Script):
    framed = False

    def __init__(self, opening: Opening) -> None:
        self._spoken: set[bool] = set()  # whether reasoning, whether text was said
        super().__init__(opening)

    def run(self) -> Steps[None]:
        inside = _TAIL.search(self.opening.tail)
        head = inside[1] if inside else (yield from self._head(""))
        while True:
            if head is None:  # an answer without channels
                found = yield from self.reader.until(_ALL, self.say)
            else:
                found = yield from self._message(head)
            self.reasoning = False
            self.frame()
            head = yield from self._head(found)

    def _head(self, found: str) -> Steps[str | None]:
        """A header, behind the mark `found`, up to its message. None: this is none, and was text."""
        parts: list[str] = []
        while found != MESSAGE:
            if found in (CHANNEL, CONSTRAIN):
                fits = _HEAD
            else:
                fits = _ROLE
                parts.clear()
            self.reader.record()
            try:
                part = yield from self.reader.collect(_ALL, fits)
            except Ended:
                left = self.reader.recorded()
                if not found:
                    self.say(left)
                raise
            if part is None:
                self.say("".join(parts) + self.reader.recorded())
                return None
            parts.append(part[0])
            found = part[1]
        self.reader.forget()
        return " ".join(parts)

    def _message(self, head: str) -> Steps[str]:
        to = _TO.search(head)
        channel = _TO.sub("", head).split()
        recipient = to[1] if to else ""
        function = recipient.removeprefix("functions.")
        if self.tools and function and (function != recipient or function in self.tools):
            self.call(function)
            yield from self.arguments()
            return (yield from self.reader.until(_ALL, self.say))
        others = bool(recipient) and not recipient.startswith("functions.")
        self.reasoning = others or "analysis" in channel
        say = self.reason if self.reasoning else self.say
        if self.reasoning in self._spoken:
            say("\n")
        self._spoken.add(self.reasoning)
        return (yield from self.reader.until(_ALL, say))


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [Provider("parser", "harmony", _build, summary="channels and recipients: gpt-oss")]


def _build(config: NoParameters, ctx: Context) -> Dialect:
    return Dialect(Harmony, MARKS, exact=True)
