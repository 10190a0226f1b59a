"""Steps of decoders, vision transformers, experts and agents on meshes: equal to the record, with the same statistics."""

import dataclasses

import jax
import pytest
import tiny

import panax
from panax.checkpoint import CheckpointConfig
from panax.cli.recipes import find_recipe
from panax.core import SourcedBatch
from panax.mesh import MeshShape
from panax.run import EvaluateConfig, Experiment
from panax.train import StepConfig

LAYOUTS = {
    "fsdp and tensor": MeshShape(fsdp=2, tensor=2, context=2),
    "pipeline": MeshShape(stage=2, fsdp=4),
}


@dataclasses.dataclass(frozen=True)
class Rows:
    resume = "exact"
    axes = tiny.AXES

    def batches(self, position=None):
        number = 0 if position is None else position["next"]
        while True:
            yield SourcedBatch(tiny.batch(number), {"next": number + 1})
            number += 1


def replayed(folder, mesh, **settings):
    experiment = Experiment(
        task=dataclasses.replace(tiny.task(), model=dataclasses.replace(tiny.CONFIG, num_layers=2, windows=(8,))),
        data=Rows(),
        optimizer=tiny.ADAMW,
        num_steps=3,
        mesh=mesh,
        directory=str(folder),
        checkpoint=CheckpointConfig(every=2),
        evaluate=EvaluateConfig(every=0),
        log_every=1,
        **settings,
    )
    panax.fit(experiment, quiet=True)
    view = panax.at(experiment, 3, rows=0)
    assert view.replay.is_verified, view.verdict
    return view


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_statistics_do_not_depend_on_the_mesh(tmp_path, layout):
    alone = replayed(tmp_path / "alone", MeshShape(fsdp=8))
    other = replayed(
        tmp_path / "other", LAYOUTS[layout], step=StepConfig(micro_batches=2 if layout == "pipeline" else 1)
    )
    norms = {each.name: each.gradient.norm for each in alone.parameters if each.gradient}
    for each in other.parameters:
        assert each.gradient and each.gradient.norm == pytest.approx(norms[each.name], rel=1e-4)
    if layout != "pipeline":
        # In a pipeline a module's output is also computed for micro-batches that are not there.
        found = {(each.phase, each.path): each.statistics.rms for each in other.modules}
        for each in alone.modules:
            assert found[each.phase, each.path] == pytest.approx(each.statistics.rms, rel=1e-4), each.path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:optimizer.schedule.warmup_steps")
@pytest.mark.parametrize("name", ["vit_digits", "moe_quickstart", "ppo_cartpole", "dqn_gridworld", "sasrec_ml100k"])
def test_recipes_replay_from_their_folders_alone(tmp_path, name):
    recipe = find_recipe(name)()
    experiment = dataclasses.replace(
        recipe, num_steps=6, directory=str(tmp_path), log_every=2, checkpoint=CheckpointConfig(every=4)
    )
    devices = jax.devices()[:1]
    panax.fit(experiment, quiet=True, devices=devices)
    view = panax.at(tmp_path, 6, rows=64, devices=devices)
    assert view.replay.is_verified, view.verdict
    assert view.origin is None
