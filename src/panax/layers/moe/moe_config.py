"""Settings of a mixture of experts."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

from ...core.errors import RecipeError, suggest_name
from ...core.validation import Validated

ROUTERS: dict[str, Callable[..., Any]] = {}
"""The registered routers, by name."""


def register_router(name: str, function: Callable[..., Any]) -> None:
    """Register a custom routing function under a name for `MoE.choice`; the rest of the mixture, such as its
    lossless exchange, is unchanged.

    Args:
        function: Takes the `MoE`, logits (float32 "batch residual router") and `Tokens`; returns each token's
            experts (integers "batch residual active") and their weights (float32, same shape). A token may
            have the same expert twice; the index `MoE.experts` means no expert. The function sees this
            device's tokens only, and is differentiated through the weights.

    Raises:
        RecipeError: The name is already registered for another function.
    """
    if name in ("token", "expert") or ROUTERS.get(name, function) is not function:
        raise RecipeError(f"a router is registered as {name!r} already; choose another name")
    ROUTERS[name] = function


BalanceScope = Literal["sequence", "batch", "global"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoE(Validated):
    """Settings of a feed-forward layer in which each token uses a few of many experts.

    Attributes:
        experts: Number of experts.
        active: Number of experts per token.
        ffn: Width of an expert; 0 uses the decoder's `ffn`.
        gated: True if experts have a gate; None follows the decoder's dense layers.
        shared: Width of the additional shared expert for every token; 0 for none.
        shared_gate: True to multiply the shared expert's output by a learned gate, a sigmoid of the token's
            features (Qwen2).
        every: The last of every n layers is a mixture, the others are dense.
        first_dense: Number of first layers that are dense regardless of `every`.
        choice: "token": each token takes its `active` best experts. "expert": each expert takes its best
            tokens of each row, `active` per token on average; this looks ahead, so generation differs from
            training. Otherwise the name of a function registered with `register_router`.
        scores: Score function: a softmax over all experts, or a sigmoid for each expert.
        normalize_topk: True to divide the weights of a token's experts by their sum.
        topk_epsilon: Added to that sum.
        scale: Factor of all weights.
        weigh: Factor that an expert's weight is multiplied with: the expert's output, or the token's features before the
            expert (Llama 4).
        groups: Number of groups of experts; a token takes its experts from the best `active_groups` of them.
        active_groups: See `groups`.
        group_score: Score of a group: its best expert, or the sum of its best two.
        logit_bias: True to add a learned bias to the router's logits (gpt-oss).
        expert_biases: True if each expert's projections have a bias.
        selection_bias: True to add a bias to each expert's score for selection only. The bias is not a
            parameter: after each step it grows by `bias_rate` for an expert that got fewer tokens than the
            mean, and shrinks for one that got more.
        bias_rate: See `selection_bias`; 0 freezes the biases.
        jitter: In training, each feature is multiplied by a random number in [1 - jitter, 1 + jitter] before
            the router.
        balance: Coefficient of the balancing loss; 0 for none.
        balance_scope: Tokens over which the load in the balancing loss is counted: those of each row, of one
            data-parallel device's micro-batch (which depends on the layout), or of the micro-batches of all
            devices together.
        z_loss: Coefficient of the squared log-sum-exp of the router's logits; 0 for none.
        capacity: None: no token is dropped. Otherwise an expert takes the first `capacity * active / experts`
            of each row's tokens that choose it, rounded up, and drops the others.
        buffer: Rows that a device receives per round, relative to its rows under equal load; excess rows take
            another round. A larger buffer costs memory, a smaller one time under unequal load.
    """

    experts: int = 8
    active: int = 2
    ffn: int = 0
    gated: bool | None = None
    shared: int = 0
    shared_gate: bool = False
    every: int = 1
    first_dense: int = 0
    choice: str = "token"
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize_topk: bool = True
    topk_epsilon: float = 1e-20
    scale: float = 1.0
    weigh: Literal["output", "input"] = "output"
    groups: int = 1
    active_groups: int = 1
    group_score: Literal["best", "best_two"] = "best_two"
    logit_bias: bool = False
    expert_biases: bool = False
    selection_bias: bool = False
    bias_rate: float = 1e-3
    jitter: float = 0.0
    balance: float = 0.01
    balance_scope: BalanceScope = "global"
    z_loss: float = 0.0
    capacity: float | None = None
    buffer: float = 1.5

    def __post_init__(self) -> None:
        def require(holds: bool, message: str) -> None:
            if not holds:
                raise RecipeError(f"model.feed_forward.{message}")

        require(self.experts > 0, f"experts={self.experts}; expected a positive number")
        require(
            0 < self.active <= self.experts,
            f"active={self.active} experts for each token; expected 1 to experts={self.experts}",
        )
        for name in ("ffn", "shared", "first_dense", "balance", "z_loss", "bias_rate"):
            require(0 <= getattr(self, name) < math.inf, f"{name}={getattr(self, name)}; expected 0 or more")
        require(
            self.weigh == "output" or not self.expert_biases,
            "weigh='input' with expert_biases=True; weighed inputs have no rule for biases, leave expert_biases False",
        )
        require(0.0 < self.topk_epsilon < 1.0, f"topk_epsilon={self.topk_epsilon}; expected a small positive number")
        require(0.0 < self.scale < math.inf, f"scale={self.scale}; expected a positive factor")
        require(
            self.shared > 0 or not self.shared_gate,
            "shared_gate=True has no effect without a shared expert; set shared, or leave shared_gate False",
        )
        require(self.every > 0, f"every={self.every}; expected 1 for every layer, 2 for every other one, ...")
        require(
            self.groups > 0 and self.experts % self.groups == 0,
            f"groups={self.groups} doesn't divide experts={self.experts}; groups are of equal size",
        )
        require(
            0 < self.active_groups <= self.groups,
            f"active_groups={self.active_groups}; expected 1 to groups={self.groups}",
        )
        each = self.experts // self.groups
        require(
            self.active <= self.active_groups * each,
            f"active={self.active} experts can't come from {self.active_groups} groups of {each}; raise active_groups",
        )
        require(
            self.groups == 1 or self.group_score == "best" or each > 1,
            "group_score='best_two' needs groups of two experts or more; use 'best'",
        )
        require(0.0 <= self.jitter < 1.0, f"jitter={self.jitter}; expected a fraction in [0, 1)")
        require(
            self.capacity is None or 0 < self.capacity < math.inf,
            f"capacity={self.capacity}; expected a positive factor, or None to drop no token",
        )
        choices = ("token", "expert", *ROUTERS)
        require(self.choice in choices, f"choice={self.choice!r}; {suggest_name(self.choice, choices)}")
        require(1.0 <= self.buffer < math.inf, f"buffer={self.buffer}; expected 1 or more")
        if self.experts_choose:
            for name, needed in (("groups", 1), ("selection_bias", False), ("capacity", None)):
                require(
                    getattr(self, name) == needed,
                    f"{name}={getattr(self, name)!r} is for tokens that choose; with choice='expert' leave it {needed!r}",
                )

    @property
    def experts_choose(self) -> bool:
        """True if each expert takes its best tokens, instead of each token its best experts."""
        return self.choice == "expert"

    def is_mixture(self, layer: int) -> bool:
        """Return True if a decoder's layer is a mixture instead of dense.

        >>> [MoE(every=2, first_dense=1).is_mixture(layer) for layer in range(6)]
        [False, True, False, True, False, True]
        """
        return layer >= self.first_dense and layer % self.every == self.every - 1

    def row_capacity(self, length: int) -> int:
        """Return the maximum number of tokens that one expert takes from a row of `length`; `length` if none
        are dropped."""
        factor = 1.0 if self.experts_choose else self.capacity
        return length if factor is None else min(length, math.ceil(factor * self.active * length / self.experts))
