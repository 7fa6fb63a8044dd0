"""Every built-in parser conforms."""

from __future__ import annotations

import pytest

from bien.core.providers import Context, NoParameters
from bien.gateway.parsing.parser import Parser
from bien.gateway.testing import ParserSuite
from bien.gateway.testing.turns import Turn
from bien.plugins.parsers import deepseek, glm, harmony, hermes, kimi_k2, kimi_k3, qwen3_coder
from tests.plugins.parsers import writers

CASES = {
    "hermes": (hermes, writers.hermes, ""),
    "glm-4.5": (glm, writers.glm45, ""),
    "glm-4.7": (glm, writers.glm47, "<|assistant|><think>"),
    "qwen3-coder": (qwen3_coder, writers.qwen3_coder, ""),
    "kimi-k2": (kimi_k2, writers.kimi_k2, ""),
    "kimi-k3": (kimi_k3, writers.kimi_k3, "<|open|>think<|sep|>"),
    "deepseek-v3": (deepseek, writers.deepseek_v3, ""),
    "deepseek-v3.1": (deepseek, writers.deepseek_v31, ""),
    "deepseek-v4": (deepseek, writers.deepseek_v4, "<｜Assistant｜><think>"),
    "harmony": (harmony, writers.harmony, "<|start|>assistant"),
}


def suite(name: str) -> type[ParserSuite]:
    module, writer, prompt = CASES[name]

    class Suite(ParserSuite):
        tail = prompt
        rounds = 5

        def build(self) -> Parser:
            parser: Parser = next(iter(module.bien_providers())).factory(NoParameters(), Context())
            return parser

        def write(self, turn: Turn) -> str:
            return writer(turn)

        def call_id(self, name: str, index: int) -> str:
            return f"functions.{name}:{index}" if module is kimi_k2 else ""

    return Suite


TESTS = [name for name in dir(ParserSuite) if name.startswith("test_")]


@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("name", CASES)
def test_conforms(name: str, test: str) -> None:
    getattr(suite(name)(), test)()
