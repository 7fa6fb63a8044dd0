"""`Thinking`: how a client wants its model to reason, in the words that chat templates know.

Templates have names of their own for it, and know some of them or none. What a template knows is set; of what
it does not know nothing is said, since nothing in the prompt could say it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from bien.core.errors import UserError

SWITCHES = ("enable_thinking", "thinking")  # Qwen, GLM, Kimi; DeepSeek
EFFORTS = ("reasoning_effort", "thinking_effort")
BUDGET = "thinking_budget"
LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(slots=True, frozen=True)
class Thinking:
    """None: nothing was said, and the template's own default holds."""

    on: bool | None = None
    effort: str | None = None  # one of LEVELS but "none"
    budget: int | None = None  # tokens, as an aim: nothing ends the reasoning there

    @classmethod
    def of_effort(cls, effort: str | None, field: str) -> Thinking:
        """`none` switches it off. UserError for what is no level."""
        if effort is None:
            return cls()
        if effort not in LEVELS:
            raise UserError(f"{field}={effort!r}; valid: {', '.join(LEVELS)}, null", field=field)
        return cls(on=False) if effort == "none" else cls(on=True, effort=effort)

    def variables(self, known: Collection[str]) -> dict[str, Any]:
        """For a template that knows the names `known`."""
        said: dict[str, Any] = dict.fromkeys(SWITCHES, self.on)
        said |= dict.fromkeys(EFFORTS, self.effort)
        said[BUDGET] = self.budget
        return {name: value for name, value in said.items() if value is not None and name in known}


NOTHING_SAID = Thinking()
