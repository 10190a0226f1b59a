"""A split vocabulary: the parts that devices look up add up to one device's, whatever the residual stream's layout is."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from panax.core import LayoutError
from panax.core.layout.layout import use_layout
from panax.layers.embedding import Embedding
from panax.mesh import MeshShape, Placement, Rules
from panax.mesh.rules import COMPUTE, STORAGE
from panax.spmd import split_cotangent

ROWS, EMBED = 16, 8
RNG = np.random.default_rng(0)
TABLE = jnp.asarray(RNG.standard_normal((ROWS, EMBED)), jnp.float32)
TOKENS = jnp.asarray(RNG.integers(0, ROWS, (2, 12)), jnp.int32)
READ = jnp.asarray(RNG.standard_normal((2, 12, EMBED)), jnp.float32)
"""What the looked-up vectors are multiplied by, so that each one's gradient is another."""


def found(table: jax.Array) -> tuple[jax.Array, jax.Array]:
    def read(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = Embedding(table=table)(TOKENS, jnp.float32)
        return split_cotangent(jnp.sum(x * READ)), x

    (_, x), gradient = jax.value_and_grad(read, has_aux=True)(table)
    return x, gradient


@pytest.mark.parametrize("storage", [("tensor",), ("tensor", "fsdp")])
def test_a_whole_residual_stream_gets_the_whole_sum(storage: tuple[str, ...]) -> None:
    rules = Rules(storage={**STORAGE, "vocab": storage, "embed": ()}).with_whole_residual()
    placement = Placement.create(MeshShape(fsdp=2, tensor=2), rules=rules, devices=jax.devices()[:4])
    split = PartitionSpec(storage, None)
    on_mesh = partial(jax.shard_map, mesh=placement.mesh, check_vma=False)
    with use_layout(placement):
        x, gradient = jax.jit(on_mesh(found, in_specs=split, out_specs=(PartitionSpec(), split)))(TABLE)
    expected_x, expected_gradient = found(TABLE)
    assert np.array_equal(x, expected_x)
    # Over fsdp the same tokens are read twice here, and gradients of what is gathered for a use are summed after it.
    times = 2 if "fsdp" in storage else 1
    np.testing.assert_allclose(gradient, times * expected_gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        ({"vocab": ("fsdp",)}, "fsdp splits the tokens"),
        ({"vocab": ("expert", "tensor"), "batch": ("replica", "fsdp")}, "split both over the same mesh axes"),
    ],
)
def test_a_vocabulary_that_cannot_be_added_up_is_rejected(compute: dict, message: str) -> None:
    rules = Rules(storage={**STORAGE, "vocab": compute["vocab"], "embed": ()}, compute={**COMPUTE, **compute})
    placement = Placement.create(MeshShape(fsdp=2, expert=2, tensor=2), rules=rules)
    with use_layout(placement), pytest.raises(LayoutError, match=message):
        jax.shard_map(
            lambda table: Embedding(table=table)(TOKENS, jnp.float32),
            mesh=placement.mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(TABLE)
