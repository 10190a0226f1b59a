"""`add_reference`: log-probabilities of a reference model, computed once and joined to an experiment's pairs."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import optax

from ...comms import Comms
from ...core import Task
from ...core.errors import RecipeError, describe_type
from ...core.params.checksums import fingerprint_weights
from ...core.task import LOG_PROBABILITIES
from ...data import LabeledAnswers, PackedSource, Preferences, ReferenceLogProbabilities, TextData
from ...data.files.cache import cache_directory, read_or_build
from ...data.files.files import fingerprint
from ...data.preferences.pair_rows import REFERENCE
from ...data.preferences.reference import load_reference
from ...data.text.packing import Documents
from ...data.text.tokens import TokenStore
from ...job.join import check_single_process
from ...optim import Optax
from ...train import StepConfig
from ..entry import check_experiment
from ..experiment import Experiment
from ..folder.initial_state import init_state
from ..opened_data import LogFn
from ..preparation import PreparedRun, prepare

_VERSION = 2
_FILE = "reference.safetensors"


def needs_reference(experiment: Experiment) -> bool:
    """Return True if an experiment trains on pairs by a loss with a reference model, and has no log-probabilities of it."""
    corpus = getattr(experiment.data, "corpus", None)
    is_missing = isinstance(corpus, Preferences | LabeledAnswers) and corpus.reference is None
    return is_missing and REFERENCE in experiment.task.required_leaves


def add_reference(experiment: Experiment, *, say: LogFn = lambda line: None) -> Experiment:
    """Return the experiment with log-probabilities of a reference model in its batches, for `models.Preference` and
    `models.Kto`.

    The reference model has the weights with which the experiment begins: those of `init`, or initialized ones. Initialized
    adapters change nothing at first, so that it is the model without them; those that `init` loads are a part of it. All
    pairs are evaluated once, on the experiment's mesh, without dropout, and the result is cached by the fingerprints of the
    tokens and the weights: other weights or data are evaluated again.

    Raises:
        RecipeError: The experiment's task has no log-probabilities, or it does not train on `TextData` of `Preferences` or
            `LabeledAnswers`.
        DataError: The pairs can't be read.
    """
    check_experiment(experiment, "add_reference")
    check_single_process("add_reference")
    data, task, corpus = experiment.data, experiment.task, getattr(experiment.data, "corpus", None)
    if not isinstance(data, TextData) or not isinstance(corpus, Preferences | LabeledAnswers):
        actual = describe_type(data) if corpus is None else f"a corpus of type {type(corpus).__name__}"
        raise RecipeError(
            f"add_reference takes data=TextData(corpus=Preferences(...)), or LabeledAnswers; the experiment has {actual}"
        )
    plain = dataclasses.replace(data, corpus=dataclasses.replace(corpus, reference=None))
    # The run itself reports its data and its weights.
    prepared = _prepare(dataclasses.replace(experiment, data=plain), task, plain, lambda line: None)
    state = init_state(prepared, lambda line: None)
    (part,) = plain.open().parts.values()
    store, weights = part.training.store, fingerprint_weights(state.params)
    settings = (data.sequence_length, data.packing, corpus.too_long, prepared.task.compute_dtype)
    root = cache_directory(data.cache_dir)
    name = f"reference-v{_VERSION}-{fingerprint(store.content, weights, *settings)}"

    def build(directory: Path) -> None:
        values = _evaluate(prepared, state, plain, store)
        ReferenceLogProbabilities(values, store.content, weights).save(directory / _FILE)
        say(f"reference log-probabilities of {len(store.offsets) // 2:,} pairs computed; cached in {root / name}")

    read_or_build(root, name, build=build, read=lambda directory: load_reference(directory / _FILE, store))
    with_reference = dataclasses.replace(corpus, reference=str(root / name / _FILE))
    return dataclasses.replace(experiment, data=dataclasses.replace(data, corpus=with_reference))


def _prepare(experiment: Experiment, task: Task, data: TextData, say: LogFn) -> PreparedRun:
    """Prepare a run that only evaluates, without optimizer state."""
    return prepare(
        dataclasses.replace(
            experiment,
            task=task.log_probability_task(data.batch_size, data.sequence_length),
            optimizer=Optax(transformation=optax.identity()),
            step=StepConfig(),
            comms=Comms(),
            held_out=None,
        ),
        say,
    )


def _evaluate(prepared: PreparedRun, state: Any, data: TextData, store: TokenStore) -> np.ndarray:
    """Return the log-probability of each token of a file; NaN for those that are no target with loss."""
    starts, lengths = store.offsets[:-1], np.diff(store.offsets)
    corpus = data.corpus
    assert isinstance(corpus, Preferences | LabeledAnswers)
    documents = Documents(store=store, starts=starts, lengths=lengths, fingerprint=f"{store.content}-all")
    rows = corpus.make_rows(documents, data, data.seed)
    values = np.full(len(store.tokens), np.nan, np.float32)
    for number, (batch, _) in enumerate(PackedSource(rows, batch_size=data.batch_size, epochs=1).batches()):
        measures = prepared.step.evaluate(state, prepared.step.put(batch))
        batch_values = np.asarray(measures["metrics"][LOG_PROBABILITIES].value)
        first = number * data.batch_size
        indices = np.arange(first, min(first + data.batch_size, rows.num_rows))
        width = batch["tokens"].shape[1]
        targets = rows.target_indices(0, indices, width)
        counted = batch["loss_mask"][: len(indices)] > 0
        values[targets[counted]] = batch_values[: len(indices), :width][counted]
    return values
