"""The vision transformer: its published sizes, its loss, and that every layout trains like one device."""

import dataclasses
import functools
import math

import drawing
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from panax.core import DataFacts, named_leaves
from panax.core.errors import DataError, LayoutError, RecipeError
from panax.mesh import MeshShape, Placement, Rules
from panax.models import VIT_PRESETS, VIT_PUBLISHED_PARAMETERS, Vit, VitConfig, VitTask
from panax.models.vision.vit import normalize_images
from panax.models.vision.vit_task import mixed_cross_entropy
from panax.optim import Chained, Schedule, Sgd
from panax.plan.collectives import count_collectives
from panax.train import CompiledStep, Program, StepConfig, evaluate_all

CONFIG = VitConfig(
    num_classes=7, image_size=12, patch=4, embed=32, num_layers=2, heads=4, ffn=64, dropout=0.1, mean=(0.4, 0.5, 0.6)
)
ROWS = 16
AXES = {
    "image": ("batch", None, None, None),
    "label": ("batch",),
    "loss_mask": ("batch",),
    "label_mixed": ("batch",),
    "mix": ("batch",),
}

# Float32 sums of the same terms in another order, as in tests/contracts/test_layouts.py: at most 16 rows of 10 positions here.
TOLERANCE = 1e-5


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 256, (ROWS, 12, 12, 3)).astype(np.uint8),
        "label": rng.integers(0, 7, ROWS).astype(np.int32),
        "loss_mask": (np.arange(ROWS) % 5 != 2).astype(np.float32),
        "label_mixed": rng.integers(0, 7, ROWS).astype(np.int32),
        "mix": rng.random(ROWS).astype(np.float32),
    }


def task(**model) -> VitTask:
    return VitTask(model=dataclasses.replace(CONFIG, **model), label_smoothing=0.1)


@functools.cache
def drawn() -> Vit:
    return drawing.drawn(task(dropout=0.0).init)[0]


@pytest.mark.parametrize("name", VIT_PRESETS)
def test_published_parameter_counts(name):
    model = jax.eval_shape(lambda key: Vit.build(key, VIT_PRESETS[name]), jax.random.key(0))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model)) == VIT_PUBLISHED_PARAMETERS[name]


def test_pooling_needs_no_class_token():
    with_token, mean = (
        jax.eval_shape(task(pooling=pooling).init, jax.random.key(0))[0] for pooling in ("class_token", "mean")
    )
    assert with_token.class_token.shape == (32,) and mean.class_token is None
    assert with_token.positions.shape == (10, 32) and mean.positions.shape == (9, 32)


def test_patches_are_read_in_rows_and_each_from_its_own_square():
    params = drawn()
    image = jnp.asarray(batch()["image"], jnp.float32)

    def patch(image, number):
        return params.patches(image, CONFIG, jnp.float32)[0, number].sum()

    seen = np.asarray(jax.jit(jax.grad(patch), static_argnums=1)(image, 5)).any(axis=-1)
    expected = np.zeros((ROWS, 12, 12), bool)
    # The second row of three patches, its third.
    expected[0, 4:8, 8:12] = True
    np.testing.assert_array_equal(seen, expected)


def test_every_position_sees_every_other():
    params = drawn()
    image = jnp.asarray(batch()["image"], jnp.float32)
    first_class = jax.jit(jax.grad(lambda image: params(image, dtype=jnp.float32)[0, 0]))(image)
    assert np.asarray(first_class)[0].any(axis=-1).all() and not np.asarray(first_class)[1:].any()


def test_bytes_are_normalized_and_floats_are_not():
    image = batch()["image"]
    expected = (image / 255 - np.array([0.4, 0.5, 0.6])) / 0.5
    np.testing.assert_allclose(normalize_images(jnp.asarray(image), CONFIG), expected, rtol=1e-6, atol=1e-6)
    as_float = jnp.asarray(expected, jnp.float32)
    assert normalize_images(as_float, CONFIG) is as_float


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_optax_cross_entropy_with_the_same_targets(smoothing):
    scores, given = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, 7)), jnp.float32), batch()
    share = given["mix"][:, None]
    targets = share * np.eye(7, dtype=np.float32)[given["label"]] + (1 - share) * np.eye(7)[given["label_mixed"]]
    targets = jnp.asarray((1 - smoothing) * targets + smoothing / 7, jnp.float32)
    given = {name: jnp.asarray(leaf) for name, leaf in given.items()}
    ours = mixed_cross_entropy(scores, given["label"], given["label_mixed"], given["mix"], smoothing)
    np.testing.assert_allclose(ours, optax.softmax_cross_entropy(scores, targets), rtol=1e-5)


