"""The one product: a user's own on a mesh gives the gradients of plain JAX, whatever the layout at rest."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from panax.mesh import MeshShape, Placement
from panax.spmd import WeightOp, apply_weight_op, gather_weight, gather_weight_early


@dataclasses.dataclass(frozen=True)
class Gated(WeightOp):
    """(x · a) * (x · b), of two weights."""

    forgets: bool = False

    def forward(self, inputs, *weights):
        a, b = (inputs @ w.value for w in weights)
        return a * b, (inputs, a, b, [w.value for w in weights])

    def backward(self, saved, gradient, *dtypes):
        x, a, b, (w_a, w_b) = saved
        d_a, d_b = gradient * b, gradient * a
        slots = [(x.T @ d).astype(dtype) for d, dtype in zip((d_a, d_b), dtypes)]
        return d_a @ w_a.T + d_b @ w_b.T, slots[:1] if self.forgets else slots


@dataclasses.dataclass(frozen=True)
class SquaredAtOnce(WeightOp):
    """The sum of (x · w)², with gradients formed alongside."""

    def value(self, inputs, *weights):
        return jnp.square(inputs @ weights[0].value).sum()

    def forward(self, inputs, *weights):
        y = inputs @ weights[0].value
        return jnp.square(y).sum(), (2 * y @ weights[0].value.T, weights[0].reduce_grad(2 * inputs.T @ y))

    def backward(self, saved, gradient, *dtypes):
        d_inputs, returned = jax.tree.map(lambda leaf: leaf * gradient, saved)
        return d_inputs, [returned]


@pytest.fixture(scope="module")
def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, ((8, 16), (16, 4), (16, 4))))


def on_eight(function, *arrays):
    """Gradients of a device's own rows' sum, for rows and weights that are split over fsdp."""
    placement = Placement.create(MeshShape(replica=1, fsdp=8))
    spec = PartitionSpec("fsdp")
    with placement.activate():
        mapped = jax.shard_map(
            jax.grad(function, tuple(range(len(arrays)))),
            mesh=placement.mesh, in_specs=(spec,) * len(arrays), out_specs=spec, check_vma=False,
        )  # fmt: skip
        return jax.jit(mapped)(*arrays)


def test_of_two_weights(arrays):
    def ours(x, a, b):
        return apply_weight_op(Gated(), x, *(gather_weight(w, "embed ffn", x.dtype) for w in (a, b))).sum()

    plain = jax.grad(lambda x, a, b: ((x @ a) * (x @ b)).sum(), (0, 1, 2))(*arrays)
    for found in (jax.grad(ours, (0, 1, 2))(*arrays), on_eight(ours, *arrays)):
        for got, expected in zip(found, plain, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_whose_gradient_is_formed_in_the_forward_pass(arrays):
    def ours(x, w):
        return 3 * apply_weight_op(SquaredAtOnce(), x, gather_weight_early(w, "embed ffn", x.dtype))

    plain = jax.grad(lambda x, w: 3 * jnp.square(x @ w).sum(), (0, 1))(*arrays[:2])
    for found in (jax.grad(ours, (0, 1))(*arrays[:2]), on_eight(ours, *arrays[:2])):
        for got, expected in zip(found, plain, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(ours(*arrays[:2]), 3 * jnp.square(arrays[0] @ arrays[1]).sum(), rtol=1e-6)


def test_a_gradient_that_is_left_out_is_named(arrays):
    def ours(x, a, b):
        return apply_weight_op(Gated(forgets=True), x, *(gather_weight(w, "embed ffn", x.dtype) for w in (a, b))).sum()

    with pytest.raises(ValueError, match=r"Gated.backward gave 1 gradients of weights for a product of 2; return one"):
        jax.grad(ours)(*arrays)
