"""Products on CPU: as matrices, by Intel's library and by XLA, they are what einsum gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from panax.kernels.product import _matrices, fusion_barrier, product, sum_rows
from panax.layers.feed_forward import ACTIVATIONS
from panax.parallel import scan_layers
from panax.spmd import add_bias, contract

SIZES = {"a": 2, "b": 9, "c": 16, "d": 4, "e": 8}
EQUATIONS = (
    "abc,cd->abd",  # forward
    "abd,cd->abc",  # gradient of the activation
    "abc,abd->cd",  # gradient of the weight
    "abc,cde->abde",
    "abde,cde->abc",
    "abc,abde->cde",
    "abcd,cde->abe",
    "cd,abd->abc",
    "ac,abc->b",
    "abc,dc->dab",
)
# The sums differ in their order: each of n terms of size 1 adds at most one rounding of float32.
ROUNDING = 2.0**-23


def operands(equation, dtype):
    inputs = equation.split("->")[0].split(",")
    keys = jax.random.split(jax.random.key(len(equation)), 2)
    shapes = [tuple(SIZES[letter] for letter in letters) for letters in inputs]
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_a_product_is_einsum(equation, dtype, library):
    a, b = operands(equation, dtype)
    lowered = jax.jit(lambda a, b: product(equation, a, b, jnp.float32)).lower(a, b)
    result = lowered.compile()(a, b)
    wide = np.einsum(equation, np.asarray(a, np.float64), np.asarray(b, np.float64))
    terms = np.einsum(equation, np.abs(np.asarray(a, np.float64)), np.abs(np.asarray(b, np.float64)))
    summed = a.size * b.size // max(wide.size, 1)
    np.testing.assert_array_less(np.abs(np.asarray(result) - wide), terms * ROUNDING * (2 + summed**0.5))
    handed = "panax_product" in lowered.as_text()
    assert handed == (library != "xla" and _matrices(equation) is not None)


def test_what_is_no_product_of_matrices_is_left_alone():
    assert _matrices("abc,bcd->abd") is None  # `b` is in both and in the result
    assert _matrices("abc,bd->acd") is None  # what is summed lies in the middle
    assert _matrices("ab,cd->abcd") is None  # nothing is summed
    assert _matrices("ac,abc->b") is None  # the summed letters are apart in the second operand
    assert _matrices("abc,cd->bad") is None  # rows in another order


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("equation", ["ab,bc->ac", "ab,cb->ac", "ba,bc->ac", "ba,cb->ac"])
@pytest.mark.parametrize("sizes", [(70, 33, 5), (5, 33, 70)], ids=["by rows", "by columns"])
def test_a_product_in_pieces(sizes, equation, dtype, library):
    """Larger than one piece, with a smaller last one; numbers so small that sums of their products are exact."""
    size = dict(zip("abc", sizes))
    first, second = equation.split("->")[0].split(",")
    a, b = (
        jax.random.randint(jax.random.key(seed), [size[letter] for letter in letters], -8, 8).astype(dtype)
        for seed, letters in enumerate((first, second))
    )
    found = jax.jit(lambda a, b: product(equation, a, b, jnp.float32))(a, b)
    np.testing.assert_array_equal(found, np.einsum(equation, np.asarray(a, np.float64), np.asarray(b, np.float64)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_under_vmap(dtype, library):
    a, b = operands("abc,acd->abd", dtype)
    found = jax.jit(jax.vmap(lambda a, b: product("bc,cd->bd", a, b, jnp.float32)))(a, b)
    wide = np.einsum("abc,acd->abd", np.asarray(a, np.float64), np.asarray(b, np.float64))
    np.testing.assert_allclose(found, wide, atol=16 * 16 * ROUNDING)


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_on_a_mesh_each_device_multiplies_its_own(check, library):
    """Rows over one mesh axis, columns over another; where what varies is checked, XLA multiplies."""
    mesh = jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    a, b = operands("abc,cd->abd", jnp.float32)
    a = jnp.concatenate([a, a])
    split = jax.shard_map(
        lambda a, b: product("abc,cd->abd", a, b, jnp.float32),
        mesh=mesh,
        in_specs=(P("rows"), P(None, "columns")),
        out_specs=P("rows", None, "columns"),
        check_vma=check,
    )
    handed = "panax_product" in jax.jit(split).lower(a, b).as_text()
    assert handed == (library != "xla" and not check)
    np.testing.assert_allclose(jax.jit(split)(a, b), jnp.einsum("abc,cd->abd", a, b), atol=16 * 16 * ROUNDING)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_sum_of_rows(dtype, library):
    x = jax.random.normal(jax.random.key(0), (300, 7)).astype(dtype)
    found = jax.jit(sum_rows)(x)
    assert found.dtype == jnp.float32
    wide = np.asarray(x, np.float64)
    np.testing.assert_array_less(np.abs(np.asarray(found) - wide.sum(0)), np.abs(wide).sum(0) * ROUNDING * 18)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_bias_and_its_gradient(dtype, library):
    x = jax.random.normal(jax.random.key(0), (3, 50, 4, 8)).astype(dtype)
    w, g = jax.random.normal(jax.random.key(1), (4, 8)), jax.random.normal(jax.random.key(2), x.shape).astype(dtype)
    out, derivative = jax.vjp(lambda x, w: add_bias(x, w, "heads head_dim"), x, w)
    dx, dw = derivative(g)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(x + w.astype(dtype)[None, None]))
    np.testing.assert_array_equal(np.asarray(dx), np.asarray(g))
    assert dw.dtype == jnp.float32
    np.testing.assert_allclose(dw, np.asarray(g, np.float64).sum((0, 1)), atol=150 * 4 * ROUNDING)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_and_its_derivative(name, dtype):
    """Against jax.nn's in float64; a bfloat16 result may be rounded once."""
    activations = {"silu": jax.nn.silu, "relu": jax.nn.relu, "relu_squared": lambda x: jax.nn.relu(x) ** 2}
    activations |= {f"gelu{tail}": lambda x, t=bool(tail): jax.nn.gelu(x, approximate=t) for tail in ("", "_tanh")}
    x = jnp.linspace(-6, 6, 401).astype(dtype)
    value, derivative = jax.vjp(ACTIVATIONS[name], x)
    (slope,) = derivative(jnp.ones_like(x))
    with jax.enable_x64(True):
        wide = jnp.asarray(np.asarray(x, np.float64))
        expected, expected_slope = activations[name](wide), jax.vmap(jax.grad(activations[name]))(wide)
    assert value.dtype == slope.dtype == dtype
    # 1 + erf and 1 + tanh, as PyTorch has them, lose what is below a rounding of 1; in the derivative that is multiplied by x, up
    # to 6, and by the slope inside the tanh, up to 5. XLA's tanh itself may be further from 1 than a rounding, by its emitter.
    wide_range = np.linspace(-40, 40, 4001, dtype=np.float32)
    tanh_error = np.abs(np.asarray(jnp.tanh(wide_range)) - np.tanh(wide_range.astype(np.float64))).max()
    lost = max(ROUNDING, tanh_error) if name.endswith("_tanh") else ROUNDING
    tolerance = {"rtol": 2.0**-8 if dtype == jnp.bfloat16 else 2e-6, "atol": 6 * 5 * lost}
    np.testing.assert_allclose(np.asarray(value, np.float64), expected, **tolerance)
    np.testing.assert_allclose(np.asarray(slope, np.float64), expected_slope, **tolerance)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_wall_changes_nothing(dtype, library):
    x = jax.random.normal(jax.random.key(0), (40, 8)).astype(dtype)
    run = jax.jit(lambda x: (fusion_barrier(x + 1), x + 1))
    np.testing.assert_array_equal(*(np.asarray(each, np.float32) for each in run(x)))
    assert ("panax_wall" in run.lower(x).as_text()) == (library != "xla")


def test_a_chain_of_layers_is_not_fused_backward(library):
    """Each layer's gradient of the residual stream is one sum, of two arrays."""
    stack = jax.random.normal(jax.random.key(0), (6, 64, 64))
    x = jax.random.normal(jax.random.key(1), (2, 32, 64))

    def loss(x):
        def layer(x, w):
            return x + contract("batch seq embed, embed ffn -> batch seq ffn", jax.nn.relu(x), w), None

        return scan_layers(layer, x, stack)[0].sum()

    assert ("panax_wall" in jax.jit(jax.grad(loss)).lower(x).as_text()) == (library != "xla")
    gradient = jax.grad(lambda x: functools.reduce(lambda x, w: x + jax.nn.relu(x) @ w, stack, x).sum())(x)
    np.testing.assert_allclose(
        jax.jit(jax.grad(loss))(x), gradient, rtol=1e-4, atol=1e-2 * np.abs(gradient).max() * 1e-2
    )
