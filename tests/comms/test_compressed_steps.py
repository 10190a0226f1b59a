"""Compressed reductions as a part of training: layouts, the guard, checkpoints, and refusals."""

import dataclasses
import math
import warnings

import jax
import numpy as np
import pytest

import panax
from panax.comms import WIRES, Comms, QuantizedWire, register_wire
from panax.core import named_leaves
from panax.core.errors import RecipeError
from panax.data import Arrays, ExampleSource
from panax.kernels.quantized import Linear
from panax.mesh import MeshShape, Placement
from panax.models import DecoderConfig, DecoderTask, VitConfig, VitTask
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig
from panax.train import CompiledStep, Program, StepConfig

CONFIG = DecoderConfig(vocab_size=128, max_length=32, embed=64, num_layers=2, heads=4, ffn=128)
ADAMW = AdamW(schedule=Schedule(peak=1e-2, decay="constant"))
AXES = dict.fromkeys(("tokens", "targets", "loss_mask"), ("batch", "seq"))


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, CONFIG.vocab_size, (16, 33)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": np.ones((16, 32), np.float32)}


def compiled(mesh, comms: Comms | None = None, task=None, **config) -> CompiledStep:
    task = task or DecoderTask(model=CONFIG)
    program = Program.create(task, ADAMW, num_steps=10, config=StepConfig(**config), comms=comms)
    devices = jax.devices()[: math.prod(mesh.values())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of meshes that suit no network
        return CompiledStep(program, Placement.create(MeshShape(**{"fsdp": 1, **mesh}), devices=devices), AXES)


def host(tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items() if name != "key"}


def trained(step: CompiledStep, steps: int = 2):
    state, losses = step.init(0), []
    for number in range(steps):
        state, scalars = step(state, step.put(batch(number)))
        losses.append(float(scalars["loss"]))
    return state, losses


@pytest.fixture(scope="module")
def on_two():
    """Two replicas and nothing else: what other layouts are compared with."""
    return trained(compiled({"replica": 2}, Comms(compress="int8"), micro_batches=2))


@pytest.mark.parametrize(
    "mesh",
    [
        {"replica": 2, "fsdp": 2, "tensor": 2},
        pytest.param({"replica": 2, "stage": 2, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param({"replica": 2, "context": 2, "expert": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda mesh: "-".join(f"{axis}{size}" for axis, size in mesh.items()),
)
def test_layouts_with_as_many_replicas_train_alike(mesh, on_two):
    state, losses = trained(compiled(mesh, Comms(compress="int8"), micro_batches=2))
    plain, _ = trained(compiled(mesh, micro_batches=2))
    expected, expected_losses = on_two
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    ours, theirs, uncompressed = host(state.params), host(expected.params), host(plain.params)
    for name in ours:
        apart, effect = np.linalg.norm(ours[name] - theirs[name]), np.linalg.norm(ours[name] - uncompressed[name])
        # A sum in another order rounds a code differently here and there; compression changes all of them.
        assert apart <= max(0.25 * effect, 1e-5 * np.linalg.norm(theirs[name])), name
    assert any(np.linalg.norm(ours[name] - uncompressed[name]) > 0 for name in ours)
    assert state.owed is not None and {x.shape[0] for x in state.owed.values()} == {2}


def test_off_is_the_plain_step():
    mesh = {"replica": 2, "fsdp": 2}
    plain, off = (compiled(mesh, comms).trace(batch()).jaxpr for comms in (None, Comms()))
    assert str(plain) == str(off)
    assert "all_to_all" not in str(plain)
    assert "all_to_all" in str(compiled(mesh, Comms(compress="int8")).trace(batch()).jaxpr)


def test_a_skipped_step_leaves_what_is_owed(on_two):
    step = compiled({"replica": 2}, Comms(compress="int8"), micro_batches=2)
    state, _ = trained(step, 1)
    before = host(state)
    bad = batch(1)
    bad["loss_mask"] = np.where(np.arange(32) == 3, 3e38, 1).astype(np.float32) * np.ones((16, 1), np.float32)
    state, scalars = step(state, step.put(bad))
    after = host(state)
    assert int(scalars["skipped"]) == 1
    changed = {name for name in after if not np.array_equal(before[name], after[name])}
    assert changed == {"step", "guard.skipped", "guard.skipped_in_a_row"}
    assert any(before[name].any() for name in before if name.startswith("owed."))


MODEL = VitConfig(num_classes=10, image_size=8, channels=1, patch=4, embed=64, num_layers=2, heads=4, ffn=128)


def images(rows: int) -> ExampleSource:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 255, (rows, 8, 8, 1)).astype(np.uint8)
    return ExampleSource(Arrays({"image": image, "label": (image.sum((1, 2, 3)) % 10).astype(np.int32)}), batch_size=16)


def fit(folder, steps: int, comms: Comms, lines: list[str] | None = None, accept_changes: bool = False, **mesh):
    experiment = panax.Experiment(
        name="compressed",
        task=VitTask(model=MODEL),
        data=images(96),
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


INT4 = Comms(compress="int4")


def test_a_resumed_run_owes_the_same_and_other_replicas_take_it_over(tmp_path):
    uninterrupted = fit(tmp_path / "whole", 4, INT4, replica=2, fsdp=2)
    fit(tmp_path / "run", 2, INT4, replica=2, fsdp=2)
    resumed = fit(tmp_path / "run", 4, INT4, replica=2, fsdp=2)
    ours, expected = host(resumed.state), host(uninterrupted.state)
    assert ours.keys() == expected.keys() and any(name.startswith("owed.") for name in ours)
    for name in ours:
        np.testing.assert_array_equal(ours[name], expected[name], err_msg=name)

    lines: list[str] = []
    # Nothing is left to train: what begins is what was restored.
    split = fit(tmp_path / "run", 4, INT4, lines, replica=4)
    assert any("residuals of compressed gradient sums pass on to the current replicas" in line for line in lines)
    assert split.state.owed.keys() == resumed.state.owed.keys()
    for name, owed in split.state.owed.items():
        assert owed.sharding.shard_shape(owed.shape)[0] == 1
        for replica in range(4):
            np.testing.assert_array_equal(owed[replica], np.asarray(resumed.state.owed[name])[replica // 2] / 2)


@pytest.mark.slow
def test_compression_may_begin_and_end_in_the_middle_of_a_run(tmp_path):
    lines: list[str] = []
    fit(tmp_path, 1, Comms(), replica=2)
    with pytest.raises(panax.core.errors.CheckpointError, match=r"comms\.compress"):
        fit(tmp_path, 2, INT4, lines, replica=2)
    begun = fit(tmp_path, 2, INT4, lines, accept_changes=True, replica=2)
    assert any(np.asarray(x).any() for x in begun.state.owed.values())
    assert any(line.startswith("comms ") and "int4 over replica" in line for line in lines)
    ended = fit(tmp_path, 3, Comms(), lines, accept_changes=True, replica=2)
    assert ended.state.owed is None
    assert any("are dropped: the run now compresses none" in line for line in lines)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"compress": "int9"}, "is not a wire format; did you mean 'int8'"),
        ({"over": ("fsdp",)}, "no effect without comms.compress"),
        ({"error_feedback": False}, "no effect without comms.compress"),
        ({"compress": "int8", "over": ("replicas",)}, "not a mesh axis; did you mean 'replica'"),
        ({"compress": "int8", "over": ()}, "at least one"),
        ({"compress": "int8", "over": ("replica", "replica")}, "each mesh axis once"),
        ({"compress": "sign", "rounding": "stochastic"}, "no numbers to choose between"),
    ],
)
def test_wrong_settings_are_refused(settings, told):
    with pytest.raises(RecipeError, match=told):
        Comms(**settings)


def test_signs_without_feedback_are_warned_of():
    with pytest.warns(UserWarning, match="leave error_feedback on"):
        Comms(compress="sign", error_feedback=False)


class _Unnamed(VitTask):
    names_axes = False


@pytest.mark.parametrize(
    ("mesh", "comms", "task", "told"),
    [
        ({"fsdp": 2}, Comms(compress="int8"), None, "replica=1; set mesh.replica"),
        (
            {"replica": 2, "fsdp": 2},
            Comms(compress="int8", over=("replica", "fsdp")),
            None,
            "is sharded over fsdp",
        ),
        ({"replica": 2}, Comms(compress="int8"), _Unnamed(model=MODEL), "XLA partitions its program"),
        (
            {"replica": 2},
            Comms(compress="int8"),
            DecoderTask(model=dataclasses.replace(CONFIG, embed=16, ffn=16, vocab_size=32)),
            "no parameter is large and regular enough",
        ),
    ],
    ids=["one replica", "split parameters", "partitioned by XLA", "small arrays"],
)
def test_meshes_and_tasks_that_do_not_fit_are_refused(mesh, comms, task, told):
    with pytest.raises(RecipeError, match=told):
        compiled(mesh, comms, task)


def test_a_wire_may_be_added():
    six = QuantizedWire(dataclasses.replace(Linear(8)))
    register_wire("whole_numbers", six)
    register_wire("whole_numbers", six)
    try:
        with pytest.raises(RecipeError, match="registered already"):
            register_wire("whole_numbers", WIRES["sign"])
        assert Comms(compress="whole_numbers").wire is six
    finally:
        del WIRES["whole_numbers"]
