"""Errors that name the thing, the value and the valid choices.

`BienError` and its kinds are the only exceptions a user is meant to read; the command line prints
their text as one paragraph and exits with `exit_code`, the gateway answers with `status`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BienError(Exception):
    """Base of every error that bien raises on purpose."""

    status = 500
    exit_code = 1
    code = "internal_error"


class UserError(BienError):
    """The caller's fault: a field, its value and what is valid. HTTP 400."""

    status = 400
    exit_code = 2
    code = "invalid_request"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextLengthError(UserError):
    """Prompt plus output do not fit into the context window."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, field: str | None = None, tokens: int = 0, most: int = 0) -> None:
        """`tokens`: what the prompt has; `most`: what it may have. 0: not said."""
        super().__init__(message, field=field)
        self.tokens = tokens
        self.most = most


class DeploymentError(UserError):
    """A deployment file or its parameters are wrong."""

    code = "invalid_deployment"


class PluginError(UserError):
    """A plugin is missing, duplicated, of a wrong API number, or failed to load."""

    code = "invalid_plugin"


class TraceError(UserError):
    """A trace file is damaged or of an unknown format."""

    code = "invalid_trace"


class ModelError(UserError):
    """A model folder is incomplete or does not fill the model exactly."""

    code = "invalid_model"


class ResourceError(UserError):
    """The machine lacks what was asked for: port, disk, memory, threads."""

    code = "no_resources"
    status = 503


class OverloadError(BienError):
    """Refused before work was spent on it; try again after `retry_after` seconds."""

    status = 503
    code = "overloaded"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class WorkerDiedError(BienError):
    """The worker ended while it held the request and tokens had been streamed already."""

    status = 502
    code = "worker_died"


class ExecutorDiedError(BienError):
    """An executor can run no further step (a rank of its group is gone). Its worker ends."""

    status = 502
    code = "executor_died"


class CollectiveError(BienError):
    """Ranks could not exchange what they computed: one of them is gone or late."""

    code = "collective_failed"


class PluginFault(BienError):
    """A plugin broke its contract at run time (an engine-side check caught it)."""

    code = "plugin_fault"


def error_kinds() -> dict[str, type[BienError]]:
    """Every class by its code. A subclass that keeps its base's code does not stand in for it."""
    found: dict[str, type[BienError]] = {}
    todo: list[type[BienError]] = [BienError]
    while todo:
        kind = todo.pop()
        found.setdefault(kind.code, kind)
        todo += kind.__subclasses__()
    return found


def nearest(value: str, choices: Iterable[str]) -> str:
    """A clause that lists the valid choices and points at the nearest one."""
    known = sorted(choices)
    hint = difflib.get_close_matches(value, known, n=1)
    near = f"; did you mean {hint[0]!r}?" if hint else ""
    return f"valid: {', '.join(known) or '(none)'}{near}"
