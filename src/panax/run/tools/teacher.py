"""`add_teacher`: a teacher's most likely tokens, computed once and joined to an experiment's batches."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...comms import Comms
from ...core import Task
from ...core.errors import RecipeError, describe_type
from ...core.task import TOP_LOG_PROBABILITIES, TOP_TOKENS
from ...data import PackedSource, TextData
from ...data.files.cache import cache_directory, read_or_build
from ...data.teacher.stored_teacher import StoredTeacher, TeacherFacts, create_teacher, load_teacher
from ...data.teacher.teacher_rows import DocumentRows
from ...data.text.packing import Documents
from ...data.text.tokenizer import Tokenizer
from ...data.text.tokens import TokenStore
from ...job.join import check_single_process
from ...optim import Optax
from ...train import StepConfig
from ..entry import check_experiment
from ..experiment import Experiment
from ..folder.addresses import CHECKPOINT_PREFIX, RELEASED_PREFIX
from ..folder.initial_state import init_state
from ..folder.model_source import find_model_source
from ..opened_data import LogFn
from ..preparation import PreparedRun, prepare
from .reference import fingerprint_weights

_VERSION = 1


class _Teacher(NamedTuple):
    """A teacher before its weights are read.

    Attributes:
        init: Its weights, as `Experiment.init`; empty if `params` are given.
        params: Its parameters; None if they are read.
        tokenizer: None if it is not known.
    """

    task: Task
    init: str
    params: Any
    tokenizer: Tokenizer | None


def add_teacher(
    experiment: Experiment,
    *,
    teacher: str | tuple[Task, Any],
    top_k: int = 64,
    say: LogFn = lambda line: None,
) -> Experiment:
    """Return the experiment with a teacher's most likely tokens in its batches, for `models.Distill`.

    All targets with loss are evaluated once, on the experiment's mesh, without dropout, at the objective's temperature. The
    result is cached by the fingerprints of the tokens and the weights: 8 bytes for each of the k tokens of each target. The
    teacher reads each document from its beginning, alone; one that is longer than a row continues in another row, without
    its earlier part. With `data.packing=False` the student reads the same; packed rows may begin within a document.

    Args:
        teacher: `hf:DIR` or `hf:ORG/NAME[@REVISION]`, a released model; `checkpoint:PLACE`, a checkpoint or a run's folder
            (its best checkpoint); or a task with its parameters.
        top_k: Number of tokens of each target; the vocabulary for its whole distribution.

    Raises:
        RecipeError: The experiment's task has no teacher, or does not train on `TextData` of one corpus of documents; or the
            teacher has another vocabulary.
        DataError: The documents can't be read.
        CheckpointError: The teacher can't be read.
    """
    check_experiment(experiment, "add_teacher")
    check_single_process("add_teacher")
    data, temperature = experiment.data, experiment.task.teacher_temperature
    if temperature is None:
        raise RecipeError("add_teacher: the experiment's task reads no teacher; set task.objective=Distill()")
    if not isinstance(data, TextData):
        raise RecipeError(f"add_teacher takes data=TextData(...); the experiment has {describe_type(data)}")
    if experiment.held_out is not None:
        raise RecipeError(
            "add_teacher: the experiment's held_out has no teacher; hold out a part of data with data.held_out"
        )
    opened = data.open()
    if len(opened.parts) > 1 or opened.has_groups:
        raise RecipeError(
            f"add_teacher takes one corpus of documents; data.corpus is a {type(data.corpus).__name__}: train on one corpus"
        )
    described = _describe(teacher)
    vocab_size = _check_vocabulary(experiment, described, opened.vocab_size, opened.tokenizer, data)
    if not 1 <= top_k <= vocab_size:
        raise RecipeError(f"top_k={top_k}; expected 1 to the vocabulary's {vocab_size}")
    prepared = _prepare(experiment, described, data, top_k, temperature, say)
    state = _init(prepared, described, say)
    (part,) = opened.parts.values()
    store, weights = part.training.store, fingerprint_weights(state.params)
    layout = f"{data.sequence_length}-{data.packing}-{prepared.task.compute_dtype}"
    facts = TeacherFacts(store.content, weights, top_k, temperature, layout)
    root = cache_directory(data.cache_dir)
    name = f"teacher-v{_VERSION}-{facts.fingerprint}"

    def build(directory: Path) -> None:
        stored = create_teacher(directory, facts, _count_targets(store))
        _evaluate(prepared, state, data, store, stored)
        say(
            f"a teacher's {top_k} most likely tokens of {len(stored.tokens):,} targets computed; cached in {root / name}"
        )

    read_or_build(root, name, build=build, read=lambda directory: load_teacher(directory, store))
    return dataclasses.replace(experiment, data=dataclasses.replace(data, teacher=str(root / name)))


def _describe(teacher: str | tuple[Task, Any]) -> _Teacher:
    if not isinstance(teacher, str):
        task, params = teacher
        return _Teacher(task, "", params, None)
    if not teacher.startswith((RELEASED_PREFIX, CHECKPOINT_PREFIX)):
        raise RecipeError(f"teacher={teacher!r}; expected hf:DIR, checkpoint:DIR, or a task with its parameters")
    source = find_model_source(teacher)
    return _Teacher(source.task, source.init, None, source.tokenizer)


def _check_vocabulary(
    experiment: Experiment, teacher: _Teacher, tokens: int, tokenizer: Tokenizer | None, data: TextData
) -> int:
    """Return the size of the vocabulary that teacher and student have in common."""
    student = experiment.task.vocabulary_size or tokens
    size = teacher.task.vocabulary_size
    if size != student:
        raise RecipeError(
            f"the teacher has a vocabulary of {size} tokens, and the experiment's model one of {student}; "
            f"distillation compares probabilities of the same tokens: choose a teacher with the same tokenizer, and set "
            f"task.model.vocab_size to the teacher's"
        )
    if teacher.tokenizer is not None and tokenizer is not None:
        differing = tokenizer.find_difference(teacher.tokenizer)
        if differing is not None:
            raise RecipeError(
                f"the teacher's tokenizer is not data.tokenizer: {differing}; distillation compares probabilities of the same "
                f"tokens: tokenize the data with the teacher's tokenizer, or choose another teacher"
            )
    return student


def _prepare(
    experiment: Experiment, teacher: _Teacher, data: TextData, top_k: int, temperature: float, say: LogFn
) -> PreparedRun:
    """Prepare a run that only evaluates, without optimizer state."""
    task = teacher.task.top_log_probability_task(
        data.batch_size, data.sequence_length, top_k=top_k, temperature=temperature
    )
    return prepare(
        dataclasses.replace(
            experiment,
            task=task,
            init=teacher.init,
            data=dataclasses.replace(data, teacher=None),
            optimizer=Optax(transformation=optax.identity()),
            step=StepConfig(),
            comms=Comms(),
            held_out=None,
        ),
        say,
    )


def _init(prepared: PreparedRun, teacher: _Teacher, say: LogFn) -> Any:
    state = init_state(prepared, say)
    if teacher.params is None:
        return state
    expected, actual = (jax.tree.structure(tree) for tree in (state.params, teacher.params))
    if expected != actual:
        raise RecipeError(
            f"teacher: these are no parameters of its {type(teacher.task).__name__}; give those of task.init"
        )
    params = jax.tree.map(
        lambda leaf, like: jax.device_put(jnp.asarray(leaf, like.dtype), like.sharding), teacher.params, state.params
    )
    return dataclasses.replace(state, params=params)


def _count_targets(store: TokenStore) -> np.ndarray:
    """Return True for the tokens that follow another one of their document, and carry loss."""
    counted = np.ones(len(store.tokens), np.bool_) if store.loss_mask is None else np.asarray(store.loss_mask) != 0
    counted[store.offsets[:-1]] = False
    return counted


def _evaluate(prepared: PreparedRun, state: Any, data: TextData, store: TokenStore, stored: StoredTeacher) -> None:
    """Fill the stored arrays, batch by batch."""
    documents = Documents(
        store=store, starts=store.offsets[:-1], lengths=np.diff(store.offsets), fingerprint=f"{store.content}-all"
    )
    rows = DocumentRows(documents, sequence_length=data.sequence_length, whole_documents=data.packing)
    for number, (batch, _) in enumerate(PackedSource(rows, batch_size=data.batch_size, epochs=1).batches()):
        measures = prepared.step.evaluate(state, prepared.step.put(batch))["metrics"]
        first = number * data.batch_size
        indices = np.arange(first, min(first + data.batch_size, rows.num_rows))
        targets = rows.target_indices(0, indices, data.sequence_length)
        counted = batch["loss_mask"][: len(indices)] > 0
        slots = stored.slots[targets[counted]]
        for array, name in ((stored.tokens, TOP_TOKENS), (stored.log_probabilities, TOP_LOG_PROBABILITIES)):
            array[slots] = np.minimum(np.asarray(measures[name].value)[: len(indices)][counted], _limit(array))


def _limit(array: np.ndarray) -> Any:
    """Return the largest value: rounding may give a log-probability just above 0."""
    return np.float32(0) if array.dtype == np.float32 else np.iinfo(array.dtype).max
