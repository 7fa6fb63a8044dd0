"""Tiny tokenizers built on the spot: byte-level (merges, control tokens) and byte-fallback (metaspace)."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

CONTROL = ["<|im_start|>", "<|im_end|>", "<s>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("<", "|"), ("|", ">"), ("i", "m")]


def byte_level(*, bos: bool = False) -> Tokenizer:
    """Ids 0-2 control tokens, then the 256 bytes, then merges."""
    words = CONTROL + sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in MERGES]
    vocab = {w: i for i, w in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 2)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As SentencePiece models have it: words with a leading "▁", other characters as <0xNN> tokens."""
    words = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    words += ["▁", "▁a", "a", "b", "▁b", "▁ab"]
    vocab = {w: i for i, w in enumerate(words)}
    merges = [("▁", "a"), ("▁", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in words[:3]])
    return tokenizer


def write_folder(folder: Path, template: str | None = CHATML) -> Path:
    """A model folder's text files."""
    byte_level().save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
