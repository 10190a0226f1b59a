"""Counting what compiled programs send, on meshes of simulated devices, against what is known beforehand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from communicating import KINDS, known, lowered
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from panax.plan import CollectiveTotal, count_collectives, summarize_collectives

SHAPE = {"a": 2, "b": 2, "c": 2}


def mesh_of(shape: dict[str, int], devices: np.ndarray | None = None) -> Mesh:
    devices = np.array(jax.devices()) if devices is None else devices
    return Mesh(devices.reshape(tuple(shape.values())), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def counted(mesh: Mesh, *args, **options):
    return count_collectives(lowered(mesh, *args, **options).compile().as_text(), dict(mesh.shape))


def facts(collectives):
    return [(c.kind, c.axes, c.dtype, c.buffer_bytes, c.wire_bytes, c.times, c.exact) for c in collectives]


@pytest.mark.parametrize("axis", ["a", "b", "c"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_over_each_axis(kind, axis):
    (found,) = counted(mesh_of(SHAPE), [(kind, axis)])
    assert facts([found]) == [(kind, (axis,), "f32", *known(kind, 2), 1, True)]
    assert found.where == f"part_{kind}"


@pytest.mark.parametrize("axes", [("a", "b"), ("a", "c"), ("b", "c"), ("a", "b", "c")])
def test_over_several_axes(axes):
    steps = [(kind, axes) for kind in KINDS[:3]]
    found = counted(mesh_of(SHAPE), steps)
    assert facts(found) == [(kind, axes, "f32", *known(kind, 2 ** len(axes)), 1, True) for kind, _ in steps]


def test_axes_of_different_sizes():
    shape = {"a": 4, "b": 1, "c": 2}
    found = counted(mesh_of(shape), [("all-gather", "a"), ("all-reduce", "c"), ("collective-permute", "a")])
    assert facts(found) == [
        ("all-gather", ("a",), "f32", *known("all-gather", 4), 1, True),
        ("all-reduce", ("c",), "f32", *known("all-reduce", 2), 1, True),
        ("collective-permute", ("a",), "f32", *known("collective-permute", 4), 1, True),
    ]


def test_nested_loops_multiply():
    (found,) = counted(mesh_of(SHAPE), [("all-reduce", "b")], loops=(3, 5, 2))
    assert (found.times, found.exact) == (30, True)
    assert found.total_wire_bytes == 30 * known("all-reduce", 2)[1]


def test_a_partitions_number_is_its_place_in_the_mesh_not_the_devices_id():
    shuffled = np.array(jax.devices())[[5, 2, 7, 0, 3, 6, 1, 4]]
    found = counted(mesh_of(SHAPE, shuffled), [("all-gather", "a"), ("collective-permute", "c")])
    assert [collective.axes for collective in found] == [("a",), ("c",)]


def test_collectives_over_one_device_are_none():
    assert counted(mesh_of({"a": 8, "b": 1, "c": 1}), [("all-reduce", "b")]) == []


def test_the_partitioners_own_collectives():
    """Under automatic sharding, where groups are written in other ways."""
    mesh = mesh_of(SHAPE)

    def loss(w, x):
        return (jnp.einsum("be,ef->bf", x, w, precision="float32") ** 2).sum()

    place = lambda *spec: NamedSharding(mesh, P(*spec))  # noqa: E731
    w = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=place("b", "c"))
    x = jax.ShapeDtypeStruct((32, 64), jnp.float32, sharding=place(("a", "b"), None))
    compiled = jax.jit(jax.grad(loss), out_shardings=place("b", "c")).lower(w, x).compile()
    totals = {
        (total.kind, total.axes): total for total in summarize_collectives(count_collectives(compiled.as_text(), SHAPE))
    }
    # The weight is gathered over b; its gradient, 64 x 64 on each device, is summed over a and b.
    assert totals["all-gather", ("b",)].wire_bytes == 64 * 64 * 4 // 2
    assert sum(total.wire_bytes for (kind, _), total in totals.items() if kind == "all-reduce") >= 64 * 64 * 4
    assert all(set(axes) <= {"a", "b"} for _, axes in totals)


def test_a_loop_of_unknown_length_and_a_branch_are_marked():
    mesh = mesh_of(SHAPE)

    def run(x, i):
        x = lax.cond(i[0] > 0, lambda x: lax.psum(x, "a"), lambda x: lax.ppermute(x, "b", [(0, 1), (1, 0)]), x)
        return lax.while_loop(
            lambda c: c[0] * c[0] < i[0], lambda c: (c[0] + 1, jnp.tanh(lax.psum(c[1], "c"))), (jnp.int32(0), x)
        )[1]

    sharded = jax.shard_map(run, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"), check_vma=False)
    arguments = jnp.zeros((64, 64), jnp.float32), jnp.zeros((1,), jnp.int32)
    collectives = count_collectives(jax.jit(sharded).lower(*arguments).compile().as_text(), SHAPE)
    assert sorted((c.kind, c.axes, c.times, c.exact) for c in collectives) == [
        ("all-reduce", ("a",), 1, False),
        ("all-reduce", ("c",), 1, False),
        ("collective-permute", ("b",), 1, False),
    ]


@pytest.mark.parametrize("written", [True, False], ids=["written down", "read from the condition"])
@pytest.mark.parametrize(
    ("start", "goes_on", "step", "times"),
    [
        (0, lambda i: i < 7, 1, 7),
        (9, lambda i: i > 3, -1, 6),
        (1, lambda i: i < 10, 4, 3),
        (2, lambda i: i <= 10, 4, 3),
        (10, lambda i: i >= 2, -3, 3),
        (0, lambda i: i != 6, 2, 3),
    ],
)
def test_loops_of_every_direction(start, goes_on, step, times, written):
    mesh = mesh_of(SHAPE)

    def run(x):
        def body(carry):
            i, x = carry
            return i + step, jnp.tanh(lax.psum(x, "a"))

        return lax.while_loop(lambda carry: goes_on(carry[0]), body, (jnp.int32(start), x))[1]

    sharded = jax.shard_map(run, mesh=mesh, in_specs=P("c"), out_specs=P("c"), check_vma=False)
    text = jax.jit(sharded).lower(jnp.zeros((64, 64), jnp.float32)).compile().as_text()
    # TPU programs are without.
    text = text if written else text.replace("known_trip_count", "unknown")
    assert [(c.axes, c.times, c.exact) for c in count_collectives(text, SHAPE)] == [(("a",), times, True)]


def test_the_same_without_the_compilers_own_trip_counts():
    """As TPU programs are: the loop's condition tells."""
    text = lowered(mesh_of(SHAPE), [("all-reduce", "b")], loops=(3, 5)).compile().as_text()
    assert "known_trip_count" in text
    (found,) = count_collectives(text.replace("known_trip_count", "unknown"), SHAPE)
    assert (found.times, found.exact) == (15, True)


def test_summary_adds_up_by_kind_and_axes():
    found = counted(mesh_of(SHAPE), [("all-reduce", "b"), ("all-gather", "a"), ("all-reduce", "b")], loops=(4,))
    gather, reduce = known("all-gather", 2)[1], known("all-reduce", 2)[1]
    assert gather == reduce
    assert summarize_collectives(found) == [
        CollectiveTotal("all-reduce", ("b",), 8, 8 * reduce, True),
        CollectiveTotal("all-gather", ("a",), 4, 4 * gather, True),
    ]


def test_another_mesh_and_another_text_are_refused():
    text = lowered(mesh_of(SHAPE), [("all-reduce", "b")]).compile().as_text()
    with pytest.raises(ValueError, match=r"for 8 devices, the mesh .* has 4"):
        count_collectives(text, {"a": 2, "b": 2})
    with pytest.raises(ValueError, match="begins with ENTRY"):
        count_collectives("nothing", SHAPE)
