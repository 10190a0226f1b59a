"""Every layout trains like one device: gradients, losses, parameters, with dropout on; and it follows its rules.

One program per layout does it all: its optimizer is AdamW or plain SGD by a flag in its state, and it keeps the gradient.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from panax.checkpoint import Checkpointer, restore
from panax.core import named_leaves
from panax.mesh import MeshShape, Placement, Rules
from panax.models import DecoderTask
from panax.optim import Chained
from panax.parallel import Pipeline
from panax.plan.collectives import count_collectives
from panax.train import CompiledStep, Program, StepConfig, evaluate_all

AXES = ("replica", "stage", "fsdp", "expert", "context", "tensor")


def layout_name(sizes: dict[str, int]) -> str:
    return "·".join(f"{axis}{size}" for axis, size in sizes.items())


ONE = dict.fromkeys(AXES, 1)
ALONE = [{axis: 2} for axis in AXES] + [{"fsdp": 8}]
PAIRS = [{a: 2, b: 2} for i, a in enumerate(AXES) for b in AXES[i + 1 :]]
MIXED = [
    {"fsdp": 2, "tensor": 4},
    {"replica": 2, "context": 4},
    {"replica": 2, "fsdp": 2, "tensor": 2},
    {"stage": 2, "fsdp": 2, "tensor": 2},
    {"fsdp": 2, "context": 2, "tensor": 2},
    {"stage": 2, "fsdp": 2, "context": 2},
    {"replica": 2, "stage": 2, "expert": 2},
    {"expert": 2, "context": 2, "tensor": 2},
]
LAYOUTS = {layout_name(sizes): sizes for sizes in [*ALONE, *PAIRS, *MIXED]}
# Each compiles for 15 to 45 s. The default tests have every axis once, alone or with two others.
DEFAULT = {"stage2", "replica2·fsdp2·tensor2", "expert2·context2·tensor2"}

# Float32 sums of the same terms in another order. A gradient here is a sum of at most 512 tokens' terms; each order rounds
# to a relative 2**-24 * sqrt(512) ~ 1.4e-6 of the terms' own norm, forward and backward pass through 3 layers.
TOLERANCE = 1e-5
ADAM, SGD_RATE = optax.adamw(1e-2), 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamwOrSgd(Chained):
    """AdamW if its state says so, else SGD; the state keeps the last gradient."""

    scope = "element"

    def chain(self, learning_rate, decay):
        def init(params):
            zeros = jax.tree.map(jnp.zeros_like, params)
            return {"adam": ADAM.init(params), "gradient": zeros, "adamw": jnp.float32(0.0)}

        def update(gradients, state, params):
            adam, adam_state = ADAM.update(gradients, state["adam"], params)
            updates = jax.tree.map(lambda a, g: jnp.where(state["adamw"] > 0, a, -SGD_RATE * g), adam, gradients)
            return updates, {"adam": adam_state, "gradient": gradients, "adamw": state["adamw"]}

        return optax.GradientTransformation(init, update)


def compiled(sizes, rules=None, task=None, **config):
    shape = MeshShape(**(ONE | sizes))
    count = int(np.prod(list(sizes.values())))
    config = StepConfig(clip_norm=None, **config)
    program = Program.create(task or tiny.task(), AdamwOrSgd(), num_steps=100, config=config)
    return CompiledStep(program, Placement.create(shape, rules, devices=jax.devices()[:count]), tiny.AXES)


@dataclasses.dataclass
class Trained:
    """What one layout's run gave, as host arrays."""

    first: dict[str, np.ndarray]
    gradient: dict[str, np.ndarray]
    sgd: dict[str, np.ndarray]
    adamw_losses: list[float]


def host(tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}


def train(step, steps=5) -> Trained:
    state = step.init(0)
    first = host(state.params)
    for i in range(steps):
        state, _ = step(state, step.put(tiny.batch(i)))
        if i == 0:
            gradient = host(state.optimizer_state["gradient"])
    sgd, losses = host(state.params), []
    state = step.init(0)
    flag = jax.device_put(jnp.float32(1.0), state.optimizer_state["adamw"].sharding)
    state = dataclasses.replace(state, optimizer_state=state.optimizer_state | {"adamw": flag})
    for i in range(steps):
        state, scalars = step(state, step.put(tiny.batch(i)))
        losses.append(float(scalars["loss"]))
    return Trained(first, gradient, sgd, losses)


