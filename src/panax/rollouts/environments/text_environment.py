"""`TextEnvironment`: a function that replies to the model's turns, as a setting that files can describe."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...core.errors import RecipeError
from ...core.validation import Validated
from ...data import Tokenizer
from ..calls.location import resolve_location, split_location
from ..calls.pool import Call, CalledFunction, CallPool
from .turns import AskedTurn, Message, TurnReply

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextEnvironment(Validated):
    """A function that replies to the model, so that an answer has several turns.

    It is called after each turn that the model has ended, and in the same kind of processes as rewards. All that it knows of
    an episode is in its arguments: any process may be asked next. An episode ends when it returns None, after `turns`, and
    when the next turn has no room. A turn that is cut at its maximum length ends it too, and is not replied to.

    Attributes:
        function: `f(messages, record, state)`, defined at the top level of a module or a script, or its location as text, as
            `Reward.function`. `messages` is the conversation, `record` that of its prompt, and `state` a JSON value, None
            at first. It returns None to end the episode; a text, as the user's message; a list of messages; or a `Reply`,
            which has a new state too.
        tokens: Maximum number of tokens of an episode after its prompt, those of the replies included.
        turns: Maximum number of turns of the model.
        name: Name in messages; by default that of the function.
        seconds: Time limit of one call.
    """

    function: Callable[..., Any] | str
    tokens: int
    turns: int = 8
    name: str = ""
    seconds: float = 10.0

    def __post_init__(self) -> None:
        where = resolve_location(self.function, "TextEnvironment.function")
        object.__setattr__(self, "function", where)
        object.__setattr__(self, "name", self.name or split_location(where)[1])
        if _NAME.fullmatch(self.name) is None:
            raise RecipeError(f"TextEnvironment.name={self.name!r}: expected letters, digits, '_', '-' and '.'")
        check_limits(self)

    def open(self, tokenizer: Tokenizer) -> "FunctionReplies":
        """Return the environment that replies to turns.

        Args:
            tokenizer: Not used.
        """
        assert isinstance(self.function, str)
        return FunctionReplies(self.name, CalledFunction(self.function, "environment", self.seconds))


def check_limits(settings: Any) -> None:
    """Check the limits of an environment's settings.

    Raises:
        RecipeError: One is out of range.
    """
    name = type(settings).__name__
    for field in ("tokens", "turns"):
        if getattr(settings, field) < 1:
            raise RecipeError(f"{name}.{field}={getattr(settings, field)}: expected 1 or more")
    if settings.seconds <= 0:
        raise RecipeError(f"{name}.seconds={settings.seconds:g}: expected a positive number")


@dataclasses.dataclass(frozen=True)
class FunctionReplies:
    """Replies of a function; see `OpenedEnvironment`."""

    name: str
    function: CalledFunction
    tools: tuple[Mapping[str, Any], ...] = ()
    reply_examples: tuple[Message, ...] = ({"role": "user", "content": "example of a reply"},)

    @property
    def functions(self) -> tuple[CalledFunction, ...]:
        return (self.function,)

    def read_turn(self, text: str, turn: int) -> Message:
        return {"role": "assistant", "content": text}

    def reply(
        self, pool: CallPool, asked: Sequence[AskedTurn], *, stop_at_failure: bool, on_wait: Callable[[], None]
    ) -> list[TurnReply]:
        calls = [
            Call(self.function, {"messages": list(each.messages), "record": dict(each.record), "state": each.state})
            for each in asked
        ]
        outcomes = pool.run(calls, stop_at_failure=stop_at_failure, on_wait=on_wait)
        return [self._read(each, *outcome) for each, outcome in zip(asked, outcomes, strict=True)]

    def _read(self, asked: AskedTurn, value: Any, error: str) -> TurnReply:
        if error:
            return TurnReply(state=asked.state, error=f"environment {self.name} {error}")
        if value is None:
            return TurnReply(state=asked.state, is_over=True)
        return TurnReply(tuple(value["messages"]), value["state"], value["is_over"])
