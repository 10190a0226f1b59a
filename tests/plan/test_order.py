"""What of a block is made in one pass, and in which order: the estimate of memory follows a compiler's habits."""

import jax
import jax.numpy as jnp
import pytest

from panax.plan.walk.fusion import group_passes
from panax.plan.walk.liveness import peak_bytes
from panax.plan.walk.program import read_program
from panax.plan.walk.schedule_order import reschedule

N = 256
ARRAY = N * N * 4


def block_of(function, *shapes):
    return read_program(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)))


def gated(x, gate, up, down, dy):
    """Forward and backward of a gated layer, its backward pass written out."""
    g, u = x @ gate, x @ up
    hidden = jax.nn.silu(g) * u
    dh = dy @ down.T
    d_down = hidden.T @ dy
    d_gate, d_up = jax.vjp(lambda g, u: jax.nn.silu(g) * u, g, u)[1](dh)
    return d_down, x.T @ d_gate, x.T @ d_up, d_gate @ gate.T + d_up @ up.T


def test_gradients_of_a_gate_are_made_in_one_pass_over_what_they_are_made_of():
    block, passes = group_passes(block_of(gated, *[(N, N)] * 5))
    (one,) = [group for group in passes if len(group) > 1]
    assert len(one) == 3, "the hidden values, and the gradients of both of its factors"
    places = [block.operations.index(operation) for operation in one]
    assert places == list(range(places[0], places[0] + 3))
    reader = next(
        i for i, op in enumerate(block.operations) if any(v is one[0].outputs[0] for v in op.arrays) and op not in one
    )
    assert places[-1] < reader


def test_a_result_that_is_needed_before_the_other_is_made_stands_alone():
    def apart(x, w):
        y = jnp.sin(x)
        z = y @ w  # reads the first result, and makes what the second one is made of
        return z, jnp.cos(x) * z @ w

    assert group_passes(block_of(apart, (N, N), (N, N)))[1] == []


def test_what_one_result_is_made_of_is_no_part_of_its_pass():
    def chained(x, w):
        y = jnp.sin(x)
        return y @ w, (jnp.cos(y) + x) @ w

    for found in group_passes(block_of(chained, (N, N), (N, N)))[1]:
        outputs = {id(operation.outputs[0]) for operation in found}
        assert not any(id(value) in outputs for operation in found for value in operation.arrays)


def test_a_large_product_waits_for_its_reader():
    def early(x, w):
        wide = x @ w
        other = (x @ (2 * w)) @ w.T
        return wide @ w.T + other

    block = block_of(early, (N, 8), (8, 64 * N))
    wide = block.operations[0].outputs[0]
    assert block.operations[0].name == "dot_general" and wide.bytes == 64 * ARRAY
    moved = reschedule(block, ())
    assert {id(operation) for operation in moved.operations} == {id(operation) for operation in block.operations}
    place = next(i for i, operation in enumerate(moved.operations) if wide in operation.outputs)
    assert any(value is wide for value in moved.operations[place + 1].arrays)
    assert peak_bytes(block) < 1.2 * wide.bytes, "never both of the large ones"


def test_a_sum_is_made_as_soon_as_all_of_it_is_there():
    def late(a, b, x, w):
        first, second = a @ b, b @ a
        big = x @ w
        total = big.sum()
        return first + second, total

    block = reschedule(block_of(late, (N, N), (N, N), (N, 8), (8, N)), ())
    names = [operation.name for operation in block.operations]
    assert names.index("add") == 2, names


@pytest.mark.parametrize("function", [gated])
def test_every_order_makes_values_before_they_are_read(function):
    block = group_passes(reschedule(block_of(function, *[(N, N)] * 5), ()))[0]
    made = {id(value) for value in block.inputs}
    for operation in block.operations:
        assert all(id(value) in made for value in operation.arrays)
        made |= {id(value) for value in operation.outputs}