def test_evaluation_knows_no_smoothing_and_counts_what_is_right():
    given = {**batch(), "row": np.arange(ROWS, dtype=np.int32)}
    given = {name: jnp.asarray(leaf) for name, leaf in given.items() if name not in ("label_mixed", "mix")}
    params = drawn()
    scores = jax.jit(lambda image: params(image, dtype=jnp.float32))(given["image"])
    evaluation = jax.jit(lambda given: task().loss(params, {}, given, jax.random.key(0), False))(given)
    mask = np.asarray(given["loss_mask"])
    plain = optax.softmax_cross_entropy_with_integer_labels(scores, given["label"])
    assert float(evaluation.losses["cross_entropy"].mean) == pytest.approx(
        float((plain * mask).sum() / mask.sum()), rel=1e-6
    )
    order = np.argsort(-np.asarray(scores), axis=1)
    right = order == np.asarray(given["label"])[:, None]
    for metric, k in (("accuracy", 1), ("accuracy_top5", 5)):
        expected = (right[:, :k].any(axis=1) * mask).sum() / mask.sum()
        assert float(evaluation.metrics[metric].value) == pytest.approx(expected)
    assert float(evaluation.metrics["images"].value) == mask.sum()


def test_a_label_that_is_no_class_is_not_trained_on():
    step, none = compiled({}), np.full(ROWS, 7, np.int32)
    with pytest.raises(DataError, match=r"the batch's leaf 'label' holds 7 at \[\d+\]; this task takes 0 to 6"):
        step.put({**batch(), "label": none})
    # One that reaches the devices all the same, which can't raise.
    sent = step.put(batch())
    _, scalars = step(step.init(0), {**sent, "label": jax.device_put(none, sent["label"].sharding)})
    assert float(scalars["skipped"]) == 1


def test_it_learns():
    program = Program.create(task(), Sgd(schedule=Schedule(peak=0.2, decay="constant")), num_steps=50)
    step = CompiledStep(program, Placement.create(devices=jax.devices()[:1]), AXES)
    plain = {**batch(), "label_mixed": batch()["label"]}
    state, losses = step.init(0), []
    for _ in range(40):
        state, scalars = step(state, step.put(plain))
        losses.append(float(scalars["loss"]))
    assert losses[0] == pytest.approx(math.log(7), rel=0.1)
    assert losses[-1] < 0.6 * losses[0] and float(scalars["accuracy"]) > 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptSgd(Chained):
    """SGD with the gradient in its state."""

    scope = "element"

    def chain(self, learning_rate, decay):
        def update(gradients, state, params=None):
            return jax.tree.map(lambda g: -0.1 * g, gradients), gradients

        return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def compiled(sizes, subject=None, rules=None, **config) -> CompiledStep:
    count = math.prod(sizes.values())
    shape = MeshShape(**{"replica": 1, "fsdp": 1, **sizes})
    config = StepConfig(clip_norm=None, **config)
    program = Program.create(subject or task(), KeptSgd(), num_steps=10, config=config)
    return CompiledStep(program, Placement.create(shape, rules, devices=jax.devices()[:count]), AXES)


def trained(step: CompiledStep) -> tuple[dict[str, np.ndarray], list[float], dict[str, np.ndarray], dict[str, float]]:
    """The first gradient, the losses of three steps, the parameters after them, and an evaluation."""
    state, losses, first = step.init(0), [], {}
    for i in range(3):
        state, scalars = step(state, step.put(batch(i)))
        losses.append(float(scalars["loss"]))
        first = first or {name: np.asarray(leaf) for name, leaf in named_leaves(state.optimizer_state).items()}
    params = {name: np.asarray(leaf) for name, leaf in named_leaves(state.params).items()}
    return first, losses, params, evaluate_all(step, state, [batch(9)])


@functools.cache
def on_one_device():
    return trained(compiled({}))


def assert_alike(many, one) -> None:
    for a, b in ((many[0], one[0]), (many[2], one[2])):
        noise = 2.0**-24 * np.sqrt(sum(float(np.sum(leaf.astype(np.float64) ** 2)) for leaf in b.values()))
        for name in b:
            distance = np.linalg.norm(a[name] - b[name])
            assert distance <= TOLERANCE * np.linalg.norm(b[name]) + noise, (name, distance)
    np.testing.assert_allclose(many[1], one[1], rtol=TOLERANCE)
    assert many[3] == pytest.approx(one[3], rel=TOLERANCE)


LAYOUTS = [
    pytest.param({"replica": 2, "fsdp": 2, "tensor": 2}, id="mixed"),
    pytest.param({"stage": 2}, id="stage2"),
    *(
        pytest.param(sizes, id="-".join(f"{axis}{size}" for axis, size in sizes.items()), marks=pytest.mark.slow)
        for sizes in (
            {"tensor": 4},
            {"fsdp": 8},
            {"expert": 2, "tensor": 4},
            {"fsdp": 4, "expert": 2},
            {"stage": 2, "fsdp": 2, "tensor": 2},
        )
    ),
]


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_trains_like_one_device(sizes):
    stages = sizes.get("stage", 1)
    # With both, a micro-batch is one row on each device: one stage's share of the loss is empty.
    step = compiled(sizes, micro_batches=1 if stages == 1 else 8 if "fsdp" in sizes else 2)
    assert_alike(trained(step), on_one_device())
    w_up = step.shardings.params.blocks.feed_forward.w_up.shard_shape((2, 32, 64))
    parts = sizes.get("fsdp", 1) * sizes.get("expert", 1)
    assert w_up == (2 // stages, 32 // parts, 64 // sizes.get("tensor", 1))


def test_partial_sums_are_reduced_once_for_each_sub_layer_and_pass():
    """Ten positions don't divide by four: partial sums are all-reduced, and nothing else of a token passes between devices."""
    step = compiled({"tensor": 4})
    text = step.lower(batch()).compile().as_text()
    activation_bytes = 4 * ROWS * CONFIG.num_tokens * CONFIG.embed
    large = [c for c in count_collectives(text, step.placement.sizes) if c.buffer_bytes >= activation_bytes]
    assert {c.kind for c in large} == {"all-reduce"}
    assert sum(c.buffer_bytes * c.times for c in large) == 2 * 2 * CONFIG.num_layers * activation_bytes


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["products", "full"])
def test_rematerialization_and_micro_batches_change_nothing(remat):
    step = compiled({"replica": 2, "tensor": 2}, dataclasses.replace(task(), remat=remat), micro_batches=2)
    assert_alike(trained(step), on_one_device())


