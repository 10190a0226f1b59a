"""Copies of tokens in a buffer's rows, and sums over those copies: gathers in both directions, each the
other's transpose.

The transpose of a gather is a scatter-add, which is slow on all backends and nondeterministic on GPUs. A
layout of tokens in rows provides both the token of each row and the rows of each token, so the transpose can
be a gather too.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from ..kernels.product import sum_few


class RowMap(eqx.Module):
    """Map between the rows of a buffer and the tokens that they copy.

    Attributes:
        token: Token of each row; any index out of range for an empty row.
        rows: Rows of each token; any index out of range for none. None if tokens have varying numbers of
            rows.
        tokens: Number of tokens.
    """

    token: Int[Array, " row"]
    rows: Int[Array, "token use"] | None
    tokens: int = eqx.field(static=True)

    @classmethod
    def of_positions(cls, place: Int[Array, "token use"], rows: int) -> "RowMap":
        """Build the map from the rows, `place`, of each token in a buffer of `rows` rows."""
        tokens, uses = place.shape
        owner = jnp.arange(tokens * uses, dtype=jnp.int32) // uses
        token = jnp.full((rows,), tokens, jnp.int32).at[place.reshape(-1)].set(owner, mode="drop")
        return cls(token, place, tokens)


@jax.custom_vjp
def copy_to_rows(x: Shaped[Array, "token ..."], places: RowMap) -> Shaped[Array, "row ..."]:
    """Copy each row's token into it; empty rows are zero.

    >>> copy_to_rows(jnp.array([1.0, 2.0]), RowMap(jnp.array([1, 2, 0]), None, 2)).tolist()
    [2.0, 0.0, 1.0]
    """
    return x.at[places.token].get(mode="fill", fill_value=0)


@jax.custom_vjp
def sum_by_token(rows: Float[Array, "row ..."], places: RowMap) -> Float[Array, "token ..."]:
    """Sum each token's rows in float32.

    >>> sum_by_token(jnp.array([1.0, 2.0, 4.0]), RowMap(jnp.array([1, 1, 5]), None, 2)).tolist()
    [0.0, 3.0]
    """
    if places.rows is None:
        zeros = jnp.zeros((places.tokens, *rows.shape[1:]), jnp.float32)
        return zeros.at[places.token].add(rows.astype(jnp.float32), mode="drop").astype(rows.dtype)
    if places.rows.shape[1] == 1:
        return rows.at[places.rows[:, 0]].get(mode="fill", fill_value=0)
    gathered = rows.at[places.rows].get(mode="fill", fill_value=0)
    return sum_few(gathered.astype(jnp.float32), 1).astype(rows.dtype)


copy_to_rows.defvjp(
    lambda x, places: (copy_to_rows(x, places), places), lambda places, gradient: (sum_by_token(gradient, places), None)
)
sum_by_token.defvjp(
    lambda rows, places: (sum_by_token(rows, places), places),
    lambda places, gradient: (copy_to_rows(gradient, places), None),
)
