"""Checks, before the first step, that settings fit each other and the held-out data."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import CollectingTask, Source
from ..core.errors import DataError, LayoutError, TrainingError
from ..data import RowSource
from ..data.loading.pad_rows import round_up
from ..hooks import EarlyStopping
from .experiment import Experiment
from .preparation import PreparedRun
from .reporting.generation import TextModel, check_generates

SMALL_RATE = 1e-4
"""Learning rate at which an update of Adam's size is below half a bit of a bfloat16 weight of usual size
(0.03 and more)."""


def check_held_out(prepared: PreparedRun) -> None:
    """Check that the devices and the task can take the first held-out batch: the evaluation may be hours
    away.

    Raises:
        LayoutError: Its rows can't be divided over the devices.
        DataError: Its leaves are not those of the training data, or hold values that the task does not allow.
    """
    source = prepared.data.held_out
    if source is None or isinstance(prepared.task, CollectingTask) or prepared.data.rollouts is not None:
        return
    batch = _with_filling(_first_batch(source), prepared.step.row_multiple)
    try:
        prepared.step.put(batch)
    except LayoutError as error:
        raise LayoutError(f"held-out data (evaluation): {error}") from error
    except (DataError, TrainingError) as error:
        raise DataError(f"held-out data (evaluation): {error}") from error


def check_questions(prepared: PreparedRun) -> None:
    """Check that the files of questions can be read, and that the task can be asked: the first time may be hours away.

    Raises:
        DataError: A file can't be read, or a record is broken.
        RecipeError: The task does not generate, or there is no tokenizer.
    """
    if not prepared.experiment.questions.files:
        return
    check_generates(TextModel(prepared.task, None, None, prepared.data.tokenizer))
    prepared.experiment.questions.read()


def interval_notes(experiment: Experiment) -> Iterator[str]:
    """Yield a line for each pair of intervals that don't fit, so that one has less effect than expected."""
    saves = experiment.checkpoint
    every, keep_every, copies = saves.every, saves.keep_every, saves.memory.every
    if keep_every and not every:
        yield f"checkpoint.keep_every={keep_every} keeps nothing on the way: checkpoint.every=0 saves at the end alone"
    elif keep_every and keep_every % every and every % keep_every:
        yield (
            f"checkpoint.keep_every={keep_every} is not a multiple of checkpoint.every={every}: of the regular checkpoints, only "
            f"those of each {math.lcm(keep_every, every)} steps are kept for good; {keep_every // every * every or every} or "
            f"{(keep_every // every + 1) * every} would keep one at each"
        )
    if copies and every and copies >= every:
        yield (
            f"checkpoint.memory.every={copies} is not below checkpoint.every={every}: a copy in memory is never newer than the "
            f"checkpoint in the store"
        )
    for hook in experiment.hooks:
        if isinstance(hook, EarlyStopping):
            name, interval = {
                "train": ("log_every", experiment.log_every),
                "questions": ("questions.every", experiment.questions.every),
            }.get(hook.metric.partition("/")[0], ("evaluate.every", experiment.evaluate.every))
            compared = experiment.num_steps // interval if interval else 0
            if interval and compared <= hook.patience:
                yield (
                    f"EarlyStopping(patience={hook.patience}) can't end this run: {name}={interval} compares "
                    f"{compared} times in num_steps={experiment.num_steps}, and the first comparison has nothing to compare with"
                )


def precision_notes(prepared: PreparedRun) -> Iterator[str]:
    """Yield a line if updates are too small for the precision of the parameters, and so are lost."""
    optimizer = prepared.experiment.optimizer
    rounds_to_nearest = getattr(optimizer, "rounding", None) == "nearest"
    peak = getattr(optimizer.schedule, "peak", None)
    narrow = any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(prepared.step.program.abstract.params))
    if narrow and rounds_to_nearest and isinstance(peak, float) and peak <= SMALL_RATE:
        yield (
            f"parameters are in bfloat16, and at optimizer.schedule.peak={peak:.3g} most updates are smaller than half of its "
            f'last bit: they are lost. Set optimizer.rounding="stochastic", or keep the parameters in float32'
        )


def _first_batch(source: Source) -> Mapping[str, np.ndarray]:
    """Return the first batch of a source, without consuming it; for single rows, the first one, repeated."""
    first = getattr(source, "first_batch", None)
    if first is not None:
        return first()
    if isinstance(source, RowSource):
        batches: Any = source.batches_of(np.zeros(1, np.int64), None)
    else:
        batches = iter(source.batches())
    with contextlib.closing(batches) if hasattr(batches, "close") else contextlib.nullcontext():
        drawn = next(batches, None)
    if drawn is None:
        raise DataError("the held-out data gives no batch; provide more, or remove held_out")
    if not isinstance(source, RowSource):
        return drawn.batch
    rows = source.batch_size
    return {name: np.repeat(np.asarray(leaf)[:1], rows, axis=0) for name, leaf in drawn.batch.items()}


def _with_filling(batch: Mapping[str, np.ndarray], multiple: int) -> dict[str, np.ndarray]:
    rows = len(next(iter(batch.values())))
    more = round_up(rows, multiple) - rows
    return {name: np.pad(leaf, [(0, more), *((0, 0),) * (np.ndim(leaf) - 1)]) for name, leaf in batch.items()}
