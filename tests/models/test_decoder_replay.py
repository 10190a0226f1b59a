"""A decoder that trains on recorded experts: each layer has its own, and other routers are refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import drawn

from panax.core.errors import RecipeError
from panax.core.measures import total_loss
from panax.layers.moe.moe_config import ROUTERS, MoE
from panax.models import DecoderConfig, DecoderTask, PolicyGradient
from panax.models.decoder.incremental import IncrementalDecoder

EXPERTS, ACTIVE, LAYERS, ROWS, LENGTH = 4, 2, 4, 3, 12
MODEL = DecoderConfig(
    vocab_size=32,
    max_length=16,
    embed=16,
    num_layers=5,
    heads=2,
    ffn=24,
    windows=(4, 0),
    feed_forward=MoE(experts=EXPERTS, active=ACTIVE, ffn=12, first_dense=1, selection_bias=True, balance=0.05),
)
TASK = DecoderTask(model=MODEL, objective=PolicyGradient(replay_experts=True))


def make_batch(seed=0):
    rng = np.random.default_rng(seed)
    rows = {name: rng.integers(0, 32, (ROWS, LENGTH)).astype(np.int32) for name in ("tokens", "targets")}
    rows["segment"] = np.ones((ROWS, LENGTH), np.int32)
    rows["position"] = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH)).copy()
    # The positions after the last action are padding.
    rows["loss_mask"] = np.zeros((ROWS, LENGTH), np.float32)
    rows["loss_mask"][:, 3:10] = 1.0
    rows["advantage"] = rng.normal(size=(ROWS, LENGTH)).astype(np.float32)
    rows["behavior_log_probability"] = np.full((ROWS, LENGTH), -3.4, np.float32)
    rows["row"] = np.arange(ROWS, dtype=np.int32)
    return rows


def compute(params, state, batch):
    """The loss, its gradients, and the load of each expert of each layer."""
    rows = {name: jnp.asarray(leaf) for name, leaf in batch.items()}

    def loss(params):
        result = TASK.loss(params, state, rows, jax.random.key(0), train=True)
        return total_loss(result.losses), result.metrics["experts/load"].value

    (value, load), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return float(value), gradients, np.asarray(load)


@pytest.fixture(scope="module")
def model():
    """A decoder with selection biases, and the experts that it chooses for the batch."""
    params, state = drawn(TASK.init)
    state = {"router_bias": jnp.asarray(np.random.default_rng(1).normal(size=(LAYERS, EXPERTS)), jnp.float32)}
    decoder = IncrementalDecoder.create(params, state, "float32", records_experts=True)
    tokens = jnp.asarray(make_batch()["tokens"])
    start, size = jnp.zeros(ROWS, jnp.int32), jnp.full(ROWS, LENGTH, jnp.int32)
    _, cache = jax.jit(lambda decoder: decoder.extend(tokens, start, size, decoder.empty_cache(ROWS, LENGTH)))(decoder)
    return params, state, np.asarray(decoder.read_experts(cache))


@pytest.mark.full
def test_the_routers_own_choices_change_no_bit(model):
    params, state, recorded = model
    batch = make_batch()
    free, replayed = compute(params, state, batch), compute(params, state, {**batch, "experts": recorded})
    assert free[0] == replayed[0] and np.array_equal(free[2], replayed[2])
    for one, other in zip(jax.tree.leaves(free[1]), jax.tree.leaves(replayed[1]), strict=True):
        assert np.array_equal(one, other)


def test_each_layer_uses_its_record_when_the_routers_have_changed(model):
    params, state, recorded = model
    turned = jax.tree.map(lambda leaf: -leaf if leaf.shape[-1] == EXPERTS else leaf, params)
    batch = make_batch()
    _, gradients, load = compute(turned, state, {**batch, "experts": recorded})
    counted = recorded[:, :10]
    expected = [np.bincount(counted[:, :, layer].reshape(-1), minlength=EXPERTS) for layer in range(LAYERS)]
    assert load.tolist() == np.array(expected, np.float32).tolist()
    assert compute(turned, state, batch)[2].tolist() != load.tolist()
    for stack in gradients.stacks:
        for block in stack.blocks:
            if block.reports:
                assert np.abs(block.feed_forward.router.w).max(axis=(1, 2)).min() > 1e-6


@pytest.mark.full
def test_the_loss_is_that_of_the_recorded_experts_by_finite_differences(model):
    """The gradient of the routers is that of the loss with fixed choices, which has no jumps."""
    params, state, recorded = model
    batch = {**make_batch(), "experts": recorded}
    batch["loss_mask"][:, 10:] = 0.0
    rng = np.random.default_rng(3)
    direction = jax.tree.map(
        lambda leaf: jnp.asarray(
            rng.normal(size=leaf.shape) if leaf.shape[-1] == EXPERTS else np.zeros(leaf.shape), leaf.dtype
        ),
        params,
    )
    _, gradients, _ = compute(params, state, batch)
    slope = sum(
        float((g * d).sum()) for g, d in zip(jax.tree.leaves(gradients), jax.tree.leaves(direction), strict=True)
    )
    values = []
    for step in (-3e-3, 3e-3):
        moved = jax.tree.map(lambda leaf, d, step=step: leaf + step * d, params, direction)
        values.append(_log_probability_sum(moved, state, batch))
    assert (values[1] - values[0]) / 6e-3 == pytest.approx(slope, rel=0.02)


def _log_probability_sum(params, state, batch):
    """A loss with the gradient of a policy gradient with a ratio of 1, and the balancing loss."""
    rows = {name: jnp.asarray(leaf) for name, leaf in batch.items()}
    scores = dataclasses.replace(TASK, objective=TASK.log_probability_task(ROWS, LENGTH).objective)

    @jax.jit
    def value(params):
        result = scores.loss(params, state, rows, jax.random.key(0), train=True)
        weighted = result.metrics["log_probabilities"].value * rows["advantage"] * rows["loss_mask"]
        balance = result.losses["balance"]
        return -weighted.sum() / rows["loss_mask"].sum() + balance.coefficient * balance.sum / balance.weight

    return float(value(params))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feed_forward": None}, "has no effect on a model without a mixture"),
        ({"feed_forward": MoE(experts=4, choice="expert")}, "choice='expert' experts choose their tokens"),
        ({"feed_forward": MoE(experts=4, capacity=1.0)}, r"capacity=1.0 drops tokens in training"),
    ],
)
def test_models_without_choices_of_tokens_are_refused(changes, message):
    with pytest.raises(RecipeError, match=message):
        DecoderTask(model=dataclasses.replace(MODEL, **changes), objective=PolicyGradient(replay_experts=True))


def test_a_custom_router_is_refused(monkeypatch):
    monkeypatch.setitem(ROUTERS, "own router", lambda moe, logits, tokens: None)
    with pytest.raises(RecipeError, match="a custom router returns its own weights"):
        dataclasses.replace(TASK, model=dataclasses.replace(MODEL, feed_forward=MoE(experts=4, choice="own router")))


def test_records_of_another_model_are_refused(model):
    params, state, recorded = model
    with pytest.raises(RecipeError, match=r"shape \(3, 12, 3, 2\); expected \(4, 2\)"):
        compute(params, state, {**make_batch(), "experts": recorded[:, :, :3]})
