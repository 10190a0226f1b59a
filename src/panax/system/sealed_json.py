"""Small JSON records with a checksum of their contents, which other programs and failing disks may have changed."""

import json
from typing import Any

import xxhash

from . import json_reader


def json_checksum(value: Any) -> str:
    """Compute the xxh3 hash of a JSON value, 16 hexadecimal digits, whatever the order of its keys.

    >>> json_checksum({"a": 1, "b": 2}) == json_checksum({"b": 2, "a": 1}) != json_checksum({"a": 1, "b": 3})
    True
    """
    return _hash(value, (",", ":"))


def seal_json(name: str, value: Any) -> bytes:
    """Format a record of one value, under a name, with its checksum.

    >>> unseal_json(seal_json("record", [1, None]), "record")
    [1, None]
    """
    return json.dumps({"checksum": json_checksum(value), name: value}).encode()


def unseal_json(text: str | bytes, *names: str) -> Any:
    """Read a record that `seal_json` wrote, under the first of `names` that it has.

    Raises:
        ValueError: The text is another kind of record, or its checksum does not match.
    """
    outer = json_reader.parse(text, constants=True)
    name = next((each for each in names if isinstance(outer, dict) and each in outer), None)
    if name is None:
        raise ValueError(f"expected an object with {' or '.join(map(repr, names))}")
    # Version 0.1.1 sealed the text with spaces.
    if outer.get("checksum") not in (json_checksum(outer[name]), _hash(outer[name], (", ", ": "))):
        raise ValueError("its checksum does not match")
    return outer[name]


def _hash(value: Any, separators: tuple[str, str]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True, separators=separators).encode())
