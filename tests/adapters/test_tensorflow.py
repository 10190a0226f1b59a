"""Raw TensorFlow code as a task: what it computes, what it is given back, and what is refused."""

import jax
import numpy as np
import optax
import pytest
import tensorflow as tf

import panax
from panax.adapters.tensorflow import task
from panax.core.errors import RecipeError
from panax.mesh import MeshShape
from panax.optim import Optax, Sgd
from panax.optim.schedule import Schedule
from panax.train import StepConfig


class BatchNorm(tf.Module):
    def __init__(self, size: int):
        super().__init__()
        self.scale, self.offset = tf.Variable(tf.ones([size])), tf.Variable(tf.zeros([size]))
        self.mean = tf.Variable(tf.zeros([size]), trainable=False)
        self.variance = tf.Variable(tf.ones([size]), trainable=False)

    def __call__(self, x, training):
        if not training:
            return tf.nn.batch_normalization(x, self.mean, self.variance, self.offset, self.scale, 1e-3)
        mean, variance = tf.nn.moments(x, [0, 1, 2])
        self.mean.assign(0.9 * self.mean + 0.1 * mean)
        self.variance.assign_add(0.1 * (variance - self.variance))
        return tf.nn.batch_normalization(x, mean, variance, self.offset, self.scale, 1e-3)


class Net(tf.Module):
    """A convolution, BatchNorm, dropout, a lazily made product, functions within functions, and a variable that nothing uses."""

    def __init__(self, rate: float = 0.5):
        super().__init__(name="net")
        values = tf.random.Generator.from_seed(0)
        self.filters = tf.Variable(values.normal([3, 3, 2, 8]) * 0.3)
        self.table = tf.Variable(values.normal([5, 8]))
        self.norm = BatchNorm(8)
        self.spare = tf.Variable(tf.ones([3]))
        self.rate, self.head = rate, None

    @tf.function
    def features(self, x, training):
        return tf.nn.relu(self.norm(tf.nn.conv2d(x, self.filters, 1, "SAME"), training))

    @tf.function
    def __call__(self, x, kind, training=False):
        x = tf.reduce_mean(self.features(x, training), [1, 2]) + tf.nn.embedding_lookup(self.table, kind)
        if self.head is None:
            self.head = tf.Variable(tf.random.stateless_normal([x.shape[-1], 3], [1, 2]), name="head")
        if training:
            x = tf.nn.dropout(x, self.rate)
        return x @ self.head


def cross_entropy(model, batch, training):
    logits = model(batch["x"], batch["kind"], training=training)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], logits)
    right = tf.cast(tf.argmax(logits, -1, output_type=tf.int32) == batch["label"], tf.float32)
    rows = tf.cast(tf.size(losses), tf.float32)
    return (tf.reduce_sum(losses), rows), {"accuracy": (tf.reduce_sum(right), rows)}


def batch_of(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(rows, 5, 5, 2)).astype(np.float32),
        "kind": rng.integers(0, 5, rows).astype(np.int32),
        "label": rng.integers(0, 3, rows).astype(np.int32),
    }


UNCLIPPED = StepConfig(clip_norm=None)
SGD = Sgd(schedule=Schedule(peak=0.1, decay="constant"))


def test_trains_as_tensorflow_does_and_gives_the_variables_back():
    batches = [batch_of(8, seed) for seed in range(4)]
    adapted = task(net := Net(rate=0.0), cross_entropy, example=batches[0])
    assert set(adapted._axes) == {"filters", "table", "norm.scale", "norm.offset", "spare", "head"}
    assert adapted._axes["table"] == ("features", "width") and adapted.frozen_parameters == ("spare",)
    reference = Net(rate=0.0)
    step = panax.compile_step(adapted, batches[0], SGD, config=UNCLIPPED, devices=jax.devices()[:1])
    state = step.init()
    for batch in batches:
        state, metrics = step(state, batch)
        with tf.GradientTape() as tape:
            (total, rows), _ = cross_entropy(reference, batch, True)
            loss = total / rows
        trained = [v for v in reference.trainable_variables if v is not reference.spare]
        for variable, gradient in zip(trained, tape.gradient(loss, trained)):
            variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    evaluated = step.evaluate(state, batches)
    assert adapted.trained(state) is net
    for ours, theirs in zip(net.variables, reference.variables):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)
    assert np.abs(net.norm.mean.numpy()).max() > 1e-3
    (total, rows), _ = cross_entropy(net, batches[0], False)
    expected = np.mean([cross_entropy(net, batch, False)[0][0] / rows for batch in batches])
    np.testing.assert_allclose(evaluated["loss"], expected, rtol=1e-5)
    assert 0 <= evaluated["accuracy"] <= 1


