"""A model's dialect is found by its chat template; a deployment may say another."""

from __future__ import annotations

from pathlib import Path

import pytest

from bien.core.compose import compose
from bien.core.deployment import parse_deployment
from bien.core.errors import PluginError
from bien.core.plugins import PluginManager
from bien.core.testing.text import CHATML
from bien.core.text.model import TextModel
from bien.core.text.template import ChatTemplate
from bien.gateway.parsing.dialects import TABLE, dialect_of
from tests.core.text.families import FAMILIES, write_family


@pytest.mark.parametrize(
    ("family", "parser"),
    [
        ("kimi", "kimi-k2"),
        ("qwen", "hermes"),
        ("glm", "glm"),
        ("deepseek", "deepseek"),
        ("gpt-oss", "harmony"),
        ("llama", "none"),
    ],
)
def test_families(tmp_path: Path, family: str, parser: str) -> None:
    if family == "glm":  # the small one's calls are written as the real one's are
        assert "<arg_key>" in FAMILIES[family].template
    assert dialect_of(TextModel.load(write_family(tmp_path, family)).template) == parser


def test_chatml_without_tools_is_hermes() -> None:
    assert dialect_of(ChatTemplate(CHATML)) == "hermes"
    assert dialect_of(ChatTemplate("{{ messages }}")) == dialect_of(None) == "none"


def test_every_row_names_a_parser_that_is_there() -> None:
    assert {name for name, _ in TABLE} | {"none"} == set(PluginManager.load("").names("parser"))


def test_a_deployment_may_choose() -> None:
    manager = PluginManager.load("")
    assert "parser" not in compose(parse_deployment({}), manager).gateway
    chosen = compose(parse_deployment({"gateway": {"parser": "glm"}}), manager).gateway["parser"]
    assert chosen.provider.name == "glm"
    with pytest.raises(PluginError, match="gateway.parser.use: no parser named 'qwen3'.*did you mean"):
        compose(parse_deployment({"gateway": {"parser": "qwen3"}}), manager)
