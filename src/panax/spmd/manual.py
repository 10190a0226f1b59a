"""Functions of shards: where a program becomes one device's, and every mesh axis is manual."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec

from ..core.layout import Layout


def map_over_shards(function: Callable[..., Any], layout: Layout, arguments: Any, results: Any) -> Callable[..., Any]:
    """`function` of whole arrays, run on each device's shards of them.

    Where a layout is that of each replica by itself (`layout.each`), the function is one replica's; `jax.vmap` over the replicas
    then runs it on all of them at once, each on its own devices and nobody else's.

    Args:
        arguments: Where its arguments lie: like them, with a `PartitionSpec` for each array or tree of arrays.
        results: The same for what it returns.
    """
    alone = jax.shard_map(function, mesh=layout.mesh, in_specs=arguments, out_specs=results, check_vma=False)
    if not layout.each:
        return alone
    front = layout.each

    def lying(specs: Any) -> Any:
        return jax.tree.map(lambda spec: PartitionSpec(front, *spec), specs, is_leaf=_is_spec)

    def of_one(*given: Any) -> Any:
        own = function(*jax.tree.map(lambda x: x[0], given))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], own)

    together = jax.shard_map(
        of_one, mesh=layout.mesh, in_specs=lying(arguments), out_specs=lying(results), check_vma=False
    )
    # What is never run, but tells the shapes of one replica's results.
    called = custom_vmap(alone)

    @called.def_vmap
    def of_all(count: int, batched: Any, *given: Any) -> tuple[Any, Any]:
        # Numbers of a program's own text are no arrays.
        whole = jax.tree.map(
            lambda x, own: x if own else jnp.broadcast_to(x, (count, *jnp.shape(x))), list(given), batched
        )
        found = together(*whole)
        return found, jax.tree.map(lambda _: True, found)

    return called


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)
