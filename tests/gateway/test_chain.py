from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bien.core.kv.hashing import HASH_BYTES, block_hash, continue_chain, extend_chain, root_hash, tenant_key
from bien.core.request import BlockRuns, GenerateRequest, Prompt, TokenIds
from bien.gateway.chain import VARIANTS, PromptChains, common_tokens

ids = st.lists(st.integers(0, 2), max_size=60).map(TokenIds.of)
runs = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), max_size=12).map(BlockRuns.of)


def tokens(prompt: Prompt) -> list[int]:
    if isinstance(prompt, TokenIds):
        return list(prompt.ids())
    return [start + i for start, n in prompt.runs() for i in range(n)]


@given(ids, st.integers(1, 7), st.binary(min_size=1, max_size=4))
def test_extend_chain_is_a_chain_of_block_hashes(prompt: Prompt, size: int, key: bytes) -> None:
    parent, expected = root_hash(key), b""
    for at in range(0, len(prompt) - size + 1, size):
        parent = block_hash(key, parent, prompt.content(at, at + size))
        expected += parent
    assert extend_chain(key, b"", prompt, size, len(prompt)) == expected
    head = extend_chain(key, b"", prompt, size, len(prompt) // 2)
    assert expected.startswith(head)
    assert extend_chain(key, head, prompt, size, len(prompt)) == expected


@given(runs, runs, st.integers(1, 7), st.data())
def test_chains_of_runs_go_on_from_any_name_and_tell_contents_apart(
    a: BlockRuns, b: BlockRuns, size: int, data: st.DataObject
) -> None:
    chain = extend_chain(b"k", b"", a, size, len(a))
    assert len(chain) == len(a) // size * HASH_BYTES
    # One by one, in parts and as a whole; long ones take another way than short ones.
    parent, names = root_hash(b"k"), b""
    for at in range(0, len(a) - size + 1, size):
        parent = continue_chain(b"k", parent, a.slice(at, at + size), size)
        names += parent
    assert names == chain
    cut = data.draw(st.integers(0, len(a)))
    assert extend_chain(b"k", chain[: cut // size * HASH_BYTES], a, size, len(a)) == chain
    # Equal names exactly where the contents up to there are equal.
    other = extend_chain(b"k", b"", b, size, len(b))
    for at in range(min(len(a), len(b)) // size):
        name = slice(at * HASH_BYTES, (at + 1) * HASH_BYTES)
        same = tokens(a)[: (at + 1) * size] == tokens(b)[: (at + 1) * size]
        assert (chain[name] == other[name]) is same
    assert not chain or extend_chain(b"l", b"", a, size, len(a))[:HASH_BYTES] != chain[:HASH_BYTES]


def test_blocks_of_runs_in_another_order_have_other_names() -> None:
    forth = BlockRuns.of([(i * 64, 64) for i in range(0, 100, 2)])
    back = BlockRuns.of([(i * 64, 64) for i in range(98, -1, -2)])
    names = {extend_chain(b"", b"", runs, 64, len(runs))[-HASH_BYTES:] for runs in (forth, back)}
    assert len(names) == 2


@given(runs, st.integers(0, 40), st.integers(0, 40), runs)
def test_runs_slice_and_join_as_tokens_do(a: BlockRuns, start: int, stop: int, b: BlockRuns) -> None:
    part = a.slice(start, stop)
    assert tokens(part) == tokens(a)[start:stop]
    assert part.content(0, len(part)) == a.content(start, stop)
    joined = a.join(b)
    assert tokens(joined) == tokens(a) + tokens(b)
    assert joined == BlockRuns.of(joined.runs())  # still canonical


@given(st.one_of(st.tuples(ids, ids), st.tuples(runs, runs), st.tuples(ids, runs)), st.integers(0, 60))
def test_common_tokens(pair: tuple[Prompt, Prompt], cut: int) -> None:
    a, b = pair
    if type(a) is not type(b):
        assert common_tokens(a, b) == common_tokens(b, a) == 0
        return
    for x, y in ((a, b), (a, a), (a, a.slice(0, cut)), (a.slice(0, cut), a)):
        expected = 0
        for p, q in zip(tokens(x), tokens(y), strict=False):
            if p != q:
                break
            expected += 1
        assert common_tokens(x, y) == expected


def test_common_tokens_of_long_prompts() -> None:
    base = TokenIds.of(range(5000))
    for at in (0, 1, 63, 64, 65, 1000, 4999):
        other = TokenIds.of([*range(at), 7_000_000, *range(at + 1, 5000)])
        assert common_tokens(base, other) == at


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.one_of(ids, runs)), max_size=14),
    st.integers(1, 6),
    st.sampled_from([300, 2000, 1 << 20]),
)
def test_equals_a_full_chain_for_any_sequence(
    turns: list[tuple[str, str, Prompt]], size: int, capacity: int
) -> None:
    chains = PromptChains(size, "secret", capacity_bytes=capacity)
    for tenant, session, prompt in turns:
        request = GenerateRequest("r", prompt, tenant=tenant, session=session)
        chains.name(request)
        key = tenant_key(tenant, b"secret")
        assert request.hash_key == key
        assert request.hashes == extend_chain(key, b"", prompt, size, len(prompt))
        assert chains.kept_bytes <= capacity
        assert chains.kept_bytes == sum(e.bytes for known in chains._sessions.values() for e in known)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks hashed per call of extend_chain."""
    counts: list[int] = []

    def counting(key: bytes, hashes: bytes, prompt: Prompt, size: int, stop: int) -> bytes:
        out = extend_chain(key, hashes, prompt, size, stop)
        counts.append((len(out) - len(hashes)) // HASH_BYTES)
        return out

    monkeypatch.setattr("bien.gateway.chain.extend_chain", counting)
    return counts


def test_hashes_only_what_is_new(hashed: list[int]) -> None:
    chains = PromptChains(4)
    parent = TokenIds.of(range(40))
    agent = TokenIds.of([*range(8), *range(900, 932)])
    for prompt in (
        parent,
        agent,
        parent.join(TokenIds.of(range(60, 68))),
        agent.join(TokenIds.of(range(5))),
        parent,
    ):
        chains.name(GenerateRequest("r", prompt, session="s"))
    # The sub-agent shares two blocks with its parent and displaces nothing; a rewound session hashes nothing.
    assert hashed == [10, 8, 2, 1, 0]


def test_variants_of_one_session_are_bounded(hashed: list[int]) -> None:
    chains = PromptChains(1)
    for n in range(3 * VARIANTS):
        chains.name(GenerateRequest("r", TokenIds.of([1000 + n, 5]), session="s"))
    assert len(chains._sessions[tenant_key(""), "s"]) == VARIANTS


def test_tenants_share_no_hash() -> None:
    chains = PromptChains(2)
    a, b = (GenerateRequest("r", TokenIds.of([1, 2, 3, 4]), tenant=t, session="s") for t in ("a", "b"))
    chains.name(a)
    chains.name(b)
    assert a.hashes[:HASH_BYTES] != b.hashes[:HASH_BYTES]
