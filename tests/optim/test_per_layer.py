"""Optax's transformations over stacked layers train exactly like separate ones; and where the state of an optimizer lies."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from panax.optim import Adafactor, Optax, Schedule

LAYERS = 3
SCHEDULE = Schedule(peak=0.1, decay="constant")
OPTIMIZERS = {
    "lamb": Optax(transformation=optax.lamb(0.1, weight_decay=0.1)),
    "muon": Optax(transformation=optax.contrib.muon(0.1)),
    "clipped": Optax(
        transformation=optax.chain(optax.clip_by_global_norm(0.5), optax.scale_by_lion()), of_schedule=True
    ),
}
AXES = {
    "w": ("layer", "embed", "ffn"),
    "bias": ("layer", "heads", "head_dim"),
    "scale": ("layer", "norm"),
    "table": ("vocab", "embed"),
}


def parameters(key):
    # Layers of very different scale: an optimizer that mixes them shows.
    scales = 10.0 ** jnp.arange(LAYERS, dtype=jnp.float32)
    return {
        "w": jax.random.normal(key, (LAYERS, 8, 16)) * scales[:, None, None],
        "bias": jax.random.normal(key, (LAYERS, 4, 6)) * scales[:, None, None],
        "scale": jnp.ones((LAYERS, 8)) * scales[:, None],
        "table": jax.random.normal(key, (20, 8)),
    }


def separate(tree):
    return {f"{name}.{i}": leaf[i] for name, leaf in tree.items() if name != "table" for i in range(LAYERS)} | {
        "table": tree["table"]
    }


def train(transformation, params, gradients):
    state = transformation.init(params)
    for gradient in gradients:
        updates, state = transformation.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stacked_layers_train_like_separate_ones(name):
    params = parameters(jax.random.key(0))
    gradients = [parameters(jax.random.key(i)) for i in range(1, 4)]
    stacked = train(OPTIMIZERS[name].build(AXES, 10), params, gradients)
    axes = {leaf: AXES[leaf.split(".")[0]][1:] if "." in leaf else AXES[leaf] for leaf in separate(params)}
    apart = train(OPTIMIZERS[name].build(axes, 10), separate(params), [separate(g) for g in gradients])
    for leaf, value in separate(stacked).items():
        # The same operations on the same numbers; vmap may fuse them otherwise.
        np.testing.assert_allclose(value, apart[leaf], rtol=2e-5, atol=2e-6, err_msg=leaf)


def test_without_the_wrapper_stacking_would_show():
    params, gradients = parameters(jax.random.key(0)), [parameters(jax.random.key(1))]
    wrapped = train(OPTIMIZERS["lamb"].build(AXES, 10), params, gradients)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        bare = train(OPTIMIZERS["lamb"].transformation, params, gradients)
    assert float(jnp.abs(wrapped["w"] - bare["w"]).max()) > 1e-2


def test_factors_of_a_second_moment_lie_like_the_axes_they_keep():
    transformation = Adafactor(minimum_factored=4).build({"w": AXES["w"], "table": AXES["table"]}, 10)
    params = {name: jnp.ones(shape) for name, shape in (("w", (LAYERS, 8, 16)), ("table", (20, 8)))}
    state = jax.eval_shape(transformation.init, params)
    axes = transformation.axes(state, {name: (leaf.shape, AXES[name]) for name, leaf in params.items()})
    assert {kind: (state[kind]["w"].shape, axes[kind]["w"]) for kind in ("square_row", "square_column")} == {
        "square_row": ((LAYERS, 8, 1), ("layer", "embed", None)),
        "square_column": ((LAYERS, 1, 16), ("layer", None, "ffn")),
    }


def test_factors_of_optax_lie_like_the_axes_they_keep():
    params = {"table": jax.ShapeDtypeStruct((20, 8), jnp.float32)}
    transformation = Optax(transformation=optax.adafactor(0.1, min_dim_size_to_factor=4)).build(
        {"table": AXES["table"]}, 10
    )
    state = jax.eval_shape(transformation.init, params)
    axes = transformation.axes(state, {"table": ((20, 8), AXES["table"])})
    updates = {
        jax.tree_util.keystr(path, simple=True, separator="."): (leaf.shape, a)
        for (path, leaf), a in zip(
            jax.tree_util.tree_flatten_with_path(state)[0], jax.tree.structure(state).flatten_up_to(axes)
        )
    }
    assert [value for name, value in updates.items() if "v_row" in name] == [((8,), ("embed",))]
    assert [value for name, value in updates.items() if "v_col" in name] == [((20,), ("vocab",))]


def test_the_schedule_warms_up_and_decays():
    rate = Schedule(peak=1.0, warmup_steps=10, final=0.1).build(110)
    assert [round(float(rate(i)), 4) for i in (0, 4, 9, 10, 110)] == [0.1, 0.5, 1.0, 1.0, 0.1]
