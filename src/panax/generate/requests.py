"""Inputs and results of an engine: requests, tokens, completions."""

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Int

from .sampling import Sampling

FinishReason = Literal["end", "stop", "length", "error"]
"""Why an answer ended: an end token; a stop token or text, or a constraint under which nothing may follow; the maximum
number of tokens; or a constraint that it can't meet."""


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """A prompt to continue.

    Attributes:
        prompt: Token ids, at least one.
        seeds: Seeds of the `n` answers; by default those of `sampling`.
    """

    prompt: tuple[int, ...]
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    seeds: tuple[int, ...] = ()

    def seed(self, sample: int) -> int:
        """Return the seed of an answer."""
        return self.seeds[sample] if self.seeds else self.sampling.seed + sample

    @classmethod
    def to_score(cls, tokens: tuple[int, ...], count: int) -> "GenerationRequest":
        """Return a request for the log-probabilities of the last `count` tokens. The engine draws a token after them, which
        takes one position; the tokens before them are computed once for all requests that begin with them."""
        first = max(1, len(tokens) - count)
        sampling = Sampling(tokens=1, temperature=0.0, prompt_log_probabilities=True, scored_from=first)
        return cls(tokens, sampling)


@dataclasses.dataclass(frozen=True)
class GeneratedToken:
    """A drawn token, or a scored one.

    Attributes:
        log_probability: By the model, before any setting of `Sampling` applies.
        sampling_log_probability: Under the distribution that it was drawn from; 0 at temperature 0, and for a scored one.
        top: The most likely tokens with their log-probabilities by the model, as many as requested.
        kept: Distinct ids, the likeliest first, if the engine records those among which a token is drawn.
        kept_count: Number of them, from the first, among which it was drawn.
    """

    token: int
    log_probability: float
    sampling_log_probability: float
    top: tuple[tuple[int, float], ...] = ()
    kept: tuple[int, ...] = ()
    kept_count: int = 0


@dataclasses.dataclass(frozen=True)
class Completion:
    """An answer.

    Attributes:
        number: Index of its request, in the order in which they were passed.
        sample: Index among the request's `n` answers.
        tokens: The tokens of the answer, without the one that ended it. If a stop text ended it, its last token may
            reach into that text, which `text` does not.
        end: The end or stop token that ended it; None if something else did.
        text: The answer's text; empty without a tokenizer.
        prompt_tokens: Each prompt token from `Sampling.scored_from` on with its log-probability, and the likeliest one in
            its place, if `prompt_log_probabilities` was requested.
        reused: Number of prompt positions that were copied from another request with the same beginning.
        error: The reason of `finish` "error": no token continues the answer under its constraint, or the constraint
            is too complex there. `tokens` and `text` are as far as it came.
        experts: The experts that each token used but the last one, those of the prompt too, (position, mixture layer, active);
            None if the model does not record them.
    """

    number: int
    sample: int
    tokens: tuple[GeneratedToken, ...]
    text: str
    finish: FinishReason
    prompt_tokens: tuple[GeneratedToken, ...] = ()
    reused: int = 0
    error: str = ""
    end: GeneratedToken | None = None
    experts: Int[np.ndarray, "position layer active"] | None = dataclasses.field(default=None, compare=False)

    @property
    def actions(self) -> tuple[GeneratedToken, ...]:
        """Return all tokens that were drawn, with the one that ended the answer."""
        return self.tokens if self.end is None else (*self.tokens, self.end)

    @property
    def prompt_log_probabilities(self) -> tuple[float, ...]:
        """Return the log-probability of each prompt token after the first."""
        return tuple(each.log_probability for each in self.prompt_tokens)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(each.token for each in self.tokens)


@dataclasses.dataclass(frozen=True)
class StreamEvent:
    """Progress of one answer.

    Attributes:
        number: Index of its request.
        sample: Index among the request's answers.
        token: The new token; None in an event that only ends the answer.
        text: Text that is new and final: a beginning of a stop text is held back until it is known not to be one.
        completion: The whole answer, in its last event.
    """

    number: int
    sample: int
    token: GeneratedToken | None
    text: str
    completion: Completion | None = None
