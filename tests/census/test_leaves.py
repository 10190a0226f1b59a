"""Boundary values of every leaf of every task: refused where the batch enters, or the same batch as with int32 and float32."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from census.tasks import CASES, step_of
from panax.core.batch_checks import MASK_LEAF, LeafRange, as_leaf_range, find_faults
from panax.core.errors import DataError
from panax.train.update import prepare_batch

WHOLE = ("int8", "uint8", "int16", "uint16", "int64", "uint32", "uint64")
FAR = (-100, 2**31 - 1, -(2**31), 2**40, -(2**40))


def _leaves():
    for name, case in CASES.items():
        batch = case.draw(0)
        for leaf, given in case.task.leaf_ranges.items():
            if leaf in batch:
                yield name, leaf, as_leaf_range(given), batch[leaf]


def _outside(allowed: LeafRange) -> list[Any]:
    near = [edge for edge in (allowed.low - 1, allowed.high + 1) if np.isfinite(edge)]
    if allowed.integral:
        return [value for value in dict.fromkeys([*map(int, near), *FAR]) if not allowed.low <= value <= allowed.high]
    outside = [value for value in (-1e-6, 1 + 1e-6) if not allowed.low <= value <= allowed.high]
    return [*near, *outside, np.nan, np.inf, -np.inf]


OUTSIDE = [
    pytest.param(name, leaf, value, id=f"{name}-{leaf}-{value}")
    for name, leaf, allowed, _ in _leaves()
    if allowed.checked
    for value in _outside(allowed)
]


def _with(batch, leaf: str, value: Any):
    """The batch with the value in the first place that counts, in a type that holds it."""
    changed = dict(batch)
    wide = np.int64 if np.issubdtype(batch[leaf].dtype, np.integer) else np.float32
    changed[leaf] = batch[leaf].astype(wide)
    changed[leaf][_first_counted(batch, leaf)] = value
    return changed


def _first_counted(batch, leaf: str) -> tuple[int, ...]:
    mask = batch.get(MASK_LEAF)
    if mask is None or leaf == MASK_LEAF or mask.shape != batch[leaf].shape[: mask.ndim]:
        return (0,) * batch[leaf].ndim
    place = np.argwhere(mask > 0)[0]
    return tuple(place) + (0,) * (batch[leaf].ndim - len(place))


@pytest.mark.parametrize(("name", "leaf", "value"), OUTSIDE)
def test_a_value_outside_is_refused_by_its_leafs_name(name, leaf, value):
    case = CASES[name]
    with pytest.raises(DataError, match=f"leaf '{leaf}' holds"):
        step_of(name).put(_with(case.draw(0), leaf, value))


@pytest.mark.parametrize(("name", "leaf", "value"), OUTSIDE)
def test_a_step_of_several_processes_finds_it_on_the_devices(name, leaf, value):
    case = CASES[name]
    held = np.iinfo(np.int32)
    if isinstance(value, int):
        value = min(max(value, held.min), held.max)
    found = find_faults({k: jnp.asarray(v) for k, v in _with(case.draw(0), leaf, value).items()}, case.task.leaf_ranges)
    assert found is not None and bool(found.has_failed)
    with pytest.raises(DataError, match=f"'{leaf}'"):
        found.raise_if_failed("the batch of step 3")


@pytest.mark.parametrize("name", CASES)
def test_a_good_batch_has_no_fault_on_the_devices(name):
    batch = {k: jnp.asarray(v) for k, v in CASES[name].draw(0).items()}
    found = find_faults(batch, CASES[name].task.leaf_ranges)
    assert found is not None and not bool(found.has_failed)


NARROW = [
    pytest.param(name, leaf, dtype, id=f"{name}-{leaf}-{dtype}")
    for (name, leaf, allowed, values), dtype in itertools.product(_leaves(), (*WHOLE, "bool", "float16", "float64"))
    if (dtype in WHOLE) == (allowed.integral and dtype in WHOLE)
    and not (allowed.integral and dtype in ("bool", "float16", "float64"))
    and (dtype != "bool" or leaf == MASK_LEAF)
    and (not allowed.integral or (np.iinfo(dtype).min <= values.min() and values.max() <= np.iinfo(dtype).max))
]


@pytest.mark.parametrize(("name", "leaf", "dtype"), NARROW)
def test_any_type_that_holds_the_values_is_the_same_batch(name, leaf, dtype):
    case, step = CASES[name], step_of(name)
    batch = case.draw(0)
    usual = batch[leaf].astype(dtype).astype(batch[leaf].dtype)
    prepared = [
        prepare_batch(case.task, step.put({**batch, leaf: values}), step.batch_axes).batch
        for values in (usual, batch[leaf].astype(dtype))
    ]
    for one, two in zip(*map(jax.tree.leaves, prepared), strict=True):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)


MISTAKES = {
    "floats": (lambda leaf: leaf.astype(np.float32), "expected integers"),
    "text": (lambda leaf: leaf.astype(str), "holds <U"),
    "complex": (lambda leaf: leaf.astype(np.complex64), "holds complex64"),
    "objects": (lambda leaf: leaf.astype(object), "holds object"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize(("name", "leaf"), [(name, leaf) for name, leaf, allowed, _ in _leaves() if allowed.integral])
def test_what_is_no_integer_is_refused_where_ids_are_meant(name, leaf, mistake):
    change, words = MISTAKES[mistake]
    batch = CASES[name].draw(0)
    with pytest.raises(DataError, match=f"leaf '{leaf}' {words}|leaf '{leaf}' holds.*{words}"):
        step_of(name).put({**batch, leaf: change(batch[leaf])})


@pytest.mark.parametrize(("name", "leaf"), [(name, leaf) for name, case in CASES.items() for leaf in case.draw(0)])
@pytest.mark.parametrize("how", ["shorter", "flat", "deeper"])
def test_a_leaf_of_another_shape_is_refused(name, leaf, how):
    batch = CASES[name].draw(0)
    leaf_of = batch[leaf]
    changed = {"shorter": leaf_of[:-1], "flat": leaf_of.reshape(-1)[: len(leaf_of)], "deeper": leaf_of[..., None]}[how]
    if changed.shape == leaf_of.shape:
        return
    with pytest.raises(DataError, match=r"leaf '.*' has"):
        step_of(name).put({**batch, leaf: changed})


@pytest.mark.parametrize(
    ("name", "leaf"), [(name, leaf) for name, case in CASES.items() for leaf in sorted(case.task.required_leaves)]
)
def test_a_missing_leaf_is_named_with_what_the_task_takes(name, leaf):
    from panax.train.batch_transfer import check_leaves

    names = set(CASES[name].draw(0)) - {leaf}
    with pytest.raises(DataError, match=f"lacks {leaf};.*takes"):
        check_leaves(CASES[name].task, names)
