"""`Turns`: a conversation as chat templates take it, out of the parts that an API has it in.

Messages and Responses put a turn together from blocks and items; a template wants one assistant message with
reasoning, text and calls, and one message per result.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from bien.core.errors import UserError

NAME = re.compile(r"[\w.:-]{1,128}", re.ASCII)  # of a function


class Turns:
    """System texts before the first turn become one message, the first; later ones stay where they are, so
    that a prompt only grows."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._called: dict[str, str] = {}  # names of functions, by the ids of their calls

    def system(self, text: str) -> None:
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += "\n\n" + text
        else:
            self.messages.append({"role": "system", "content": text})

    def user(self, text: str, *, new: bool = True) -> None:
        """`new` False: it goes on with what the user said before, if he spoke last."""
        if not new and self.messages and self.messages[-1]["role"] == "user":
            self.messages[-1]["content"] += "\n" + text
        else:
            self.messages.append({"role": "user", "content": text})

    def said(self, text: str = "") -> None:
        """By the assistant; what it says, thinks and calls without being answered is one turn."""
        self._turn()["content"] += text

    def thought(self, text: str) -> None:
        turn = self._turn()
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def call(self, id: str, name: str, arguments: str | dict[str, Any]) -> None:
        self._turn().setdefault("tool_calls", []).append(call(id, name, arguments))
        self._called[id] = name

    def result(self, id: str, text: str, field: str) -> None:
        """UserError naming `field` for the result of a call that was not made."""
        if id not in self._called:
            raise UserError(f"{field}={id!r} answers no call before it; valid: the id of one", field=field)
        self.messages.append({"role": "tool", "tool_call_id": id, "name": self._called[id], "content": text})

    def _turn(self) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def call(id: str, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Templates expect arguments as an object; APIs carry them as JSON text, too."""
    if isinstance(arguments, str):
        try:
            decoded = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            decoded = None
        if isinstance(decoded, dict):
            arguments = decoded
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


class Functions:
    """Tools that are functions, as templates take them; each is added once its protocol has read it."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._tools: list[dict[str, Any]] = []

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """None: there are none."""
        return self._tools or None

    def add(self, name: str | None, description: str | None, parameters: Any, where: str) -> None:
        """UserError naming a field under `where`."""
        if not name or not NAME.fullmatch(name):
            raise UserError(
                f"{where}.name is {name!r}; valid: 1 to 128 letters, digits and . : _ -",
                field=f"{where}.name",
            )
        if name in self.names:
            raise UserError(f"{where} is a second {name!r}; valid: names that differ", field="tools")
        found: dict[str, Any] = {"name": name}
        if description is not None:
            found["description"] = description
        if parameters is not None:
            found["parameters"] = parameters
        self.names.append(name)
        self._tools.append({"type": "function", "function": found})
