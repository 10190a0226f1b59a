"""Each pair of run parts leaves training unchanged, bit for bit, also when the run is resumed without the pair."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest
import tiny_recipe

from panax import Experiment, fit
from panax.checkpoint import CheckpointConfig
from panax.checkpoint.memory import MemoryConfig
from panax.core import named_leaves
from panax.hooks import Histograms, Hook
from panax.mesh import MeshShape
from panax.metrics import Peak
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, RollbackConfig, VerifyConfig

STEPS, STOP = 4, 2


class Requests(Hook):
    """Requests everything that a hook may, at every step."""

    def after_step(self, run: Any) -> None:
        run.evaluate()
        run.save()
        run.log({"mine/step": run.step, **run.read()})


FEATURES: Mapping[str, Mapping[str, Any]] = {
    "checkpoints": {"checkpoint": {"every": 1, "keep_last": 1, "keep_best": 0}},
    "best checkpoint": {"checkpoint": {"every": 3, "keep_best": 2}, "evaluate": EvaluateConfig(every=2, batches=1)},
    "memory": {"checkpoint": {"every": 2, "memory": MemoryConfig(every=1)}},
    "rollback": {"rollback": RollbackConfig(after=1)},
    "verification": {"verify": VerifyConfig(every=1)},
    "evaluation": {"evaluate": EvaluateConfig(every=1, batches=1)},
    "requests": {"hooks": (Requests(),)},
    "histograms": {"hooks": (Histograms(every=1),)},
    "profile": {"profile": 1},
    "reports": {"log_every": 1},
}
PAIRS = [*itertools.combinations(FEATURES, 2)]


def with_features(experiment: Experiment, names: tuple[str, ...]) -> Experiment:
    checkpoint: dict[str, Any] = {"every": 0}
    hooks: tuple[Hook, ...] = ()
    settings: dict[str, Any] = {}
    for name in names:
        feature = dict(FEATURES[name])
        checkpoint |= feature.pop("checkpoint", {})
        hooks += feature.pop("hooks", ())
        settings |= feature
    return dataclasses.replace(experiment, checkpoint=CheckpointConfig(**checkpoint), hooks=hooks, **settings)


class Stop(Hook):
    """Ends a run after a few steps, as a person would who wants to continue with other settings."""

    def after_step(self, run: Any) -> None:
        if run.step == STOP:
            run.stop("to continue without the features")

    def restore(self, state: Any) -> None:
        assert state is None


def values(state: Any) -> dict[str, np.ndarray]:
    """The state as arrays; keys by their data."""
    raw = jax.tree.map(
        lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x, state
    )
    return {name: np.asarray(leaf) for name, leaf in named_leaves(raw).items()}


@pytest.fixture(scope="module")
def plain(cache, tmp_path_factory):
    """An experiment on two devices, and the state after it without any feature."""
    base = tiny_recipe.tiny()
    experiment = dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, cache_dir=cache),
        mesh=MeshShape(fsdp=2),
        optimizer=AdamW(schedule=Schedule(peak=6e-3, warmup_steps=1)),
        num_steps=STEPS,
        directory=str(tmp_path_factory.mktemp("plain")),
    )
    return experiment, values(run_features(experiment, ()).state)


def run_features(experiment: Experiment, names: tuple[str, ...], *more: Hook):
    experiment = with_features(experiment, names)
    experiment = dataclasses.replace(experiment, hooks=(*experiment.hooks, *more))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("panax.run.reporting.report.measure_peak", lambda prepared: Peak(1e9, "a test"))
        return fit(experiment, quiet=True, devices=jax.devices()[:2])


def check_pair(plain, pair: tuple[str, str], folder) -> None:
    experiment, expected = plain
    experiment = dataclasses.replace(experiment, directory=str(folder))
    stopped = run_features(experiment, pair, Stop())
    assert stopped.step == STOP and stopped.stopped
    resumed = run_features(experiment, ())
    assert resumed.step == STEPS
    found = values(resumed.state)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not np.array_equal(found[name], expected[name])] == []


COVERING = [
    ("checkpoints", "requests"),
    ("memory", "verification"),
    ("best checkpoint", "rollback"),
    ("evaluation", "histograms"),
    ("profile", "reports"),
]
"""Each feature once."""


@pytest.mark.full
@pytest.mark.parametrize("pair", COVERING, ids=" + ".join)
def test_a_pair_leaves_training_as_it_is(plain, pair, tmp_path):
    check_pair(plain, pair, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair not in COVERING], ids=" + ".join)
def test_every_pair_leaves_training_as_it_is(plain, pair, tmp_path):
    check_pair(plain, pair, tmp_path / "run")


def test_every_feature_is_in_a_pair_that_ci_runs():
    assert sorted(name for pair in COVERING for name in pair) == sorted(FEATURES)
