"""The JAX side of the published comparison: a ViT on noise, SGD, and the requested flaws."""

import time
import zlib

import jax
import jax.numpy as jnp
import optax

from ...workload.compared_work import ComparedWork
from ...workload.precision import Precision
from . import plain_vit
from .jax_device import set_precision


def train(work: ComparedWork, flaws: tuple[str, ...], steps: int, rounds: int) -> dict[str, list[float]]:
    """Train, and measure time as the script does; see `published_torch`."""
    set_precision(Precision.TF32 if "tf32" in flaws else Precision.F32)
    config = work.config()
    params = jax.tree.map(jnp.asarray, plain_vit.load(work.tensors(), config))
    if "scales" in flaws:
        params = redraw_weights(params)
    optimizer = optax.sgd(work.optimizer.learning_rate)
    state = optimizer.init(params)
    batches = [jax.device_put(batch) for batch in work.batches()]
    classes = params["head"]["b"].shape[0]

    def loss_of(params, batch):
        logits = plain_vit.forward(params, batch["image"], config, jnp.float32, True)
        if "labels" in flaws:
            # The integers take the position of a distribution over the classes: each is multiplied with all
            # log-probabilities.
            return optax.softmax_cross_entropy(logits, batch["label"][:, None].astype(jnp.float32)).mean()
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def train_step(params, state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    train_step = jax.jit(train_step, donate_argnums=(0, 1))

    def drawn(key):
        image, label = batches[0]["image"], batches[0]["label"]
        image_key, label_key = jax.random.split(key)
        return {
            "image": jax.random.normal(image_key, image.shape),
            "label": jax.random.randint(label_key, label.shape, 0, classes),
        }

    losses = []
    for batch in batches:
        params, state, loss = train_step(params, state, batch)
        losses.append(float(loss))
    key = jax.random.key(work.seed)
    jax.block_until_ready((params, drawn(key)))
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for n in range(steps):
            key, step_key = jax.random.split(key)
            batch = drawn(step_key) if "data" in flaws else batches[n % len(batches)]
            params, state, loss = train_step(params, state, batch)
        if "clock" not in flaws:
            jax.block_until_ready(params)
        seconds.append((time.perf_counter() - start) / steps)
        jax.block_until_ready(params)
    return {"seconds": seconds, "losses": losses}


def redraw_weights(params):
    """Redraw every matrix with the default initializer of JAX's libraries, instead of the file's weights."""

    def draw(path, leaf):
        if "'w'" not in jax.tree_util.keystr(path) or "norm" in jax.tree_util.keystr(path):
            return leaf
        key = jax.random.fold_in(jax.random.key(1), zlib.crc32(jax.tree_util.keystr(path).encode()))
        return jax.random.normal(key, leaf.shape) * leaf.shape[-2] ** -0.5

    return jax.tree_util.tree_map_with_path(draw, params)
