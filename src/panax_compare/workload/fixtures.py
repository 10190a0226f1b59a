"""Creation of a `ComparedWork`: weights drawn by Panax's task from a seed, batches drawn by NumPy, both
before any clock starts.

It runs in a separate process, which ends before the first column begins.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from panax.adapters.huggingface import save
from panax.core import Task
from panax.core.errors import RecipeError, describe_type
from panax.data import BytePairTokenizer, PythonLibrary, TextData
from panax.models import DecoderConfig, DecoderTask, VitConfig, VitTask, count_parameters
from panax.models.flops import training_flops_per_image, training_flops_per_token
from panax.run.experiment import Experiment
from panax.run.opened_data import OpenedData
from panax.run.preparation import open_data
from panax.system import json_reader

from ..measure.stream import TRAIN, Stream, make_stream
from .click_data import make_clicks
from .compared_work import Batch, ComparedWork, Family, OptimizerNumbers, save_batches, save_nudged
from .precision import Precision
from .settings import Settings
from .shapes import decoder_shape, vit_shape

MIN_VOCABULARY = 1024
"""Minimum vocabulary of a decoder that is trained on text: a byte-pair tokenizer needs more than the bytes
themselves."""

NUM_BATCHES = 4
"""Number of distinct batches; a column cycles through them."""


def make_work(
    settings: Settings, folder: Path, find_recipe: Callable[[str], Any], stream_steps: int = 0
) -> ComparedWork:
    """Write a work's files.

    Args:
        find_recipe: Maps a recipe's name to a function that returns its experiment.
        stream_steps: Number of batches to take from the recipe's data (for a named decoder, from the
            quickstart's text), in addition to its held-out data; 0 for random batches.

    Raises:
        RecipeError: The recipe's model has no layout that other frameworks read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if settings.kind == "recipe":
        work = _of_recipe(settings, folder, find_recipe, stream_steps)
    elif settings.kind == "dlrm":
        work = make_clicks(settings, folder, optimizer_numbers(settings))
    elif settings.kind == "vit":
        work = _of_vit(settings, folder, vit_shape(settings))
    else:
        config, length = decoder_shape(settings)
        if stream_steps and config.vocab_size <= MIN_VOCABULARY:
            config = dataclasses.replace(config, vocab_size=MIN_VOCABULARY)
        work = _of_decoder(settings, folder, config, length)
        if stream_steps:
            _stream(settings, folder, work, open_data(_on_text(config, length), lambda line: None), stream_steps)
    work.save()
    save_nudged(work)
    return work


def _of_recipe(settings: Settings, folder: Path, find_recipe: Callable[[str], Any], stream_steps: int) -> ComparedWork:
    name = settings.work.partition(":")[2]
    experiment = find_recipe(name)()
    if stream_steps == 0:
        return _of_task(settings, folder, experiment, experiment.task)
    opened = open_data(experiment, lambda line: None)
    work = _of_task(settings, folder, experiment, experiment.task.adapt_to_data(opened.facts))
    _stream(settings, folder, work, opened, stream_steps)
    return work


def _on_text(config: DecoderConfig, length: int) -> Experiment:
    """Return an experiment on the quickstart's text, which every machine has, for a decoder without a data
    set."""
    tokenizer = BytePairTokenizer(vocab_size=config.vocab_size)
    data = TextData(corpus=PythonLibrary(definitions=True), tokenizer=tokenizer, sequence_length=length, batch_size=16)
    return Experiment(name="compare", task=DecoderTask(model=config), data=data)


def _stream(settings: Settings, folder: Path, work: ComparedWork, opened: OpenedData, steps: int) -> None:
    """Replace the random batches by real ones."""
    length = work.units_per_step // settings.batch_size
    make_stream(settings.work, opened, folder, batch_size=settings.batch_size, length=length, steps=steps)
    stream = Stream(folder, TRAIN)
    save_batches(folder, [stream[n] for n in range(NUM_BATCHES)])


