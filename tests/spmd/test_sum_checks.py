"""A forgotten sum is an error before a step runs; right tasks are none on any layout."""

import jax
import optax
import pytest
from broken_tasks import AXES, BROKEN, NoEqualShares, Split, Whole, batch

from panax.core import LayoutError
from panax.mesh import MeshShape, Placement, Rules
from panax.optim import Optax
from panax.train import CompiledStep, Program, StepConfig

MESHES = {
    "fsdp2·tensor2": MeshShape(replica=1, fsdp=2, tensor=2),
    "replica2·fsdp2·tensor2": MeshShape(replica=2, fsdp=2, tensor=2),
    "tensor4": MeshShape(replica=1, fsdp=1, tensor=4),
}


def compiled(task, mesh, rules=None, **config):
    config = StepConfig(clip_norm=None, **config)
    program = Program.create(task, Optax(transformation=optax.sgd(0.1)), num_steps=10, config=config)
    sizes = [getattr(mesh, axis) for axis in ("replica", "fsdp", "tensor")]
    devices = jax.devices()[: sizes[0] * sizes[1] * sizes[2]]
    return CompiledStep(program, Placement.create(mesh, rules, devices=devices), AXES)


@pytest.mark.parametrize("task", BROKEN, ids=lambda task: task.__name__)
@pytest.mark.parametrize("mesh", ["fsdp2·tensor2", "replica2·fsdp2·tensor2"])
def test_a_broken_task_is_found(task, mesh):
    axis, says, line = BROKEN[task]
    with pytest.raises(LayoutError) as caught:
        compiled(task(), MESHES[mesh]).lower(batch())
    first, *_ = str(caught.value).splitlines()
    assert f"'{axis}'" in first.split(", the ")[0], str(caught.value)
    assert says in first and line in first, str(caught.value)
    assert not line or "broken_tasks.py:" in first


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("zero", ["3", "2", "1"])
@pytest.mark.parametrize("task", [Split, Whole], ids=lambda task: task.__name__)
def test_a_right_task_is_not(task, mesh, zero):
    step = compiled(task(), MESHES[mesh], Rules(zero=zero), micro_batches=2)
    step.lower(batch())


def losses(task, mesh, **config):
    step = compiled(task, mesh, **config)
    state, found = step.init(0), []
    for _ in range(3):
        state, scalars = step(state, step.put(batch()))
        found.append(float(scalars["loss"]))
    return found


def test_right_tasks_are_right_and_a_broken_one_is_wrong():
    mesh, expected = MESHES["fsdp2·tensor2"], losses(Split(), MeshShape(replica=1, fsdp=1))
    for task in (Split, Whole):
        assert losses(task(), mesh) == pytest.approx(expected, rel=1e-5)
    # Unchecked, the loss goes down with gradients of twice their size.
    assert losses(NoEqualShares(), mesh, check_sums=False)[2] != pytest.approx(expected[2], rel=1e-3)


def test_the_check_can_be_turned_off():
    task = next(iter(BROKEN))
    compiled(task(), MESHES["fsdp2·tensor2"], check_sums=False).lower(batch())
