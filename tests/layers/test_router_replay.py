"""Router replay: a mixture uses recorded experts, and its router has the gradients of its current scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import drawn

from panax.layers.moe.moe import MixtureOfExperts
from panax.layers.moe.moe_config import MoE
from panax.layers.moe.routing import Tokens

EMBED, FFN, EXPERTS, ACTIVE, BATCH, LENGTH = 8, 6, 5, 2, 2, 6
MIXTURES = {
    "softmax": MoE(experts=EXPERTS, active=ACTIVE),
    "sigmoid": MoE(experts=EXPERTS, active=ACTIVE, scores="sigmoid", normalize_topk=False, scale=1.5),
}


def build(moe):
    layer = drawn(lambda key: MixtureOfExperts.build(key, EMBED, FFN, moe, gated=True, activation="silu"))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, LENGTH, EMBED)), jnp.float32)
    return layer, x


def recorded_at_random(seed=1):
    """Distinct experts of each token, in no order."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(EXPERTS)[:ACTIVE] for _ in range(BATCH * LENGTH)]
    return np.array(rows, np.int32).reshape(BATCH, LENGTH, ACTIVE)


def reference(layer, moe, x, experts):
    """Every expert on every token, weighted by the scores of the forced ones."""
    with jax.default_matmul_precision("highest"):
        logits = x @ layer.router.w
        scores = jax.nn.softmax(logits) if moe.scores == "softmax" else jax.nn.sigmoid(logits)
        weight = jnp.take_along_axis(scores, jnp.asarray(experts), axis=-1)
        if moe.normalize_topk:
            weight = weight / weight.sum(axis=-1, keepdims=True)
        each = layer.experts
        gate, up = (jnp.einsum("bse,xef->bsxf", x, w) for w in (each.w_gate, each.w_up))
        y = jnp.einsum("bsxf,xfe->bsxe", jax.nn.silu(gate) * up, each.w_down)
        chosen = jnp.take_along_axis(y, jnp.asarray(experts)[..., None], axis=2)
        return (chosen * (weight * moe.scale)[..., None]).sum(axis=2)


@pytest.mark.parametrize("name", MIXTURES)
def test_forced_experts_have_the_outputs_and_gradients_of_a_reference(name):
    moe = MIXTURES[name]
    layer, x = build(moe)
    experts = recorded_at_random()
    direction = jnp.asarray(np.random.default_rng(2).normal(size=x.shape), jnp.float32)

    def of_layer(layer, x):
        y, terms = layer(x, Tokens(experts=jnp.asarray(experts)))
        return (y * direction).sum(), (y, terms.load)

    def of_reference(layer, x):
        y = reference(layer, moe, x, experts)
        return (y * direction).sum(), y

    (_, (y, load)), (grads, x_grad) = jax.jit(jax.value_and_grad(of_layer, argnums=(0, 1), has_aux=True))(layer, x)
    (_, expected), (expected_grads, expected_x) = jax.jit(
        jax.value_and_grad(of_reference, argnums=(0, 1), has_aux=True)
    )(layer, x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(x_grad, expected_x, rtol=1e-4, atol=1e-5)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert np.abs(grads.router.w).max() > 1e-2
    assert load[0].tolist() == np.bincount(experts.reshape(-1), minlength=EXPERTS).tolist()
    # The router would have chosen others.
    free, _, assigned = layer.run_recorded(x, Tokens())
    assert np.mean(assigned.expert.reshape(experts.shape) == experts) < 0.6
    assert np.abs(free - y).max() > 1e-2


def test_its_own_choices_change_no_bit_and_positions_without_a_record_choose():
    layer, x = build(MIXTURES["softmax"])

    def run(experts):
        return jax.jit(lambda layer, experts: layer.run_recorded(x, Tokens(experts=experts)))(layer, experts)

    free, _, assigned = jax.jit(lambda layer: layer.run_recorded(x, Tokens()))(layer)
    chosen = np.asarray(assigned.expert).reshape(BATCH, LENGTH, ACTIVE)
    replayed, _, again = run(jnp.asarray(chosen))
    assert np.array_equal(free, replayed) and np.array_equal(again.expert, assigned.expert)
    partly = recorded_at_random()
    partly[:, 2:] = -1
    _, _, mixed = run(jnp.asarray(partly))
    mixed = np.asarray(mixed.expert).reshape(BATCH, LENGTH, ACTIVE)
    assert np.array_equal(mixed[:, :2], partly[:, :2]) and np.array_equal(mixed[:, 2:], chosen[:, 2:])