def _of_task(settings: Settings, folder: Path, experiment: Any, task: Task) -> ComparedWork:
    name = settings.work.partition(":")[2]
    if isinstance(task, VitTask):
        config = dataclasses.replace(task.model, dropout=0.0, num_classes=task.model.num_classes or 10)
        return _of_vit(settings, folder, config, name)
    if not isinstance(task, DecoderTask):
        raise RecipeError(
            f"recipe {name!r} trains {describe_type(task)}, which has no Hugging Face layout of its weights for the "
            "other columns; "
            "recipes of a DecoderTask or a VitTask can be compared"
        )
    config = dataclasses.replace(task.model, dropout=0.0, vocab_size=task.model.vocab_size or 8192)
    if config.feed_forward is not None:
        config = dataclasses.replace(
            config, feed_forward=dataclasses.replace(config.feed_forward, balance=0.0, z_loss=0.0, jitter=0.0)
        )
    length = settings.sequence_length or getattr(experiment.data, "sequence_length", None) or 256
    return _of_decoder(settings, folder, config, min(length, config.max_length), name)


def _of_decoder(settings: Settings, folder: Path, config: DecoderConfig, length: int, recipe: str = "") -> ComparedWork:
    parameters = count_parameters(config)
    mixture = config.feed_forward
    experts = f", {mixture.experts} experts of which {mixture.active} active" if mixture else ""
    family = _write_weights(settings, folder, DecoderTask(model=config))
    random = np.random.default_rng(settings.seed)
    shape = (settings.batch_size, length + 1)
    rows = [random.integers(0, config.vocab_size, shape, np.int32) for _ in range(NUM_BATCHES)]
    save_batches(folder, [{"tokens": row[:, :-1], "targets": row[:, 1:]} for row in rows])
    tokens = settings.batch_size * length
    return ComparedWork(
        title=(
            f"{family.capitalize()} shape: {parameters / 1e6:,.1f} M parameters, {config.num_layers} layers of {config.embed}"
            f"{experts}, {settings.batch_size} rows of {length} tokens, {config.vocab_size:,} in the vocabulary"
        ),
        folder=str(folder),
        family=family,
        unit="tokens",
        units_per_step=tokens,
        flops_per_step=training_flops_per_token(config, length) * tokens,
        parameters=parameters,
        optimizer=optimizer_numbers(settings),
        precision=Precision(settings.precision),
        attention=settings.attention,
        seed=settings.seed,
        recipe=recipe,
    )


def _of_vit(settings: Settings, folder: Path, config: VitConfig, recipe: str = "") -> ComparedWork:
    task = VitTask(model=config)
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    family = _write_weights(settings, folder, task)
    save_batches(folder, random_images(settings, config))
    return ComparedWork(
        title=(
            f"ViT of {config.num_layers} layers of {config.embed}, patches of {config.patch}: {parameters / 1e6:,.1f} "
            f"M parameters, {settings.batch_size} images of {config.image_size} x {config.image_size}, "
            f"{config.num_classes:,} classes"
        ),
        folder=str(folder),
        family=family,
        unit="images",
        units_per_step=settings.batch_size,
        flops_per_step=training_flops_per_image(config) * settings.batch_size,
        parameters=parameters,
        optimizer=optimizer_numbers(settings),
        precision=Precision(settings.precision),
        attention=settings.attention,
        seed=settings.seed,
        recipe=recipe,
    )


def _write_weights(settings: Settings, folder: Path, task: Task) -> Family:
    params, state = jax.jit(task.init)(jax.random.key(settings.seed))
    save(folder, params, state, max_shard_bytes=2**62)
    family = json_reader.read(folder / "config.json")["model_type"]
    if family not in ("llama", "mixtral", "vit"):
        raise RecipeError(
            f"the model is of Hugging Face's family {family!r}; columns are written for llama, mixtral and vit: change its norm, "
            "positions or feed-forward to those of one of them"
        )
    return family


def optimizer_numbers(settings: Settings) -> OptimizerNumbers:
    """Return the optimizer's settings; by default with the optimizer's usual learning rate."""
    usual = {"adamw": 3e-4, "sgd": 1e-3, "adagrad": 1e-3}[settings.optimizer]
    decay = settings.weight_decay if settings.optimizer == "adamw" else 0.0
    return OptimizerNumbers(name=settings.optimizer, learning_rate=settings.learning_rate or usual, weight_decay=decay)


def random_images(settings: Settings, config: VitConfig) -> list[Batch]:
    """Generate batches of noise with random labels, as in the published comparison."""
    random = np.random.default_rng(settings.seed)
    shape = (settings.batch_size, config.image_size, config.image_size, config.channels)
    return [
        {
            "image": random.standard_normal(shape, np.float32),
            "label": random.integers(0, config.num_classes, settings.batch_size, np.int32),
        }
        for _ in range(NUM_BATCHES)
    ]
