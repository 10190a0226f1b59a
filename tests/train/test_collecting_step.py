"""Tasks that collect their own data: a step with one, on an agent that can be counted through by hand."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import panax
from panax.checkpoint import CheckpointConfig
from panax.comms import Comms
from panax.core import CollectingTask, CollectionResult, DataChecks, Evaluation, Loss, Sum
from panax.core.errors import DataError, RecipeError
from panax.core.measures import NO_FAULT
from panax.data import IterableSource
from panax.mesh import MeshShape, Placement
from panax.optim import Schedule, Sgd
from panax.run import EvaluateConfig, Experiment
from panax.train import CompiledStep, Program, StepConfig
from panax.train.debug import DebugStep

ROWS, RATE = 8, 0.125


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting(CollectingTask):
    """Each row counts collections; the parameter falls by `RATE` in each update, so that all is known in advance."""

    rollouts_per_step: int = 2  # pyright: ignore
    updates: int = 3  # pyright: ignore
    stops_above: float | None = None
    breaks_at: int = -1

    rows = ROWS  # pyright: ignore
    evaluation_rows = ROWS  # pyright: ignore
    unit = "rows"

    @property
    def may_stop_early(self) -> bool:
        return self.stops_above is not None

    def init(self, key):
        state = {"counts": jnp.zeros((ROWS,), jnp.int32), "seen": jnp.float32(0.0), "followed": jnp.float32(0.0)}
        return {"w": jnp.zeros((), jnp.float32)}, {**state, "drawn": jnp.zeros((ROWS,), jnp.float32)}

    def parameter_axes(self, params):
        return {"w": ()}

    def state_axes(self, state):
        return {"counts": ("environment",), "drawn": ("environment",), "seen": (), "followed": ()}

    def collect(self, params, state, batch, key):
        counts = state["counts"] + 1
        drawn = jax.vmap(lambda row: jax.random.uniform(jax.random.fold_in(key, row)))(batch["row"])
        collect_state = {"counts": counts, "drawn": drawn}
        bad = jnp.where(counts[0] == self.breaks_at, -1.0, NO_FAULT).astype(jnp.float32)
        metrics = {
            "collected": Sum(jnp.float32(counts.size)),
            "sick": DataChecks(bad[None], ("the environment is broken: ",)),
        }
        learning = {"seen": state["seen"], "followed": state["followed"]}
        return CollectionResult({"w": params["w"], "counts": counts}, collect_state, learning, metrics)

    def minibatch(self, experience, state, index, key):
        counts = experience["counts"]
        return {"index": jnp.full(counts.shape, index), "began": jnp.full(counts.shape, experience["w"])}

    def should_continue(self, scalars):
        assert self.stops_above is not None
        return scalars["moved"] <= self.stops_above

    def update_state(self, params, state):
        return {**state, "followed": params["w"]}

    def loss(self, params: Any, state: Any, batch: Any, key: jax.Array, train: bool) -> Evaluation:
        rows = batch["row"].shape[0]
        if not train:
            return Evaluation({"w": Loss(params["w"] * rows, jnp.float32(rows))}, state, {})
        moved = batch["began"].mean() - params["w"]
        metrics = {"moved": Sum(moved), "index": Sum(batch["index"].sum().astype(jnp.float32) / rows)}
        after = {**state, "seen": state["seen"] + 1.0}
        return Evaluation({"w": Loss(params["w"] * rows, jnp.float32(rows))}, after, metrics)


def program_of(task: CollectingTask, **settings) -> Program:
    optimizer = Sgd(schedule=Schedule(peak=RATE, decay="constant"), momentum=0.0)
    return Program.create(task, optimizer, num_steps=4, config=StepConfig(clip_norm=None), **settings)


def taken(task: CollectingTask, steps: int, mesh: MeshShape | None = None):
    placement = Placement.create(mesh or MeshShape(), devices=None if mesh else jax.devices()[:1])
    step = CompiledStep(program_of(task), placement, {"row": ("batch",)})
    state, batch, scalars = step.init(0), step.put({"row": np.arange(ROWS, dtype=np.int32)}), {}
    for _ in range(steps):
        state, scalars = step(state, batch)
    return jax.device_get(state), jax.device_get(dict(scalars))


def test_a_step_is_collections_with_updates_each():
    state, scalars = taken(Counting(), 2)
    assert state.step == 2 and state.params["w"] == -RATE * 2 * 2 * 3
    assert state.model_state["counts"].tolist() == [4] * ROWS, "one for each collection"
    assert state.model_state["seen"] == 12 and state.model_state["followed"] == state.params["w"]
    assert scalars["updates"] == 6 and scalars["collected"] == 2 * ROWS and scalars["index"] == 1.0
    assert scalars["moved"] == pytest.approx(RATE * (0 + 1 + 2) / 3), "the mean over updates"
    assert scalars["skipped"] == 0


def test_the_schedule_counts_updates():
    task = Counting(rollouts_per_step=1, updates=5)
    program = Program.create(task, Sgd(schedule=Schedule(peak=1.0, decay="linear", final=0.0)), num_steps=2)
    step = CompiledStep(program, Placement.create(MeshShape(), devices=jax.devices()[:1]), {"row": ("batch",)})
    state, batch, rates = step.init(0), step.put({"row": np.arange(ROWS, dtype=np.int32)}), []
    for _ in range(2):
        state, scalars = step(state, batch)
        rates.append(float(scalars["learning_rate"]))
    assert rates == pytest.approx([0.6, 0.1]), "of the last of 5, and of 10 updates"


@pytest.mark.parametrize("mesh", [MeshShape(fsdp=8), MeshShape(replica=2, fsdp=4)], ids=["fsdp", "replicas"])
def test_meshes_draw_and_count_alike(mesh):
    one, split = taken(Counting(), 2), taken(Counting(), 2, mesh)
    assert all(
        (a == b).all() for a, b in zip(jax.tree.leaves(one[0].model_state), jax.tree.leaves(split[0].model_state))
    )
    assert one[0].params["w"] == split[0].params["w"]
    assert len(set(one[0].model_state["drawn"].tolist())) == ROWS, "each row draws for itself"


def test_the_debugger_takes_the_same_step():
    step = DebugStep(program_of(Counting()), {})
    state = step.init(0)
    after, _ = step(state, {"row": jnp.arange(ROWS, dtype=jnp.int32)})
    expected = taken(Counting(), 1)
    for one, other in zip(jax.tree.leaves(after.model_state), jax.tree.leaves(expected[0].model_state)):
        np.testing.assert_array_equal(one, other)
    assert float(after.params["w"]) == float(expected[0].params["w"]) and int(after.step) == 1


def test_updates_end_where_the_task_states():
    state, scalars = taken(Counting(stops_above=1.5 * RATE), 1)
    assert state.params["w"] == -RATE * 2 * 2, "the third update of each collection is not made"
    assert scalars["updates"] == 4 and scalars["moved"] == pytest.approx(RATE / 2)
    assert state.model_state["counts"][0] == 2 and state.model_state["seen"] == 4


def test_what_the_environment_breaks_is_not_learned_from():
    state, scalars = taken(Counting(breaks_at=2), 1)
    assert state.params["w"] == -RATE * 3, "the first of two collections alone"
    with pytest.raises(DataError, match="the environment is broken: -1"):
        scalars["sick"].raise_if_failed("step 1")


def experiment(tmp_path, **settings) -> Experiment:
    return Experiment(
        task=Counting(),
        optimizer=Sgd(schedule=Schedule(peak=RATE)),
        num_steps=settings.pop("num_steps", 4),
        directory=str(tmp_path),
        checkpoint=CheckpointConfig(every=1),
        evaluate=EvaluateConfig(every=2),
        **settings,
    )


def test_a_run_needs_no_data_and_a_broken_environment_ends_it(tmp_path):
    result = panax.fit(experiment(tmp_path / "one"))
    assert result.state.model_state["counts"].tolist() == [8] * ROWS
    assert result.evaluation["loss"] == pytest.approx(float(result.state.params["w"]))
    broken = dataclasses.replace(experiment(tmp_path / "two"), task=Counting(breaks_at=3))
    with pytest.raises(DataError, match="step 2: the environment is broken: -1"):
        panax.fit(broken)


def test_what_does_not_go_together_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="data is an IterableSource, and Counting collects its own: remove data"):
        experiment(tmp_path, data=IterableSource([{"x": np.zeros((4, 2), np.float32)}]))
    with pytest.raises(RecipeError, match="overfit_batches are of data"):
        experiment(tmp_path, overfit_batches=2)
    with pytest.raises(RecipeError, match="makes 6 updates in a step, which can't be combined with comms"):
        program_of(Counting(), comms=Comms(local_steps=4))
    step = CompiledStep(
        program_of(Counting()), Placement.create(MeshShape(), devices=jax.devices()[:1]), {"row": ("batch",)}
    )
    with pytest.raises(RecipeError, match="has 8 environments, and the batch has 16 rows"):
        step.get_compiled({"row": jax.ShapeDtypeStruct((16,), jnp.int32)})
