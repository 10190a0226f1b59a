"""The averaged copy of the parameters: how it moves, that it is evaluated and exported, and that it survives a resume."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import panax
from panax.core import named_leaves
from panax.core.errors import RecipeError
from panax.core.state import init_averages, replace_averaged
from panax.data import Arrays, ExampleSource
from panax.mesh import MeshShape, Placement
from panax.models import VitConfig, VitTask
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig
from panax.run.folder.trained_model import load_model
from panax.train import CompiledStep, Program, StepConfig, evaluate_all

MODEL = VitConfig(num_classes=10, image_size=8, channels=1, patch=4, embed=16, num_layers=1, heads=2, ffn=32)
DECAY = 0.9
ADAMW = AdamW(schedule=Schedule(peak=1e-2, decay="constant"))


def images(rows: int, seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 10, rows).astype(np.int32)
    image = rng.integers(0, 60, (rows, 8, 8, 1)) + 19 * label[:, None, None, None]
    return Arrays({"image": image.astype(np.uint8), "label": label})


def batch(seed: int) -> dict[str, np.ndarray]:
    return next(ExampleSource(images(16, seed), batch_size=16).batches()).batch


def experiment(folder, steps: int = 12, **changes) -> panax.Experiment:
    return panax.Experiment(
        name="averaged",
        task=VitTask(model=MODEL),
        data=ExampleSource(images(96, 0), batch_size=16),
        held_out=ExampleSource(images(32, 1), batch_size=16, epochs=1),
        optimizer=ADAMW,
        num_steps=steps,
        evaluate=EvaluateConfig(every=0),
        directory=str(folder),
        **{"step": StepConfig(ema_decay=DECAY), **changes},
    )


def fit(experiment: panax.Experiment, lines: list[str] | None = None, accept_changes: bool = False):
    say = (lambda line: None) if lines is None else lines.append
    return panax.fit(experiment, say=say, devices=jax.devices()[:1], accept_changes=accept_changes)


def host(tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}


def assert_same(a, b) -> None:
    a, b = host(a), host(b)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    return fit(experiment(tmp_path_factory.mktemp("whole")))


def compiled(sizes: dict[str, int], frozen: tuple[str, ...] = (), **config) -> CompiledStep:
    config = StepConfig(ema_decay=DECAY, **config)
    program = Program.create(VitTask(model=MODEL), ADAMW, num_steps=10, config=config, frozen=frozen)
    count = int(np.prod([*sizes.values()]))
    placement = Placement.create(MeshShape(**{"replica": 1, "fsdp": 1, **sizes}), devices=jax.devices()[:count])
    return CompiledStep(program, placement, ExampleSource(images(16, 0), batch_size=16).axes)


def test_it_is_the_average_of_the_parameters_after_each_update():
    step = compiled({"fsdp": 2, "tensor": 2}, frozen=("patches",))
    state = step.init(0)
    expected = host(state.averaged)
    assert "patches.w" in host(state.params) and "patches.w" not in expected
    assert_same(state.averaged, {name: leaf for name, leaf in host(state.params).items() if name in expected})
    for updates in range(1, 4):
        state, _ = step(state, step.put(batch(updates)))
        # Warming up: of ten numbers, the first one counts a tenth, ...
        decay = min(DECAY, (1 + updates) / (10 + updates))
        for name, leaf in host(state.params).items():
            if name in expected:
                expected[name] = expected[name] + (1 - decay) * (leaf - expected[name])
    for name, leaf in host(state.averaged).items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-5, atol=1e-7, err_msg=name)
    places = named_leaves(state.params)
    assert all(leaf.sharding == places[name].sharding for name, leaf in named_leaves(state.averaged).items())


def test_an_update_that_is_refused_leaves_the_average():
    step = compiled({}, clip_norm=None)
    state = step.init(0)
    before = host(state.averaged)
    poisoned = dataclasses.replace(state.params, positions=state.params.positions * jnp.nan)
    state, scalars = step(dataclasses.replace(state, params=poisoned), step.put(batch(0)))
    assert float(scalars["skipped"]) == 1
    assert_same(state.averaged, before)


def test_without_a_decay_there_is_none_and_it_costs_nothing():
    state = Program.create(VitTask(model=MODEL), ADAMW, num_steps=10).abstract
    assert state.averaged is None
    assert not any("averaged" in name for name in named_leaves(state))


def test_it_is_kept_wider_than_narrow_parameters():
    params = {"w": jnp.ones((2,), jnp.bfloat16), "v": jnp.zeros((2,), jnp.float32)}
    averaged = init_averages(params)
    assert averaged["w"].dtype == jnp.float32
    judged = replace_averaged(params, {"w": averaged["w"] + 1.0, "v": None})
    assert judged["w"].dtype == jnp.bfloat16 and judged["w"].tolist() == [2.0, 2.0] and judged["v"] is params["v"]


def test_the_average_is_what_is_judged_and_the_metrics_report_it(whole):
    step, state = whole.prepared.step, whole.state
    held_out = [batch for batch, _ in whole.prepared.data.held_out.batches()]
    plain = compiled_without(whole)
    averaged = dataclasses.replace(state, params=state.eval_params, averaged=None)
    raw = dataclasses.replace(state, averaged=None)
    of_average = evaluate_all(plain, averaged, held_out)
    assert whole.evaluation["ema_decay"] == DECAY and "ema_decay" not in of_average
    assert whole.evaluation["loss"] == of_average["loss"]
    assert whole.evaluation["loss"] != evaluate_all(plain, raw, held_out)["loss"]
    assert step.program.abstract.averaged is not None


def compiled_without(result) -> CompiledStep:
    step = result.prepared.step
    program = Program.create(result.prepared.task, AdamW(), num_steps=10)
    return CompiledStep(program, step.placement, step.batch_axes)


def test_it_resumes_bitwise(whole, tmp_path):
    fit(experiment(tmp_path, steps=5))
    resumed = fit(experiment(tmp_path))
    assert_same(resumed.state.averaged, whole.state.averaged)
    assert_same(resumed.state.params, whole.state.params)
    assert resumed.evaluation == whole.evaluation


def test_the_average_is_what_is_exported_and_started_from(whole, tmp_path):
    trained = load_model(whole.prepared.experiment.folder)
    assert_same(trained.params, whole.state.eval_params)
    begun = fit(
        experiment(tmp_path, steps=1, frozen=("blocks",), init=f"checkpoint:{whole.prepared.experiment.folder}")
    )
    assert_same(begun.state.params.blocks, whole.state.eval_params.blocks)


def test_it_may_begin_and_end_in_the_middle_of_a_run(tmp_path):
    lines: list[str] = []
    before = fit(experiment(tmp_path, steps=3, step=StepConfig()))
    with_it = fit(experiment(tmp_path, steps=4), lines, accept_changes=True)
    assert "an average of the parameters begins with those of the checkpoint" in lines
    average, start = host(with_it.state.averaged), host(before.state.params)
    after = host(with_it.state.params)
    for name in average:
        # One update, the fourth: (1 + 4) / (10 + 4) of what was there.
        np.testing.assert_allclose(
            average[name], start[name] + (9 / 14) * (after[name] - start[name]), rtol=1e-5, atol=1e-6
        )
    without = fit(experiment(tmp_path, steps=5, step=StepConfig()), lines, accept_changes=True)
    assert any("averaged parameters are dropped" in line for line in lines)
    assert without.state.averaged is None and without.step == 5


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5])
def test_senseless_decays_are_refused(decay):
    with pytest.raises(RecipeError, match="expected a decay in"):
        StepConfig(ema_decay=decay)
