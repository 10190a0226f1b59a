"""Local steps: replicas train apart as they would alone, and agree by the outer optimizer."""

import math
import warnings

import jax
import numpy as np
import pytest

import panax
from panax.comms import Comms
from panax.core import named_leaves
from panax.core.errors import RecipeError
from panax.data import Arrays, ExampleSource
from panax.mesh import MeshShape, Placement
from panax.models import DecoderConfig, DecoderTask, VitConfig, VitTask
from panax.optim import AdamW, Schedule, ScheduleFreeAdamW, Soap
from panax.plan import count_collectives
from panax.plan.walk.walk import walk_agreement
from panax.run import EvaluateConfig
from panax.train import CompiledStep, Program, StepConfig

CONFIG = DecoderConfig(vocab_size=128, max_length=32, embed=64, num_layers=2, heads=4, ffn=128)
ADAMW = AdamW(schedule=Schedule(peak=1e-2, decay="constant"))
AXES = dict.fromkeys(("tokens", "targets", "loss_mask"), ("batch", "seq"))
EVERY = 2


def batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, CONFIG.vocab_size, (8, 33)).astype(np.int32)
    # Replicas have different numbers of tokens that count: each divides by its own.
    mask = (rng.random((8, 32)) < np.linspace(0.3, 1, 8)[:, None]).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": mask}


def compiled(mesh, comms: Comms | None = None, optimizer=ADAMW, task=None, **config) -> CompiledStep:
    program = Program.create(
        task or DecoderTask(model=CONFIG), optimizer, num_steps=10, config=StepConfig(**config), comms=comms
    )
    devices = jax.devices()[: math.prod(mesh.values())]
    return CompiledStep(program, Placement.create(MeshShape(**{"fsdp": 1, **mesh}), devices=devices), AXES)


def host(tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items() if name != "key"}


def trained(step: CompiledStep, steps: int):
    state, losses = step.init(0), []
    for number in range(steps):
        state, scalars = jax.block_until_ready(step(state, step.put(batch(number))))
        losses.append(float(scalars["loss"]))
    return state, losses


@pytest.fixture(scope="module")
def on_two():
    """Three steps of two replicas: they agree after the second."""
    return trained(compiled({"replica": 2}, Comms(local_steps=EVERY)), 3)


