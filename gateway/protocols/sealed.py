"""Reasoning that goes to a client as an opaque text, and comes back with the conversation's next turn.

Nothing is stored here, and nothing is secret: it is the client's own answer. What others have sealed, or what
was damaged on its way, cannot be read, and is no reasoning of this conversation's model.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

_PREFIX = "bien1."


def seal(text: str) -> str:
    return _PREFIX + base64.b64encode(text.encode()).decode()


def unseal(sealed: str) -> str | None:
    """None for what `seal` did not write."""
    if not sealed.startswith(_PREFIX):
        return None
    try:
        return base64.b64decode(sealed[len(_PREFIX) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def signature(text: str) -> str:
    """Of reasoning that its client sees: clients keep only what is signed. It is not checked."""
    return base64.b64encode(hashlib.blake2b(text.encode(), digest_size=48).digest()).decode()
