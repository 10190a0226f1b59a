"""JSON is read by one reader: `json.loads`, `json.load` and decoders stand elsewhere only with a stated reason."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

EXCEPTIONS = {
    "panax/system/json_reader.py": "the reader",
    "panax/core/install_hints.py": "what pip has noted in this environment, in a room below the reader's",
    "panax/data/formats/json_records.py": "records of a user's data, which it reads by pieces and whose doubled names it reports",
    "panax/data/text/tokenizer.py": "what the tokenizers library serialized in this process",
    "panax/generate/constraints/settings.py": "where a schema in a grammar ends; its text is read by the reader",
    "panax/data/loading/iterable.py": "a copy of what this process serialized",
    "panax_compare/published_study.py": "a copy of what this process serialized",
    "panax_compare/results.py": "a copy of what this process serialized",
}


def readers_in(source: str) -> list[int]:
    """The lines on which JSON is read by the standard library."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "json"
            and node.attr in ("loads", "load", "JSONDecoder", "decoder")
        )
        or (isinstance(node, ast.ImportFrom) and node.module == "json")
    ]


def test_json_is_read_by_the_reader():
    found = {
        f"{path.relative_to(SOURCE)}:{line}"
        for path in SOURCE.rglob("*.py")
        if str(path.relative_to(SOURCE)) not in EXCEPTIONS
        for line in readers_in(path.read_text(encoding="utf-8"))
    }
    assert not found, "read JSON of others with panax.system.json_reader"


@pytest.mark.parametrize(
    "planted", ["json.loads(text)", "json.load(file)", "json.JSONDecoder()", "from json import loads"]
)
def test_another_reader_is_seen(planted):
    assert readers_in(f"import json\n\n{planted}\n") == [3]


def test_exceptions_are_still_needed():
    assert all(readers_in((SOURCE / name).read_text(encoding="utf-8")) for name in EXCEPTIONS)
