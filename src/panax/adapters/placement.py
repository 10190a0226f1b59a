"""Transfer of host weights to devices shard by shard: no device ever holds all of a sharded array."""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np


@runtime_checkable
class HostArray(Protocol):
    """An array that can be placed: a NumPy array, a view of a tensor, an array in a file that is read in
    slices."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __getitem__(self, index: Any) -> Any: ...


def device_put_tree(tree: Any, shardings: Any) -> Any:
    """Copy each array of `tree` to the devices of its sharding; the source is neither retained nor shared.

    Args:
        tree: A pytree of host arrays.
        shardings: A sharding for each.
    """
    places = jax.tree.structure(tree).flatten_up_to(shardings)
    leaves = [_placed(leaf, sharding) for leaf, sharding in zip(jax.tree.leaves(tree), places)]
    return jax.tree.structure(tree).unflatten(leaves)


def _placed(array: HostArray, sharding: jax.sharding.Sharding) -> jax.Array:
    if _is_key(array):
        return jax.device_put(array, sharding)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)

    def shard(index: Any) -> np.ndarray:
        # A separate copy: on CPU the device may take the memory as it is, and donate it later.
        return np.array(array[index], dtype=dtype, copy=True)

    return jax.make_array_from_callback(tuple(array.shape), sharding, shard)


def zeros_tree(tree: Any) -> Any:
    """Return zeros of the same shapes, for an `init` that is called only for its shapes."""
    return jax.tree.map(_blank, tree)


def _is_key(array: Any) -> bool:
    """Return True for an array of typed random keys."""
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _dtype_of(leaf: Any) -> Any:
    return leaf.dtype if _is_key(leaf) else jax.dtypes.canonicalize_dtype(leaf.dtype)


def _blank(leaf: Any) -> jax.Array:
    if not _is_key(leaf):
        return jnp.zeros(leaf.shape, _dtype_of(leaf))
    return jax.random.wrap_key_data(jnp.zeros_like(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
