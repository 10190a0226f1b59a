"""From a folder of PNGs to a trained classifier: it learns, and continues bitwise after an interruption."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import panax
from panax.core import Evaluation, Loss, Mean, named_leaves
from panax.data.images.images import ImageFolder
from panax.data.loading.example_data import ExampleData
from panax.data.loading.example_source import ExampleSource
from panax.optim import AdamW, Schedule


class Classifier(panax.Task):
    """One linear layer on gray pixels."""

    def init(self, key):
        return {"w": jnp.zeros((64, 10), jnp.float32), "b": jnp.zeros((10,), jnp.float32)}, {}

    def parameter_axes(self, params):
        return {"w": ("pixel", "class"), "b": ("class",)}

    def loss(self, params, state, batch, key, train):
        pixels = batch["image"].astype(jnp.float32).reshape(-1, 64) / 255
        scores = jax.nn.log_softmax(pixels @ params["w"] + params["b"][None])
        mask, weight = batch["loss_mask"], batch["loss_mask"].sum()
        right = (scores.argmax(-1) == batch["label"]).astype(jnp.float32)
        surprise = -jnp.take_along_axis(scores, batch["label"][:, None], axis=1)[:, 0]
        losses = {"surprise": Loss(sum=(surprise * mask).sum(), weight=weight)}
        return Evaluation(losses, state, {"accuracy": Mean(sum=(right * mask).sum(), weight=weight)})


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """300 handwritten digits, 8 by 8 pixels, in folders by class, and one file that is not an image."""
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("digits")
    data = load_digits()
    for number, (pixels, label) in enumerate(zip(data.images[:300], data.target[:300], strict=True)):
        path = folder / str(label) / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray((pixels * 15.9375).astype(np.uint8)).save(path)
    (folder / "3" / "broken.png").write_bytes(b"\x89PNG")
    return folder


def test_a_classifier_of_digits_learns_and_resumes_bitwise(digits, tmp_path):
    data = ExampleData(
        examples=ImageFolder(path=str(digits), size=8, channels=1), batch_size=16, held_out=0.2, max_bad_records=1
    ).open()

    def shifted(example, generator):
        return {**example, "image": np.roll(example["image"], int(generator.integers(-1, 2)), axis=1)}

    def run(name: str, num_steps: int):
        experiment = panax.Experiment(
            name=name,
            task=Classifier(),
            data=ExampleSource(data.train.examples, batch_size=16, seed=1, augment=shifted),
            held_out=data.held_out,
            optimizer=AdamW(schedule=Schedule(peak=0.1, decay="constant")),
            num_steps=num_steps,
            directory=str(tmp_path / name),
        )
        return panax.fit(experiment, say=lambda line: None, devices=jax.devices()[:1])

    uninterrupted = run("whole", 24)
    run("parts", 9)
    resumed = run("parts", 24)
    assert uninterrupted.evaluation["accuracy"] > 0.5  # one in ten by chance
    assert uninterrupted.evaluation == resumed.evaluation
    left, right = named_leaves(uninterrupted.state.params), named_leaves(resumed.state.params)
    assert all((np.asarray(left[name]) == np.asarray(right[name])).all() for name in left)