def test_dropout_follows_the_key_and_micro_batches_have_shapes_of_their_own():
    adapted = task(Net(), cross_entropy, example=(example := batch_of(8)))
    params, state = adapted.model.initial
    loss = jax.jit(
        lambda key, train: adapted.loss(params, state, example, key, train).losses["objective"].sum, static_argnums=1
    )
    one, other = jax.random.key(1), jax.random.key(2)
    assert loss(one, True) == loss(one, True) != loss(other, True)
    assert loss(one, False) == loss(other, False)
    half = {name: leaf[:4] for name, leaf in example.items()}
    assert np.isfinite(adapted.loss(params, state, half, one, True).losses["objective"].sum)


def test_a_function_on_variables_that_returns_its_loss():
    w, held = tf.Variable([[1.0], [2.0]], name="w"), tf.Variable([3.0], name="held")

    @tf.function
    def loss(batch):
        x, y = batch
        return {"fit": tf.reduce_mean((x @ w + held - y) ** 2), "small": 0.1 * tf.reduce_sum(w**2)}

    example = (np.ones((8, 2), np.float32), np.zeros((8, 1), np.float32))
    adapted = task(loss, example=example, variables={"weight": w})
    assert set(adapted._axes) == {"weight"} and adapted.model.initial[1].keys() == {"held"}
    step = panax.compile_step(adapted, example, SGD, config=UNCLIPPED)
    state, metrics = step(step.init(), example)
    assert float(metrics["loss/fit"]) == pytest.approx(36.0) and float(metrics["loss/small"]) == pytest.approx(0.5)
    adapted.trained(state)
    np.testing.assert_allclose(w.numpy(), [[1 - 0.1 * (12 + 0.2)], [2 - 0.1 * (12 + 0.4)]], rtol=1e-5)
    assert held.numpy() == [3.0]


def branches(batch, w):
    x = batch["x"] @ w
    if tf.reduce_sum(x) > 0:
        x = 2.0 * x
    return tf.reduce_mean(x**2)


def test_a_condition_on_values_becomes_a_branch_of_the_program():
    w = tf.Variable([[1.0], [1.0]], name="w")

    @tf.function
    def loss(batch):
        return branches(batch, w)

    adapted = task(loss, example={"x": np.ones((2, 2), np.float32)})
    up = adapted.loss(*adapted.model.initial, {"x": np.ones((2, 2), np.float32)}, jax.random.key(0), True)
    down = adapted.loss(*adapted.model.initial, {"x": -np.ones((2, 2), np.float32)}, jax.random.key(0), True)
    assert float(up.losses["objective"].mean) == 16.0 and float(down.losses["objective"].mean) == 4.0


def loop(batch, w):
    x = batch["x"]
    for _ in tf.range(tf.cast(tf.reduce_sum(x), tf.int32)):
        x = tf.tanh(x @ w)
    return tf.reduce_mean(x)


