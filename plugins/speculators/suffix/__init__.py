"""Speculator "suffix": drafts are what followed the longest repetitions of the last tokens.

Oliaro et al., "SuffixDecoding" (2024, arXiv 2411.04975), with other means: hash chains over n-grams of four
lengths in place of suffix trees. Agents edit files that they have read and repeat calls that they have made,
so that whole sessions are looked through, tool results included: a turn's prompt adds only what it has beyond
texts that are known already, and its answer joins them when it ends. How long a draft is follows from how
often drafts of its kind were taken (chances.py).

What is shared: `request` nothing; `session` the turns of a session; `tenant` all sessions of a tenant and its
salt; `global` everything of everybody, which lets one tenant's text show in another one's speed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from bien.core.api import (
    Architecture,
    Context,
    Draft,
    KVGroup,
    Provider,
    Scope,
    SpeculatorCaps,
    hookimpl,
)
from bien.plugins.speculators.suffix.chances import path
from bien.plugins.speculators.suffix.corpus import (
    CONTEXT,
    Corpus,
    CorpusChoice,
    Found,
    Maker,
    corpus_maker,
    packed,
    unpacked,
)
from bien.plugins.speculators.suffix.texts import Text, Texts

NOTHING = b""
_NONE = Found([], [], [], [])


class SuffixConfig(msgspec.Struct, forbid_unknown_fields=True):
    max_drafts: Annotated[int, msgspec.Meta(ge=1, le=256)] = 16
    scope: Literal["request", "session", "tenant", "global"] = "tenant"
    min_chance: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1  # that all drafts up to one are taken
    tree: bool = False  # drafts may branch where texts went on differently
    tokens: Annotated[int, msgspec.Meta(ge=256, le=1 << 30)] = 1 << 20  # kept per scope; 36 bytes each
    # Of all scopes: those used least recently go first, those that somebody runs in never.
    memory_mb: Annotated[int, msgspec.Meta(ge=1)] = 256
    corpus: CorpusChoice = "auto"  # compiled where there is a compiler; "native" insists on it

    def groups(self, architecture: Architecture, block_tokens: int) -> tuple[KVGroup, ...]:
        return ()


class _Live:
    """A running sequence. Its answer has a corpus of its own until it ends."""

    __slots__ = ("added", "answer", "found", "key", "prompt", "seam", "text", "texts", "waiting")

    def __init__(self, key: tuple[str, ...], texts: Texts, text: Text, prompt: list[int], answer: Corpus):
        self.key, self.texts, self.text, self.answer = key, texts, text, answer
        self.prompt = prompt  # its last tokens
        self.seam = (text.end, answer.end)
        self.added: list[int] = []  # the answer so far
        self.waiting = 0  # how much of it has joined its corpus
        self.found: Found = _NONE  # the last draft, until what followed is known


class Suffix:
    def __init__(self, config: SuffixConfig, make: Maker) -> None:
        topology: Literal["chain", "tree"] = "tree" if config.tree else "chain"
        self.caps = SpeculatorCaps(
            place="host", max_drafts=config.max_drafts, topology=topology, confidence="own"
        )
        self._config, self._make = config, make
        self._scopes: OrderedDict[tuple[str, ...], Texts] = OrderedDict()
        self._live: dict[str, _Live] = {}
        self._bytes = 0  # of all scopes

    def start(self, id: str, tokens: list[int], scope: Scope) -> None:
        self.end(id)
        key = self._key(id, scope)
        texts = self._scopes.get(key)
        if texts is None:
            texts = self._scopes[key] = Texts(self._make(self._config.tokens))
        self._scopes.move_to_end(key)
        texts.live += 1
        prompt = packed(tokens)
        text = texts.begin(prompt, scope.session)
        answer = self._make(self._config.tokens)
        tail = prompt[-4 * CONTEXT :]
        answer.append(tail, fresh=True, repeated=CONTEXT)
        self._live[id] = _Live(key, texts, text, unpacked(tail), answer)
        self._fit(texts)

    def extend(self, id: str, tokens: list[int]) -> None:
        live = self._live[id]
        if live.found is not _NONE:
            for node, taken in path(live.found.parents, live.found.tokens, tokens):
                live.texts.chances.learn(live.found.cells[node], taken)
            live.found = _NONE
        live.added += tokens

    def propose(self, id: str, limit: int) -> Draft:
        live, config = self._live[id], self._config
        limit = min(limit, config.max_drafts)
        if limit <= 0:
            return Draft()
        fresh = packed(live.added[live.waiting :]) if live.waiting < len(live.added) else NOTHING
        live.waiting = len(live.added)
        found = live.answer.propose(
            live.texts.corpus,
            live.seam,
            fresh,
            limit,
            tree=config.tree,
            least=config.min_chance,
            chances=live.texts.chances,
        )
        live.found = found if found.tokens else _NONE
        parents = found.parents if config.tree else None
        return Draft(found.tokens, parents, found.chances, "suffix")

    def observe(self, id: str, drafted: int, accepted: int) -> None:
        pass  # `extend` has seen what followed

    def end(self, id: str) -> None:
        live = self._live.pop(id, None)
        if live is None:
            return
        live.texts.live -= 1
        live.text.users -= 1
        if live.key[0] == "alone":
            self._drop(live.key)
        elif live.added:
            known = packed(live.prompt + live.added)
            live.texts.extend(live.text, known, known[4 * len(live.prompt) :])
            if self._scopes.get(live.key) is live.texts:
                self._fit(live.texts)

    def close(self) -> None:
        self._live.clear()
        self._scopes.clear()

    def size(self) -> tuple[int, int]:
        """(tokens, bytes) of all texts that are kept, answers under way included."""
        corpora = [t.corpus for t in self._scopes.values()] + [s.answer for s in self._live.values()]
        sizes = [corpus.size() for corpus in corpora]
        return sum(s.tokens for s in sizes), sum(s.bytes for s in sizes)

    def _key(self, id: str, scope: Scope) -> tuple[str, ...]:
        match self._config.scope:
            case "global":
                return ("global",)
            case "tenant":
                return ("tenant", scope.tenant, scope.salt)
            case "session" if scope.session:
                return ("session", scope.tenant, scope.salt, scope.session)
        return ("alone", id)

    def _drop(self, key: tuple[str, ...]) -> None:
        texts = self._scopes.pop(key, None)
        if texts is not None:
            self._bytes -= texts.bytes

    def _fit(self, grown: Texts) -> None:
        before, grown.bytes = grown.bytes, grown.corpus.size().bytes
        self._bytes += grown.bytes - before
        if self._bytes <= self._config.memory_mb << 20:
            return
        for key in [key for key, texts in self._scopes.items() if not texts.live]:
            self._drop(key)
            if self._bytes <= self._config.memory_mb << 20:
                return


def _make(config: SuffixConfig, ctx: Context) -> Suffix:
    return Suffix(config, corpus_maker(config.corpus))


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "speculator",
            "suffix",
            _make,
            SuffixConfig,
            summary="what followed the longest repetitions in request, session or tenant (host)",
        )
    ]
