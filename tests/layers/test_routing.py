"""Which experts tokens go to: against plain Python over each token, for every way to choose."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.core import RecipeError
from panax.layers import MixtureOfExperts, MoE, Tokens, register_router, router_metrics
from panax.layers.moe.routing import Router, rank_by_expert

BATCH, LENGTH, EMBED, EXPERTS = 2, 24, 8, 8


def routed(moe, tokens=None, seed=0):
    keys = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(keys[0], (BATCH, LENGTH, EMBED))
    router = Router.create(keys[1], {"embed": EMBED, "router": moe.experts}, moe=moe)
    assigned, terms = router(x, tokens or Tokens())
    logits = np.einsum("bse,er->bsr", np.asarray(x, np.float64), np.asarray(router.w, np.float64))
    return assigned, terms, logits


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_token(assigned, active):
    shape = (BATCH, LENGTH, active)
    return np.asarray(assigned.expert).reshape(shape), np.asarray(assigned.weight).reshape(shape)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalized", [True, False])
def test_tokens_take_their_best_experts(scores, normalized):
    moe = MoE(experts=EXPERTS, active=3, scores=scores, normalize_topk=normalized, scale=2.5)
    assigned, _, logits = routed(moe)
    expert, weight = by_token(assigned, 3)
    values = softmax(logits) if scores == "softmax" else sigmoid(logits)
    best = np.argsort(-values, axis=-1)[..., :3]
    np.testing.assert_array_equal(expert, best)
    wanted = np.take_along_axis(values, best, -1)
    wanted = 2.5 * (wanted / wanted.sum(-1, keepdims=True) if normalized else wanted)
    np.testing.assert_allclose(weight, wanted, rtol=1e-5)
    assert assigned.weight.dtype == jnp.float32


def by_place(moe, logits, tokens):
    """Each token goes to the experts after its own number, whatever its features are; weighed by their logits."""
    place = jnp.arange(logits.shape[1])[None, :, None] + jnp.arange(moe.active)[None, None]
    expert = jnp.broadcast_to(place % moe.experts, (*logits.shape[:2], moe.active))
    return expert, jax.nn.sigmoid(jnp.take_along_axis(logits, expert, axis=-1))


def too_few(moe, logits, tokens):
    expert, weight = by_place(moe, logits, tokens)
    return expert[..., :1], weight


register_router("by_place", by_place)
register_router("too_few", too_few)


def test_a_router_of_the_users_own_chooses_and_padding_is_nobodys():
    valid = jnp.arange(LENGTH)[None] < jnp.array([[LENGTH], [5]])
    assigned, terms, logits = routed(MoE(experts=EXPERTS, active=2, choice="by_place"), Tokens(valid=valid))
    expert, weight = by_token(assigned, 2)
    wanted = (np.arange(LENGTH)[:, None] + np.arange(2)) % EXPERTS
    np.testing.assert_array_equal(expert[0], wanted)
    np.testing.assert_array_equal(expert[1], np.where(np.arange(LENGTH)[:, None] < 5, wanted, EXPERTS))
    np.testing.assert_allclose(weight[0], np.take_along_axis(sigmoid(logits)[0], wanted, -1), rtol=1e-5)
    np.testing.assert_array_equal(terms.load[0].sum(), 2 * (LENGTH + 5))


def test_a_router_that_gives_something_else_is_refused():
    with pytest.raises(
        RecipeError, match=r"router 'too_few' gave experts int32\[2, 24, 1\] and weights \[2, 24, 2\]; expected"
    ):
        routed(MoE(experts=EXPERTS, active=2, choice="too_few"))
    with pytest.raises(RecipeError, match="registered as 'by_place' already"):
        register_router("by_place", too_few)
    with pytest.raises(RecipeError, match=r"choice='by_plaice'; .*by_place"):
        MoE(choice="by_plaice")


def test_a_bias_moves_the_choice_and_not_the_weight():
    moe = MoE(experts=EXPERTS, active=2, scores="sigmoid", normalize_topk=False, selection_bias=True)
    bias = jnp.zeros(EXPERTS).at[5].set(10.0).at[2].set(-10.0)
    assigned, _, logits = routed(moe, Tokens(bias=bias))
    expert, weight = by_token(assigned, 2)
    assert (expert[..., 0] == 5).all() and (expert != 2).all()
    np.testing.assert_allclose(weight, np.take_along_axis(sigmoid(logits), expert, -1), rtol=1e-5)


@pytest.mark.parametrize("group_score", ["best", "best_two"])
def test_tokens_stay_in_their_best_groups(group_score):
    moe = MoE(experts=EXPERTS, active=3, groups=4, active_groups=2, group_score=group_score, scores="sigmoid")
    assigned, _, logits = routed(moe)
    expert, _ = by_token(assigned, 3)
    for row in range(BATCH):
        for at in range(LENGTH):
            values = sigmoid(logits[row, at]).reshape(4, 2)
            judged = values.max(1) if group_score == "best" else values.sum(1)
            groups = np.argsort(-judged)[:2]
            allowed = [e for e in np.argsort(-values.reshape(-1)) if e // 2 in groups][:3]
            assert expert[row, at].tolist() == allowed


def test_padding_goes_nowhere_and_counts_nothing():
    valid = jnp.arange(LENGTH)[None] < jnp.array([[10], [LENGTH]])
    moe = MoE(experts=EXPERTS, active=2)
    assigned, terms, logits = routed(moe, Tokens(valid=valid))
    expert, _ = by_token(assigned, 2)
    assert (expert[0, 10:] == EXPERTS).all() and (expert[1] < EXPERTS).all()
    assert float(terms.load.sum()) == 2 * (10 + LENGTH) and float(terms.tokens) == 10 + LENGTH
    shown = softmax(logits)[np.asarray(valid)]
    np.testing.assert_allclose(terms.probability[0], shown.sum(0), rtol=1e-5)
    np.testing.assert_allclose(terms.entropy, -(shown * np.log(shown)).sum(), rtol=1e-5)
    z = np.log(np.exp(logits).sum(-1))[np.asarray(valid)]
    np.testing.assert_allclose(terms.z, (z**2).sum(), rtol=1e-4)


def test_capacity_takes_the_first_of_each_row_and_counts_the_rest():
    moe = MoE(experts=EXPERTS, active=2, capacity=0.5)
    free, _, _ = routed(dataclasses.replace(moe, capacity=None))
    assigned, terms, _ = routed(moe)
    capacity = moe.row_capacity(LENGTH)
    assert capacity == 3
    dropped = 0
    for row in range(BATCH):
        load = dict.fromkeys(range(EXPERTS), 0)
        for wanted, got in zip(np.asarray(free.expert)[row], np.asarray(assigned.expert)[row]):
            load[int(wanted)] += 1
            accepted = load[int(wanted)] <= capacity
            assert got == (wanted if accepted else EXPERTS)
            dropped += not accepted
    assert float(terms.dropped) == dropped > 0
    np.testing.assert_array_equal(terms.load[0], np.bincount(np.asarray(free.expert).ravel(), minlength=EXPERTS))


def test_experts_take_their_best_tokens_of_each_row():
    moe = MoE(experts=EXPERTS, active=2, choice="expert")
    valid = jnp.arange(LENGTH)[None] < jnp.array([[4], [LENGTH]])
    assigned, terms, logits = routed(moe, Tokens(valid=valid))
    counts = [moe.row_capacity(tokens) for tokens in (4, LENGTH)]
    assert counts == [4 * 2 // EXPERTS, LENGTH * 2 // EXPERTS]
    position, expert = np.asarray(assigned.position), np.asarray(assigned.expert)
    values = softmax(logits)
    for row in range(BATCH):
        length, count = int(valid[row].sum()), counts[row]
        for e in range(EXPERTS):
            chosen = position[row][expert[row] == e]
            assert sorted(chosen) == sorted(np.argsort(-values[row, :length, e])[:count])
            weights = np.asarray(assigned.weight)[row][expert[row] == e]
            np.testing.assert_allclose(weights, values[row, chosen, e], rtol=1e-5)
    assert terms.load[0].tolist() == [sum(counts)] * EXPERTS


@pytest.mark.parametrize("scope", ["sequence", "batch", "global"])
def test_the_balancing_loss_is_one_where_all_are_loaded_alike_and_grows_with_the_worst(scope):
    moe = MoE(experts=4, active=1, balance_scope=scope)
    even = jnp.tile(10.0 * jnp.eye(4), (LENGTH // 4, 1))[None].repeat(BATCH, 0)
    for x, least, most in ((even, 0.999, 1.001), (even[:, :1].repeat(LENGTH, 1), 3.9, 4.0)):
        router = dataclasses.replace(Router.create(jax.random.key(0), {"embed": 4, "router": 4}, moe=moe), w=jnp.eye(4))
        _, terms = router(x, Tokens())
        losses, metrics = router_metrics(moe, jax.tree.map(lambda t: t[None], terms), terms.tokens)
        assert least <= float(losses["balance"].mean) <= most
        assert float(metrics["experts/load"].value.sum()) == BATCH * LENGTH


def test_jitter_is_drawn_in_training_only():
    moe = MoE(experts=EXPERTS, active=1, jitter=0.5)
    row = jnp.arange(BATCH)
    plain, noisy, other = (
        routed(moe, tokens)[1].probability
        for tokens in (Tokens(), Tokens(row=row, key=jax.random.key(1)), Tokens(row=row, key=jax.random.key(2)))
    )
    assert not np.allclose(plain, noisy) and not np.allclose(noisy, other)


def dense(layer: MixtureOfExperts, x, assigned):
    """Every expert on every token, in float64."""
    act = lambda v: v / (1 + np.exp(-v))  # noqa: E731
    x = np.asarray(x, np.float64)
    out = np.zeros_like(x)
    for e in range(layer.experts.w_up.shape[0]):
        up, gate, down = (
            np.asarray(w[e], np.float64) for w in (layer.experts.w_up, layer.experts.w_gate, layer.experts.w_down)
        )
        y = (act(x @ gate) * (x @ up)) @ down
        for row, at, expert, weight in zip(
            np.repeat(np.arange(x.shape[0]), assigned.expert.shape[1]),
            *(np.asarray(leaf).ravel() for leaf in (assigned.position, assigned.expert, assigned.weight)),
        ):
            if expert == e:
                out[row, at] += weight * y[row, at]
    return out


@pytest.mark.parametrize("skew", ["none", "all to one", "one without"])
def test_the_layer_is_what_each_expert_gives_each_of_its_tokens(skew):
    moe = MoE(experts=EXPERTS, active=2, ffn=12, selection_bias=True)
    layer = MixtureOfExperts.build(jax.random.key(0), EMBED, 12, moe, gated=True, activation="silu")
    x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, EMBED))
    biases = {"none": {}, "all to one": {3: 10.0}, "one without": {3: -10.0}}[skew]
    bias = jnp.zeros(EXPERTS)
    for expert, value in biases.items():
        bias = bias.at[expert].set(value)
    y, terms = layer(x, Tokens(bias=bias))
    assigned, _ = layer.router(x, Tokens(bias=bias))
    # Float32 products of 8 and 12 terms: 2**-24 * sqrt(12) of the terms' norm, twice.
    np.testing.assert_allclose(y, dense(layer, x, assigned), atol=1e-6 * float(jnp.abs(y).max()) * 4)
    if skew != "none":
        assert float(terms.load[0, 3]) == (BATCH * LENGTH if skew == "all to one" else 0)


def test_ranks_are_places_among_the_same():
    expert = jax.random.randint(jax.random.key(0), (100,), 0, 5)
    counts, rank = rank_by_expert(expert, 4)
    seen = dict.fromkeys(range(5), 0)
    for e, r in zip(expert.tolist(), rank.tolist()):
        assert r == seen[e]
        seen[e] += 1
    assert counts.tolist() == [seen[e] for e in range(4)]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"active": 9}, "experts for each token; expected 1 to experts=8"),
        ({"groups": 3}, "groups=3 doesn't divide experts=8"),
        ({"groups": 4, "active_groups": 1, "active": 3}, "active=3 experts can't come from 1 groups of 2"),
        ({"groups": 8, "active_groups": 8}, "needs groups of two experts or more"),
        ({"capacity": 0.0}, "capacity=0.0; expected a positive factor, or None"),
        ({"choice": "expert", "selection_bias": True}, "selection_bias=True is for tokens that choose"),
        ({"buffer": 0.5}, "buffer=0.5; expected 1 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, message):
    with pytest.raises(RecipeError, match=message):
        MoE(**fields)
