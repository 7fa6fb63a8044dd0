"""`Mark`: a control token in the text of an answer, told apart from text that looks like it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Mark(NamedTuple):
    text: str  # as the vocabulary spells it


Piece = str | Mark
"""What a detokeniser hands over, in order. Text is never half a character."""

Marks = Mapping[int, Piece]
"""Tokens that are handed over as what is said here, by id. A token that is none of them is its text, or
nothing where the model's files call it special."""

NO_MARKS: Marks = MappingProxyType({})