def test_replicas_train_as_they_would_alone_and_agree_as_defined(on_two):
    state, losses = on_two
    alone = compiled({})
    states = [alone.init(0), alone.init(0)]
    first = host(states[0].params)
    agreed = dict(first)
    momentum = {name: np.zeros_like(w) for name, w in agreed.items()}
    for number in range(3):
        rows = batch(number)
        of_each, tokens = [], []
        for replica in range(2):
            replica_rows = {name: leaf[4 * replica : 4 * replica + 4] for name, leaf in rows.items()}
            states[replica], scalars = alone(states[replica], alone.put(replica_rows))
            of_each.append(float(scalars["loss"]))
            tokens.append(float(replica_rows["loss_mask"].sum()))
        # The mean over all tokens: a replica that has more of them counts for more.
        assert losses[number] == pytest.approx(np.average(of_each, weights=tokens), rel=1e-5)
        if (number + 1) % EVERY == 0:
            replica_rows = [host(one.params) for one in states]
            for name, before in agreed.items():
                outer = np.mean([before - each[name] for each in replica_rows], axis=0)
                momentum[name] = 0.9 * momentum[name] + outer
                agreed[name] = before - 0.7 * (outer + 0.9 * momentum[name])
            tree = jax.tree.structure(states[0].params)
            states = [one.with_params(tree.unflatten([jax.numpy.array(w) for w in agreed.values()])) for one in states]
    for name, w in host(state.params).items():
        # By how far it has moved: where gradients are near 0, the sign of Adam's steps is rounding's.
        assert np.linalg.norm(w - agreed[name]) <= 1e-3 * np.linalg.norm(agreed[name] - first[name]), name
    apart = [host(one.params) for one in states]
    for name, both in host(state.replicas.params).items():
        for replica in range(2):
            # Adam's steps are of the rate's size where gradients are near 0, whose sign is then rounding's.
            np.testing.assert_allclose(both[replica], apart[replica][name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_layouts_inside_a_replica_change_nothing(on_two):
    state, losses = trained(compiled({"replica": 2, "fsdp": 2, "tensor": 2}, Comms(local_steps=EVERY)), 3)
    expected, expected_losses = on_two
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, w in host(state.params).items():
        assert np.linalg.norm(w - host(expected.params)[name]) <= 1e-4 * np.linalg.norm(w), name


@pytest.mark.parametrize(("wire", "each"), [("", 4.0), ("int4", 0.5 + 4 / 256)])
def test_nothing_crosses_replicas_but_what_they_agree_on(wire, each):
    step = compiled({"replica": 2, "fsdp": 2}, Comms(local_steps=EVERY, compress=wire))
    text = step.lower(batch(0)).compile().as_text()
    crossing = [one for one in count_collectives(text, step.placement.sizes) if "replica" in one.axes]
    # A few numbers that are reported.
    assert sum(one.total_wire_bytes for one in crossing) < 1e3
    cost = walk_agreement(step)
    assert cost is not None
    sent = sum(one.wire_bytes for one in cost.traffic)
    assert {one.axes for one in cost.traffic} == {("replica",)}
    shapes = zip(jax.tree.leaves(step.program.abstract.params), jax.tree.leaves(step.shardings.params))
    numbers = [math.prod(place.shard_shape(leaf.shape)) for leaf, place in shapes]
    # Of n = 2, half of what is gathered and half of what is scattered; small arrays travel in float32, and boxes are smaller.
    assert sent >= 2 * 0.5 * each * sum(numbers)
    assert sent <= 2 * 0.5 * (each if wire == "" else 1.4 * each) * sum(numbers)


def test_replicas_agree_at_the_end_of_a_run():
    step = compiled({"replica": 2}, Comms(local_steps=4))
    agrees = [number for number in range(1, 11) if step.program.outer_sync_after(number)]
    assert agrees == [4, 8, 10]


def test_a_replica_with_bad_numbers_skips_its_own_step(on_two):
    step = compiled({"replica": 2}, Comms(local_steps=EVERY))
    state = step.init(0)
    bad = batch(0)
    bad["loss_mask"] = np.where(np.arange(8)[:, None] == 6, 3e38, bad["loss_mask"]).astype(np.float32)
    before = host(state.replicas.params)
    state, scalars = step(state, step.put(bad))
    after = host(state.replicas.params)
    assert int(scalars["skipped"]) == 1 and np.asarray(state.replicas.guard.skipped).tolist() == [0, 1]
    assert all(np.array_equal(before[name][1], after[name][1]) for name in before)
    assert any(not np.array_equal(before[name][0], after[name][0]) for name in before)


MODEL = VitConfig(num_classes=10, image_size=8, channels=1, patch=4, embed=64, num_layers=1, heads=4, ffn=128)


def fit(folder, steps: int, comms: Comms, lines: list[str] | None = None, accept_changes: bool = False, **mesh):
    rng = np.random.default_rng(0)
    image = rng.integers(0, 255, (96, 8, 8, 1)).astype(np.uint8)
    data = Arrays({"image": image, "label": (image.sum((1, 2, 3)) % 10).astype(np.int32)})
    experiment = panax.Experiment(
        name="apart",
        task=VitTask(model=MODEL),
        data=ExampleSource(data, batch_size=16),
        held_out=ExampleSource(data, batch_size=16, epochs=1),
        optimizer=ADAMW,
        num_steps=steps,
        comms=comms,
        mesh=MeshShape(**{"fsdp": 1, **mesh}),
        evaluate=EvaluateConfig(every=0),
        directory=str(folder),
    )
    say = (lambda line: None) if lines is None else lines.append
    devices = jax.devices()[: math.prod(mesh.values())]
    return panax.fit(experiment, say=say, devices=devices, accept_changes=accept_changes)


@pytest.mark.slow
def test_a_run_resumes_bitwise_and_continues_with_other_replicas(tmp_path):
    comms = Comms(local_steps=2, compress="int8")
    uninterrupted = fit(tmp_path / "whole", 6, comms, replica=2)
    fit(tmp_path / "run", 4, comms, replica=2)
    resumed = fit(tmp_path / "run", 6, comms, replica=2)
    ours, expected = host(resumed.state), host(uninterrupted.state)
    assert ours.keys() == expected.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], expected[name], err_msg=name)
    assert resumed.evaluation == uninterrupted.evaluation
    for name, both in host(resumed.state.replicas.params).items():
        for replica in both:
            np.testing.assert_array_equal(replica, host(resumed.state.params)[name], err_msg=name)
    lines: list[str] = []
    more = fit(tmp_path / "run", 6, comms, lines, replica=4)
    assert any("replicas begin from what they agreed on last" in line for line in lines)
    for name, all_ in host(more.state.replicas.params).items():
        for replica in all_:
            np.testing.assert_array_equal(replica, host(resumed.state.params)[name], err_msg=name)
    ended = fit(tmp_path / "run", 7, Comms(), lines, accept_changes=True, replica=2)
    assert ended.state.replicas is None and any("the run now has no local steps" in line for line in lines)


def test_local_steps_may_begin_in_the_middle_of_a_run_with_the_optimizers_state(tmp_path):
    lines: list[str] = []
    fit(tmp_path / "run", 4, Comms(), replica=2)
    parted = fit(tmp_path / "run", 5, Comms(local_steps=2), lines, accept_changes=True, replica=2)
    assert any("replicas begin to take local steps" in line for line in lines)
    new = fit(tmp_path / "new", 1, Comms(local_steps=2), replica=2)
    after, first = host(parted.state), host(new.state)
    assert after.keys() == first.keys()
    # Moments of five steps, not of one; the count of updates says so exactly.
    counts = [name for name in after if name.startswith("optimizer_state.") and after[name].shape == (2,)]
    assert counts
    for name in counts:
        assert after[name].tolist() == [5, 5] and first[name].tolist() == [1, 1], name
    assert int(parted.state.step) == 5


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"local_steps": 0}, "expected 1 or more"),
        ({"local_steps": 4, "outer_rate": 0.0}, "more than 0"),
        ({"local_steps": 4, "outer_momentum": 1.0}, "momentum in"),
        ({"outer_rate": 0.5}, "no effect with local_steps=1"),
        ({"local_steps": 4, "compress": "int8", "over": ("context",)}, "local steps are those of replicas"),
    ],
)
def test_wrong_settings_are_refused(settings, told):
    with pytest.raises(RecipeError, match=told):
        Comms(**settings)


@pytest.mark.parametrize(
    ("mesh", "options", "told"),
    [
        ({"fsdp": 2}, {}, "the mesh has replica=1"),
        ({"replica": 2}, {"optimizer": Soap()}, "Soap renews state"),
        ({"replica": 2}, {"optimizer": ScheduleFreeAdamW()}, "a separate average of its parameters"),
        ({"replica": 2}, {"ema_decay": 0.9}, "a separate average of its parameters"),
    ],
    ids=["one replica", "renewals", "an optimizer's average", "an average"],
)
def test_what_replicas_apart_can_not_do_is_refused(mesh, options, told):
    with warnings.catch_warnings(), pytest.raises(RecipeError, match=told):
        warnings.simplefilter("ignore")
        compiled(mesh, Comms(local_steps=4), **options)