@functools.cache
def on_one_device() -> Trained:
    return train(compiled({}))


def assert_trains_alike(many: Trained, one: Trained) -> None:
    for name in one.first:
        np.testing.assert_array_equal(many.first[name], one.first[name], err_msg=f"{name}: depends on the mesh")
    assert_close(many.gradient, one.gradient)
    np.testing.assert_allclose(many.adamw_losses, one.adamw_losses, rtol=TOLERANCE)
    assert_close(many.sgd, one.sgd)


def assert_close(a: dict, b: dict) -> None:
    """Norm-wise per tensor. A gradient that is nothing but rounding (a key's bias shifts all scores of a query alike) is compared
    with what it is the rounding of: the whole gradient, at float32's precision."""
    noise = 2.0**-24 * np.sqrt(sum(float(np.sum(leaf.astype(np.float64) ** 2)) for leaf in b.values()))
    for name in b:
        distance = np.linalg.norm(a[name] - b[name])
        assert distance <= TOLERANCE * np.linalg.norm(b[name]) + noise, (name, distance / np.linalg.norm(b[name]))


def shard_shapes(step) -> dict[str, tuple[int, ...]]:
    state = jax.tree.map(lambda leaf, place: place.shard_shape(leaf.shape), step.program.abstract, step.shardings)
    block = state.params.stacks[0].blocks[0]
    batch = step.put(tiny.batch())
    return {
        "w_up": block.feed_forward.w_up,
        "w_k": block.attention.w_k,
        "table": state.params.embedding.table,
        "scale": state.params.final_norm.scale,
        "tokens": batch["tokens"].sharding.shard_shape(batch["tokens"].shape),
    }


def expected_shards(sizes) -> dict[str, tuple[int, ...]]:
    """Three layers in two kinds of stacks don't fall into two equal stages: they rest split along `embed`."""
    replica, stage, fsdp, expert, context, tensor = (sizes.get(axis, 1) for axis in AXES)
    embed = 32 // (fsdp * expert * stage)
    return {
        "w_up": (1, embed, 64 // tensor),
        "w_k": (1, embed, 2 // tensor if 2 % tensor == 0 else 2, 8),
        "table": (128 // tensor, embed),
        "scale": (32,),
        "tokens": (16 // (replica * fsdp * expert), 32 // context),
    }


def communication(step) -> dict[str, set[str]]:
    """Mesh axis to the kinds of collectives over it, alone or with others, in the compiled step."""
    (program,) = step._train.programs
    found: dict[str, set[str]] = {}
    for collective in count_collectives(program.as_text(), step.placement.sizes):
        for axis in collective.axes:
            found.setdefault(axis, set()).add(collective.kind)
    return found


def expected_communication(sizes) -> dict[str, set[str]]:
    sharded = {"all-gather", "reduce-scatter", "all-reduce"}
    # Rings where two key-value heads, split over tensor, are fewer than the context axis has devices; else heads for positions.
    ring = sizes.get("context", 1) * sizes.get("tensor", 1) > 2
    kinds = {
        "replica": {"all-reduce"},
        "stage": {*sharded, "collective-permute", "all-to-all"},
        "fsdp": sharded,
        "expert": sharded,
        "context": {"all-reduce", "collective-permute"} if ring else {"all-reduce", "all-to-all", "all-gather"},
        "tensor": sharded,
    }
    return {axis: kinds[axis] for axis in sizes}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] * (name not in DEFAULT)) for name in LAYOUTS]
)
def test_trains_like_one_device(layout):
    sizes = LAYOUTS[layout]
    step = compiled(sizes, micro_batches=2 if "stage" in sizes else 1)
    assert_trains_alike(train(step), on_one_device())
    assert shard_shapes(step) == expected_shards(sizes)
    assert communication(step) == expected_communication(sizes)


RESTING = dataclasses.replace(tiny.CONFIG, num_layers=4, windows=(0,))


