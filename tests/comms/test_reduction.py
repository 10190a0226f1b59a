"""Compressed sums on 8 devices: what they give, what they owe, and that nothing is lost in between."""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from panax.comms import WIRES, Comms
from panax.comms.reduction import compressed_views, reduce_compressed
from panax.comms.residuals import reshard_residual
from panax.comms.rows import RowView
from panax.mesh import MeshShape, Placement
from panax.mesh.placement import partition_entries

AXES = {"up": ("layer", "embed", "ffn"), "query": ("embed", "heads", "head_dim"), "tall": ("vocab", "embed")}
SHAPES = {"up": (3, 64, 96), "query": (64, 4, 24), "tall": (96, 48)}
STEPS = {"bfloat16": 2.0**-8, "int8": 1 / 254, "float8": 2.0**-4, "int4": 1 / 14}
"""By wire, the most that rounding to the nearest changes a number, as a share of the largest in its box."""


@functools.cache
def _placed(mesh) -> Placement:
    mesh = dict(mesh)
    return Placement.create(MeshShape(**{"fsdp": 1, **mesh}), devices=jax.devices()[: math.prod(mesh.values())])


def placed(**mesh) -> Placement:
    return _placed(tuple(mesh.items()))


_compiled = {}


def terms(replicas: int, seed: int = 0, scale: float = 1.0) -> dict[str, np.ndarray]:
    """Each replica's gradients, those of one step: boxes of very different size."""
    rng = np.random.default_rng(seed)
    return {
        name: (scale * rng.standard_normal((replicas, *shape)) * np.exp(2 * rng.standard_normal(shape))).astype(
            np.float32
        )
        for name, shape in SHAPES.items()
    }


def compiled(placement: Placement, comms: Comms):
    """(gradients, owed, count) of all replicas -> (what each device has for the sum, owed), each with replicas in front."""
    key = (id(placement), comms)
    if key not in _compiled:
        _compiled[key] = _program(placement, comms)
    return _compiled[key]


def _program(placement: Placement, comms: Comms):
    lies = {name: PartitionSpec("replica", *partition_entries(placement.storage(axes))) for name, axes in AXES.items()}

    def local(terms, owed, count):
        local_terms = {name: x[0] for name, x in terms.items()}
        ways = compressed_views({name: (x.shape, AXES[name]) for name, x in local_terms.items()}, comms, placement)
        assert ways.keys() == AXES.keys()
        sums, owed = reduce_compressed(local_terms, ways, owed, comms, placement, count)
        return {name: x[None] for name, x in sums.items()}, owed

    out = (lies, lies if comms.error_feedback else None)
    return jax.jit(
        jax.shard_map(
            local, mesh=placement.mesh, in_specs=(lies, out[1], PartitionSpec()), out_specs=out, check_vma=False
        )
    )


def summed(placement: Placement, comms: Comms, gradients, owed=None, count: int = 0):
    """(the sums, which all replicas have alike; what they owe)"""
    if comms.error_feedback and owed is None:
        owed = {name: np.zeros_like(x) for name, x in gradients.items()}
    sums, owed = compiled(placement, comms)(gradients, owed, jnp.int32(count))
    for name, x in sums.items():
        for replica in np.asarray(x)[1:]:
            np.testing.assert_array_equal(replica, np.asarray(x)[0], err_msg=name)
    return {name: np.asarray(x)[0] for name, x in sums.items()}, owed and jax.tree.map(np.asarray, owed)


@pytest.mark.parametrize(
    ("wire", "replicas", "others"), [*((wire, 4, {"fsdp": 2}) for wire in WIRES), ("sign", 3, {"tensor": 2})]
)
def test_what_is_not_sent_is_owed(wire, replicas, others):
    comms, placement = Comms(compress=wire), placed(replica=replicas, **others)
    gradients, owed = terms(replicas), None
    for count in range(3):
        before = {name: np.zeros_like(x) for name, x in gradients.items()} if owed is None else owed
        sums, owed = summed(placement, comms, gradients, owed, count)
        for name in AXES:
            exact_sum = gradients[name].astype(np.float64).sum(0) + before[name].astype(np.float64).sum(0)
            result = sums[name].astype(np.float64) + owed[name].astype(np.float64).sum(0)
            # Each of a few additions rounds in float32, beside numbers that may be larger than their sum.
            size = np.abs(gradients[name]).sum(0) + np.abs(before[name]).sum(0) + np.abs(owed[name]).sum(0)
            assert np.abs(result - exact_sum).max() <= 8 * 2.0**-24 * size.max(), name


@pytest.mark.parametrize("wire", STEPS)
def test_a_sum_is_as_near_as_its_codes(wire):
    placement = placed(replica=4, fsdp=2)
    gradients = terms(4)
    sums, _ = summed(placement, Comms(compress=wire), gradients)
    for name, axes in AXES.items():
        rows = RowView.of(name, SHAPES[name], axes, placed(fsdp=1), 1)
        largest = sum(np.abs(np.asarray(rows.to_rows(jnp.asarray(x)))).max(-1) for x in gradients[name])
        # Each term is rounded at most once, then the sum, whose box holds nothing larger than all theirs together.
        apart = np.abs(
            np.asarray(rows.to_rows(jnp.asarray(sums[name] - gradients[name].astype(np.float64).sum(0))))
        ).max(-1)
        assert (apart <= 2 * STEPS[wire] * largest * (1 + STEPS[wire]) + 1e-6 * largest).all(), name
        assert (apart > 0).any()


