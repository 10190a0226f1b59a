"""Changes to bytes and to JSON, drawn from a generator: damage by a disk, a network or an attacker."""

import copy
import json
import random
from typing import Any

_EXTREMES = (
    0,
    1,
    2,
    -1,
    -2,
    127,
    128,
    255,
    2**15,
    2**16 - 1,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
)
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 0.5, -0.0, 2**31, 2**44, 2**63, 2**64, 10**30, -(2**63), 1e308, float("nan"), float("inf"),
    "", "x", "../../x", "/etc/passwd", "\ud800", "a" * 10_000, "\0", [], [[]], {}, {"a": 1}, [0] * 1000, [None],
)  # fmt: skip


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Bytes with one to three changes; more often near the beginning and the end, where headers are."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _CHANGES[rng.randrange(len(_CHANGES))](changed, rng)
    return bytes(changed)


def _place(data: bytearray, rng: random.Random) -> int:
    size = max(len(data), 1)
    match rng.randrange(4):
        case 0:
            return rng.randrange(min(size, 64))
        case 1:
            return size - 1 - rng.randrange(min(size, 64))
        case _:
            return rng.randrange(size)


def _run(data: bytearray, rng: random.Random) -> tuple[int, int]:
    begin = _place(data, rng)
    return begin, min(len(data), begin + rng.choice((1, 2, 4, 8, 16, 100, 1000)))


def _flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 8)) if data else 0):
        data[_place(data, rng)] ^= 1 << rng.randrange(8)


def _zeros(data: bytearray, rng: random.Random) -> None:
    begin, end = _run(data, rng)
    data[begin:end] = bytes(max(0, end - begin))


def _ones(data: bytearray, rng: random.Random) -> None:
    begin, end = _run(data, rng)
    data[begin:end] = b"\xff" * max(0, end - begin)


def _truncate(data: bytearray, rng: random.Random) -> None:
    del data[_place(data, rng) :]


def _duplicate(data: bytearray, rng: random.Random) -> None:
    begin, end = _run(data, rng)
    data[begin:begin] = data[begin:end] * rng.choice((1, 2, 50))


def _splice(data: bytearray, rng: random.Random) -> None:
    begin, end = _run(data, rng)
    to = _place(data, rng)
    data[to : to + end - begin] = data[begin:end]


def _delete(data: bytearray, rng: random.Random) -> None:
    begin, end = _run(data, rng)
    del data[begin:end]


def _insert(data: bytearray, rng: random.Random) -> None:
    at = _place(data, rng)
    data[at:at] = rng.randbytes(rng.choice((1, 4, 50)))


def _integer(data: bytearray, rng: random.Random) -> None:
    """Put an extreme number at the place of a possible field."""
    width, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "little", "big"))
    at = _place(data, rng)
    at -= at % rng.choice((1, 2, 4, 8))
    data[at : at + width] = (rng.choice(_EXTREMES) % 2 ** (8 * width)).to_bytes(width, order)


def _step(data: bytearray, rng: random.Random) -> None:
    """Make a length a little larger or smaller."""
    if data:
        at = _place(data, rng)
        data[at] = (data[at] + rng.choice((-2, -1, 1, 2))) % 256


_CHANGES = (
    _flip, _flip, _zeros, _ones, _truncate, _duplicate, _splice, _delete, _insert, _integer, _integer, _integer, _step,
)  # fmt: skip


def mutate_json(text: bytes, rng: random.Random) -> bytes:
    """JSON with one to three of its values replaced by others, of the same or another type; as bytes now and then."""
    if rng.random() < 0.25:
        return mutate(text, rng)
    try:
        root = json.loads(text)
    except (ValueError, RecursionError):
        return mutate(text, rng)
    holder = [root]
    for _ in range(rng.choice((1, 1, 2, 3))):
        place, key = rng.choice(_places(holder))
        place[key] = _another(place[key], rng)
        if isinstance(place, dict) and rng.random() < 0.15:
            del place[key]
    if rng.random() < 0.05:
        return b"[" * 100_000
    return json.dumps(holder[0]).encode()


def _places(value: Any) -> list[tuple[Any, Any]]:
    places: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(places) < 10_000:
        one = waiting.pop()
        items = one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ()
        for key, inside in items:
            places.append((one, key))
            waiting.append(inside)
    return places


def _another(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool) or rng.random() < 0.4:
        return copy.deepcopy(rng.choice(_VALUES))
    if isinstance(value, int):
        return rng.choice(
            (value + 1, value - 1, -value, value * 2**20, float(value), str(value), rng.choice(_EXTREMES))
        )
    if isinstance(value, str):
        return rng.choice((value[:-1], value + value, value.upper(), value[::-1], "", value + "\0"))
    value = copy.deepcopy(value)
    if isinstance(value, list) and value:
        return rng.choice((value[:-1], value + copy.deepcopy(value), value[::-1], [value], value * 3))
    if isinstance(value, dict) and value:
        return rng.choice((dict(list(value.items())[1:]), {**value, "more": copy.deepcopy(value)}, list(value)))
    if rng.random() < 0.1:
        for _ in range(300):
            value = [value]
        return value
    return copy.deepcopy(rng.choice(_VALUES))