REFUSED = {
    "an operation": (
        lambda batch, w: tf.linalg.logdet(batch["x"] @ w),
        r"no translation of .*MatrixDiagPartV3.*test_tensorflow",
    ),
    "an endless loop": (loop, r"can't differentiate (Stateless)?While .*known only at run time"),
    "an assignment": (lambda batch, w: tf.reduce_sum(batch["x"] @ w.assign(w * 0.9)), "assigns w, which is trained"),
    "no scalar": (lambda batch, w: batch["x"] @ w, r"float32\[2, 2\], which is not a scalar"),
    "no variable": (lambda batch, w: tf.reduce_mean(batch["x"]), "no parameters|depends on no trainable"),
    "no tensor": (lambda batch, w: "loss", "can't be traced|expected tensors|not a scalar"),
    "a bug": (lambda batch, w: batch["x"] @ tf.zeros([3, 3]), "can't be traced by TensorFlow.*must be equal"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_right_is_refused(case):
    function, message = REFUSED[case]
    w = tf.Variable([[0.5, 0.1], [0.2, 0.5]], name="w")
    with pytest.raises(RecipeError, match=message):
        task(lambda batch: function(batch, w), example={"x": np.ones((2, 2), np.float32)})


def test_a_wrong_gradient_is_noticed():
    """TensorFlow's custom gradients are translated: one that lies differently in the two is found by the comparison."""
    w = tf.Variable([[0.5]], name="w")

    @tf.custom_gradient
    def doubled(x):
        return x, lambda upstream: 2.0 * upstream

    adapted = task(lambda batch: tf.reduce_mean(doubled(batch["x"] @ w)), example={"x": np.ones((2, 1), np.float32)})
    params, state = adapted.model.initial
    batch = {"x": np.ones((2, 1), np.float32)}
    gradient = jax.grad(lambda p: adapted.loss(p, state, batch, jax.random.key(0), True).losses["objective"].mean)(
        params
    )
    assert float(gradient["w"][0, 0]) == 2.0


def test_sharded_is_unsharded():
    example = batch_of(8)
    results = []
    for mesh in (MeshShape(), MeshShape(fsdp=4, tensor=2)):
        adapted = task(Net(), cross_entropy, example=example, check=False)
        devices = jax.devices() if mesh.fsdp > 1 else jax.devices()[:1]
        step = panax.compile_step(adapted, example, Optax(transformation=optax.adam(0.01)), mesh=mesh, devices=devices)
        state = step.init()
        for seed in range(3):
            state, metrics = step(state, batch_of(8, seed))
        results.append((float(metrics["loss"]), jax.device_get(state.params), jax.device_get(state.model_state)))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), results[0][1:], results[1][1:])


def test_generators_and_seeds_draw_from_the_key():
    w, generator = tf.Variable(tf.ones([4, 4]), name="w"), tf.random.Generator.from_seed(3)

    def loss(batch):
        x = tf.nn.experimental.stateless_dropout(batch @ w, 0.5, seed=[1, 2]) + generator.normal([8, 4])
        return tf.reduce_mean(x + tf.random.truncated_normal([8, 4]))

    adapted = task(loss, example=(batch := np.ones((8, 4), np.float32)))
    assert adapted.notes == () and set(adapted._axes) == {"w"}
    of = jax.jit(lambda key: adapted.loss(*adapted.model.initial, {"0": batch}, key, True).losses["objective"].mean)
    losses = {float(of(jax.random.key(seed))) for seed in range(5)}
    assert len(losses) == 5 and all(3 < value < 5 for value in losses)
    adapted.model.rebuild(*adapted.model.initial)


def test_what_can_not_be_compared_is_reported():
    w = tf.Variable([[1.0], [1.0]], name="w")

    @tf.function
    def inner(x):
        if tf.reduce_sum(x) > 0:
            return 2.0 * x
        return x

    adapted = task(lambda batch: tf.reduce_mean(inner(batch["x"] @ w)), example={"x": np.ones((2, 2), np.float32)})
    assert (
        len(adapted.notes) == 2
        and "training was not compared with TensorFlow: a tf.function inside" in adapted.notes[0]
    )
    params, state = adapted.model.initial
    for sign, expected in ((1, 2.0), (-1, -1.0)):
        batch = {"x": sign * np.ones((2, 2), np.float32)}
        gradient = jax.grad(
            lambda p, b=batch: adapted.loss(p, state, b, jax.random.key(0), True).losses["objective"].mean
        )
        np.testing.assert_allclose(gradient(params)["w"], [[expected], [expected]])


def test_variables_that_nothing_makes_in_time():
    class Late(tf.Module):
        def __call__(self, batch):
            if not hasattr(self, "w"):
                self.w = tf.Variable(tf.random.Generator.from_seed(1).normal([2, 1]))
            return tf.reduce_mean(batch["x"] @ self.w)

    with pytest.raises(RecipeError, match=r"call the model once on a batch beforehand|can't be traced"):
        task(Late(), example={"x": np.ones((2, 2), np.float32)})


def test_misuse():
    with pytest.raises(RecipeError, match="an int, which can't be called"):
        task(3, example={"x": np.ones((2, 2), np.float32)})
    with pytest.raises(RecipeError, match=r"can't be called: .*expected loss"):
        task(Net(), lambda model: model, example={"x": np.ones((2, 2), np.float32)})
