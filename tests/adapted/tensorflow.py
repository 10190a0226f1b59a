"""TensorFlow: a `tf.Module` with a `tf.function`, trained by a GradientTape and SGD written out."""

import tensorflow as tf

from panax.adapters.tensorflow import task

from .case import MOMENTUM, RATE, SIZES, Case, Own, batch

INPUTS, HIDDEN, CLASSES = SIZES


class Dense(tf.Module):
    def __init__(self, inputs, outputs, seed):
        super().__init__()
        self.kernel = tf.Variable(tf.random.stateless_normal([inputs, outputs], [seed, 0], stddev=inputs**-0.5))
        self.bias = tf.Variable(tf.zeros([outputs]))

    def __call__(self, x):
        return x @ self.kernel + self.bias


class Net(tf.Module):
    def __init__(self, rate=0.0):
        super().__init__(name="net")
        self.rate, self.up, self.head = rate, Dense(INPUTS, HIDDEN, 1), Dense(HIDDEN, CLASSES, 2)
        self.scale, self.shift = tf.Variable(tf.ones([HIDDEN])), tf.Variable(tf.zeros([HIDDEN]))
        self.mean = tf.Variable(tf.zeros([HIDDEN]), trainable=False)
        self.variance = tf.Variable(tf.ones([HIDDEN]), trainable=False)

    @tf.function
    def __call__(self, x, training):
        x = self.up(x)
        if training:
            mean, variance = tf.nn.moments(x, [0])
            self.mean.assign_sub(0.1 * (self.mean - mean))
            self.variance.assign_sub(0.1 * (self.variance - variance))
        else:
            mean, variance = self.mean, self.variance
        x = tf.nn.relu(tf.nn.batch_normalization(x, mean, variance, self.shift, self.scale, 1e-3))
        return self.head(tf.nn.dropout(x, self.rate) if training and self.rate else x)


def loss(model, batch, training):
    logits = model(batch["x"], training)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], logits))


def weighted(model, batch):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], model(batch["x"]))
    return tf.reduce_sum(losses * batch["weight"]), tf.reduce_sum(batch["weight"])


def named(model):
    return {
        "up.kernel": model.up.kernel,
        "up.bias": model.up.bias,
        "head.kernel": model.head.kernel,
        "head.bias": model.head.bias,
        "scale": model.scale,
        "shift": model.shift,
    }


def weights_of(model):
    return {name: variable.numpy().copy() for name, variable in named(model).items()}


def statistics_of(model):
    return {"mean": model.mean.numpy().copy(), "variance": model.variance.numpy().copy()}


class TensorflowOwn(Own):
    def start(self, model):
        self.model = Net()
        for mine, given in zip(self.model.variables, model.variables):
            mine.assign(given)
        self.moments = [tf.Variable(tf.zeros_like(v)) for v in self.model.trainable_variables]

    def gradients(self, batch, key):
        before = [tf.identity(v) for v in self.model.variables]
        value, gradients = self.differentiate(batch)
        for variable, was in zip(self.model.variables, before):
            variable.assign(was)
        order = {v.ref(): g for v, g in zip(self.model.trainable_variables, gradients)}
        found = {name: order[v.ref()] for name, v in named(self.model).items()}
        return float(value), {name: tf.convert_to_tensor(g).numpy() for name, g in found.items()}

    def differentiate(self, batch):
        with tf.GradientTape() as tape:
            value = loss(self.model, batch, True)
        return value, tape.gradient(value, self.model.trainable_variables)

    def step(self, batch, key):
        value, gradients = self.differentiate(batch)
        for variable, gradient, moment in zip(self.model.trainable_variables, gradients, self.moments):
            moment.assign(MOMENTUM * moment + gradient)
            variable.assign_sub(RATE * moment)
        return float(value)

    def evaluate(self, batch):
        return float(loss(self.model, batch, False))


CASE = Case(
    task=task(Net(), loss, example=batch()),
    noisy=task(Net(0.25), loss, example=batch()),
    weighted=task(Dense(INPUTS, CLASSES, 3), weighted, example=batch()),
    own=TensorflowOwn(),
    weights=weights_of,
    statistics=statistics_of,
)