@functools.cache
def four_like_layers_on_one_device() -> Trained:
    return train(compiled({}, task=DecoderTask(model=RESTING)))


@pytest.mark.parametrize(
    "sizes, pipeline, remat, zero",
    [
        ({"stage": 4, "fsdp": 2}, Pipeline(), "none", "auto"),
        ({"stage": 2, "fsdp": 2}, Pipeline(schedule="interleaved", chunks=2), "products", "auto"),
        ({"stage": 2, "tensor": 2}, Pipeline(schedule="gpipe"), "full", "auto"),
        ({"stage": 2, "fsdp": 2}, Pipeline(), "none", "3"),
        ({"stage": 2, "fsdp": 2}, Pipeline(), "none", "2"),
    ],
    ids=["1f1b", "interleaved", "gpipe", "zero3", "zero2"],
)
def test_every_schedule_trains_alike(sizes, pipeline, remat, zero):
    task = DecoderTask(model=RESTING, pipeline=pipeline, remat=remat)
    step = compiled(sizes, Rules(zero=zero), task, micro_batches=4)
    assert_trains_alike(train(step), four_like_layers_on_one_device())
    # Layers that fall into equal, adjacent stages rest there, and travel nowhere; the embedding is no stage's own.
    rest = pipeline.schedule != "interleaved"
    w_up = step.shardings.params.stacks[0].blocks[0].feed_forward.w_up.shard_shape((4, 32, 64))
    assert w_up[0] == (4 // sizes["stage"] if rest else 4)
    assert ("all-to-all" in communication(step)["stage"]) == (not rest)


class Contiguous(DecoderTask):
    row_order = "contiguous"


@pytest.mark.parametrize(
    "kind, asked, remat",
    [(DecoderTask, "ring", "full"), (DecoderTask, "ulysses", "products"), (Contiguous, "ring", "none")],
    ids=["ring-full", "ulysses-products", "ring-contiguous"],
)
def test_every_way_to_attend_over_devices_trains_alike(kind, asked, remat):
    task = kind(model=tiny.task().model, context_attention=asked, remat=remat)
    assert_trains_alike(train(compiled({"context": 2, "fsdp": 2}, task=task)), on_one_device())


@functools.cache
def evaluated_on_one_device() -> dict[str, float]:
    step = compiled({})
    return evaluate_all(step, step.init(0), [tiny.batch(i) for i in range(2)])


@pytest.mark.parametrize(
    "sizes",
    [{"stage": 2, "fsdp": 2, "context": 2}, {"replica": 2, "tensor": 4}, {"stage": 2, "fsdp": 2, "tensor": 2}],
    ids=layout_name,
)
def test_evaluates_like_one_device(sizes):
    step = compiled(sizes)
    found = evaluate_all(step, step.init(0), [tiny.batch(i) for i in range(2)])
    assert found == pytest.approx(evaluated_on_one_device(), rel=TOLERANCE)


def test_overlapped_tensor_parallelism_sends_in_rings_and_trains_alike():
    step = compiled({"fsdp": 2, "tensor": 4}, Rules(overlap=True), tiny.task(remat="full"))
    assert_trains_alike(train(step), on_one_device())
    # The embedding's scatter and the loss's gather have no product to hide behind.
    assert communication(step)["tensor"] == {"collective-permute", "all-gather", "reduce-scatter", "all-reduce"}


def test_a_checkpoint_of_one_layout_continues_in_another(tmp_path):
    many = compiled({"stage": 2, "fsdp": 2, "tensor": 2}, micro_batches=2)
    state, _ = many(many.init(0), many.put(tiny.batch(0)))
    saved = host((state.params, state.optimizer_state))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(state, 1, {})
    checkpointer.finish()
    one = compiled({})
    restored = restore(checkpointer.open(1), one.program.abstract, one.shardings)
    for name, leaf in host((restored.params, restored.optimizer_state)).items():
        np.testing.assert_array_equal(leaf, saved[name], err_msg=name)
    expected = train(one, steps=2).sgd
    restored, _ = one(restored, one.put(tiny.batch(1)))
    assert_close(host(restored.params), expected)


@pytest.mark.parametrize("zero, sizes", [("1", {"fsdp": 4}), ("2", {"replica": 2, "fsdp": 2, "tensor": 2})])
def test_every_zero_level_trains_alike(zero, sizes):
    step = compiled(sizes, Rules(zero=zero), micro_batches=2)
    assert_trains_alike(train(step), on_one_device())


@pytest.mark.parametrize("sizes", [{}, {"replica": 2, "fsdp": 4}], ids=["one", "hsdp"])
def test_micro_batches_give_the_gradient_of_the_whole_batch(sizes):
    whole, split = (train(compiled(sizes, micro_batches=n), steps=1).gradient for n in (1, 2))
    # The same terms of a sum, added in groups: each tensor as between layouts, and on one device, where the groups are the only
    # difference, the gradient as one vector to 1e-6. (Over devices, where rows are regrouped too, it is at 1.2e-6.)
    assert_close(split, whole)
    if not sizes:
        distance = np.sqrt(sum(np.sum((split[name] - whole[name]) ** 2) for name in whole))
        assert distance <= 1e-6 * np.sqrt(sum(np.sum(leaf**2) for leaf in whole.values()))


def test_shards_are_where_the_rules_say():
    step = compiled({"replica": 2, "fsdp": 2, "tensor": 2})
    state = step.init(0)
    block = state.params.stacks[0].blocks[0]

    def shard(leaf):
        return leaf.addressable_shards[0].data.shape

    assert block.feed_forward.w_up.shape == (1, 32, 64)
    assert shard(block.feed_forward.w_up) == (1, 16, 32)
    assert shard(block.attention.w_o) == (1, 2, 8, 16)
    assert shard(state.params.embedding.table) == (64, 16)
    assert state.params.final_norm.scale.is_fully_replicated
    assert shard(step.put(tiny.batch())["tokens"]) == (4, 32)


def test_moments_lie_like_their_parameters():
    step = compiled({"fsdp": 4})
    state = step.init(0)
    moments = named_leaves(state.optimizer_state)
    for name, leaf in named_leaves(state.params).items():
        assert moments[f"adam.0.mu.{name}"].sharding == leaf.sharding, name


def test_key_value_heads_that_tensor_does_not_divide_are_replicated():
    step = compiled({"tensor": 4})
    state = step.init(0)
    attention = state.params.stacks[0].blocks[0].attention
    assert attention.w_k.addressable_shards[0].data.shape == attention.w_k.shape
    assert attention.w_q.addressable_shards[0].data.shape == (1, 32, 1, 8)


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 8}], ids=["one", "fsdp8"])
def test_the_second_step_compiles_nothing(sizes):
    step = compiled(sizes)
    state, _ = step(step.init(0), step.put(tiny.batch(0)))
    before = step.compile_seconds
    state, _ = step(state, step.put(tiny.batch(1)))
    assert step.compile_seconds == before


def of_bfloat16_parameters(sizes):
    config = StepConfig(micro_batches=2)
    program = Program.create(tiny.task(parameter_dtype="bfloat16"), tiny.ADAMW, num_steps=100, config=config)
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return CompiledStep(program, Placement.create(MeshShape(**(ONE | sizes)), devices=devices), tiny.AXES)


def test_parameters_have_the_dtype_that_the_task_states():
    abstract = of_bfloat16_parameters({}).program.abstract
    assert {leaf.dtype.name for leaf in jax.tree.leaves(abstract.params)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(abstract.optimizer_state) if leaf.ndim} == {"bfloat16"}


@pytest.mark.slow
def test_parameters_of_bfloat16_train_alike_on_a_mesh():
    def losses(sizes):
        step, result = of_bfloat16_parameters(sizes), []
        state = step.init(0)
        for i in range(4):
            state, scalars = step(state, step.put(tiny.batch(i)))
            result.append(float(scalars["loss"]))
        return result

    # A parameter has 8 bits: each update rounds it to a relative 2**-9, in a direction that the order of sums decides.
    np.testing.assert_allclose(losses({"stage": 2, "fsdp": 2, "tensor": 2}), losses({}), rtol=2.0**-9)
