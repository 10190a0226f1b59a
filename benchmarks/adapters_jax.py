"""Published models of JAX libraries, adapted, against a training step written in the library's own way.

Models that no one here wrote, unmodified: Haiku's own ResNet-18, jax-resnet's (Linen), vitax's vision transformer (NNX), Keras's
MobileNetV2. Both sides start from the same weights, see the same batches, draw the same dropout masks and take the same optimizer
(SGD with momentum); the losses of the first steps are compared. (MobileNetV2, freshly drawn, is chaotic: with its weights moved
by one rounding, Keras's own run leaves itself by 1e-2 within three steps at a rate of 1e-2.) `adaptation` is what `task(...)`
takes. A step of Panax's also measures the gradient's norm and guards against updates that are not finite; the own one does not.
Rounds are interleaved, in one process, on one device; a clock is read when the result is there.

    pip install --no-deps jax-resnet vitax
    KERAS_BACKEND=jax JAX_PLATFORMS=cpu python benchmarks/adapters_jax.py [--rounds 7] [--steps 5] [--models nnx_vit]
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import panax
from panax.mesh import MeshShape
from panax.optim import Optax
from panax.train import StepConfig

RATE, MOMENTUM, CLASSES = 1e-3, 0.9, 10


def sgd() -> optax.GradientTransformation:
    return optax.sgd(RATE, MOMENTUM)


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


@dataclasses.dataclass(frozen=True)
class Published:
    """A model, adapted, and the step that its library's users write.

    Attributes:
        adapt: Makes the task for an example batch.
        begin: The library's own training state, from a model in its own form.
        step: `(state, batch, key) -> (state, loss)`.
        pixels: Of the side of an image.
        package: What ships the model.
    """

    adapt: Callable[[Any], Any]
    begin: Callable[[Any], Any]
    step: Callable[[Any, Any, jax.Array], tuple[Any, Any]]
    pixels: int
    package: str


def haiku_model(network: Callable[[], Any], pixels: int) -> Published:
    import haiku as hk

    def loss(batch, is_training):
        return cross_entropy(network()(batch["x"], is_training), batch)

    own = hk.transform_with_state(loss)

    @jax.jit
    def step(state, batch, key):
        (params, variables), moments = state
        (value, variables), gradients = jax.value_and_grad(own.apply, has_aux=True)(params, variables, key, batch, True)
        updates, moments = sgd().update(gradients, moments)
        return ((optax.apply_updates(params, updates), variables), moments), value

    def adapt(example):
        return panax.adapters.haiku.task(loss, example=example)

    return Published(adapt, lambda model: (model, sgd().init(model[0])), step, pixels, "dm-haiku")


def haiku_resnet18() -> Published:
    import haiku as hk

    return haiku_model(lambda: hk.nets.ResNet18(CLASSES), 32)


def linen_resnet18() -> Published:
    from functools import partial

    import flax.linen as nn
    import jax_resnet
    from flax.training import train_state

    def net():
        return jax_resnet.ResNet18(n_classes=CLASSES, norm_cls=partial(nn.BatchNorm, momentum=0.9))

    class State(train_state.TrainState):
        batch_stats: Any

    def begin(model):
        return State.create(apply_fn=net().apply, params=model["params"], batch_stats=model["batch_stats"], tx=sgd())

    @jax.jit
    def step(state, batch, key):
        def objective(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, updates = state.apply_fn(variables, batch["x"], mutable=["batch_stats"])
            return cross_entropy(logits, batch), updates["batch_stats"]

        (value, statistics), gradients = jax.value_and_grad(objective, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients, batch_stats=statistics), value

    def loss(model, batch):
        return cross_entropy(model(batch["x"]), batch)

    def adapt(example):
        return panax.adapters.flax_linen.task(net(), loss, example=example)

    return Published(adapt, begin, step, 32, "jax-resnet")


def nnx_vit() -> Published:
    from flax import nnx

    # The package itself imports a class that transformers 5 no longer has; the model's file needs flax alone.
    found = importlib.util.find_spec("vitax")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("vitax is not installed; run: pip install --no-deps vitax")
    path = Path(found.submodule_search_locations[0]) / "models/vit.py"
    spec = importlib.util.spec_from_file_location("vitax_vit", path)
    assert spec is not None and spec.loader is not None
    vit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(vit)

    def create(rngs):
        return vit.VisionTransformer(
            CLASSES, img_size=64, num_layers=6, num_heads=3, mlp_dim=768, hidden_size=192, rngs=rngs
        )

    def loss(model, batch):
        return cross_entropy(model(batch["x"]), batch)

    def begin(model):
        model = nnx.clone(jax.tree.map(jnp.asarray, model))
        model.train()
        return model, nnx.Optimizer(model, sgd(), wrt=nnx.Param)

    @nnx.jit
    def update(model, optimizer, batch, key):
        nnx.reseed(model, default=key)
        value, gradients = nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, gradients)
        return value

    def step(state, batch, key):
        return state, update(*state, batch, key)

    def adapt(example):
        return panax.adapters.flax_nnx.task(create, loss, axis_names={"data": "width"})

    return Published(adapt, begin, step, 64, "vitax")


def keras_mobilenet_v2() -> Published:
    import keras

    def net():
        model = keras.applications.MobileNetV2(
            (64, 64, 3), alpha=0.35, weights=None, classes=CLASSES, classifier_activation=None
        )
        model.compile(
            optimizer=keras.optimizers.SGD(RATE, MOMENTUM),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    def begin(model):
        own = net()
        for mine, given in zip(own.variables, model.variables):
            mine.assign(np.array(given.value))
        return own

    def step(model, batch, key):
        return model, model.train_on_batch(batch["x"], batch["y"])

    given = net()
    return Published(lambda example: panax.adapters.keras.task(given), begin, step, 64, "keras.applications")


MODELS = {
    "haiku_resnet18": haiku_resnet18,
    "linen_resnet18": linen_resnet18,
    "nnx_vit": nnx_vit,
    "keras_mobilenet_v2": keras_mobilenet_v2,
}


def batches(pixels: int, rows: int = 16) -> Iterator[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    while True:
        x = random.standard_normal((rows, pixels, pixels, 3), dtype=np.float32)
        yield {"x": x, "y": random.integers(0, CLASSES, rows).astype(np.int32)}


@dataclasses.dataclass
class Pair:
    """One model on both sides, at the same weights.

    Attributes:
        adaptation_seconds: What making the task took.
        keys: What the model draws from in each step.
    """

    published: Published
    plain: Any
    state: Any
    own: Any
    batches: Iterator[Any]
    adaptation_seconds: float

    @classmethod
    def create(cls, name: str) -> "Pair":
        published = MODELS[name]()
        source = batches(published.pixels)
        example = next(source)
        start = time.perf_counter()
        task = published.adapt(example)
        seconds = time.perf_counter() - start
        step = panax.compile_step(
            task,
            example,
            Optax(transformation=sgd()),
            mesh=MeshShape(replica=1, fsdp=1),
            devices=jax.devices()[:1],
            config=StepConfig(clip_norm=None),
        )
        state = step.init(0)
        return cls(published, step, state, published.begin(task.trained(state)), source, seconds)

    def panax_steps(self, given: list[Any]) -> list[float]:
        losses = []
        for batch in given:
            self.state, scalars = self.plain(self.state, batch)
            losses.append(scalars["loss"])
        return [float(loss) for loss in losses]

    def own_steps(self, given: list[Any], keys: list[jax.Array]) -> list[float]:
        losses = []
        for batch, key in zip(given, keys):
            self.own, loss = self.published.step(self.own, batch, key)
            losses.append(loss)
        return [float(loss) for loss in losses]

    def next_keys(self, count: int) -> list[jax.Array]:
        first = int(self.state.step)
        steps = [jax.random.fold_in(self.state.key, first + i) for i in range(count)]
        return [jax.random.fold_in(key, 0) for key in steps]

    def round(self, steps: int) -> tuple[list[float], list[float], float, float]:
        """Losses and seconds of a step, Panax's first."""
        given = [next(self.batches) for _ in range(steps)]
        keys = self.next_keys(steps)
        start = time.perf_counter()
        mine = self.panax_steps(given)
        middle = time.perf_counter()
        theirs = self.own_steps(given, keys)
        return mine, theirs, (middle - start) / steps, (time.perf_counter() - middle) / steps


def measured(name: str, rounds: int, steps: int) -> dict[str, Any]:
    pair = Pair.create(name)
    mine, theirs, *_ = pair.round(steps)
    difference = max(abs(a - b) / abs(b) for a, b in zip(mine, theirs))
    seconds = [pair.round(steps)[2:] for _ in range(rounds)]
    panax_seconds, own_seconds = (statistics.median(each) for each in zip(*seconds))
    ratios = sorted(a / b for a, b in seconds)
    return {
        "model": name,
        "package": pair.published.package,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(pair.state.params)),
        "adaptation_seconds": round(pair.adaptation_seconds, 3),
        f"largest relative difference of {steps} losses": f"{difference:.1e}",
        "panax_seconds": round(panax_seconds, 4),
        "own_seconds": round(own_seconds, 4),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--models", default=",".join(MODELS))
    options = parser.parse_args()
    print(json.dumps({"jax": jax.__version__, "machine": platform.machine(), "cores": os.cpu_count()}))
    for name in options.models.split(","):
        print(json.dumps({**measured(name, options.rounds, options.steps), "load": os.getloadavg()[0]}), flush=True)


if __name__ == "__main__":
    main()
