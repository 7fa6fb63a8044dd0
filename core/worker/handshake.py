"""How a gateway and a worker show each other that they know the same token, which itself never travels.

The gateway joins with a nonce. The worker answers with one of its own and a proof, an HMAC-SHA256 under the
token over both; then the gateway sends its proof. So whoever puts a lease of their own into the store learns
nothing and gets no prompt, and what is recorded is worth nothing with the next nonces. The address enters
too, as the worker has announced it and the gateway has dialled it: else a proof could be fetched from a
worker elsewhere and passed on. Nothing is encrypted: who sees the packets of a network sees prompts.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal, NamedTuple

import msgspec

NONCE_BYTES = 32


class Meeting(NamedTuple):
    """What both sides know of one connection before they trust each other."""

    address: str  # of the worker, host:port
    gateway: str  # its nonce
    worker: str


def new_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def proof(side: Literal["gateway", "worker"], token: str, meeting: Meeting) -> str:
    """That `side` knows the token: neither can show the other's."""
    text = msgspec.msgpack.encode(("bien join", side, *meeting))
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()


def proves(shown: str, side: Literal["gateway", "worker"], token: str, meeting: Meeting) -> bool:
    """Whether that is it; takes as long for one wrong proof as for another."""
    return hmac.compare_digest(shown.encode(), proof(side, token, meeting).encode())
