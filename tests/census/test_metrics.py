"""Metrics of every kind and number are the same on each mesh, and of replicas that take local steps."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from panax.comms import Comms
from panax.core import DataChecks, Maximum, Mean, Sum
from panax.core.measures import NO_FAULT, merge_stacked
from panax.mesh import MeshShape, Placement
from panax.models import DecoderTask
from panax.optim import Schedule, Sgd
from panax.train import CompiledStep, Program, StepConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured(DecoderTask):
    """A decoder with a metric of each kind, of whole numbers and of others."""

    def compute_metrics(self, params: Any, items: Any, targets: Any, train: bool) -> Any:
        losses, metrics = super().compute_metrics(params, items, targets, train)
        words, mask = targets["targets"], targets["loss_mask"]
        large = words > 40
        result = jnp.where(large.any(), words.max().astype(jnp.float32), NO_FAULT)
        return losses, {
            **metrics,
            "large": Sum(large.sum()),
            "large_weight": Sum((large.astype(jnp.float32) * mask).sum()),
            "largest": Maximum(words.max()),
            "largest_weight": Maximum(mask.max()),
            "mean_word": Mean((words.astype(jnp.float32) * mask).sum(), mask.sum()),
            "checked": DataChecks(jnp.where(result[None] > 1e6, result[None], NO_FAULT), ("a word is too large: ",)),
        }


CONFIG = dataclasses.replace(tiny.CONFIG, dropout=0.0, num_layers=2)
NAMES = ("large", "large_weight", "largest", "largest_weight", "mean_word", "tokens", "loss")


def taken(mesh: dict[str, int], comms: Comms | None = None) -> dict[str, float]:
    sizes = dict.fromkeys(("replica", "stage", "fsdp", "expert", "context", "tensor"), 1) | mesh
    optimizer = Sgd(schedule=Schedule(peak=0.1, decay="constant"))
    program = Program.create(
        Measured(model=CONFIG), optimizer, num_steps=4, config=StepConfig(clip_norm=None), comms=comms
    )
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    step = CompiledStep(program, Placement.create(MeshShape(**sizes), devices=devices), tiny.AXES)
    batch = tiny.batch(0)
    # One half of the rows has few targets, so that means of means differ from the mean.
    batch["loss_mask"][len(batch["loss_mask"]) // 2 :, 4:] = 0
    _, scalars = step(step.init(0), step.put(batch))
    assert not bool(scalars["checked"].has_failed)
    return {name: float(scalars[name]) for name in NAMES}


@pytest.fixture(scope="module")
def alone() -> dict[str, float]:
    return taken({})


@pytest.mark.filterwarnings("ignore:mesh.stage")
@pytest.mark.parametrize("mesh", [{"replica": 2}, {"stage": 2}, {"context": 2, "tensor": 2}], ids="x".join)
def test_metrics_of_every_kind_are_those_of_one_device(mesh, alone):
    assert taken(mesh) == pytest.approx(alone, rel=1e-5)


def test_replicas_that_take_local_steps_report_sums(alone):
    assert taken({"replica": 2}, Comms(local_steps=2)) == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("count", [1, 2, 8, 9, 40])
def test_stacked_measures_merge_in_their_order(count):
    rng = np.random.default_rng(0)
    values = jnp.array(rng.standard_normal(count), jnp.float32)
    stacked = {"sum": Sum(values), "mean": Mean(values, values + 3), "most": Maximum(values)}
    merged = merge_stacked(stacked, count)
    total = np.float32(values[0])
    for value in np.asarray(values)[1:]:
        total = np.float32(total + value)
    assert float(merged["sum"].value) == total and float(merged["most"].value) == float(values.max())


def test_merging_many_micro_batches_is_a_program_of_one_size():
    def equations(count: int) -> int:
        stacked = {str(n): Mean(jnp.ones(count), jnp.ones(count)) for n in range(20)}
        return len(jax.make_jaxpr(lambda tree: merge_stacked(tree, count))(stacked).eqns)

    assert equations(256) == equations(16) < 500
