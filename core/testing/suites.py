"""Running a conformance suite without pytest: what `bien plugins check` and the tests of suites do."""

from __future__ import annotations

import asyncio
import inspect
import traceback
import unittest
from typing import Any


def failures(suite: type) -> list[str]:
    """Run every `test_` method of a suite class on a fresh instance, with `setup_method` and
    `teardown_method` where it has them. One line per failure, "name: Error: text"; [] = conforms.

    Methods may be coroutines; they take no pytest fixtures. unittest.SkipTest is no failure.
    """
    found = []
    for name in sorted(n for n in dir(suite) if n.startswith("test_")):
        try:
            _run(suite(), name)
        except unittest.SkipTest:
            continue
        except Exception as error:
            # a bare assert has no text outside pytest: show its source line
            text = str(error).strip() or traceback.extract_tb(error.__traceback__)[-1].line
            found.append(f"{name}: {type(error).__name__}: {text}")
    return found


def _run(case: Any, name: str) -> None:
    method = getattr(case, name)
    try:
        _call(case, "setup_method", method)
        result = method()
        if inspect.iscoroutine(result):
            asyncio.run(result)
    finally:
        _call(case, "teardown_method", method)


def _call(case: Any, name: str, method: Any) -> None:
    fixture = getattr(case, name, None)
    if fixture is not None:
        # pytest passes the method to those that take it
        fixture(method) if inspect.signature(fixture).parameters else fixture()
