"""Shape once: axes, initialization and stacking from one annotation."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, TypeCheckError

from panax.core import Module, constant, logical_axes, named_leaves, normal, parameter, stack, stacked_modules


class Layer(Module):
    w: Float[Array, "embed ffn"] = parameter(normal("embed"))
    b: Float[Array, " ffn"] | None = parameter(constant(0.0))
    name: str = eqx.field(static=True, default="layer")


class Model(Module):
    table: Float[Array, "vocab embed"] = parameter(normal(std=0.02))
    layers: tuple[Layer, ...] = stacked_modules("layer")


SIZES = {"embed": 64, "ffn": 128, "vocab": 32}


def build(key):
    layers = (stack(key, 3, lambda k: Layer.create(k, SIZES)),)
    return Model.create(key, SIZES, layers=layers)


def test_axes_of_a_stack_are_prefixed():
    axes = logical_axes(jax.eval_shape(build, jax.random.key(0)))
    assert axes.table == ("vocab", "embed")
    assert axes.layers[0].w == ("layer", "embed", "ffn")
    assert axes.layers[0].b == ("layer", "ffn")


def test_initialization_follows_the_named_fan_in():
    layer = Layer.create(jax.random.key(0), {"embed": 400, "ffn": 500})
    # 200,000 draws: the standard deviation is known to a relative 1 / sqrt(2 * 200,000), times five.
    assert abs(float(layer.w.std()) * 20 - 1) < 0.008
    assert abs(float(layer.w.mean()) * 20) < 5 / 200_000**0.5
    # Irwin-Hall of four: fourth moment 2.7, no value beyond 2 * sqrt(3) deviations.
    assert abs(float((layer.w * 20).__pow__(4).mean()) - 2.7) < 0.05
    assert 3.0 < float(jnp.abs(layer.w).max()) * 20 <= 3.4642
    assert float(jnp.abs(layer.b).max()) == 0.0


def test_a_parameter_left_out_changes_no_other():
    whole = Layer.create(jax.random.key(0), SIZES)
    less = Layer.create(jax.random.key(0), SIZES, b=None)
    assert less.b is None
    np.testing.assert_array_equal(whole.w, less.w)


def test_stacked_layers_are_each_drawn_by_their_own_key():
    model = jax.jit(build)(jax.random.key(0))
    w = np.asarray(model.layers[0].w)
    assert w.shape == (3, 64, 128)
    assert not np.allclose(w[0], w[1])


def test_names_are_dotted_paths():
    assert list(named_leaves(jax.eval_shape(build, jax.random.key(0)))) == ["table", "layers.0.w", "layers.0.b"]


def test_a_wrong_rank_is_refused_where_checks_are_on():
    from panax.layers import Norm

    with pytest.raises(TypeCheckError):
        Norm(scale=jnp.ones((2, 2)), bias=None, kind="rms", epsilon=1e-6, unit_offset=False)
