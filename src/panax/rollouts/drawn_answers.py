"""`DrawnAnswers`: the answers of one rollout before their rewards, as values that a checkpoint can hold."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import DataError
from .answers import Episode, ReplyTokens, SampledAnswer


@dataclasses.dataclass(frozen=True)
class DrawnAnswers:
    """Answers to one batch of prompts, those of each prompt together.

    Attributes:
        number: Number of the batch of prompts, from 1 in the data's order.
        step: Steps taken before the draw.
        indices: Index of each answer's prompt among all records.
        seconds: Time of the draw, without that of replies.
        reply_seconds: Time for which an environment was awaited.
    """

    number: int
    step: int
    answers: Sequence[SampledAnswer]
    indices: Sequence[int]
    seconds: float = 0.0
    reply_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the answers as JSON values. Experts are left out: `Collector` has none of answers that are stored."""
        return {
            "number": self.number,
            "step": self.step,
            "indices": list(self.indices),
            "answers": [_to_fields(answer) for answer in self.answers],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "DrawnAnswers":
        """Read the output of `to_json`.

        Raises:
            DataError: The values have another form.
        """
        try:
            return cls(
                int(fields["number"]),
                int(fields["step"]),
                [_from_fields(each) for each in fields["answers"]],
                [int(index) for index in fields["indices"]],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"the checkpoint's answers for its next step have another form: {error!r}; resume from another checkpoint"
            ) from error


def _to_fields(answer: SampledAnswer) -> dict[str, Any]:
    return {
        "prompt": list(answer.prompt),
        "group": answer.group,
        "actions": list(answer.actions),
        "log_probabilities": list(answer.log_probabilities),
        "text": answer.text,
        "is_truncated": answer.is_truncated,
        "replies": [[reply.place, list(reply.tokens)] for reply in answer.replies],
        "episode": None if answer.episode is None else dataclasses.asdict(answer.episode),
        "kept": [list(tokens) for tokens in answer.kept],
        "kept_counts": list(answer.kept_counts),
    }


def _from_fields(fields: Mapping[str, Any]) -> SampledAnswer:
    episode = fields["episode"]
    return SampledAnswer(
        tuple(int(token) for token in fields["prompt"]),
        int(fields["group"]),
        tuple(int(token) for token in fields["actions"]),
        tuple(float(value) for value in fields["log_probabilities"]),
        str(fields["text"]),
        bool(fields["is_truncated"]),
        None,
        tuple(ReplyTokens(int(place), tuple(int(token) for token in tokens)) for place, tokens in fields["replies"]),
        None if episode is None else Episode(**{**episode, "messages": tuple(episode["messages"])}),
        tuple(tuple(int(token) for token in tokens) for tokens in fields.get("kept", ())),
        tuple(int(count) for count in fields.get("kept_counts", ())),
    )
