"""`AheadDraws`: rollouts that are drawn one update ahead, so that their rewards are asked for while the model learns."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...core import Position
from ...rollouts.collector import Collector, RolloutBatch
from ...rollouts.drawn_answers import DrawnAnswers
from ...rollouts.journal import Journal
from ...rollouts.verdicts import AskedRewards

STORED = "rollout"
"""Entry of a checkpoint with the answers for the next step."""


class PromptBatch(NamedTuple):
    """Prompts of a rollout: their indices among all records."""

    prompts: list[int]
    position: Position
    number: int


class AheadDraws:
    """The rollout for the next step, drawn by the parameters that the last step began with (one batch of asynchrony)."""

    def __init__(self, collector: Collector, journal: Journal):
        self._collector, self._journal = collector, journal
        self._next: tuple[PromptBatch, AskedRewards] | None = None
        self._restored: DrawnAnswers | None = None

    def begin(self, stored: Mapping[str, Any]) -> None:
        """Continue from another state.

        Args:
            stored: The answers for its next step, as `to_host` returned them; empty without any.

        Raises:
            DataError: They have another form.
        """
        self.close()
        self._restored = DrawnAnswers.from_json(stored[STORED]) if STORED in stored else None

    def make(
        self, step: int, item: PromptBatch, following: Callable[[], PromptBatch | None], *, is_last: bool
    ) -> tuple[RolloutBatch, PromptBatch]:
        """Draw the rollout after this one, and return this one with the prompts that it was drawn for.

        Args:
            step: Steps taken.
            item: Prompts of this rollout for the first one after `begin`, afterwards those of the next one.
            following: Returns the next prompts.
            is_last: True if no other rollout follows.

        Raises:
            DataError: A prompt is too long.
            TrainingError: A reward or the environment failed.
            EvaluationStopped: The run is to stop; this rollout stays the next one.
        """
        collector, journal = self._collector, self._journal
        after: PromptBatch | None = item
        if self._next is None:
            drawn, self._restored = self._restored, None
            if drawn is None or drawn.number != item.number:
                drawn = collector.draw(item.number, step, item.prompts, journal)
            self._next = item, collector.rewards.begin(drawn, journal, in_background=True)
            after = following()
        prompts, asked = self._next
        ahead = None
        try:
            if not is_last and after is not None:
                drawn = collector.draw(after.number, step, after.prompts, journal)
                ahead = after, collector.rewards.begin(drawn, journal, in_background=True)
            rollout = collector.assemble([collector.judge(asked, journal)])
        except BaseException:
            if ahead is not None:
                ahead[1].cancel()
            raise
        self._next = ahead
        metrics = {**rollout.metrics, "staleness": float(step - asked.drawn.step)}
        return dataclasses.replace(rollout, metrics=metrics), prompts

    def settle(self, on_wait: Callable[[], None]) -> None:
        """Wait for the rewards of the next rollout.

        Args:
            on_wait: Called several times a second; an exception from it ends the wait.
        """
        if self._next is not None:
            self._collector.rewards.settle(self._next[1], self._journal, on_wait)

    def to_host(self, on_wait: Callable[[], None]) -> dict[str, Any]:
        """Return the answers for the next step as JSON values, empty without any; their rewards are in the journal then."""
        if self._next is None:
            return {}
        self.settle(on_wait)
        return {STORED: self._next[1].drawn.to_json()}

    def close(self) -> None:
        """Give up the next rollout."""
        if self._next is not None:
            self._next[1].cancel()
        self._next = None
