"""Named contraction: values, gradients, dtypes, sharding, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from panax.mesh import MeshShape, Placement
from panax.spmd import all_gather_sequence, contract, gather
from panax.spmd.contraction import Equation

TEXT = "batch seq embed, embed ffn -> batch seq ffn"


def operands(dtype=jnp.float32):
    x = jax.random.normal(jax.random.key(0), (8, 4, 16)).astype(dtype)
    return x, jax.random.normal(jax.random.key(1), (16, 24))


def test_equals_einsum_with_gradients():
    x, w = operands()

    def ours(x, w):
        return jnp.sin(contract(TEXT, x, w)).sum()

    def plain(x, w):
        return jnp.sin(jnp.einsum("bse,ef->bsf", x, w)).sum()

    for a, b in zip(jax.grad(ours, (0, 1))(x, w), jax.grad(plain, (0, 1))(x, w)):
        # Two orders of summing 24 or 32 float32 products.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "text, shapes",
    [
        ("batch seq embed, embed heads head_dim -> batch seq heads head_dim", ((2, 3, 8), (8, 4, 5))),
        ("batch seq heads head_dim, heads head_dim embed -> batch seq embed", ((2, 3, 4, 5), (4, 5, 8))),
        ("batch seq embed, vocab embed -> batch seq vocab", ((2, 3, 8), (11, 8))),
        ("token expert embed, expert embed ffn -> token expert ffn", ((6, 3, 8), (3, 8, 5))),
    ],
)
def test_every_orientation(text, shapes):
    x = jax.random.normal(jax.random.key(0), shapes[0])
    w = jax.random.normal(jax.random.key(1), shapes[1])
    a, b, o = Equation(text).letters
    g = jax.random.normal(jax.random.key(2), jnp.einsum(f"{a},{b}->{o}", x, w).shape)
    y, pull = jax.vjp(lambda x, w: contract(text, x, w), x, w)
    y2, pull2 = jax.vjp(lambda x, w: jnp.einsum(f"{a},{b}->{o}", x, w), x, w)
    np.testing.assert_allclose(y, y2, rtol=1e-5, atol=1e-5)
    for mine, plain in zip(pull(g), pull2(g)):
        np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-5)


def test_multiplies_in_the_activations_dtype_and_returns_the_weights_gradient_in_its_own():
    x, w = operands(jnp.bfloat16)
    y, pull = jax.vjp(lambda x, w: contract(TEXT, x, w), x, w)
    assert y.dtype == jnp.bfloat16
    dx, dw = pull(jnp.ones_like(y))
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)
    # A gradient summed in bfloat16 would miss the exact sum of bfloat16 values by far more than float32 does.
    exact = np.asarray(x.astype(jnp.float32)).reshape(-1, 16).astype(np.float64).sum(0)
    np.testing.assert_allclose(np.asarray(dw)[:, 0], exact, rtol=1e-6, atol=1e-6)


def on_mesh(placement, function, in_specs, out_specs):
    return jax.jit(
        jax.shard_map(function, mesh=placement.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )


def test_a_weights_gradient_is_scattered_into_its_storage_layout():
    placement = Placement.create(MeshShape(replica=2, fsdp=4))
    x, w = operands()
    rows, stored = PartitionSpec(("replica", "fsdp")), PartitionSpec("fsdp")

    def both(x, w):
        y, pull = jax.vjp(lambda w: contract(TEXT, x, w), w)
        # Shares of the replicas: summed once a step.
        return y, jax.lax.psum(pull(jnp.ones_like(y))[0], "replica")

    with placement.activate():
        y, gradient = on_mesh(placement, both, (rows, stored), (rows, stored))(x, w)
    expected, pull = jax.vjp(lambda w: contract(TEXT, x, w), w)
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradient, pull(jnp.ones_like(expected))[0], rtol=1e-6, atol=1e-6)
    assert gradient.addressable_shards[0].data.shape == (w.shape[0] // 4, w.shape[1])


def test_a_sum_over_a_split_axis_is_scattered_along_the_sequence():
    """What tensor parallelism does to a feed-forward layer, without the layer."""
    placement = Placement.create(MeshShape(fsdp=1, tensor=8))
    x, up = operands()
    x = jnp.concatenate([x] * 8, axis=1)
    down = jax.random.normal(jax.random.key(9), up.shape[::-1])

    def layer(x, up, down):
        hidden = contract("batch seq embed, embed ffn -> batch seq ffn", all_gather_sequence(x), up)
        return contract("batch seq ffn, ffn embed -> batch seq embed", hidden, down)

    def gradients(x, up, down):
        return jax.grad(lambda *arrays: (layer(*arrays) ** 2).sum(), argnums=(0, 1, 2))(x, up, down)

    residual, columns, rows = PartitionSpec(None, "tensor"), PartitionSpec(None, "tensor"), PartitionSpec("tensor")
    specs = (residual, columns, rows)
    with placement.activate():
        actual = on_mesh(placement, gradients, specs, specs)(x, up, down)
    for got, expected in zip(actual, gradients(x, up, down)):
        assert np.linalg.norm(got - expected) <= 1e-6 * np.linalg.norm(expected)


def test_gather_gives_back_the_parameters_own_dtype():
    gradient = jax.grad(lambda w: gather(w, "norm", jnp.bfloat16).astype(jnp.float32).sum())(jnp.ones(4))
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, np.ones(4))


@pytest.mark.parametrize(
    "text, shapes, says",
    [
        (TEXT, ((2, 3, 8), (9, 4)), "axis 'embed' is 8 in the first operand and 9 in the second"),
        (TEXT, ((2, 8), (8, 4)), "the first operand should have axes batch seq embed, got shape (2, 8)"),
        ("batch embed -> batch", ((2, 8), (8, 4)), "expected 'axes, axes -> axes'"),
        ("batch embed, embed ffn -> batch width", ((2, 8), (8, 4)), "'width' of the result is in neither operand"),
    ],
)
def test_errors_name_the_axis(text, shapes, says):
    with pytest.raises(ValueError, match=says.replace("(", r"\(").replace(")", r"\)")):
        contract(text, jnp.ones(shapes[0]), jnp.ones(shapes[1]))
