"""Copies of tokens in the rows of a buffer, and their sums: gathers in both directions, each the other's gradient.

The transpose of a gather is a scatter with additions, which is slow everywhere and not deterministic on GPUs. Whoever lays tokens
out in rows knows both which token each row is of and which rows each token is in: so the transpose is a gather too.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped


class RowMap(eqx.Module):
    """Which tokens the rows of a buffer are copies of.

    Attributes:
        token: Of each row; any number that is no token's where a row is of none.
        rows: Of each token; any number that is no row's for none. None where tokens are in any number of rows.
        tokens: How many there are.
    """

    token: Int[Array, " row"]
    rows: Int[Array, "token use"] | None
    tokens: int = eqx.field(static=True)

    @classmethod
    def of_places(cls, place: Int[Array, "token use"], rows: int) -> "RowMap":
        """Each token's `place`s in a buffer of so many rows."""
        tokens, uses = place.shape
        owner = jnp.arange(tokens * uses, dtype=jnp.int32) // uses
        token = jnp.full((rows,), tokens, jnp.int32).at[place.reshape(-1)].set(owner, mode="drop")
        return cls(token, place, tokens)


@jax.custom_vjp
def spread(x: Shaped[Array, "token ..."], places: RowMap) -> Shaped[Array, "row ..."]:
    """A copy of its token in each row; zeros in a row that is of none.

    >>> spread(jnp.array([1.0, 2.0]), RowMap(jnp.array([1, 2, 0]), None, 2)).tolist()
    [2.0, 0.0, 1.0]
    """
    return x.at[places.token].get(mode="fill", fill_value=0)


@jax.custom_vjp
def collect(rows: Float[Array, "row ..."], places: RowMap) -> Float[Array, "token ..."]:
    """The sum of each token's rows, added up in float32.

    >>> collect(jnp.array([1.0, 2.0, 4.0]), RowMap(jnp.array([1, 1, 5]), None, 2)).tolist()
    [0.0, 3.0]
    """
    if places.rows is None:
        zeros = jnp.zeros((places.tokens, *rows.shape[1:]), jnp.float32)
        return zeros.at[places.token].add(rows.astype(jnp.float32), mode="drop").astype(rows.dtype)
    if places.rows.shape[1] == 1:
        return rows.at[places.rows[:, 0]].get(mode="fill", fill_value=0)
    taken = rows.at[places.rows].get(mode="fill", fill_value=0)
    return taken.astype(jnp.float32).sum(axis=1).astype(rows.dtype)


spread.defvjp(lambda x, places: (spread(x, places), places), lambda places, gradient: (collect(gradient, places), None))
collect.defvjp(
    lambda rows, places: (collect(rows, places), places), lambda places, gradient: (spread(gradient, places), None)
)
