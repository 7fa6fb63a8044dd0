"""`failures` runs suites as pytest would."""

from __future__ import annotations

import unittest

from bien.core.testing.suites import failures


class Good:
    def setup_method(self) -> None:
        self.ready = True

    def test_sees_its_setup(self) -> None:
        assert self.ready

    async def test_may_be_a_coroutine(self) -> None:
        assert self.ready

    def test_may_skip(self) -> None:
        raise unittest.SkipTest("not here")

    def helper(self) -> None:
        raise AssertionError("not a test")


class Bad(Good):
    closed = 0

    def teardown_method(self, method: object) -> None:
        Bad.closed += 1

    def test_says(self) -> None:
        raise AssertionError("what broke")

    def test_bare(self) -> None:
        raise AssertionError

    async def test_later(self) -> None:
        raise ValueError("late")


def test_a_good_suite_has_no_failures():
    assert failures(Good) == []


def test_failures_name_test_error_and_text():
    found = failures(Bad)
    assert found[0].startswith("test_bare: AssertionError: ")
    assert "raise AssertionError" in found[0]
    assert found[1:] == ["test_later: ValueError: late", "test_says: AssertionError: what broke"]


def test_teardown_always_runs():
    Bad.closed = 0
    failures(Bad)
    assert Bad.closed == 6
