"""Every mesh axis that a task declares can be traced, with the reductions and placements that it allows (K8)."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from census.tasks import CASES, Case, make_step
from panax.layers import TablesConfig
from panax.models import DlrmTask, SequenceTask, TwoTowerTask


def words(value: Any) -> str:
    return value if isinstance(value, str) else "x".join(value)


PAIRS = [("stage", "tensor"), ("stage", "context"), ("context", "tensor"), ("fsdp", "context"), ("expert", "tensor")]
MESHES = {
    name: [
        *({axis: 2} for axis in sorted(case.task.mesh_axes)),
        *({one: 2, two: 2} for one, two in PAIRS if {one, two} <= case.task.mesh_axes),
    ]
    for name, case in CASES.items()
}


def shapes(case: Case) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in case.draw(0).items()}


@pytest.mark.filterwarnings("ignore:mesh.stage")
@pytest.mark.parametrize(
    ("name", "mesh"),
    [(n, m) for n, meshes in MESHES.items() for m in meshes],
    ids=words,
)
def test_a_declared_axis_can_be_traced(name, mesh):
    case = CASES[name]
    if "context" in mesh and isinstance(case.task, SequenceTask):
        return
    make_step(case, mesh=mesh).trace(shapes(case))


@pytest.mark.parametrize("leaves", [("tokens", "targets", "loss_mask")])
@pytest.mark.parametrize("choice", ["token", "expert"])
@pytest.mark.parametrize(
    "mesh", [{"stage": 2, "fsdp": 2}, {"stage": 2, "tensor": 2}, {"context": 2, "tensor": 2}], ids="x".join
)
@pytest.mark.filterwarnings("ignore:mesh.stage")
def test_a_mixture_takes_rows_that_are_not_packed(leaves, choice, mesh):
    case = CASES["mixture"]
    task: Any = case.task
    feed_forward = dataclasses.replace(task.model.feed_forward, choice=choice)
    task = dataclasses.replace(task, model=dataclasses.replace(task.model, feed_forward=feed_forward))
    case = Case(
        task, lambda seed: {leaf: values for leaf, values in CASES["mixture"].draw(seed).items() if leaf in leaves}
    )
    make_step(case, mesh=mesh).trace(shapes(case))


def placed(case: Case, placement: str) -> Case:
    """The task with all of its tables placed so."""

    def tables(config: TablesConfig) -> TablesConfig:
        return dataclasses.replace(
            config, tables=tuple(dataclasses.replace(table, placement=placement) for table in config.tables)
        )

    task: Any = case.task
    names = ("tables",) if isinstance(task, DlrmTask) else ("query", "item")
    changes = {name: tables(getattr(task.model, name)) for name in names}
    return case._replace(task=dataclasses.replace(task, model=dataclasses.replace(task.model, **changes)))


@pytest.mark.parametrize(
    ("name", "placement", "mesh"),
    list(
        itertools.product(
            ("dlrm", "towers"), ("rows", "columns", "everywhere"), ({"context": 2}, {"tensor": 2}, {"fsdp": 2})
        )
    ),
    ids=lambda v: v if isinstance(v, str) else "x".join(v),
)
def test_tables_of_every_placement_can_be_traced(name, placement, mesh):
    case = placed(CASES[name], placement)
    make_step(case, mesh=mesh).trace(shapes(case))


@pytest.mark.parametrize("name", ["dlrm", "towers"])
def test_an_axis_that_splits_no_rows_trains_as_one_device(name):
    case = CASES[name]
    problems = []
    for mesh in ({}, {"context": 2, "fsdp": 2}):
        step = make_step(case, mesh=mesh)
        state, scalars = step(step.init(0), step.put(case.draw(0)))
        state, after = step(state, step.put(case.draw(1)))
        problems.append(
            [float(each[name]) for each in (scalars, after) for name in ("loss", "gradient_norm", "examples")]
        )
        assert isinstance(case.task, DlrmTask | TwoTowerTask)
    np.testing.assert_allclose(*problems, rtol=1e-5)
