"""Readers of JSON from other programs, processes and runs: bounded in size, depth and numbers, with one
exception for all errors.

`json.loads` responds to hostile text with five kinds of exceptions, or with values that break later: a
`RecursionError` for deep nesting, integers of thousands of digits, floats that become infinite, strings that
can't be written again. Here each of them is a `JsonError`, which is a `ValueError`.
"""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, TypeVar

MAX_BYTES = 64 << 20
"""Maximum length of a text, unless the caller passes another bound."""

MAX_DEPTH = 64
"""Maximum nesting of lists and objects: far more than any format that Panax reads, far less than Python's
stack."""

MAX_DIGITS = 40
"""Maximum number of digits of an integer: 128 bits. Tokenizers write 10**30 for "no limit"."""

T = TypeVar("T", dict[str, Any], list[Any])

_KINDS = {dict: "an object", list: "a list"}
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """Text that is not JSON of the expected form, or exceeds a bound; the message names the error, but not
    the source of the text."""


def parse(text: str | bytes, *, max_bytes: int = MAX_BYTES, constants: bool = False) -> Any:
    """Parse a JSON text.

    Args:
        text: The text; bytes are UTF-8.
        max_bytes: Maximum length of the text; characters, for a string.
        constants: True to accept NaN, Infinity and -Infinity, which Python writes but JSON does not define.

    Raises:
        JsonError: The text is not JSON, too long, nested deeper than `MAX_DEPTH`, or holds a number or a string
            that no other program could read.
    """
    if len(text) > max_bytes:
        raise JsonError(f"it is {len(text):,} bytes long; at most {max_bytes:,} are read")
    try:
        if not isinstance(text, str):
            text = text.decode("utf-8-sig")
        value = (_WITH_CONSTANTS if constants else _STRICT).decode(text)
    except JsonError:
        raise
    except RecursionError:
        raise JsonError(f"it is nested deeper than {MAX_DEPTH} lists and objects") from None
    except ValueError as error:
        raise JsonError(f"it is not JSON: {error}") from error
    _check_depth(value)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise JsonError("a string in it holds half of a surrogate pair, which is not a character") from None
    return value


def parse_as(kind: type[T], text: str | bytes, *, max_bytes: int = MAX_BYTES, constants: bool = False) -> T:
    """Parse a JSON text that is an object or a list.

    Args:
        kind: `dict` or `list`.
        text, max_bytes, constants: As for `parse`.

    Raises:
        JsonError: As for `parse`, or the value is of another type.
    """
    value = parse(text, max_bytes=max_bytes, constants=constants)
    if not isinstance(value, kind):
        raise JsonError(f"it holds {_KINDS.get(type(value), f'a {type(value).__name__}')}; expected {_KINDS[kind]}")
    return value


def read(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES, constants: bool = False) -> Any:
    """Read the value of a JSON file.

    Raises:
        JsonError: As for `parse`, or the path is not a regular file (reading a pipe would block).
        OSError: The file can't be read.
    """
    return parse(read_bytes(path, max_bytes), max_bytes=max_bytes, constants=constants)


def read_as(kind: type[T], path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES, constants: bool = False) -> T:
    """Read a JSON file that holds an object or a list.

    Raises:
        JsonError: As for `parse_as`, or the path is not a regular file.
        OSError: The file can't be read.
    """
    return parse_as(kind, read_bytes(path, max_bytes), max_bytes=max_bytes, constants=constants)


def read_bytes(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> bytes:
    """Read the bytes of a regular file of at most `max_bytes`.

    Raises:
        JsonError: The file is longer than `max_bytes`, or not a regular file.
        OSError: The file can't be read.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    descriptor = os.open(Path(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        file_stat = os.fstat(file.fileno())
        if stat.S_ISDIR(file_stat.st_mode):
            raise IsADirectoryError(f"{path} is a folder")
        if not stat.S_ISREG(file_stat.st_mode):
            raise JsonError("it is not a regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise JsonError(f"it is {max(file_stat.st_size, len(data)):,} bytes long; at most {max_bytes:,} are read")
    return data


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise JsonError(f"it is nested deeper than {MAX_DEPTH} lists and objects")


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise JsonError(f"an integer in it has {len(text):,} digits; at most {MAX_DIGITS} are read")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise JsonError(f"a number in it exceeds the range of float64: {text[:20]}")
    return value


def _constant(text: str) -> float:
    raise JsonError(f"it holds {text}, which is not JSON")


_STRICT = json.JSONDecoder(parse_float=_float, parse_int=_integer, parse_constant=_constant)
_WITH_CONSTANTS = json.JSONDecoder(parse_float=_float, parse_int=_integer)
