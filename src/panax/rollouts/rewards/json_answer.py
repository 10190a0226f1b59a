"""`json_answer`: a reward for answers in JSON that are valid by the record's schema and hold its values."""

import functools
import json
from collections.abc import Mapping
from typing import Any

from ...core.errors import RecipeError
from ...core.install_hints import install_command
from ...system import json_reader
from .stock import record_field

try:
    import jsonschema.validators
    import referencing
    import referencing.exceptions
except ImportError as import_error:
    raise RecipeError(
        f"the reward json_answer needs jsonschema, which can't be imported ({import_error}); run: {install_command('rl')}"
    ) from import_error

MAX_ANSWER_CHARACTERS = 1 << 20
"""Maximum length of an answer that is parsed; a longer one has the reward 0."""


def json_answer(answer: str, record: Mapping[str, Any]) -> float:
    """Return 1 if the whole answer is JSON that is valid by `record["schema"]` and holds `record["values"]`, 0
    otherwise.

    A schema alone rewards any answer of that form, such as the same one to every prompt.

    Args:
        record: `schema` is a JSON schema, by default of draft 2020-12, without references to other documents;
            `values` are members that the answer must have, each equal in JSON: 1 and 1.0 are, 1 and true aren't.

    Raises:
        ValueError: The record has no valid schema, or no mapping of values.

    >>> schema = {"type": "object", "required": ["age"], "properties": {"age": {"type": "integer"}}}
    >>> json_answer('{"age": 7}', {"schema": schema, "values": {"age": 7}})
    1.0
    """
    schema, values = record_field(record, "schema"), record_field(record, "values")
    if not isinstance(values, Mapping):
        raise ValueError(f"the record's values are {values!r:.80}; expected an object with the members of the answer")
    validator = _validator(json.dumps(schema))
    try:
        value = json_reader.parse(answer, max_bytes=MAX_ANSWER_CHARACTERS)
    except json_reader.JsonError:
        return 0.0
    try:
        is_valid = validator.is_valid(value)
    except referencing.exceptions.Unresolvable as error:
        raise ValueError(f"the record's schema refers to {error.ref!r:.80}, which it does not contain") from None
    holds = isinstance(value, dict) and all(name in value and _equal(value[name], values[name]) for name in values)
    return float(is_valid and (holds or not values))


@functools.lru_cache(maxsize=1024)
def _validator(schema: str) -> Any:
    value = json_reader.parse(schema)
    try:
        kind = jsonschema.validators.validator_for(value, default=jsonschema.validators.Draft202012Validator)
        kind.check_schema(value)
    except (jsonschema.SchemaError, AttributeError, TypeError) as error:
        raise ValueError(f"the record's schema is invalid: {getattr(error, 'message', error)!s:.200}") from None
    # An empty registry: nothing is fetched.
    return kind(value, registry=referencing.Registry())


def _equal(first: Any, second: Any) -> bool:
    """Return True for equal JSON values; Python's own comparison takes True for 1."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_equal(first[name], second[name]) for name in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_equal, first, second))
    return first == second