def test_signs_reach_a_minimum_with_feedback_and_miss_it_without():
    # Each replica pulls to a point of its own; gradient descent is to find the mean of these.
    pulls = terms(4, seed=3)
    goal = {name: pull.mean(0) for name, pull in pulls.items()}
    apart = {}
    for feedback in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is shown here
            comms = Comms(compress="sign", error_feedback=feedback)
        at, owed = {name: np.zeros_like(x) for name, x in goal.items()}, None
        for step in range(400):
            gradients = {name: (at[name] - pull) / 4 for name, pull in pulls.items()}
            sums, owed = summed(placed(replica=4), comms, gradients, owed, step)
            at = {name: x - 0.3 / (1 + step / 40) * sums[name] for name, x in at.items()}
        apart[feedback] = {name: np.linalg.norm(at[name] - x) / np.linalg.norm(x) for name, x in goal.items()}
    for name in goal:
        assert apart[True][name] < 0.3 < 0.7 < apart[False][name], apart


@pytest.mark.parametrize("wire", ["int8", "sign"])
def test_no_layout_changes_what_is_summed(wire):
    gradients = terms(2)
    results = {}
    for mesh in ({"replica": 2}, {"replica": 2, "fsdp": 4}, {"replica": 2, "fsdp": 2, "tensor": 2}):
        owed = None
        for count in range(2):
            sums, owed = summed(placed(**mesh), Comms(compress=wire), gradients, owed, count)
        results[str(mesh)] = sums, owed
    first, *others = results.values()
    # A mean of 256 sizes is rounded as the program happens to add them up; a maximum is not.
    rounded = 0 if wire == "int8" else 256 * 2.0**-24
    for other in others:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rounded, atol=100 * rounded), first, other)


@pytest.mark.parametrize("wire", ["bfloat16", "int4"])
def test_rounding_by_chance_is_right_in_the_mean_and_the_same_on_every_mesh(wire):
    comms = Comms(compress=wire, rounding="stochastic", error_feedback=False)
    gradients = terms(2)
    apart = dict.fromkeys(AXES, 0.0)
    nearest, _ = summed(placed(replica=2), Comms(compress=wire, error_feedback=False), gradients)
    tries = 32
    for count in range(tries):
        sums, _ = summed(placed(replica=2), comms, gradients, count=count)
        apart = {name: apart[name] + (sums[name] - gradients[name].astype(np.float64).sum(0)) for name in AXES}
    other, _ = summed(placed(replica=2, fsdp=2, tensor=2), comms, gradients, count=tries - 1)
    jax.tree.map(np.testing.assert_array_equal, sums, other)
    for name in AXES:
        once = np.linalg.norm(nearest[name] - gradients[name].sum(0))
        # By chance errors are larger, at most by the root of 4 over the third of a uniform one, and the mean of 32 is a sixth.
        assert np.linalg.norm(apart[name] / tries) < once / 2, name


def test_zeros_stay_zeros_and_huge_numbers_finite():
    nothing = {name: np.zeros_like(x) for name, x in terms(4).items()}
    huge = {name: np.clip(x, -5, 5) * np.float32(1e37) for name, x in terms(4).items()}
    for wire in WIRES:
        sums, owed = summed(placed(replica=4, fsdp=2), Comms(compress=wire), nothing)
        assert not any(x.any() for x in (*sums.values(), *owed.values()))
        sums, owed = summed(placed(replica=4, fsdp=2), Comms(compress=wire), huge)
        assert all(np.isfinite(x).all() for x in (*sums.values(), *owed.values())), wire
        assert all(np.abs(x).max() > 1e36 for x in sums.values())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("wire", WIRES)
def test_what_is_not_finite_is_seen_by_all(wire, bad):
    gradients = terms(4)
    gradients["up"][2, 1, 5, 7] = bad
    sums, _ = summed(placed(replica=4, fsdp=2), Comms(compress=wire), gradients)
    assert not np.isfinite(sums["up"][1, 5, 7])
    assert np.isfinite(sums["query"]).all()


@pytest.mark.parametrize(("shape", "owners"), [((32, 512, 256), 4), ((3, 512, 96), 4), ((5, 64, 72), 3)])
def test_boxes_are_dealt_out_and_put_back(shape, owners):
    rows = RowView.of("up", shape, ("layer", "embed", "ffn"), placed(fsdp=1), owners)
    x = jnp.arange(1, 1 + math.prod(shape), dtype=jnp.float32).reshape(shape)
    cut = rows.to_rows(x)
    assert cut.shape == (owners, rows.rows_per_owner, rows.row_length)
    np.testing.assert_array_equal(rows.from_rows(cut), x)
    assert sorted(np.asarray(cut[cut > 0])) == sorted(np.asarray(x).reshape(-1))
    if shape == (32, 512, 256):
        assert rows.row_length == 256 and rows.rows_per_owner * owners * 256 == math.prod(shape)


@pytest.mark.parametrize(("before", "after"), [((4,), (2,)), ((2,), (4,)), ((3,), (2,)), ((2, 2), (2,)), ((1,), (1,))])
def test_what_is_owed_passes_on_whole(before, after):
    owed = np.random.default_rng(0).integers(-64, 64, (*before, 6, 4)).astype(np.float32)
    found = np.asarray(reshard_residual(jnp.asarray(owed), 2, after))
    assert found.shape == (*after, 6, 4)
    np.testing.assert_allclose(
        found.sum(tuple(range(len(after)))), owed.sum(tuple(range(len(before)))), rtol=1e-6, atol=1e-5
    )


def test_four_replicas_merge_two_by_two():
    owed = np.arange(8, dtype=np.float32).reshape(4, 2)
    np.testing.assert_array_equal(reshard_residual(jnp.asarray(owed), 1, (2,)), [[2, 4], [10, 12]])
