"""float16: the loss is scaled before it is differentiated, the scale follows what gradients bear, and nothing else changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch

from panax.adapters.torch import task as from_torch
from panax.checkpoint import Checkpointer, restore
from panax.core import Evaluation, Loss, RecipeError, Task, named_leaves
from panax.mesh import MeshShape, Placement
from panax.optim import Schedule, Sgd
from panax.train import CompiledStep, Program, StepConfig

STEADY = Sgd(schedule=Schedule(peak=1.0, decay="constant"))
AXES = {"x": ("batch", None), "y": ("batch", None)}


@dataclasses.dataclass(frozen=True)
class Half(Task):
    """A matrix that is multiplied in float16 or float32, and a loss in float32."""

    dtype: str = "float16"

    @property
    def scales_loss(self):
        return self.dtype == "float16"

    def init(self, key):
        return {"w": jax.random.normal(key, (4, 3)), "scale": jnp.ones(())}, {}

    def parameter_axes(self, params):
        return {"w": ("embed", "ffn"), "scale": ()}

    def loss(self, params, state, batch, key, train):
        found = (batch["x"].astype(self.dtype) @ params["w"].astype(self.dtype)).astype(jnp.float32)
        error = (found * params["scale"] - batch["y"]) ** 2
        return Evaluation({"fit": Loss(error.sum(), jnp.float32(len(error)))}, state, {})


def batch(size=1.0, seed=0):
    random = np.random.default_rng(seed)
    return {
        "x": random.standard_normal((16, 4), np.float32) * np.float32(size),
        "y": random.standard_normal((16, 3), np.float32) * np.float32(size),
    }


def made(task, devices=1, **config):
    program = Program.create(task, STEADY, num_steps=100, config=StepConfig(clip_norm=None, **config))
    placement = Placement.create(MeshShape(fsdp=devices), devices=jax.devices()[:devices])
    return CompiledStep(program, placement, AXES)


def numbers(tree):
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}


def test_small_gradients_are_kept_that_float16_would_lose():
    # Errors of 1e-4 over 16 rows: gradients of the matrix's outputs of 1e-5, and of its weights' terms of 1e-9.
    small = batch(1e-4)
    moved = {}
    for name, task, config in (
        ("float32", Half("float32"), {}), ("scaled", Half(), {"loss_scale": 2.0**15}), ("plain", Half(), {"loss_scale": 1.0}),
    ):  # fmt: skip
        step = made(task, **config)
        state = step.init(0)
        before = numbers(state.params)
        state, _ = step(state, step.put(small))
        moved[name] = np.asarray(state.params["w"]) - before["w"]
    error = {name: np.linalg.norm(moved[name] - moved["float32"]) for name in ("scaled", "plain")}
    size = np.linalg.norm(moved["float32"])
    assert size > 0 and error["scaled"] < 2e-2 * size and error["plain"] > 3 * error["scaled"]


def test_the_scale_is_halved_doubled_and_does_not_count_until_it_is_least(tmp_path):
    step = made(Half(), devices=4, loss_scale=4.0, loss_scale_steps=2)
    state = step.init(0)
    first = numbers(state.params)
    told = []

    def take(step_batch):
        nonlocal state
        state, scalars = step(state, step.put(step_batch))
        told.append(tuple(float(scalars[name]) for name in ("loss_scale", "skipped", "skipped_in_a_row")))

    # Beyond 65,504 in float16, whatever the loss is multiplied with.
    for step_batch in (batch(1e6), batch(1e6), batch(1e6), batch(1e6)):
        take(step_batch)
    # 4 and 2 are halved; at 1 there is nothing left to halve, and the run may end by it.
    assert told == [(2, 1, 0), (1, 2, 0), (1, 3, 1), (1, 4, 2)]
    assert all((numbers(state.params)[name] == value).all() for name, value in first.items())
    take(batch(1e-3))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(state, 5, {})
    checkpointer.wait()
    restored = restore(checkpointer.open(5), step.program.abstract, step.shardings)
    assert (float(restored.guard.scale), int(restored.guard.scaled_well)) == (1.0, 1)
    for _ in range(4):
        take(batch(1e-3))
    assert [scale for scale, *_ in told[4:]] == [1, 2, 2, 4, 4]
    assert told[-1][1:] == (4, 0)
    again, _ = step(restored, step.put(batch(1e-3)))
    assert (float(again.guard.scale), int(again.guard.scaled_well)) == (2.0, 0)
    assert len(step._train) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_others_have_no_scale_and_settings_of_one_are_refused(dtype):
    program = Program.create(tiny.task(compute_dtype=dtype), tiny.ADAMW, num_steps=10)
    assert sorted(named_leaves(program.abstract.guard)) == ["skipped", "skipped_in_a_row", "usual_norm"]
    for config in ({"loss_scale": 1024.0}, {"loss_scale_steps": 100}):
        with pytest.raises(RecipeError, match=r"has no effect: DecoderTask does not compute in float16; set task.comp"):
            Program.create(tiny.task(compute_dtype=dtype), tiny.ADAMW, num_steps=10, config=StepConfig(**config))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"loss_scale": 3.0}, r"step.loss_scale=3.0; expected a power of two from 1 to 16777216"),
        ({"loss_scale": 0.5}, r"step.loss_scale=0.5"),
        ({"loss_scale": float("inf")}, r"step.loss_scale=inf"),
        ({"loss_scale_steps": 0}, r"step.loss_scale_steps=0; expected 1 or more"),
    ],
)
def test_a_scale_that_is_none_is_refused(config, message):
    with pytest.raises(RecipeError, match=message):
        StepConfig(**config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [{"fsdp": 1}, {"fsdp": 2, "tensor": 2, "context": 2}, {"stage": 3, "fsdp": 2}],
    ids=lambda mesh: "-".join(mesh),
)
def test_a_decoder_s_gradients_in_float16_are_float32_s(mesh):
    count = int(np.prod(list(mesh.values())))
    results = {}
    for dtype in ("float32", "float16"):
        task = tiny.task(compute_dtype=dtype)
        config = StepConfig(micro_batches=mesh.get("stage", 1))
        program = Program.create(task, tiny.ADAMW, num_steps=10, config=config)
        placement = Placement.create(MeshShape(**mesh), devices=jax.devices()[:count])
        step = CompiledStep(program, placement, tiny.AXES)
        state = step.init(0)
        _, scalars = step(state, step.put(tiny.batch(rows=12)))
        results[dtype] = {name: float(value) for name, value in scalars.items()}
    half, full_precision = results["float16"], results["float32"]
    assert half["loss_scale"] == 2.0**15 and half["skipped"] == 0
    # 11 bits of fraction, over three layers.
    assert half["loss"] == pytest.approx(full_precision["loss"], rel=2e-3)
    assert half["gradient_norm"] == pytest.approx(full_precision["gradient_norm"], rel=1e-2)


@pytest.mark.slow
def test_a_torch_module_in_float16_is_trained_with_a_scale():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    small = batch(1e-3)
    moved = {}
    for dtype, config in (("float32", {}), ("float16", {"loss_scale": 2.0**12})):
        task = from_torch(module, torch.nn.MSELoss(), small, compute_dtype=dtype)
        assert task.scales_loss is (dtype == "float16")
        step = made(task, **config)
        state = step.init(0)
        before = numbers(state.params)
        state, _ = step(state, step.put(small))
        weight = next(name for name in before if name.endswith("0.weight"))
        moved[dtype, config.get("loss_scale")] = numbers(state.params)[weight] - before[weight]
    wanted = moved["float32", None]
    assert np.linalg.norm(moved["float16", 2.0**12] - wanted) < 2e-2 * np.linalg.norm(wanted)
