"""Rows to their experts' devices and back: every row arrives once, in the order of its expert, whatever the loads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from panax.parallel.exchange import ExchangePlan
from panax.parallel.rows import RowMap, copy_to_rows, sum_by_token

WAYS, EXPERTS, ROWS = 4, 3, 24
"""Devices, experts of each, rows of each."""


def emulated_ragged(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """The collective that the CPU lacks: by gathering everything."""
    rows = jax.lax.all_gather(operand, axis_name)
    starts, sizes, at = (jax.lax.all_gather(v, axis_name) for v in (input_offsets, send_sizes, output_offsets))
    me = jax.lax.axis_index(axis_name)
    for source in range(WAYS):
        place = jnp.arange(rows.shape[1]) - starts[source, me]
        inside = (place >= 0) & (place < sizes[source, me])
        output = output.at[jnp.where(inside, at[source, me] + place, output.shape[0])].set(rows[source], mode="drop")
    return output


@functools.cache
def exchanged(ragged: bool, buffer: int):
    """A program for any loads: each row, multiplied by its expert's number, back; and how often each was seen where."""
    exchange = ExchangePlan(("expert",), WAYS, buffer, ragged)

    def local(rows, counts):
        rows, counts = rows[0], counts[0]
        plan = exchange.plan(counts)
        rounds = exchange.rounds(plan)

        def one(carry):
            number, back, counts_taken, ordered = carry
            window = exchange.window(plan, number)
            arrived = exchange.send(rows, plan, window)
            arrivals = exchange.arrivals(plan, window)
            mine = jax.lax.axis_index("expert") * EXPERTS
            scaled = arrived * (mine + arrivals.expert + 1).astype(jnp.float32)
            back = back + exchange.send_back(scaled, plan, window, ROWS)
            # In the order of experts, ranks fill each expert's places one after the other.
            starts = jnp.cumsum(arrivals.counts) - arrivals.counts
            inside = jnp.minimum(arrivals.expert, EXPERTS - 1)
            place = jnp.where(arrivals.expert < EXPERTS, starts[inside] + arrivals.rank, buffer)
            filled = jnp.zeros(buffer, jnp.int32).at[place].add(1, mode="drop")
            expected = jnp.arange(buffer) < arrivals.counts.sum()
            return (
                number + 1,
                back,
                counts_taken + arrivals.counts,
                ordered & (filled == expected.astype(jnp.int32)).all(),
            )

        start = (jnp.int32(0), jnp.zeros_like(rows), jnp.zeros(EXPERTS, jnp.int32), jnp.bool_(True))
        _, back, counts_taken, ordered = jax.lax.while_loop(lambda carry: carry[0] < rounds, one, start)
        return back[None], counts_taken[None], ordered[None], rounds[None]

    mesh = Mesh(np.array(jax.devices()[:WAYS]), ("expert",))
    split = PartitionSpec("expert")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))


def loads(kind: str, rng) -> np.ndarray:
    """[device, expert] rows, at most ROWS for each device."""
    shape = (WAYS, WAYS * EXPERTS)
    if kind == "all to one":
        counts = np.zeros(shape, np.int32)
        counts[:, 5] = ROWS
        return counts
    if kind == "none":
        return np.zeros(shape, np.int32)
    weights = rng.dirichlet(np.full(shape[1], 0.2 if kind == "skewed" else 50.0), WAYS)
    return np.stack([rng.multinomial(rng.integers(0, ROWS + 1), w) for w in weights]).astype(np.int32)


@pytest.mark.parametrize("ragged", [False, True], ids=["padded", "ragged"])
@pytest.mark.parametrize("buffer", [8, 24, 96])
def test_no_row_is_lost_whatever_the_loads(ragged, buffer, monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated_ragged)
    program, rng, max_rounds = exchanged(ragged, buffer), np.random.default_rng(buffer), 0
    for kind in ["all to one", "none", *["skewed"] * 20, *["even"] * 5]:
        counts = loads(kind, rng)
        rows = np.arange(1, WAYS * ROWS + 1, dtype=np.float32).reshape(WAYS, ROWS)
        back, counts_taken, ordered, rounds = (np.asarray(leaf) for leaf in program(rows, counts))
        expert = np.stack(
            [np.repeat(np.arange(1, WAYS * EXPERTS + 1), row).tolist() + [0] * (ROWS - row.sum()) for row in counts]
        )
        np.testing.assert_array_equal(back, rows * expert, err_msg=kind)
        np.testing.assert_array_equal(counts_taken, counts.sum(axis=0).reshape(WAYS, EXPERTS))
        assert ordered.all() and len(set(rounds.tolist())) == 1
        arrivals = counts.reshape(WAYS, WAYS, EXPERTS).sum(axis=2)
        needed = arrivals.sum(axis=0).max() / buffer if ragged else arrivals.max() / (buffer // WAYS)
        assert rounds[0] == np.ceil(needed)
        max_rounds = max(max_rounds, rounds[0])
    # A buffer for everything takes one round, a small one many.
    assert max_rounds == {8: 12, 24: 4, 96: 1}[buffer]


@pytest.mark.parametrize("uses", [1, 3])
def test_gathers_are_each_others_gradients(uses):
    rng = np.random.default_rng(0)
    place = jnp.asarray(rng.permutation(30)[: 8 * uses].reshape(8, uses), jnp.int32)
    place = place.at[2, 0].set(40)
    x, rows = jnp.asarray(rng.normal(size=(8, 5)), jnp.float32), jnp.asarray(rng.normal(size=(30, 5)), jnp.float32)
    for places in (RowMap.of_positions(place, 30), RowMap(RowMap.of_positions(place, 30).token, None, 8)):
        matrix = np.zeros((30, 8))
        for row, token in enumerate(np.asarray(places.token)):
            if token < 8:
                matrix[row, token] = 1.0
        assert matrix.sum() == 8 * uses - 1
        spread_, pull = jax.vjp(lambda x, p=places: copy_to_rows(x, p), x)
        np.testing.assert_allclose(spread_, matrix @ np.asarray(x), atol=1e-6)
        np.testing.assert_allclose(pull(rows)[0], matrix.T @ np.asarray(rows), atol=1e-6)
        collected, pull = jax.vjp(lambda rows, p=places: sum_by_token(rows, p), rows)
        np.testing.assert_allclose(collected, matrix.T @ np.asarray(rows), atol=1e-6)
        np.testing.assert_allclose(pull(x)[0], matrix @ np.asarray(x), atol=1e-6)
