"""`EpisodeSampler`: draws answers of several turns, all of one turn together, with an environment's replies between them."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.errors import RecipeError
from ..generate import Completion, GeneratedToken, GenerationEngine, GenerationRequest, Sampling
from .answers import Episode, ReplyTokens, SampledAnswer, hash_tokens, read_actions
from .draws import draw_answers
from .environments.turns import AskedTurn, Message, TurnReply
from .prompts import Record
from .rollout_data import OpenedRollouts

AskReplies = Callable[[Sequence[AskedTurn]], Sequence[TurnReply]]
"""Returns the replies to turns of the same number."""


class EpisodeSampler:
    """Draws episodes.

    Attributes:
        seconds: Time for which `sample` has waited for replies.
    """

    def __init__(self, rollouts: OpenedRollouts, on_progress: Callable[[], None]):
        """
        Args:
            on_progress: Called with each token; an exception from it abandons the draws.
        """
        environment, replies = rollouts.environment, rollouts.replies
        assert environment is not None and replies is not None
        self._rollouts, self._on_progress = rollouts, on_progress
        self._environment, self._replies = environment, replies
        self.seconds = 0.0

    def sample(
        self,
        engine: GenerationEngine,
        prompts: Sequence[int],
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
        ask: AskReplies,
    ) -> list[SampledAnswer]:
        """Draw episodes: for each prompt one with each of its seeds, those of a prompt together.

        Raises:
            TrainingError: As `ask`.
        """
        settings, self.seconds = self._rollouts.settings.environment, 0.0
        assert settings is not None
        episodes = [
            self._begin(group, index, seed)
            for group, (index, of_prompt) in enumerate(zip(prompts, seeds, strict=True))
            for seed in of_prompt
        ]
        for turn in range(1, settings.turns + 1):
            active = {place: episode for place, episode in enumerate(episodes) if not episode.is_over}
            if not active:
                break
            self._draw_turn(engine, list(active.values()), sampling, turn)
            asked = [episode.ask(place, turn) for place, episode in active.items() if not episode.is_over]
            began = time.perf_counter()
            replies = ask(asked) if asked else ()
            self.seconds += time.perf_counter() - began
            for each, reply in zip(asked, replies, strict=True):
                self._continue(episodes[each.place], reply, is_last=turn == settings.turns)
        return [episode.finish() for episode in episodes]

    def _begin(self, group: int, index: int, seed: int) -> "_OpenEpisode":
        record = self._rollouts.records[index]
        messages = self._rollouts.read_messages(index)
        return _OpenEpisode(group, record, self._rollouts.encode(index), seed, list(messages))

    def _draw_turn(
        self, engine: GenerationEngine, episodes: Sequence["_OpenEpisode"], sampling: Sampling, turn: int
    ) -> None:
        """Draw a turn of each episode, with at most the tokens that it has left; equal ones are answers to one request."""
        equal: dict[tuple[tuple[int, ...], int], list[_OpenEpisode]] = {}
        for episode in episodes:
            tokens = min(sampling.tokens, self._limit - len(episode.tokens))
            equal.setdefault(((*episode.prompt, *episode.tokens), tokens), []).append(episode)
        requests = [
            GenerationRequest(
                ids,
                dataclasses.replace(sampling, tokens=tokens, n=len(those)),
                tuple(derive_seed(episode.seed, turn) for episode in those),
            )
            for (ids, tokens), those in equal.items()
        ]
        asked = list(equal.values())
        for each in draw_answers(engine, requests, self._on_progress):
            message = self._environment.read_turn(each.text, turn)
            asked[each.number][each.sample].add_turn(each, message)

    @property
    def _limit(self) -> int:
        environment = self._rollouts.settings.environment
        assert environment is not None
        return environment.tokens

    def _continue(self, episode: "_OpenEpisode", reply: TurnReply, *, is_last: bool) -> None:
        """Add a reply to an episode, unless it ends there."""
        episode.take(reply)
        if reply.error or reply.is_over:
            episode.is_over = True
            return
        if is_last:
            episode.is_over = episode.at_limit = True
            return
        try:
            tokens = self._encode(episode, reply.messages)
        except RecipeError as error:
            episode.error = f"environment {self._environment.name} returned messages that can't be rendered: {error}"
            episode.is_over = True
            return
        # The next turn needs at least one token.
        if len(episode.tokens) + len(tokens) >= self._limit:
            episode.is_over = episode.is_truncated = True
        else:
            episode.add_reply(tokens)

    def _encode(self, episode: "_OpenEpisode", messages: Sequence[Message]) -> tuple[int, ...]:
        is_chat = self._rollouts.is_chat(episode.record)
        return (
            self._replies.encode_chat(messages, episode.tokens[-1]) if is_chat else self._replies.encode_text(messages)
        )


def derive_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn, a function of the answer's seed; the first turn has that itself.

    >>> derive_seed(7, 1), derive_seed(7, 2) != derive_seed(7, 3)
    (7, True)
    """
    return seed if turn == 1 else int(np.random.SeedSequence([seed, turn]).generate_state(1)[0])


@dataclasses.dataclass
class _OpenEpisode:
    """An episode in progress."""

    group: int
    record: Record
    prompt: tuple[int, ...]
    seed: int
    messages: list[Message]
    tokens: list[int] = dataclasses.field(default_factory=list)
    actions: list[GeneratedToken] = dataclasses.field(default_factory=list)
    replies: list[ReplyTokens] = dataclasses.field(default_factory=list)
    experts: list[np.ndarray] = dataclasses.field(default_factory=list)
    state: Any = None
    text: str = ""
    turns: int = 0
    calls: int = 0
    failed_calls: int = 0
    error: str = ""
    is_over: bool = False
    at_limit: bool = False
    is_truncated: bool = False

    def add_turn(self, completion: Completion, message: Message) -> None:
        drawn = completion.actions
        self.tokens += [token.token for token in drawn]
        self.actions += drawn
        self.text, self.turns = completion.text, self.turns + 1
        self.messages.append(message)
        self.is_over = self.is_truncated = completion.finish == "length"
        if completion.experts is not None:
            # Positions of earlier turns were recorded when they were drawn, but the last one of each, which is run first now.
            self.experts.append(completion.experts[sum(map(len, self.experts)) :])

    def add_reply(self, tokens: tuple[int, ...]) -> None:
        self.replies.append(ReplyTokens(len(self.actions), tokens))
        self.tokens += tokens

    def take(self, reply: TurnReply) -> None:
        self.messages += reply.messages
        self.state, self.error = reply.state, reply.error
        self.calls, self.failed_calls = self.calls + reply.calls, self.failed_calls + reply.failed_calls

    def ask(self, place: int, turn: int) -> AskedTurn:
        digest = hash_tokens(self.prompt, self.tokens)
        return AskedTurn(place, digest, turn, self.text, tuple(self.messages), self.record, self.state)

    def finish(self) -> SampledAnswer:
        episode = Episode(
            tuple(self.messages), self.state, self.turns, self.at_limit, self.calls, self.failed_calls, self.error
        )
        return SampledAnswer(
            self.prompt,
            self.group,
            text=self.text,
            is_truncated=self.is_truncated,
            experts=np.concatenate(self.experts) if self.experts else None,
            replies=tuple(self.replies),
            episode=episode,
            **read_actions(self.actions),
        )
