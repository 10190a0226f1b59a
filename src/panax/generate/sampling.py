"""`Sampling`: how the tokens of one request are drawn, and how its answers end."""

import dataclasses
from collections.abc import Mapping

from ..core.errors import RecipeError
from ..core.validation import Validated
from .constraints import Constraint

MAX_TOP_LOG_PROBABILITIES = 20
"""Maximum number of most likely tokens that are returned beside each drawn one."""

MAX_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling(Validated):
    """Settings of one request. They apply in this order: bias, repetition, presence and frequency penalties,
    constraint, temperature, top-k, top-p, min-p.

    Attributes:
        tokens: Maximum number of tokens to add.
        temperature: Divisor of the logits; 0 takes the most likely token.
        top_k: Draw among the k most likely tokens; 0: among all.
        top_p: Draw among the most likely tokens, as many as have this probability together (arXiv:1904.09751); 1: all.
        min_p: Exclude tokens less likely than this share of the most likely one (arXiv:2407.01082); 0: none.
        repetition_penalty: Divide positive logits of tokens in prompt or answer by it, and multiply negative ones
            (arXiv:1909.05858); 1: no penalty.
        presence_penalty: Subtracted from the logit of each token in the answer.
        frequency_penalty: Subtracted from the logit of each token for each time it is in the answer.
        bias: Added to the logits of single tokens, by id.
        seed: Seed of the draws. A request draws the same tokens whatever others run beside it.
        n: Number of answers; the i-th draws with `seed + i`.
        stop: Texts at which the answer ends; it does not contain them.
        stop_ids: Tokens at which the answer ends, beside those of the tokenizer; it does not contain them.
        ignore_end: Continue after the tokenizer's end tokens.
        constraint: The answer is JSON under a schema, or matches an expression or a grammar, unless it is cut by
            `tokens`, `stop` or `stop_ids`. Top-k and the following settings apply to the tokens that it allows.
        top_log_probabilities: Return this many most likely tokens beside each drawn one, at most 20.
        prompt_log_probabilities: Return the log-probability of each prompt token after the first.
        scored_from: With `prompt_log_probabilities`, those from this token on; the ones before it may be copied from
            another request with the same beginning.
    """

    tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    seed: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_end: bool = False
    constraint: Constraint | None = None
    top_log_probabilities: int = 0
    prompt_log_probabilities: bool = False
    scored_from: int = 1

    def __post_init__(self) -> None:
        for name, minimum in (("tokens", 1), ("n", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
            if getattr(self, name) < minimum:
                raise RecipeError(f"{name}={getattr(self, name)}; expected {minimum} or more")
        if not 0.0 < self.top_p <= 1.0:
            raise RecipeError(f"top_p={self.top_p}; expected a probability above 0, at most 1")
        if not 0.0 <= self.min_p <= 1.0:
            raise RecipeError(f"min_p={self.min_p}; expected a share from 0 to 1")
        if not self.repetition_penalty > 0.0:
            raise RecipeError(f"repetition_penalty={self.repetition_penalty}; expected a number above 0, 1 for none")
        if self.seed + self.n - 1 > MAX_SEED:
            raise RecipeError(f"seed={self.seed} and n={self.n}; expected seeds up to {MAX_SEED}")
        if not 0 <= self.top_log_probabilities <= MAX_TOP_LOG_PROBABILITIES:
            raise RecipeError(
                f"top_log_probabilities={self.top_log_probabilities}; expected 0 to {MAX_TOP_LOG_PROBABILITIES}"
            )
        if self.scored_from < 1:
            raise RecipeError(
                f"scored_from={self.scored_from}; expected 1 or more: nothing precedes the first token of a prompt"
            )
        if self.constraint is not None and self.ignore_end:
            raise RecipeError(
                "ignore_end has no effect with a constraint, which determines the end; remove one of them"
            )
        if "" in self.stop:
            raise RecipeError("stop has an empty text, which every answer begins with; remove it")
