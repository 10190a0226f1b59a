"""Annotations for the planner of facts that a traced program does not show.

These are the trip count of a loop that is known only at run time, the frequency of each branch, and the
payload of a collective. They are stored in name scopes.
"""

import contextlib
import re
from collections.abc import Sequence
from typing import Any

import jax

_TURNS = re.compile(r"turns:(\d+)\.\.(\d+)")
_CARGO = re.compile(r"moving:([\w ]+)")
_SHARES = re.compile(r"shares:([\d.,]+)")


def declare_trip_count(expected: int, maximum: int) -> contextlib.AbstractContextManager[Any]:
    """Declare the expected and maximum trip count of the `while_loop` traced inside.

    >>> def loop(x):
    ...     with declare_trip_count(0, 7):
    ...         return jax.lax.while_loop(lambda y: y < 3, lambda y: y + 1, x)
    >>> find_trip_count(str(jax.make_jaxpr(loop)(0).eqns[0].source_info.name_stack))
    (0, 7)
    """
    return jax.named_scope(f"turns:{expected}..{maximum}")


def declare_branch_probs(*probs: float) -> contextlib.AbstractContextManager[Any]:
    """Declare how often each branch of the `cond` or `switch` traced inside is taken, on the busiest device.

    >>> def choice(x):
    ...     with declare_branch_probs(0.25, 0.75):
    ...         return jax.lax.cond(x > 0, lambda y: y, lambda y: -y, x)
    >>> find_branch_probs(str(jax.make_jaxpr(choice)(1.0).eqns[-1].source_info.name_stack))
    (0.25, 0.75)
    """
    return jax.named_scope("shares:" + ",".join(f"{share:.4f}" for share in probs))


def tag_comm(content: str) -> contextlib.AbstractContextManager[Any]:
    """Declare the content that the collectives traced inside send, such as "weights".

    >>> def send(x):
    ...     with tag_comm("weights"):
    ...         return x + 1
    >>> find_comm_tag(str(jax.make_jaxpr(send)(0).eqns[0].source_info.name_stack))
    'weights'
    """
    return jax.named_scope(f"moving:{content}")


def find_comm_tag(name_stack: str) -> str | None:
    """Return the content that collectives send, from the innermost declaration in a name stack, if any."""
    found = _CARGO.findall(name_stack)
    return found[-1] if found else None


def find_trip_count(name_stack: str) -> tuple[int, int] | None:
    """Return (expected, maximum) trip count from the innermost declaration in a name stack, if any."""
    found = _TURNS.findall(name_stack)
    return (int(found[-1][0]), int(found[-1][1])) if found else None


def find_branch_probs(name_stack: str) -> Sequence[float] | None:
    """Return the frequency of each branch from the innermost declaration in a name stack, if any."""
    found = _SHARES.findall(name_stack)
    return tuple(map(float, found[-1].split(","))) if found else None
