"""Handwritten digits with Flax NNX: an ordinary module with BatchNorm and dropout, trained on whatever devices there are.

    pip install 'panax-jax[flax]' scikit-learn
    python examples/flax_nnx_digits.py

The module knows nothing of Panax. Running the script again goes on from its last checkpoint; another mesh, such as
`mesh=MeshShape(fsdp=4, tensor=2)`, changes nothing but where its weights lie.
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import panax
from panax.data import Arrays, ExampleSource
from panax.optim import AdamW, Schedule


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), strides=2, rngs=rngs)
        self.norm2 = nnx.BatchNorm(64, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(4 * 4 * 64, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.relu(self.norm2(self.conv2(x)))
        return self.head(self.dropout(x.reshape(x.shape[0], -1)))


def loss(model, batch):
    logits = model(batch["x"])
    # 0 for rows that fill up the last batch of an evaluation.
    counts = batch["loss_mask"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    right = logits.argmax(-1) == batch["y"]
    return ((losses * counts).sum(), counts.sum()), {"accuracy": ((right * counts).sum(), counts.sum())}


def main() -> None:
    digits = load_digits()
    x, y = digits.images[..., None].astype(np.float32) / 16, digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(x))
    test, train = order[:397], order[397:]

    def source(rows, **settings):
        return ExampleSource(Arrays({"x": x[rows], "y": y[rows]}), batch_size=64, **settings)

    result = panax.fit(
        panax.Experiment(
            name="nnx-digits",
            task=panax.adapters.flax_nnx.task(lambda rngs: Net(rngs), loss),
            data=source(train, seed=0),
            held_out=source(test, epochs=1),
            optimizer=AdamW(schedule=Schedule(peak=3e-3, warmup_steps=20), weight_decay=0.01),
            num_steps=300,
            log_every=50,
        )
    )
    print(f"accuracy on {len(test)} digits it never saw: {result.evaluation['accuracy']:.3f}")

    model = result.prepared.task.trained(result.state)
    model.eval()
    predicted = model(jnp.asarray(x[test])).argmax(-1)
    print(f"the module itself: {float((predicted == y[test]).mean()):.3f}, of {type(model).__name__}")


if __name__ == "__main__":
    main()
