"""Conversion of functions of whole arrays to functions of shards, in which every mesh axis is manual."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec

from ..core.layout.layout import Layout


def map_over_shards(function: Callable[..., Any], layout: Layout, arguments: Any, results: Any) -> Callable[..., Any]:
    """Run `function` on each device's shards of whole arrays.

    If the layout describes independent replicas (`layout.each`), `function` is that of one replica;
    `jax.vmap` over the replicas then runs all of them at once, each on its own devices.

    Args:
        arguments: Sharding of the arguments: the same structure, with a `PartitionSpec` for each array or
            tree of arrays.
        results: Sharding of the results, in the same form.
    """
    alone = jax.shard_map(function, mesh=layout.mesh, in_specs=arguments, out_specs=results, check_vma=False)
    if not layout.local_axes:
        return alone
    front = layout.local_axes

    def lying(specs: Any) -> Any:
        return jax.tree.map(lambda spec: PartitionSpec(front, *spec), specs, is_leaf=_is_spec)

    def of_one(*inputs: Any) -> Any:
        outputs = function(*jax.tree.map(lambda x: x[0], inputs))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], outputs)

    together = jax.shard_map(
        of_one, mesh=layout.mesh, in_specs=lying(arguments), out_specs=lying(results), check_vma=False
    )
    # `alone` is never run under vmap, but gives the shapes of one replica's results.
    called = custom_vmap(alone)

    @called.def_vmap
    def of_all(count: int, batched: Any, *inputs: Any) -> tuple[Any, Any]:
        # Python scalars in the program are not arrays, so they have no `shape`.
        broadcast_inputs = jax.tree.map(
            lambda x, is_batched: x if is_batched else jnp.broadcast_to(x, (count, *jnp.shape(x))),
            list(inputs),
            batched,
        )
        outputs = together(*broadcast_inputs)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return called


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)
