"""Kimi K3 (XTML): channels and calls out of three control tokens, raw strings, everything else JSON.

    <|open|>think<|sep|>why<|close|>think<|sep|><|open|>response<|sep|>text<|close|>response<|sep|>
    <|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1
    <|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>

Attributes escape & and ". Only the tokens themselves are marks, so that code which spells one stays code
(vLLM and SGLang end a string there); where an engine gives text only, spelling has to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from bien.core.api import Context, NoParameters, Provider, hookimpl
from bien.gateway.api import TYPES, Ended, Opening, Script, Steps
from bien.plugins.parsers._dialect import Dialect

OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
MARKS = frozenset({OPEN, CLOSE, SEPARATOR})
_HEAD = re.compile(r"[^<]{0,4096}")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_TAIL = re.compile(r"<\|open\|>\s*(think|response)\s*<\|sep\|>\s*$")


class KimiK3(Script):
    def __init__(self, opening: Opening) -> None:
        inside = _TAIL.search(opening.tail)
        self._channel = inside[1] if inside else ""
        super().__init__(opening)

    def run(self) -> Steps[None]:
        while True:
            self.reasoning = self._channel == "think"
            self.framed = not self._channel
            if self.called:
                found = yield from self.between((OPEN, CLOSE))
            else:
                say = self.reason if self.reasoning else self.say
                found = yield from self.reader.until((OPEN, CLOSE), say)
            self.reader.record(found)
            try:
                head = yield from self.reader.collect((SEPARATOR,), _HEAD)
            except Ended:
                if self.called and self.reader.ended:  # the model left out closing marks only
                    self.end_parameters()
                raise
            what = head[0].strip().partition(" ")[0] if head else ""
            said = _attributes(head[0]) if head else {}
            if not self._known(what, said, found == OPEN):
                self.reader.forget() if self.called else self._text(self.reader.recorded())
                continue
            self.reader.forget()
            yield from self._structure(what, said, found == OPEN)

    def _structure(self, what: str, said: dict[str, str], opens: bool) -> Steps[None]:
        if what == "argument":
            if opens:
                yield from self._argument(said)
        elif what == "call":
            if self.called:
                self.end_parameters()
            if opens:
                self.call(said["tool"])
        else:
            if self.called:  # its own end is missing
                self.end_parameters()
            self._channel = what if opens and what in ("think", "response") else ""
            self.reasoning = False
            self.frame()

    def _argument(self, said: dict[str, str]) -> Steps[None]:
        kind = said.get("type", "string")
        types = frozenset({"string"}) if kind == "string" else TYPES - {"string"}
        self.parameter(said["key"])
        yield from self.value(types, (CLOSE,))
        yield from self.reader.collect((SEPARATOR,), _HEAD)

    def _known(self, what: str, said: dict[str, str], opens: bool) -> bool:
        if what == "argument":
            return bool(self.called) and (not opens or "key" in said)
        if what == "call":
            return bool(self.tools and said.get("tool")) if opens else bool(self.called)
        return what in ("think", "response", "tools", "message")

    def _text(self, text: str) -> None:
        (self.reason if self.reasoning else self.say)(text)


def _attributes(head: str) -> dict[str, str]:
    return {k: v.replace("&quot;", '"').replace("&amp;", "&") for k, v in _ATTRIBUTE.findall(head)}


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider("parser", "kimi-k3", _build, summary="XTML, out of <|open|>, <|close|>, <|sep|>: Kimi K3")
    ]


def _build(config: NoParameters, ctx: Context) -> Dialect:
    return Dialect(KimiK3, MARKS, exact=True)
