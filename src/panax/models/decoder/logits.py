"""The decoder's logits: for metrics on a mesh, and for the few positions of generation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core.layout.layout import current_layout
from ...kernels.product import materialize
from ...spmd import all_gather_sequence, contract
from ...spmd.collectives import all_gather
from .model import Decoder


def gather_logits(model: Decoder, hidden: Float[Array, "batch residual embed"]) -> Float[Array, "batch seq vocab"]:
    """Return the logits of this device's positions in float32, gathered over a sharded vocabulary; not
    differentiable.
    """
    hidden, table = jax.lax.stop_gradient((hidden, model.output_table))
    equation = "batch seq embed, vocab embed -> batch seq vocab"
    return finish_logits(model, contract(equation, all_gather_sequence(hidden), table, out_dtype=jnp.float32))


def finish_logits(model: Decoder, logits: Float[Array, "batch seq shard"]) -> Float[Array, "batch seq vocab"]:
    """Gather logits over a sharded vocabulary, without its padding, and apply the cap."""
    layout = current_layout()
    axes = () if layout is None else layout.compute(("vocab",))[0]
    logits = all_gather(logits, axes, logits.ndim - 1)[..., : model.config.vocab_size]
    cap = model.config.logit_soft_cap
    return logits if cap is None else materialize(cap * jnp.tanh(logits / cap))


def compute_logits(model: Decoder, hidden: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq vocab"]:
    """Return all logits in float32, for small inputs: the computation is not chunked."""
    logits = contract(
        "batch seq embed, vocab embed -> batch seq vocab", hidden, model.output_table, out_dtype=jnp.float32
    )[..., : model.config.vocab_size]
    cap = model.config.logit_soft_cap
    return logits if cap is None else materialize(cap * jnp.tanh(logits / cap))
