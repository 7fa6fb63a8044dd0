"""Hostile templates end with an error, soon and without taking the machine's memory."""

from __future__ import annotations

import resource

import pytest

from bien.core.errors import UserError
from bien.core.text.sandbox import LENGTH, STEPS
from bien.core.text.template import ChatTemplate

USER = [{"role": "user", "content": "hello world\n"}]
N = "1000000000"


def refused(source: str) -> str:
    with pytest.raises(UserError) as caught:
        ChatTemplate(source).render(USER, {"big": "x" * 100_000})
    assert caught.value.status == 400 and caught.value.field == "messages"
    return str(caught.value)


@pytest.fixture(autouse=True)
def little_memory() -> object:
    """What is refused is never made: a gigabyte more than there is now would be an error here."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 900_000_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * %s }}",
        "{{ %s * 'x' }}",
        "{{ [0] * %s }}",
        "{{ (1, 2) * %s }}",
        "{{ 'x' | center(%s) }}",
        "{{ 'x'.center(%s) }}",
        "{{ 'x'.ljust(%s) }}",
        "{{ 'x'.rjust(width=%s) if false else 'x'.zfill(%s) }}",
        "{{ 'x' | indent(%s, true) }}",
        "{{ '\\n\\n' | indent(big * 5000, true) }}",
        "{{ '\\t' | string | list | batch(%s, 'x') | list }}",
        "{{ '\\t'.expandtabs(%s) }}",
        "{{ {'a': 1} | tojson(indent=%s) }}",
        "{{ '%%1000000000d' %% 1 }}",
        "{{ '%%*d' %% (%s, 1) }}",
        "{{ '%%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w='%s') }}",
        "{{ '{a[0]:>1000000000}'.format_map({'a': [1]}) }}",
        "{{ 10 ** %s }}",
        "{{ (2 ** 3000) * (2 ** 3000) }}",
        "{{ (1).to_bytes(%s, 'big') }}",
        "{{ big.replace('x', big) }}",
        "{{ big | replace('x', big) }}",
        "{{ big.join(big) }}",
        "{{ big | list | join(big) }}",
        "{{ big.translate({120: big}) }}",
        "{{ lipsum(n=%s) }}",
        "{%% for i in range(%s) %%}{%% endfor %%}",
        "{{ range(%s) | list }}",
        "{{ big | wordwrap(1, wrapstring=big) }}",
    ],
)
def test_what_would_be_huge_is_not_made(source: str) -> None:
    text = refused(source.replace("%s", N).replace("%%", "%"))
    assert any(w in text for w in ("longer than", "width that", "Range too big", "undefined", "steps")), text


@pytest.mark.parametrize(
    "source",
    [
        # Doubling, by every way to put texts together.
        *(
            f"{{% set n = namespace(s='x') %}}{{% for i in range(99) %}}{step}{{% endfor %}}"
            for step in (
                "{% set n.s = n.s + n.s %}",
                "{% set n.s = n.s ~ n.s %}",
                "{% set n.s = [n.s, n.s] | join %}",
                "{% set n.s = '%s%s' % (n.s, n.s) %}",
                "{% set n.s = '{}{}'.format(n.s, n.s) %}",
                "{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}",
                "{% set n.s = (n.s | list) + (n.s | list) %}",
            )
        ),
        # A small nest of lists that is endless as a text.
        *(
            "{% set n = namespace(s=[1]) %}{% for i in range(40) %}{% set n.s = [n.s, n.s] %}{% endfor %}"
            + end
            for end in (
                "{{ n.s }}",
                "{{ n.s | tojson }}",
                "{{ n.s ~ '' }}",
                "{{ n.s | string | length }}",
                "{{ n.s | upper | length }}",
                "{{ '%s' % n.s }}",
                "{{ '{}'.format(n.s) }}",
                "{{ n.s | join(',') }}",
            )
        ),
        "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}",
    ],
)
def test_what_grows_is_stopped(source: str) -> None:
    assert any(w in refused(source) for w in (f"longer than {LENGTH:,}", "recursion"))


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% for i in range(n) %}{{ m(n) }}{% endfor %}{% endmacro %}{{ m(2) }}",
        "{% for i in range(99999) %}{% set s = big.upper() %}{% endfor %}",
        "{% for i in range(99999) %}{% set s = big | upper %}{% endfor %}",
        "{% set long %}{% for i in range(99999) %}{% for j in range(99) %}"
        + "x" * 700
        + "{% endfor %}{% endfor %}"
        "{% endset %}",
    ],
)
def test_loops_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bien.core.text.sandbox.STEPS", STEPS // 20)
    assert any(w in refused(source) for w in (f"more than {STEPS // 20:,} steps", "recursion"))


def test_a_long_conversation_is_far_from_the_bounds() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
        "{% else %}{{ m.content | trim ~ '<|im_end|>' }}{% endif %}{{ m | tojson }}{% endfor %}"
    )
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": "some words of code " * 200} for i in range(1000)
    ]
    assert len(ChatTemplate(source).render(messages)) > 7_000_000


def test_one_rendering_does_not_spend_the_budget_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bien.core.text.sandbox.STEPS", 3000)
    template = ChatTemplate("{% for i in range(500) %}{{ i }}{% endfor %}")
    for _ in range(5):
        assert template.render(USER).endswith("498499")
