"""Kinds of functions that a process calls: their arguments, and the values that they may return."""

import inspect
import json
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ...core.errors import describe_type
from ...system import json_reader
from .error_text import describe_error
from .tool_schema import InvalidFunctionError, bind_arguments

MAX_VALUE_BYTES = 1 << 19
"""Maximum size of a returned value as JSON."""

_LEVELS_AROUND = 8
"""Number of lists and objects around a value in requests and in the journal, at most."""


class FunctionKind(Protocol):
    """How functions of one kind are called."""

    def check(self, function: Callable[..., Any], where: str) -> None:
        """Check that a function takes the arguments of this kind.

        Raises:
            InvalidFunctionError: It does not.
        """
        ...

    def call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Call a function with the arguments of a request."""
        ...

    def convert(self, value: Any, arguments: Mapping[str, Any]) -> Any:
        """Return the returned value as JSON.

        Raises:
            ValueError: It is of another form; the message is a predicate of the function.
        """
        ...


class RewardKind:
    """Rewards: `f(answer, record)`, or `f(answer, record, episode)`, for a number."""

    def check(self, function: Callable[..., Any], where: str) -> None:
        check_call(function, where, ("answer", "record"), takes=("episode",))

    def call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        further = {"episode": arguments.get("episode")} if _takes(function, "episode") else {}
        return function(arguments["answer"], arguments["record"], **further)

    def convert(self, value: Any, arguments: Mapping[str, Any]) -> float:
        return to_reward(value)


class EnvironmentKind:
    """Environments: `f(messages, record, state)`, for a reply."""

    def check(self, function: Callable[..., Any], where: str) -> None:
        check_call(function, where, ("messages", "record", "state"))

    def call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        return function(arguments["messages"], arguments["record"], arguments["state"])

    def convert(self, value: Any, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        return to_reply(value, arguments["state"])


class ToolKind:
    """Tools: the arguments of the model's call, and `record` and `state` if the function has parameters of these names; for
    a text or another JSON value."""

    def check(self, function: Callable[..., Any], where: str) -> None:
        """Pass: its description is made of its parameters."""

    def call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        return function(**bind_arguments(function, arguments))

    def convert(self, value: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
        result = value if isinstance(value, str) else check_json(value, "a text or another JSON value")
        content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        return check_json({"content": content, "state": arguments["state"]}, "a text or another JSON value")


KINDS: Mapping[str, FunctionKind] = {"reward": RewardKind(), "environment": EnvironmentKind(), "tool": ToolKind()}
"""Kinds by name."""


def check_call(function: Callable[..., Any], where: str, names: tuple[str, ...], takes: tuple[str, ...] = ()) -> None:
    """Check that a function can be called with these arguments, in their order.

    Args:
        takes: Further arguments that are passed by name, if the function has parameters of these names.

    Raises:
        InvalidFunctionError: It can't.
    """
    try:
        further = {name: None for name in takes if _takes(function, name)}
        inspect.signature(function).bind(*names, **further)
    except TypeError as error:
        raise InvalidFunctionError(f"{where} can't be called as f({', '.join(names)}): {error}") from None
    except ValueError:  # a function in C without a signature
        pass


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except ValueError:  # a function in C without a signature
        return False


def to_reward(value: Any) -> float:
    """Convert the returned value of a reward to a float.

    Raises:
        ValueError: It is not one finite number; the message is a predicate of the reward.

    >>> [to_reward(True), to_reward(2)]
    [1.0, 2.0]
    """
    try:
        # A scalar of NumPy, JAX or PyTorch.
        is_scalar = getattr(value, "shape", None) == () and hasattr(value, "item")
        item = value.item() if is_scalar and not isinstance(value, numbers.Real) else value
        number = float(item) if isinstance(item, numbers.Real) else None
    except Exception as error:  # of an integer beyond float64, or of an object's own conversion
        raise ValueError(f"returned {describe_type(value)} that can't be a float64: {describe_error(error)}") from None
    if number is None:
        raise ValueError(f"returned {_describe(value)}; expected a number")
    if not math.isfinite(number):
        raise ValueError(f"returned {number}; expected a finite number")
    return number


def to_reply(value: Any, state: Any) -> dict[str, Any] | None:
    """Convert the returned value of an environment to a reply: its messages, state, and whether the episode is over; None if
    it is over without any message.

    Args:
        state: The state before, which remains if the value has none.

    Raises:
        ValueError: It is of another form; the message is a predicate of the environment.

    >>> to_reply("Wrong. Try again.", None)
    {'messages': [{'role': 'user', 'content': 'Wrong. Try again.'}], 'state': None, 'is_over': False}
    """
    expected = "None, a text, a list of messages such as {'role': 'user', 'content': '...'}, or a Reply"
    if value is None:
        return None
    is_over = False
    if isinstance(value, tuple) and len(value) == 3 and hasattr(value, "is_over"):
        value, state, is_over = value
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list | tuple) or not isinstance(is_over, bool):
        raise ValueError(f"returned {_describe(value)}; expected {expected}")
    for message in messages:
        if not isinstance(message, Mapping):
            raise ValueError(f"returned a message that is {_describe(message)}; expected {expected}")
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"returned a message with {sorted(map(str, message))}; expected texts as role and content")
        if message["role"] == "assistant":
            raise ValueError(
                "returned a message of the assistant; expected those of other roles, since the model writes these"
            )
    if not messages and not is_over:
        raise ValueError("returned no message; expected at least one, or None to end the episode")
    return check_json({"messages": [dict(each) for each in messages], "state": state, "is_over": is_over}, expected)


def check_json(value: Any, expected: str) -> Any:
    """Return a value as JSON reads it back.

    Raises:
        ValueError: It is not JSON, too large, or too deep; the message is a predicate of the function.
    """
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"returned a value that is not JSON ({error}); expected {expected}") from None
    if len(text) > MAX_VALUE_BYTES:
        raise ValueError(f"returned {len(text):,} bytes of JSON; expected at most {MAX_VALUE_BYTES:,}")
    try:
        json_reader.parse("[" * _LEVELS_AROUND + text + "]" * _LEVELS_AROUND)
        return json_reader.parse(text)
    except json_reader.JsonError as error:
        raise ValueError(f"returned a value that JSON can't hold: {error}; expected {expected}") from None


def _describe(value: Any) -> str:
    return "None" if value is None else describe_type(value)
