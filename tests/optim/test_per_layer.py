"""The contract of every optimizer: stacked layers train exactly like separate ones, weights decay and norms don't."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from panax.optim import Adafactor, AdamW, Optax, Schedule, Sgd, optimizer_state_axes

LAYERS = 3
SCHEDULE = Schedule(peak=0.1, decay="constant")
OPTIMIZERS = {
    "adamw": AdamW(schedule=SCHEDULE, weight_decay=0.3),
    "adafactor": Adafactor(schedule=SCHEDULE, minimum_factored=4, weight_decay=0.01),
    "sgd": Sgd(schedule=SCHEDULE, momentum=0.9, weight_decay=0.1),
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


@pytest.mark.parametrize("name", ["adamw", "adafactor", "sgd"])
def test_weights_decay_and_norms_and_biases_never_do(name):
    params = parameters(jax.random.key(0))
    zeros = jax.tree.map(jnp.zeros_like, params)
    after = train(OPTIMIZERS[name].build(AXES, 10), params, [zeros])
    for leaf in ("bias", "scale"):
        np.testing.assert_array_equal(after[leaf], params[leaf], err_msg=leaf)
    for leaf in ("w", "table"):
        assert float(jnp.abs(after[leaf]).sum()) < float(jnp.abs(params[leaf]).sum()), leaf


def test_factors_of_a_second_moment_lie_like_the_axes_they_keep():
    params = {"w": jax.ShapeDtypeStruct((LAYERS, 8, 16), jnp.float32)}
    transformation = OPTIMIZERS["adafactor"].build({"w": AXES["w"]}, 10)
    state = jax.eval_shape(transformation.init, params)
    axes = optimizer_state_axes(state, {"w": ((LAYERS, 8, 16), AXES["w"])})
    found = {
        jax.tree_util.keystr(path, simple=True, separator="."): (leaf.shape, a)
        for (path, leaf), a in zip(
            jax.tree_util.tree_flatten_with_path(state)[0], jax.tree.structure(state).flatten_up_to(axes)
        )
    }
    rows = [value for name, value in found.items() if "v_row" in name and name.endswith("w")]
    columns = [value for name, value in found.items() if "v_col" in name and name.endswith("w")]
    assert rows == [((LAYERS, 8), ("layer", "embed"))]
    assert columns == [((LAYERS, 16), ("layer", "ffn"))]


def test_the_schedule_warms_up_and_decays():
    rate = Schedule(peak=1.0, warmup_steps=10, final=0.1).build(110)
    assert [round(float(rate(i)), 4) for i in (0, 4, 9, 10, 110)] == [0.1, 0.5, 1.0, 1.0, 0.1]
