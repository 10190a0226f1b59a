"""The contract of every optimizer on shards: stacked layers train like separate ones, and every layout like one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimized import AXES, LAYERS, axes_of, compared, parameters, run, separate

from panax.core import RecipeError
from panax.optim import Adafactor, AdamW, Lamb, Lars, Lion, Muon, Schedule, ScheduleFreeAdamW, Sgd, Shampoo, Soap

SCHEDULE = Schedule(peak=0.1, warmup_steps=3)
OPTIMIZERS = {
    "adamw": AdamW(schedule=SCHEDULE, weight_decay=0.3),
    "lion": Lion(schedule=SCHEDULE, weight_decay=0.3),
    "sgd": Sgd(schedule=SCHEDULE, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adafactor": Adafactor(schedule=SCHEDULE, minimum_factored=4, weight_decay=0.01),
    "lamb": Lamb(schedule=SCHEDULE, weight_decay=0.1),
    "lars": Lars(schedule=SCHEDULE, weight_decay=0.1, trust=0.01),
    "muon": Muon(schedule=SCHEDULE, dtype="float32"),
    # Where statistics of few gradients have no full rank, a root is as uncertain as a rounding over the ridge.
    "shampoo": Shampoo(schedule=SCHEDULE, block=16, precondition_frequency=2, ridge=0.01),
    # Wider sides' statistics have no full rank after so few steps, and a rounding decides on the rest of a basis.
    "soap": Soap(schedule=SCHEDULE, precondition_frequency=2, largest=12),
    "schedule_free": ScheduleFreeAdamW(schedule=Schedule(peak=0.1, warmup_steps=3, decay="constant"), weight_decay=0.1),
}
BOUND = 4e-6
"""A few dozen roundings of float32, of 6e-8 each."""
BOUNDS = {"muon": 2e-4, "soap": 2e-4}
"""Newton and Schulz's slope at zero is 3.4 in each of five iterations, 480 in all: so small singular values' roundings grow. An
eigenvector is as uncertain as a rounding over the distance of two eigenvalues, here of 1e-3 or more."""
MESHES = {
    "fsdp8": {"fsdp": 8},
    "tensor2": {"replica": 2, "tensor": 2, "fsdp": 2},
    "expert": {"expert": 2, "fsdp": 4},
    "expert_tensor": {"expert": 2, "tensor": 2, "fsdp": 2},
    "stage": {"stage": 4, "fsdp": 2},
    "stage_tensor": {"stage": 2, "tensor": 2, "fsdp": 2},
    "replica8": {"replica": 8},
    "context": {"context": 2, "fsdp": 4},
}


def gradients(count: int) -> list[dict[str, jax.Array]]:
    return [parameters(seed) for seed in range(1, count + 1)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stacked_layers_train_like_separate_ones(name):
    stacked, _ = run(OPTIMIZERS[name], parameters(0), gradients(3))
    apart, _ = run(OPTIMIZERS[name], separate(parameters(0)), [separate(g) for g in gradients(3)])
    compared(separate(stacked), apart, bound=BOUNDS.get(name, BOUND))


USUAL = {
    ("adamw", "fsdp8"), ("lamb", "stage_tensor"), ("lars", "tensor2"), ("adafactor", "expert"), ("muon", "tensor2"),
    ("muon", "expert_tensor"), ("muon", "stage"), ("shampoo", "stage_tensor"),
}  # fmt: skip
"""Of each way to ask other devices some, in the default suite."""


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=() if (name, mesh) in USUAL else pytest.mark.slow)
        for name in OPTIMIZERS
        for mesh in MESHES
    ],
)
def test_every_layout_trains_like_one_device(name, mesh):
    one, kept = run(OPTIMIZERS[name], parameters(0), gradients(3))
    found, state = run(OPTIMIZERS[name], parameters(0), gradients(3), mesh=MESHES[mesh])
    compared(found, one, bound=BOUNDS.get(name, BOUND))
    compared(state, kept, bound=BOUNDS.get(name, BOUND))


@pytest.mark.parametrize("name", ["adamw", "adafactor", "sgd", "lamb", "muon"])
def test_weights_decay_and_norms_and_biases_never_do(name):
    params = parameters(0)
    after, _ = run(OPTIMIZERS[name], params, [jax.tree.map(jnp.zeros_like, params)])
    for leaf in ("bias", "scale"):
        np.testing.assert_array_equal(after[leaf], params[leaf], err_msg=leaf)
    for leaf in ("up", "table", "expert"):
        assert float(jnp.abs(after[leaf]).sum()) < float(jnp.abs(params[leaf]).sum()), leaf


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_and_gradients_of_zeros_stay_finite(name):
    zeros = jax.tree.map(jnp.zeros_like, parameters(0))
    after, state = run(OPTIMIZERS[name], zeros, [zeros, parameters(1), zeros])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((after, state)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_in_bfloat16_keep_moments_in_bfloat16_and_move_as_float32_rounded(name):
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), parameters(0))
    gradient = jax.tree.map(lambda p: p.astype(jnp.bfloat16), parameters(1))
    optimizer = OPTIMIZERS[name]
    state = optimizer.build(axes_of(half), 10).init(half)
    state_dtypes = {kind: {leaf.dtype.name for leaf in jax.tree.leaves(leaves)} for kind, leaves in state.items()}
    moments = {"mean", "square", "square_row", "square_column", "offset"}
    assert state_dtypes == {
        kind: {"bfloat16" if kind in moments else "int32" if kind == "count" else "float32"} for kind in state_dtypes
    }
    updates, _ = optimizer.build(axes_of(half), 10).update(gradient, state, half)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), (gradient, half))
    wanted, _ = optimizer.build(axes_of(half), 10).update(
        wide[0], optimizer.build(axes_of(half), 10).init(wide[1]), wide[1]
    )
    compared(updates, wanted, bound=1e-2)


def test_rates_and_decays_by_pattern():
    layers = {i: {"up": ("up", i), "scale": ("scale", i), "bias": ("bias", i)} for i in range(LAYERS)}
    plain = Sgd(schedule=Schedule(peak=1.0, decay="constant"), weight_decay=0.5)
    chosen = {"*": 2.0, "layers.1-2": 0.5, "layers.2.up": 0.0, "table": 3.0}
    optimizer = Sgd(
        schedule=plain.schedule,
        weight_decay=0.5,
        lr_multipliers=chosen,
        decay_multipliers={"up": 0.0, "layers.3.scale": 1.0, "layers.0.up": 2.0},
    )
    params, zeros = parameters(0), jax.tree.map(jnp.zeros_like, parameters(0))
    updates = {}
    for kind, gradient in (("gradient", parameters(1)), ("decay", zeros)):
        for which, one in (("plain", Sgd(schedule=plain.schedule)), ("chosen", optimizer)):
            transformation = one.build(axes_of(params), 10, layers)
            updates[kind, which] = transformation.update(gradient, transformation.init(params), params)[0]
    decay = updates["decay", "chosen"]
    moved = {
        name: (updates["gradient", "chosen"][name] - decay[name]) / updates["gradient", "plain"][name]
        for name in params
    }
    for name, factors in {
        "up": [2.0, 0.5, 0.0, 2.0], "scale": [2.0, 0.5, 0.5, 2.0], "query": [2.0] * 4, "expert": [2.0] * 4,
    }.items():  # fmt: skip
        np.testing.assert_allclose([moved[name][i].mean() for i in range(LAYERS)], factors, rtol=1e-3, err_msg=name)
    np.testing.assert_allclose(moved["table"], 3.0, rtol=1e-3)
    shrunk = {
        name: [float((-decay[name][i] / params[name][i]).mean()) for i in range(LAYERS)]
        for name in ("up", "scale", "query")
    }
    np.testing.assert_allclose(shrunk["up"], [2.0 * 0.5 * 2.0, 0, 0, 0], rtol=1e-5)
    np.testing.assert_allclose(shrunk["scale"], [0, 0, 0, 2.0 * 0.5], rtol=1e-5)
    np.testing.assert_allclose(shrunk["query"], [2.0 * 0.5] * 4, rtol=1e-5)


def test_rates_of_single_layers_go_with_them_to_their_stages():
    layers = {i: {"up": ("up", i)} for i in range(LAYERS)}
    optimizer = Lamb(schedule=SCHEDULE, lr_multipliers={f"layers.{i}": 0.5**i for i in range(LAYERS)})

    class Layered(Lamb):
        def build(self, axes, num_steps, found=None):
            return super().build(axes, num_steps, layers)

    optimizer = Layered(schedule=SCHEDULE, lr_multipliers=optimizer.lr_multipliers)
    one, _ = run(optimizer, parameters(0), [parameters(1)])
    staged, _ = run(optimizer, parameters(0), [parameters(1)], mesh={"stage": 2, "fsdp": 4})
    compared(staged, one, bound=BOUND)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lamb(excluded=("embed",)), r"Lamb scales no parameter: all 2 that train are axes embed.*use AdamW"),
        (lambda: Lars(), r"Lars scales no parameter.*optimizer.vectors to True.*use Sgd"),
        (lambda: Muon(), r"Muon found no eligible matrix.*use AdamW"),
        (lambda: AdamW(lr_multipliers={"nowhere": 1.0}), r"optimizer.lr_multipliers: 'nowhere' matches no parameter"),
        (lambda: AdamW(decay_multipliers={"bias": -1.0}), r"optimizer.decay_multipliers: 'bias' has the factor -1.0"),
        (lambda: AdamW(b1=1.0), r"optimizer.b1=1.0; expected a decay rate"),
        (lambda: Lamb(max_ratio=0.0), r"optimizer.max_ratio=0.0"),
        (lambda: Muon(iterations=0), r"optimizer.iterations=0"),
        (lambda: Adafactor(clipping=0.0), r"optimizer.clipping=0.0"),
        (lambda: Sgd(nesterov=True), r"optimizer.nesterov has no effect"),
        (lambda: ScheduleFreeAdamW(schedule=Schedule()), r"replaces a decay; set optimizer.schedule.decay"),
        (lambda: ScheduleFreeAdamW(b1=0.0), r"optimizer.b1=0; expected a share above 0"),
        (lambda: Muon(excluded=("vocabulary",)), r"optimizer.excluded: 'vocabulary' is not a logical axis.*vocab"),
        (lambda: Lamb(excluded=("embd",)), r"optimizer.excluded: 'embd' is not a logical axis.*embed"),
        (lambda: Sgd(decay_multipliers={"up": 1.0}), r"optimizer.decay_multipliers has no effect with weight_decay=0"),
        (lambda: AdamW(weight_decay=-0.1), r"optimizer.weight_decay=-0.1"),
    ],
)  # fmt: skip
def test_settings_without_sense_are_refused(make, message):
    axes = {"Lamb": ("table", "bias"), "Lars": ("scale", "bias"), "Muon": ("table", "bias")}
    with pytest.raises(RecipeError, match=message):
        optimizer = make()
        names = axes.get(type(optimizer).__name__, ("up", "bias"))
        optimizer.build({name: AXES[name] for name in names}, 10)


def half(seed):
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16), parameters(seed))


def test_moments_are_kept_in_the_type_that_is_asked_for():
    for moments, dtype in (("bfloat16", "bfloat16"), ("float32", "float32"), ("same", "bfloat16")):
        state = AdamW(moments=moments).build(axes_of(half(0)), 10).init(half(0))
        assert {leaf.dtype.name for kind in ("mean", "square") for leaf in state[kind].values()} == {dtype}, moments
    assert {
        leaf.dtype.name
        for leaf in jax.tree.leaves(AdamW(moments="bfloat16").build(axes_of(AXES), 10).init(parameters(0)))
    } == {
        "int32",
        "bfloat16",
    }


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_rounding_by_chance_is_the_same_on_every_mesh(name):
    optimizer = dataclasses.replace(OPTIMIZERS[name], rounding="stochastic")
    # Of one layer's scale, so that float32's own sums, in another order, seldom lie on the edge between two bits.
    one, state_dtypes = run(optimizer, half(0), gradients(2))
    params, state = run(optimizer, half(0), gradients(2), mesh={"stage": 2, "tensor": 2, "fsdp": 2})
    assert {leaf.dtype.name for leaf in jax.tree.leaves((one, params))} == {"bfloat16"}
    differing = [
        float((np.asarray(a) != np.asarray(b)).mean())
        for a, b in zip(jax.tree.leaves((params, state)), jax.tree.leaves((one, state_dtypes)))
    ]
    assert max(differing) < (0.1 if name == "muon" else 0.01)


def test_small_updates_of_bfloat16_are_kept_by_chance_and_lost_without():
    rate = 1e-4
    params = {"up": jnp.ones((1, 64, 128), jnp.bfloat16)}
    gradient = {"up": jnp.ones((1, 64, 128), jnp.bfloat16)}
    axes = {"up": AXES["up"]}
    moved = {}
    for rounding in ("nearest", "stochastic"):
        optimizer = Sgd(schedule=Schedule(peak=rate, decay="constant"), rounding=rounding)
        after, _ = run(optimizer, params, [gradient] * 100, axes=axes, num_steps=100)
        moved[rounding] = 1 - float(after["up"].astype(jnp.float32).mean())
    assert moved["nearest"] == 0.0
    # Below 1 the next bfloat16 is 2**-8 away: 100 steps of that with a chance of 0.0256 have a deviation of 0.0062 in a weight.
    assert moved["stochastic"] == pytest.approx(100 * rate, abs=5 * 0.0062 / 8192**0.5)


def test_rounding_by_chance_where_nothing_is_in_bfloat16_is_refused():
    with pytest.raises(RecipeError, match=r"has no effect: neither parameters nor the optimizer state are in bfloat16"):
        AdamW(rounding="stochastic").build(axes_of(AXES), 10).init(parameters(0))
    AdamW(rounding="stochastic", moments="bfloat16").build(axes_of(AXES), 10).init(parameters(0))
