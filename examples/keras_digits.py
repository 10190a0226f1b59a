"""Handwritten digits with Keras: a model as one writes it, compiled as one compiles it, trained on whatever devices there are.

    pip install 'panax-jax[keras]' scikit-learn
    python examples/keras_digits.py

Only `model.fit` is replaced. The trained model is the same Keras model, and is saved as a `.keras` file.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
from sklearn.datasets import load_digits

import panax
from panax.data import Arrays, ExampleSource
from panax.optim import AdamW, Schedule


def net() -> keras.Model:
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.Conv2D(64, 3, strides=2, padding="same"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10, activation="softmax"),
        ],
        name="digits",
    )
    model.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main() -> None:
    digits = load_digits()
    x, y = digits.images[..., None].astype(np.float32) / 16, digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(x))
    test, train = order[:397], order[397:]

    def source(rows, **settings):
        return ExampleSource(Arrays({"x": x[rows], "y": y[rows]}), batch_size=64, **settings)

    keras.utils.set_random_seed(0)
    model = net()
    result = panax.fit(
        panax.Experiment(
            name="keras-digits",
            task=panax.adapters.keras.task(model, example={"x": x[:64], "y": y[:64]}),
            data=source(train, seed=0),
            held_out=source(test, epochs=1),
            optimizer=AdamW(schedule=Schedule(peak=3e-3, warmup_steps=20), weight_decay=0.01),
            num_steps=300,
            log_every=50,
        )
    )
    print(f"accuracy on {len(test)} digits it never saw: {result.evaluation['accuracy']:.3f}")

    result.prepared.task.trained(result.state)
    model.save("digits.keras")
    _, accuracy = keras.models.load_model("digits.keras").evaluate(x[test], y[test], verbose=0)
    print(f"the saved model itself: {accuracy:.3f}")


if __name__ == "__main__":
    main()
