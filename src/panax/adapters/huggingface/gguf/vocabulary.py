"""A tokenizer of bytes and merges (tokenizer.json) as the entries of a GGUF file."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....core.errors import RecipeError
from ....data.text.special_tokens import read_companions
from ....system import json_reader

_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5
"""Types of tokens, by llama.cpp's numbers."""

_LLAMA3 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|"
    "\\s+(?!\\S)|\\s+"
)
_QWEN2 = _LLAMA3.replace("\\p{N}{1,3}", "\\p{N}")

_PRE = {_LLAMA3: "llama-bpe", _QWEN2: "qwen2"}
"""Expressions by which texts are split before merging, to llama.cpp's names."""


def read_vocabulary(folder: Path, vocab_size: int) -> dict[str, Any]:
    """Return the tokenizer's entries: tokens, their types, merges, end tokens and chat template.

    Args:
        vocab_size: Rows of the embedding; ids past the tokenizer's are marked unused.

    Raises:
        RecipeError: The tokenizer is of another kind.
    """
    raw = json_reader.read(folder / "tokenizer.json")
    model, added = raw.get("model") or {}, raw.get("added_tokens") or []
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise RecipeError(
            f"{folder / 'tokenizer.json'} is of the kind {model.get('type')!r}; GGUF files are written with byte-level BPE "
            f"tokenizers. Export without --gguf, and convert the folder by llama.cpp"
        )
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [_UNUSED] * vocab_size
    for token, number in model["vocab"].items():
        tokens[number], types[number] = token, _NORMAL
    for token in added:
        tokens[token["id"]], types[token["id"]] = token["content"], _CONTROL if token.get("special") else _USER
    entries: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre(raw.get("pre_tokenizer") or {}, folder),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.add_bos_token": False,
    }
    settings = _optional(folder / "tokenizer_config.json")
    ids = {token: number for number, token in enumerate(tokens)}
    for name in ("bos", "eos"):
        token = settings.get(f"{name}_token")
        token = token.get("content") if isinstance(token, Mapping) else token
        if token in ids:
            entries[f"tokenizer.ggml.{name}_token_id"] = ids[token]
    ends = _optional(folder / "generation_config.json").get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    if isinstance(ends[0], int):
        # The one that ends an answer; llama.cpp stops at the end of a turn too.
        entries["tokenizer.ggml.eos_token_id"] = ends[0]
        if len(ends) > 1:
            entries["tokenizer.ggml.eot_token_id"] = ends[1]
    return entries | _chat_templates(read_companions(folder).chat_templates())


def _chat_templates(templates: Mapping[str, str]) -> dict[str, Any]:
    """Return the entries of chat templates; llama.cpp selects templates other than the default by name."""
    others = {re.sub("[^a-zA-Z0-9]", "_", name): text for name, text in templates.items() if name != "default"}
    entries: dict[str, Any] = {f"tokenizer.chat_template.{name}": text for name, text in others.items()}
    if others:
        entries["tokenizer.chat_templates"] = list(others)
    return entries | ({"tokenizer.chat_template": templates["default"]} if "default" in templates else {})


def _pre(pre: Mapping[str, Any], folder: Path) -> str:
    """Return llama.cpp's name of how texts are split before merging."""
    parts = pre.get("pretokenizers") if pre.get("type") == "Sequence" else [pre]
    for part in parts or []:
        if part.get("type") == "Split":
            expression = (part.get("pattern") or {}).get("Regex")
            if expression in _PRE:
                return _PRE[expression]
        elif part.get("type") == "ByteLevel" and part.get("use_regex", True) and not part.get("add_prefix_space"):
            return "gpt-2"
    raise RecipeError(
        f"{folder / 'tokenizer.json'} splits texts in a way that has no name in llama.cpp here; export without --gguf, and "
        f"convert the folder by llama.cpp"
    )


def _optional(path: Path) -> dict[str, Any]:
    value = json_reader.read(path) if path.is_file() else {}
    return value if isinstance(value, dict) else {}
