"""Questions for the first runs of post-training: which of two words? Made on this machine, with a tokenizer."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from panax.data import BytePairTokenizer, PretrainedTokenizer, TextFiles
from panax.data.files.cache import cache_directory, read_or_build

NAME = "recipe-choices-v1"

WORDS = (
    "alder", "amber", "apple", "arrow", "aspen", "basil", "beach", "bench", "berry", "birch", "board", "brass",
    "bread", "brick", "brook", "cabin", "candy", "cedar", "chair", "chalk", "clock", "cloud", "coral", "daisy",
    "eagle", "fence", "field", "flute", "glass", "grape", "heron", "holly", "honey", "ivory", "jewel", "larch",
    "lemon", "lilac", "maple", "olive", "pearl", "plate", "robin", "scarf", "stone", "tiger", "tulip", "wheat",
)  # fmt: skip
"""Words of one length: an answer's length tells nothing about it."""

QUESTIONS = 200
"""Number of questions that no file for training has."""


def choices_folder() -> Path:
    """Return the folder with the files, which are made once and cached.

    - `either.jsonl`: questions, each answered by one of its two words at random.
    - `first.jsonl`: other questions, answered by the word that comes first in the alphabet.
    - `pairs.jsonl`: the same questions, with the first word as the chosen answer and the other one as the rejected one.
    - `questions.jsonl`: questions of two words that stand together in no other file, with the first word as their answer.
    - `tokenizer`: of bytes and merges, trained on these questions.
    """
    root = cache_directory(None)
    return read_or_build(root, NAME, build=_make, read=lambda folder: folder)


def choices_tokenizer() -> PretrainedTokenizer:
    return PretrainedTokenizer(path=str(choices_folder() / "tokenizer"))


def _make(folder: Path) -> None:
    draw = random.Random(0)
    both = [(one, other) for one in WORDS for other in WORDS if one != other]
    draw.shuffle(both)
    # Both orders of two words are in the same file.
    held_out = {frozenset(pair) for pair in both[:QUESTIONS]}
    trained = [pair for pair in both if frozenset(pair) not in held_out]
    asked = [pair for pair in both if frozenset(pair) in held_out]

    def prompts(pairs: list[tuple[str, str]], count: int) -> Iterable[tuple[str, tuple[str, str]]]:
        for number in range(count):
            one, other = pair = pairs[number % len(pairs)]
            yield f"{draw.randrange(1000):03d} {one} or {other}?", pair

    either = [{"prompt": text, "answer": f" {draw.choice(pair)}"} for text, pair in prompts(trained, 4000)]
    ordered = [(text, *sorted(pair)) for text, pair in prompts(trained, 2000)]
    write_records(folder / "either.jsonl", either)
    write_records(folder / "first.jsonl", ({"prompt": text, "answer": f" {first}"} for text, first, _ in ordered))
    pairs = ({"prompt": text, "chosen": f" {first}", "rejected": f" {last}"} for text, first, last in ordered)
    write_records(folder / "pairs.jsonl", pairs)
    questions = ({"prompt": text, "answer": min(pair)} for text, pair in prompts(asked, QUESTIONS))
    write_records(folder / "questions.jsonl", questions)
    texts = folder / "texts.txt"
    texts.write_text("\n".join(record["prompt"] + record["answer"] for record in either))
    BytePairTokenizer(vocab_size=320).train(TextFiles(paths=(str(texts),))).save(folder / "tokenizer")


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write records as JSON lines."""
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
