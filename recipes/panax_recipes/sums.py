"""Sums of two numbers for the first runs of reinforcement learning. Made on this machine, with a tokenizer."""

import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from panax.data import BytePairTokenizer, PretrainedTokenizer, TextFiles
from panax.data.files.cache import cache_directory, read_or_build

from .choices import write_records

NAME = "recipe-sums-v3"

NUMBERS = range(10, 100)

ERRORS = 0, 1, 1, -1, -1
"""Errors of the answers for supervised training: a fifth is right."""

EPOCHS = 8
"""Answers to each sum for supervised training, each with an error of its own."""

HELD_OUT = 500
"""Number of sums that no file for training has."""


def sums_folder() -> Path:
    """Return the folder with the files, which are made once and cached.

    - `answered.jsonl`: sums with answers, of which a fifth is right; the others are one too large or too small.
    - `prompts.jsonl`: the same sums, with the right answer for the reward.
    - `questions.jsonl`: sums that are in no other file.
    - `tokenizer`: of bytes, so that each digit is a token.
    """
    root = cache_directory(None)
    return read_or_build(root, NAME, build=_make, read=lambda folder: folder)


def sums_tokenizer() -> PretrainedTokenizer:
    return PretrainedTokenizer(path=str(sums_folder() / "tokenizer"))


def is_right(answer: str, record: Mapping[str, Any]) -> float:
    """Return 1 for the right sum, else 0."""
    found = re.fullmatch(r"\s*(\d+)\s*", answer)
    return float(found is not None and int(found[1]) == int(record["answer"]))


def _make(folder: Path) -> None:
    draw = random.Random(0)
    pairs = [(one, other) for one in NUMBERS for other in NUMBERS]
    draw.shuffle(pairs)
    held_out, trained = pairs[:HELD_OUT], pairs[HELD_OUT:]
    write_records(
        folder / "answered.jsonl",
        (
            {"prompt": f"{a}+{b}=", "answer": str(a + b + draw.choice(ERRORS))}
            for _ in range(EPOCHS)
            for a, b in trained
        ),
    )
    write_records(folder / "prompts.jsonl", ({"prompt": f"{a}+{b}=", "answer": a + b} for a, b in trained))
    write_records(folder / "questions.jsonl", ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in held_out))
    texts = folder / "texts.txt"
    texts.write_text("\n".join(f"{a}+{b}={a + b}" for a, b in trained[:100]))
    # One id for each byte, and the end of a document: no two digits are one token.
    BytePairTokenizer(vocab_size=257).train(TextFiles(paths=(str(texts),))).save(folder / "tokenizer")
