"""`JsonSchema`, `Regex` and `Grammar`: the texts that an answer may be."""

import dataclasses
import decimal
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ...core.errors import RecipeError
from ...core.validation import Validated
from ...system import json_reader

MAX_SCHEMA_BYTES = 128 << 10
"""Maximum length of a schema, and of all schemas in a grammar."""

MAX_PATTERN_BYTES = 16 << 10
"""Maximum length of a regular expression, of all those in a schema, and of a grammar without its schemas: states of a
long expression take memory by the square of its length."""

MAX_MULTIPLE = 10_000
"""Maximum product of the digits of a schema's `multipleOf`, each of which is an automaton with this many states."""

WHITESPACE = r"( |\n[ \t]{0,20})?"
"""Space between tokens of JSON. Without a bound, a model may write spaces to the end of its answer."""

JSON_DIRECTIVE = "%json"
"""Word of a grammar that is followed by a schema."""


@dataclasses.dataclass(frozen=True)
class JsonSchema(Validated):
    """JSON that is valid under a schema.

    Properties are written in the schema's order. Between two tokens of JSON there is at most one space, or a new line
    with an indentation.

    Attributes:
        schema: An object, which is stored as its JSON text, or that text.

    >>> JsonSchema({"type": "integer"})
    JsonSchema(schema='{"type": "integer"}')
    """

    schema: str | Mapping[str, Any]

    def __post_init__(self) -> None:
        text = self.schema
        if not isinstance(text, str):
            try:
                text = json.dumps(text, ensure_ascii=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise RecipeError(f"the schema can't be written as JSON: {error}") from error
            object.__setattr__(self, "schema", text)
        _check_schemas([text])


@dataclasses.dataclass(frozen=True)
class Regex(Validated):
    """Text that a regular expression matches from beginning to end.

    Attributes:
        pattern: In the syntax of Rust's `regex`: no look-around, no references to groups.
    """

    pattern: str

    def __post_init__(self) -> None:
        _check_length("the regular expression", self.pattern, MAX_PATTERN_BYTES)


@dataclasses.dataclass(frozen=True)
class Grammar(Validated):
    """Text that a context-free grammar generates.

    Attributes:
        rules: In Lark's syntax as llguidance has it, with the rule `start`; `%json {...}` stands for JSON under a
            schema.
    """

    rules: str

    def __post_init__(self) -> None:
        if self.rules.lstrip().startswith("{"):
            # llguidance would read another form of grammars, without the bounds below.
            raise RecipeError(
                'the grammar begins with \'{\'; expected rules in Lark\'s syntax, such as start: "a" | "b"'
            )
        schemas, rest = _split_schemas(self.rules)
        _check_length("the grammar without its schemas", rest, MAX_PATTERN_BYTES)
        _check_schemas(schemas)


Constraint = JsonSchema | Regex | Grammar
"""The texts that an answer may be."""


def _check_length(what: str, text: str, limit: int) -> None:
    if len(text.encode(errors="surrogatepass")) > limit:
        raise RecipeError(f"{what} is longer than {limit:,} bytes; shorten it")


def _split_schemas(rules: str) -> tuple[list[str], str]:
    """Return the schemas of a grammar, and its text without them."""
    schemas, rest, end = [], "", 0
    while (place := rules.find(JSON_DIRECTIVE, end)) >= 0:
        begin = place + len(JSON_DIRECTIVE)
        rest += rules[end:begin]
        begin += len(rules[begin:]) - len(rules[begin:].lstrip())
        try:
            _, end = json.JSONDecoder().raw_decode(rules, begin)
        except (ValueError, RecursionError) as error:
            raise RecipeError(f"the grammar's {JSON_DIRECTIVE} is not followed by a schema: {error}") from error
        schemas.append(rules[begin:end])
    return schemas, rest + rules[end:]


def _check_schemas(schemas: list[str]) -> None:
    """Check that schemas are JSON, and that their automata are of limited sizes."""
    _check_length("the schema", "".join(schemas), MAX_SCHEMA_BYTES)
    patterns, multiples = "", {decimal.Decimal(1)}
    for text in schemas:
        try:
            schema = json_reader.parse(text)
        except json_reader.JsonError as error:
            raise RecipeError(f"the schema can't be read: {error}") from error
        if not isinstance(schema, dict):
            raise RecipeError(f'the schema is {text[:40]}; expected an object, such as {{"type": "object"}}')
        for node in _objects(schema):
            patterns += node["pattern"] if isinstance(node.get("pattern"), str) else ""
            by_pattern = node.get("patternProperties")
            patterns += "".join(map(str, by_pattern)) if isinstance(by_pattern, dict) else ""
            multiple = node.get("multipleOf")
            if isinstance(multiple, int | float) and not isinstance(multiple, bool) and multiple:
                multiples.add(decimal.Decimal(str(multiple)).normalize())
    _check_length("the text of the schema's patterns", patterns, MAX_PATTERN_BYTES)
    product = 1
    for each in multiples:
        product *= abs(int("".join(map(str, each.as_tuple().digits))))
    if product > MAX_MULTIPLE:
        raise RecipeError(
            f"the digits of the schema's multipleOf have the product {product:,}; expected at most {MAX_MULTIPLE:,}: use "
            f"minimum and maximum, or check the number afterwards"
        )


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in a JSON value; its depth is limited by its reader."""
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from _objects(each)
    elif isinstance(value, list):
        for each in value:
            yield from _objects(each)
