"""Work in processes of its own: every result, the error of one, the end of one that was killed."""

from __future__ import annotations

import math
import os

import pytest

from bien.core.errors import ResourceError
from bien.core.worker.apart import in_processes


def test_results_come_with_their_numbers() -> None:
    assert dict(in_processes(math.factorial, [3, 0, 5], 2)) == {0: 6, 1: 1, 2: 120}


def test_what_it_raises_is_raised() -> None:
    with pytest.raises(ValueError, match="negative"):
        list(in_processes(math.factorial, [-1], 1))


def test_a_process_that_is_killed_is_said() -> None:
    with pytest.raises(ResourceError, match="was killed; fewer at a time"):
        list(in_processes(os._exit, [9], 1))
