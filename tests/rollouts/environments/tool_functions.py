"""Tools and environments of these tests, which processes import from this file."""

import time
from typing import Literal

from panax.rollouts import Reply


def add(a: int, b: int = 1) -> int:
    """Add two
    numbers.

    The sum is exact.

    Args:
        a: The first, which
            must be there.
        b (int): The second.

    Returns:
        The sum.
    """
    return a + b


def look_up(name: str, record: dict, state: dict) -> dict:
    """Return the record's number."""
    state["looked"] = state.get("looked", 0) + 1
    return {"name": name, "number": record["number"], "looked": state["looked"]}


def forget(state: dict) -> str:
    """Forget the state."""
    state.clear()
    return "forgotten"


def fails(kind: Literal["raises", "hangs", "object"]) -> object:
    """Fail."""
    if kind == "raises":
        raise ValueError("it is not so")
    if kind == "hangs":
        time.sleep(60)
    return object()


def many(a: int, b: float, c: bool, d: list[str], e: dict, f: str | None = None) -> str:
    return "all"


def replies(messages, record, state):
    """Reply to each turn but `done` with its length."""
    text = messages[-1]["content"]
    if text == "done":
        return None
    if text == "last":
        return Reply([{"role": "user", "content": "it was the last"}], "ended", is_over=True)
    turns = 1 if state is None else state + 1
    return Reply([{"role": "user", "content": f"{record['number']}:{len(text)}"}], turns)


def strange_role(messages, record, state):
    return [{"role": "oracle", "content": "hm"}]


def without_annotation(a):
    return a


def with_rest(*a: int):
    return a


def with_object(a: object):
    return a