@pytest.mark.slow
@pytest.mark.parametrize("zero", ["1", "2"])
def test_every_zero_level_trains_alike(zero):
    step = compiled({"fsdp": 2, "tensor": 2}, rules=Rules(zero=zero))
    assert_alike(trained(step), on_one_device())


def test_a_single_image_on_a_device_and_no_mask_are_no_false_alarm():
    """A sum along a dimension of one element is how a broadcast along it is transposed: no sum over devices is forgotten."""
    images = {name: leaf for name, leaf in batch().items() if name in ("image", "label")}
    config = StepConfig(clip_norm=None, micro_batches=4)
    program = Program.create(task(), KeptSgd(), num_steps=10, config=config)
    placement = Placement.create(MeshShape(stage=2, fsdp=2), devices=jax.devices()[:4])
    CompiledStep(program, placement, {name: AXES[name] for name in images}).trace(images)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2}, {"stage": 2, "tensor": 2}])
def test_mean_pooling_trains_alike_on_any_mesh(sizes):
    subject = task(pooling="mean")
    micro_batches = 4 if "stage" in sizes else 1
    assert_alike(trained(compiled(sizes, subject, micro_batches=micro_batches)), trained(compiled({}, subject)))


@pytest.mark.slow
def test_dropout_is_the_same_in_a_pipeline():
    subject = task(dropout=0.1)
    assert_alike(trained(compiled({"stage": 2}, subject, micro_batches=2)), trained(compiled({}, subject)))


def test_a_mesh_that_divides_rows_is_refused():
    with pytest.raises(
        LayoutError, match=r"mesh\.context=2: VitTask supports the mesh axes replica, stage, fsdp, expert, tensor"
    ):
        compiled({"context": 2})


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"image_size": 30, "patch": 16}, "image_size=30 is not divisible by patch=16"),
        ({"embed": 30}, "embed=30 is not divisible by heads=12"),
        ({"std": (0.5, 0.5)}, "std=.* expected one number for all channels, or 3"),
        ({"std": (0.0,)}, "expected positive numbers"),
        ({"num_layers": 0}, "num_layers=0; expected a positive number"),
    ],
)
def test_senseless_models_are_refused(wrong, message):
    with pytest.raises(RecipeError, match=message):
        VitConfig(**wrong)


def test_classes_come_from_the_data():
    open_task = VitTask(model=VitConfig())
    assert open_task.adapt_to_data(DataFacts(num_classes=37)).model.num_classes == 37
    with pytest.raises(RecipeError, match="does not state how many"):
        open_task.adapt_to_data(DataFacts())
    with pytest.raises(RecipeError, match="num_classes=7 is less than the data's 37"):
        task().adapt_to_data(DataFacts(num_classes=37))
    with pytest.raises(RecipeError, match="label_smoothing=1"):
        VitTask(model=CONFIG, label_smoothing=1.0)


def test_images_of_another_shape_are_refused():
    with pytest.raises(RecipeError, match=r"images have the shape \(8, 12, 3\).*the model's \(12, 12, 3\)"):
        step = compiled({})
        step(step.init(0), step.put({**batch(), "image": np.zeros((ROWS, 8, 12, 3), np.uint8)}))


def test_a_collapsed_model_is_not_right():
    from panax.models.vision.vit_task import class_metrics

    label, mask = jnp.array([0, 1, 2]), jnp.ones(3)
    alike = class_metrics(jnp.zeros((3, 8)), label, mask, "images")
    assert alike["accuracy"].value == 0.0 and alike["accuracy_top5"].value == 0.0
    told = class_metrics(jax.nn.one_hot(label, 8) + jnp.arange(8.0)[None] / 100, label, mask, "images")
    assert told["accuracy"].value == 1.0 and told["accuracy_top5"].value == 1.0
    second = class_metrics(jnp.arange(8.0)[None] * jnp.ones((3, 1)), jnp.array([6, 3, 2]), mask, "images")
    assert second["accuracy"].value == 0.0 and second["accuracy_top5"].value == pytest.approx(2 / 3)
