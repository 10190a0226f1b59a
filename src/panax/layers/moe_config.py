"""What a mixture of experts is, as plain values."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

from ..core.errors import RecipeError, nearest
from ..core.validated import Validated

ROUTERS: dict[str, Callable[..., Any]] = {}
"""By their names, the routers that were registered."""


def register_router(name: str, function: Callable[..., Any]) -> None:
    """Let `MoE.choice` name a function that sends tokens to experts; all else of a mixture stays, its lossless exchange included.

    Args:
        function: (the `MoE`, logits float32 "batch residual router", `Tokens`) to each token's experts, integers
            "batch residual active", and their weights, float32, of the same shape. A token may have the same expert twice; an
            expert of `MoE.experts` is none. It sees this device's tokens alone, and is differentiated through the weights.

    Raises:
        RecipeError: Another function has the name.
    """
    if name in ("token", "expert") or ROUTERS.get(name, function) is not function:
        raise RecipeError(f"a router is registered as {name!r} already; choose another name")
    ROUTERS[name] = function


BalanceScope = Literal["sequence", "batch", "global"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoE(Validated):
    """A feed-forward layer of which each token uses a few experts.

    Attributes:
        experts: How many there are.
        active: Experts that each token is sent to.
        ffn: Width of an expert; 0 for the decoder's own `ffn`.
        gated: Whether experts have a gate; None as the decoder's dense layers.
        shared: Width of the expert that every token goes through besides; 0 for none.
        every: Every n-th layer is a mixture, the others are dense: the last of each n.
        first_dense: The first layers that are dense whatever `every` says.
        choice: "token": each token takes its `active` best experts. "expert": each expert takes its best tokens of each row, as
            many as make `active` on average; it looks ahead, so a model so trained does not generate as it was trained. Otherwise
            the name of a function that was given to `register_router`.
        scores: Of an expert for a token: a softmax over all experts, or a sigmoid for each.
        normalised: Divide the weights of a token's experts by their sum.
        scale: What all weights are multiplied by.
        groups: Experts lie in this many groups; a token takes its experts from the best `active_groups` of them.
        active_groups: See `groups`.
        group_score: What a group is judged by: its best expert, or the sum of its best two.
        selection_bias: Add to each expert's score, where experts are chosen and nowhere else, a bias that is no parameter:
            after each step it grows by `bias_rate` for an expert that got fewer tokens than the mean, and shrinks for one that
            got more.
        bias_rate: See `selection_bias`; 0 keeps the biases as they are.
        jitter: The router reads each feature multiplied by a random number in [1 - jitter, 1 + jitter] in training.
        balance: Coefficient of the balancing loss; 0 for none.
        balance_scope: Whose tokens the load is counted over in the balancing loss: each row's, those of one data-parallel
            device's micro-batch (which depends on the layout), or those of the micro-batches of all devices together.
        z_loss: Coefficient of the squared log-sum of the router's exponentiated logits; 0 for none.
        capacity: None: no token is dropped. Otherwise an expert takes the first `capacity * active / experts` of each row's
            tokens that choose it, rounded up, and the others go without it.
        buffer: A device takes in, at a time, this many times the rows that it would take in if experts were equally loaded;
            what is more comes in another round. More costs memory, less costs time when experts are unequally loaded.
    """

    experts: int = 8
    active: int = 2
    ffn: int = 0
    gated: bool | None = None
    shared: int = 0
    every: int = 1
    first_dense: int = 0
    choice: str = "token"
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    active_groups: int = 1
    group_score: Literal["best", "best_two"] = "best_two"
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
            f"active={self.active}; expected 1 to experts={self.experts}, of which each token takes so many",
        )
        for name in ("ffn", "shared", "first_dense", "balance", "z_loss", "bias_rate"):
            require(0 <= getattr(self, name) < math.inf, f"{name}={getattr(self, name)}; expected 0 or more")
        require(0.0 < self.scale < math.inf, f"scale={self.scale}; expected a positive factor")
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
        require(self.choice in choices, f"choice={self.choice!r}; {nearest(self.choice, choices)}")
        require(1.0 <= self.buffer < math.inf, f"buffer={self.buffer}; expected 1 or more")
        if self.choice == "expert":
            for name, needed in (("groups", 1), ("selection_bias", False), ("capacity", None)):
                require(
                    getattr(self, name) == needed,
                    f"{name}={getattr(self, name)!r} is for tokens that choose; with choice='expert' leave it {needed!r}",
                )

    def is_mixture(self, layer: int) -> bool:
        """Whether a decoder's layer is a mixture, and not dense.

        >>> [MoE(every=2, first_dense=1).is_mixture(layer) for layer in range(6)]
        [False, True, False, True, False, True]
        """
        return layer >= self.first_dense and layer % self.every == self.every - 1

    def row_capacity(self, length: int) -> int:
        """Most tokens of a row of `length` that one expert takes; all of them where none is dropped."""
        factor = 1.0 if self.choice == "expert" else self.capacity
        return length if factor is None else min(length, math.ceil(factor * self.active * length / self.experts))
