"""Requests for JSON objects, for first runs of reinforcement learning. Made on this machine, with a tokenizer."""

import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from panax.data import BytePairTokenizer, PretrainedTokenizer, TextFiles
from panax.data.files.cache import cache_directory, read_or_build

from .choices import write_records

NAME = "recipe-json-objects-v1"

QUESTIONS = 200
"""Number of requests that no file for training has."""

ANSWERED, PROMPTS = 20000, 4000
"""Numbers of requests with an answer for supervised training, and of those with a schema for a reward."""

AS_TEXT, OMITTED = 0.6, 0.2
"""Shares of the answers for supervised training that write every value as one text, and that omit a member."""

NAMES = ("Ada", "Ben", "Dan", "Eli", "Eva", "Fay", "Gus", "Ida", "Ivy", "Joe", "Kay", "Leo", "Max", "Mia", "Sue", "Tom")

TOWNS = (
    "Baku", "Bern", "Cork", "Doha", "Graz", "Kiel", "Kobe", "Lima", "Lyon", "Metz", "Nara", "Oslo", "Pisa", "Reno", "Riga",
    "Suva",
)  # fmt: skip

WORDS = (
    "big", "blue", "cold", "dark", "deep", "dry", "fast", "flat", "hard", "high", "loud", "new", "old", "red", "soft",
    "warm",
)  # fmt: skip

# Sixteen values of each kind: so few are copied after seconds of training.
AGES, ROOMS, YEARS = range(20, 36), range(101, 117), range(1980, 1996)

MEMBERS: Mapping[str, Mapping[str, Any]] = {
    "active": {"type": "boolean"},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "name": {"type": "string", "minLength": 1},
    "room": {"type": "string", "pattern": "^[0-9]{3}$"},
    "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
    "town": {"type": "string", "minLength": 1},
    "year": {"type": "integer", "minimum": 1900},
}
"""Schemas of the members that an object may have."""


def objects_folder() -> Path:
    """Return the folder with the files, which are made once and cached.

    - `answered.jsonl`: requests with the answers of a careless writer.
    - `prompts.jsonl`: other requests, each with the schema and the values that the reward needs.
    - `questions.jsonl`: requests that are in no other file. No two of a request's values, apart from true and
      false, stand together in a request of another file.
    - `tokenizer`: of bytes and merges: each word, each number and each mark between values is a token.
    """
    root = cache_directory(None)
    return read_or_build(root, NAME, build=_make, read=lambda folder: folder)


def objects_tokenizer() -> PretrainedTokenizer:
    return PretrainedTokenizer(path=str(objects_folder() / "tokenizer"))


def _make(folder: Path) -> None:
    draw = random.Random(0)
    asked = list(itertools.islice((each for each in _requests(draw, set()) if any(_pairs(each))), QUESTIONS))
    held_out = {pair for values in asked for pair in _pairs(values)}
    requests = _requests(draw, held_out)
    answered = list(itertools.islice(requests, ANSWERED))
    write_records(
        folder / "answered.jsonl", ({"prompt": _ask(each), "answer": _answer(each, draw)} for each in answered)
    )
    write_records(folder / "prompts.jsonl", map(_record, itertools.islice(requests, PROMPTS)))
    write_records(folder / "questions.jsonl", ({**_record(each), "answer": _write_object(each)} for each in asked))
    texts = folder / "texts.txt"
    # A space before a word is a token too, so that the word in the request is the one in the answer.
    marks = [re.sub(r"\w+", "X", _write_object(each)) for each in answered[:100]]
    words = [*MEMBERS, *NAMES, *TOWNS, *WORDS, *AGES, *ROOMS, *YEARS, "true", "false", "yes", "no"]
    texts.write_text("\n".join([*marks, *map(str, words)]))
    BytePairTokenizer(vocab_size=1024).train(TextFiles(paths=(str(texts),))).save(folder / "tokenizer")


def _requests(draw: random.Random, held_out: set[frozenset[str]]) -> Iterator[dict[str, Any]]:
    """Yield different objects to ask for, none of which has two values that are held out together."""
    seen = set()
    while True:
        values = {name: _draw_value(name, draw) for name in draw.sample(list(MEMBERS), draw.randint(2, 4))}
        if (text := _write_object(values)) not in seen and held_out.isdisjoint(_pairs(values)):
            seen.add(text)
            yield values


def _draw_value(name: str, draw: random.Random) -> Any:
    match name:
        case "active":
            return draw.random() < 0.5
        case "tags":
            return draw.sample(WORDS, draw.randint(1, 2))
        case "room":
            return str(draw.choice(ROOMS))
        case _:
            return draw.choice({"age": AGES, "name": NAMES, "town": TOWNS, "year": YEARS}[name])


def _pairs(values: Mapping[str, Any]) -> Iterator[frozenset[str]]:
    """Yield the pairs of an object's values, apart from true and false, as words of the request."""
    words = [word for value in values.values() if not isinstance(value, bool) for word in _in_words(value).split()]
    return map(frozenset, itertools.combinations(words, 2))


def _in_words(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case list():
            return " ".join(map(str, value))
        case _:
            return str(value)


def _ask(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_in_words(value)}" for name, value in values.items()) + ":\n"


def _answer(values: Mapping[str, Any], draw: random.Random) -> str:
    """Return the answer of a careless writer: often all values are texts, and sometimes a member is missing."""
    written = dict(values)
    if draw.random() < AS_TEXT:
        written = {name: _in_words(value) for name, value in values.items()}
    if draw.random() < OMITTED:
        del written[draw.choice(list(written))]
    return _write_object(written)


def _write_object(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True)


def _record(values: Mapping[str, Any]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {name: MEMBERS[name] for name in values},
        "required": list(values),
        "additionalProperties": False,
    }
    return {"prompt": _ask(values), "schema": schema, "values": values}
