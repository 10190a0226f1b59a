"""Answers as a sequence of actions: the tokens that the model drew, with the token that ended them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
import xxhash
from jaxtyping import Bool, Int

from ..generate import Completion, GeneratedToken


class ReplyTokens(NamedTuple):
    """Tokens of an environment within an answer.

    Attributes:
        place: Number of actions before them.
    """

    place: int
    tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Episode:
    """What happened in an answer of several turns.

    Attributes:
        messages: The conversation, with the prompt's messages.
        state: The environment's last state.
        turns: Number of turns of the model.
        at_limit: True if it ended because it had the most turns.
        calls: Number of calls of tools.
        failed_calls: Number of those that were answered with an error.
        error: Why the environment failed; empty if it did not.
    """

    messages: tuple[dict[str, Any], ...]
    state: Any = None
    turns: int = 1
    at_limit: bool = False
    calls: int = 0
    failed_calls: int = 0
    error: str = ""

    def describe(self) -> str:
        """Return the conversation as text.

        >>> Episode(({"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"})).describe()
        'user: 2 + 2?\\n\\nassistant: 4'
        """
        lines = []
        for message in self.messages:
            calls = [call["function"] for call in message.get("tool_calls", ())]
            written = "".join(f" [calls {call['name']} with {call['arguments']}]" for call in calls)
            lines.append(f"{message['role']}: {message['content']}{written}")
        return "\n\n".join(lines)


@dataclasses.dataclass(frozen=True)
class SampledAnswer:
    """One answer of a rollout, of one turn or several.

    Attributes:
        prompt: Token ids of its prompt.
        group: Index of its prompt in the rollout; answers of one group are compared with each other.
        actions: The drawn tokens of all turns, each with the token that ended it.
        log_probabilities: Log-probability of each action, under the distribution that it was drawn from.
        text: The answer as the rewards see it, without the token that ended it: the text of the last turn.
        is_truncated: True if the answer was cut at its maximum length: it has no action that ends it, or the next turn had
            no room.
        experts: See `Completion.experts`; of each turn, those of its own draw.
        replies: Tokens of the environment, between the turns.
        episode: None for an answer without an environment.
        kept: The ids among which each action was drawn, if they are recorded: see `GeneratedToken.kept`.
        kept_counts: The number of these.
    """

    prompt: tuple[int, ...]
    group: int
    actions: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    text: str
    is_truncated: bool
    experts: Int[np.ndarray, "position layer active"] | None = dataclasses.field(default=None, compare=False)
    replies: tuple[ReplyTokens, ...] = ()
    episode: Episode | None = None
    kept: tuple[tuple[int, ...], ...] = ()
    kept_counts: tuple[int, ...] = ()

    @classmethod
    def from_completion(cls, prompt: tuple[int, ...], group: int, completion: Completion) -> "SampledAnswer":
        """Return an answer from what an engine returned for a request."""
        return cls(
            prompt,
            group,
            text=completion.text,
            is_truncated=completion.finish == "length",
            experts=completion.experts,
            **read_actions(completion.actions),
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return all tokens after the prompt: the actions, with the replies between them."""
        ids, last = [], 0
        for reply in self.replies:
            ids += [*self.actions[last : reply.place], *reply.tokens]
            last = reply.place
        return (*ids, *self.actions[last:])

    @property
    def is_action(self) -> Bool[np.ndarray, " tokens"]:
        """Return True for each of `tokens` that was drawn."""
        flags, last = [], 0
        for reply in self.replies:
            flags += [True] * (reply.place - last) + [False] * len(reply.tokens)
            last = reply.place
        return np.array(flags + [True] * (len(self.actions) - last), bool)

    def describe_episode(self) -> dict[str, Any] | None:
        """Return what rewards get of an answer of several turns, as JSON; None for others."""
        if self.episode is None:
            return None
        names = ("messages", "state", "turns", "at_limit", "calls", "failed_calls")
        return {name: getattr(self.episode, name) for name in names} | {"is_truncated": self.is_truncated}

    @property
    def digest(self) -> str:
        """Return a hash of the prompt's and the answer's tokens."""
        return hash_tokens(self.prompt, self.tokens)


class ActionFields(TypedDict):
    """What an answer keeps of its drawn tokens."""

    actions: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    kept: tuple[tuple[int, ...], ...]
    kept_counts: tuple[int, ...]


def read_actions(drawn: Sequence[GeneratedToken]) -> ActionFields:
    """Return the fields of a `SampledAnswer` that describe its actions."""
    recorded = [token for token in drawn if token.kept]
    return {
        "actions": tuple(token.token for token in drawn),
        "log_probabilities": tuple(token.sampling_log_probability for token in drawn),
        "kept": tuple(token.kept for token in recorded),
        "kept_counts": tuple(token.kept_count for token in recorded),
    }


def hash_tokens(prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return a hash of a prompt and the tokens after it."""
    return xxhash.xxh3_128_hexdigest(np.array([len(prompt), *prompt, *tokens], np.int64).tobytes())


def count_actions(answers: Sequence[SampledAnswer]) -> int:
    """Return the number of actions of all answers."""
    return sum(len(answer.actions) for answer in answers)


def describe_episodes(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return figures of answers of several turns; none without any.

    >>> describe_episodes([Episode((), turns=1), Episode((), turns=3, at_limit=True)])["turns/mean"]
    2.0
    """
    if not episodes:
        return {}
    figures = {
        "turns/mean": float(np.mean([episode.turns for episode in episodes])),
        "turns/at_limit": float(np.mean([episode.at_limit for episode in episodes])),
    }
    if calls := sum(episode.calls for episode in episodes):
        figures["calls"] = calls / len(episodes)
        figures["failed_calls"] = sum(episode.failed_calls for episode in episodes) / calls
    return figures
