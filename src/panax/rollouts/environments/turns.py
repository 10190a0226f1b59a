"""Turns of an episode: what an environment is asked after each turn of the model, and its replies."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ..calls.pool import CalledFunction, CallPool
from ..prompts import Record

Message = dict[str, Any]
"""A message of a conversation: `role`, `content`, and others that its chat template reads."""


class Reply(NamedTuple):
    """Reply of an environment to a turn of the model.

    Attributes:
        messages: Messages that follow the turn, such as `{"role": "user", "content": "Try again."}`.
        state: The episode's new state: any JSON value, which the next call and the rewards get.
        is_over: True to end the episode. The rewards see the messages, the model does not.
    """

    messages: Sequence[Mapping[str, Any]]
    state: Any = None
    is_over: bool = False


@dataclasses.dataclass(frozen=True)
class AskedTurn:
    """A turn that waits for a reply.

    Attributes:
        place: Index of its answer in the rollout.
        digest: A hash of all tokens up to the end of the turn.
        turn: Number of the turn, from 1.
        text: The model's text of this turn.
        messages: The conversation with this turn.
        record: Record of the prompt.
        state: State of the episode; None at first.
    """

    place: int
    digest: str
    turn: int
    text: str
    messages: Sequence[Message]
    record: Record
    state: Any


@dataclasses.dataclass(frozen=True)
class TurnReply:
    """A checked reply.

    Attributes:
        messages: As `Reply.messages`.
        state: As `Reply.state`.
        is_over: As `Reply.is_over`.
        calls: Number of calls of tools in the turn.
        failed_calls: Number of those that were answered with an error.
        error: Why there is no reply, as text; empty if there is one.
    """

    messages: tuple[Message, ...] = ()
    state: Any = None
    is_over: bool = False
    calls: int = 0
    failed_calls: int = 0
    error: str = ""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "TurnReply":
        """Return the reply with these fields.

        Raises:
            ValueError: They are of another form.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        messages = fields.get("messages")
        if fields.keys() != names or not isinstance(messages, list):
            raise ValueError(f"a reply has the fields {sorted(fields)}; expected {sorted(names)}")
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a message of a reply is not an object")
        return cls(**{**fields, "messages": tuple(messages)})


class OpenedEnvironment(Protocol):
    """An environment that replies to turns."""

    @property
    def name(self) -> str:
        """Name in messages and in the journal."""
        ...

    @property
    def functions(self) -> tuple[CalledFunction, ...]:
        """Functions that `reply` calls in a pool."""
        ...

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """Descriptions of the tools that prompts offer, in OpenAI's form."""
        ...

    @property
    def reply_examples(self) -> tuple[Message, ...]:
        """Messages such as replies have, by which a chat template is checked."""
        ...

    def read_turn(self, text: str, turn: int) -> Message:
        """Return the assistant's message of a turn of the model."""
        ...

    def reply(
        self, pool: CallPool, asked: Sequence[AskedTurn], *, stop_at_failure: bool, on_wait: Callable[[], None]
    ) -> list[TurnReply]:
        """Reply to turns.

        Args:
            stop_at_failure: True to begin no further call once the environment has failed.
            on_wait: As for `CallPool.run`.

        Raises:
            TrainingError: The pool is closed, or a process can't be started again.
        """
        ...
