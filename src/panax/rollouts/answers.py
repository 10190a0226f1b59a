"""Answers as a sequence of actions: the tokens that the model drew, with the token that ended them."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import xxhash
from jaxtyping import Int

from ..generate import Completion


@dataclasses.dataclass(frozen=True)
class SampledAnswer:
    """One answer of a rollout.

    Attributes:
        prompt: Token ids of its prompt.
        group: Index of its prompt in the rollout; answers of one group are compared with each other.
        actions: The drawn tokens, with the one that ended the answer.
        log_probabilities: Log-probability of each action, under the distribution that it was drawn from.
        text: The answer as the rewards see it, without the token that ended it.
        is_truncated: True if the answer was cut at its maximum length: it has no action that ends it.
        experts: See `Completion.experts`.
    """

    prompt: tuple[int, ...]
    group: int
    actions: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    text: str
    is_truncated: bool
    experts: Int[np.ndarray, "position layer active"] | None = dataclasses.field(default=None, compare=False)

    @classmethod
    def from_completion(cls, prompt: tuple[int, ...], group: int, completion: Completion) -> "SampledAnswer":
        """Return an answer from what an engine returned for a request."""
        drawn = completion.actions
        return cls(
            prompt,
            group,
            tuple(token.token for token in drawn),
            tuple(token.sampling_log_probability for token in drawn),
            completion.text,
            completion.finish == "length",
            completion.experts,
        )

    @property
    def digest(self) -> str:
        """Return a hash of the prompt's and the answer's tokens."""
        tokens = np.array([len(self.prompt), *self.prompt, *self.actions], np.int64)
        return xxhash.xxh3_128_hexdigest(tokens.tobytes())


def count_actions(answers: Sequence[SampledAnswer]) -> int:
    """Return the number of actions of all answers."""
    return sum(len(answer.actions) for answer in answers)
