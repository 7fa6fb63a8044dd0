"""`Calling`: what a client wants of calls. Nothing forces a model yet: it is told, at the end of the prompt.

There, and not in the system message, because what is before it stays cached from turn to turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

_TOLD = {
    "none": "Answer now without calling any function.",
    "required": "Now call at least one of the functions; answer with calls only.",
    "one": "Now call exactly one of the functions; answer with that call only.",
}


@dataclass(slots=True, frozen=True)
class Calling:
    choice: Literal["auto", "none", "required"] = "auto"
    name: str = ""  # with "required": this function and no other
    parallel: bool = True  # False: the answer ends with its first call

    def told(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation with what the model is told of it, in its last message."""
        text = self._text
        if not text:
            return messages
        last = messages[-1]
        if last["role"] == "assistant" or not isinstance(last.get("content"), str):
            return [*messages, {"role": "user", "content": text}]
        return [*messages[:-1], {**last, "content": f"{last['content']}\n\n{text}"}]

    @property
    def _text(self) -> str:
        if self.name:
            return f"Now call the function {self.name}, and no other; answer with that call only."
        if self.choice == "required" and not self.parallel:
            return _TOLD["one"]
        return _TOLD.get(self.choice, "")


AUTO = Calling()
