"""Mixture of experts: a router, the routed experts, and a shared expert for all tokens."""

import math
from typing import Any

import jax
from jaxtyping import Array, Float

from ...core import Loss, Mean, Module, Sum, constant, normal, parameter
from ...core.layout.layout import current_layout
from ...core.measures import Losses, Metrics
from ...spmd import contract, sequence_parallel_axes, sum_over_sequence, token_axes
from ...spmd.collectives import all_reduce
from ..feed_forward import Activation, FeedForward, GateClamp
from .experts import Experts
from .moe_config import MoE
from .routing import Assignments, Router, RouterTerms, Tokens


class MixtureOfExperts(Module):
    """A mixture of experts, in place of a layer's dense `FeedForward`."""

    router: Router
    experts: Experts
    shared: FeedForward | None
    w_shared_gate: Float[Array, " embed"] | None = parameter(None, default=None)

    @classmethod
    def build(
        cls,
        key: jax.Array,
        embed: int,
        ffn: int,
        moe: MoE,
        *,
        gated: bool,
        activation: Activation,
        clamp: GateClamp | None = None,
        output_gain: float = 1.0,
    ) -> "MixtureOfExperts":
        """Initialize the parameters; `ffn` and `gated` are the decoder's, used if `moe` does not set them."""
        router_key, experts_key, shared_key = jax.random.split(key, 3)
        shared_gate = {"w_shared_gate": normal("embed")} if moe.shared_gate else {}
        gated = gated if moe.gated is None else moe.gated
        sizes = {"embed": embed, "router": moe.experts, "expert": moe.experts, "expert_ffn": moe.ffn or ffn}
        absent = {} if gated else {"w_gate": None}
        biases = (("b_gate",) if gated else ()) + ("b_up", "b_down") if moe.expert_biases else ()
        options = {"activation": activation, "clamp": clamp, "output_gain": output_gain}
        return cls.create(
            jax.random.fold_in(shared_key, 1),
            sizes,
            router=Router.create(router_key, sizes, moe=moe, **({"b": constant(0.0)} if moe.logit_bias else {})),
            experts=Experts.create(
                experts_key,
                sizes,
                activation=activation,
                buffer=moe.buffer,
                clamp=clamp,
                weigh=moe.weigh,
                w_down=normal("expert_ffn", gain=output_gain),
                **absent,
                **dict.fromkeys(biases, constant(0.0)),
            ),
            shared=None
            if not moe.shared
            else FeedForward.build(shared_key, embed, moe.shared, gated=gated, bias=False, **options),
            **shared_gate,
        )

    @property
    def flops(self) -> float:
        """FLOPs of one layer's forward matmuls per position, counting only the experts that a token is routed
        to."""
        met = self.router.moe.active / self.router.moe.experts
        experts = sum(math.prod(w.shape) for w in self.experts.matrices if w is not None)
        shared = 0.0 if self.shared is None else self.shared.flops
        return 2.0 * (math.prod(self.router.w.shape) + met * experts) + shared

    def __call__(
        self, x: Float[Array, "batch residual embed"], tokens: Tokens
    ) -> tuple[Float[Array, "batch residual embed"], RouterTerms]:
        y, terms, _ = self.run_recorded(x, tokens)
        return y, terms

    def run_recorded(
        self, x: Float[Array, "batch residual embed"], tokens: Tokens
    ) -> tuple[Float[Array, "batch residual embed"], RouterTerms, Assignments]:
        """Run the layer, and also return the experts that it used."""
        assigned, terms = self.router(x, tokens)
        y = self.experts(x, assigned)
        if self.shared is None:
            return y, terms, assigned
        # Independent of the exchange, so the two can overlap.
        shared = self.shared(x)
        if self.w_shared_gate is not None:
            logit = contract("batch residual embed, embed -> batch residual", x, self.w_shared_gate)
            shared = shared * jax.nn.sigmoid(logit.astype(jax.numpy.float32)).astype(x.dtype)[..., None]
        return y + shared, terms, assigned


def router_metrics(moe: MoE, terms: RouterTerms, tokens: Float[Array, ""]) -> tuple[Losses, Metrics]:
    """Compute the losses and metrics of all mixture layers.

    The balancing loss of a layer is the sum over experts of f·P (arXiv:2412.19437, equation 17), where f is
    an expert's share of the load times the number of experts, and P its mean probability; it is 1 if all
    experts are equally loaded. It is linear in the probabilities for any load f, so the shares of different
    devices can be summed. Losses are summed over layers.

    Args:
        terms: Router terms with a leading axis of layers.
        tokens: Weight of the losses: the number of this device's tokens, without padding.
    """
    summed = RouterTerms(*(sum_over_sequence(term) for term in terms))
    losses: dict[str, Loss] = {}
    if moe.balance > 0.0 and not moe.experts_choose:
        load = all_reduce(jax.lax.stop_gradient(terms.load), _scope_axes(moe))
        share = moe.experts * load / jax.numpy.maximum(load.sum(axis=-1, keepdims=True), 1.0)
        losses["balance"] = Loss((share * summed.probability).sum(), tokens, moe.balance)
    if moe.z_loss > 0.0:
        losses["router_z"] = Loss(summed.z.sum(), tokens, moe.z_loss)
    metric_terms: Any = jax.lax.stop_gradient(summed)
    load = metric_terms.load.sum(axis=1)
    return losses, {
        "experts/load": Sum(load),
        "experts/entropy": Mean(metric_terms.entropy, metric_terms.tokens),
        "experts/router_z": Mean(metric_terms.z, metric_terms.tokens),
        "experts/dropped": Mean(metric_terms.dropped, load.sum(axis=-1)),
    }


def router_weights(moe: MoE, tokens: Float[Array, ""]) -> dict[str, jax.Array]:
    """Return the denominator of each loss."""
    balanced = moe.balance > 0.0 and not moe.experts_choose
    return ({"balance": tokens} if balanced else {}) | ({"router_z": tokens} if moe.z_loss > 0.0 else {})


def _scope_axes(moe: MoE) -> tuple[str, ...]:
    """Return the mesh axes over which the load in the balancing loss is counted."""
    layout = current_layout()
    if layout is None:
        return ()
    rows = layout.compute(("seq",))[0] + sequence_parallel_axes()
    return tuple(dict.fromkeys((*token_axes(), *rows))) if moe.balance_scope == "global" else rows
