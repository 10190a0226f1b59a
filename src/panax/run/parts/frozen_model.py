"""`FrozenModel`: a second model of a run, which is evaluated on the run's devices and never trained."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from ...comms import Comms
from ...core import Axes, DataFacts, Task, TrainState
from ...core.errors import RecipeError
from ...data.loading.pad_rows import round_up
from ...job.heartbeat import heartbeat
from ...mesh import MESH_AXES, MeshShape, Placement
from ...mesh.topology import data_parallel_size
from ...optim import Optax
from ...train import CompiledStep, StepConfig
from ...train.compilation.mesh_requirements import mesh_requirements
from ..folder.initial_state import load_state
from ..folder.model_source import ModelSource, find_model_source
from ..opened_data import LogFn
from ..preparation import PreparedRun, make_program

EvaluationOf = Callable[[Task, int], Task]
"""Returns the task that evaluates a model's task, for a number of rows of a batch."""


class FrozenModel:
    """A model with its evaluation; its weights are placed once, in the compute dtype of the run.

    Mesh axes that an evaluation of rows does not use (stages, and those that the task does not support) split rows and
    weights as `fsdp` does.

    Attributes:
        setting: The setting that names the model, for messages.
        source: The model's task, address and tokenizer.
        step: Its evaluation on the mesh.
        rows: Rows of a batch.
    """

    def __init__(
        self, prepared: PreparedRun, setting: str, address: str, evaluation: EvaluationOf, axes: Mapping[str, Axes]
    ):
        """Prepare the evaluation; no weight is read.

        Args:
            address: See `find_model_source`.
            evaluation: Returns the task with the metrics that `evaluate` returns.
            axes: Logical axes of the leaves of its batches.

        Raises:
            RecipeError: The model's tokens are not those of the run, or its task can't be evaluated so.
            CheckpointError: There is no such model.
            LayoutError: A weight is not divisible over the devices.
        """
        self.setting, self.source = setting, find_model_source(address)
        _check_tokens(prepared, setting, address, self.source)
        rollouts = prepared.data.rollouts
        assert rollouts is not None and prepared.placement is not None
        settings = rollouts.settings
        sizes = fold_axes(prepared.placement.sizes, self.source.task.mesh_axes)
        self.rows = round_up(min(settings.num_answers, settings.rows), data_parallel_size(sizes))
        facts = DataFacts(rollouts.tokenizer.vocab_size, settings.length)
        task = evaluation(self.source.task.adapt_to_data(facts), self.rows)
        wide, narrow = _with_dtypes(task, prepared.task)
        experiment = dataclasses.replace(
            prepared.experiment,
            init=self.source.init,
            optimizer=Optax(transformation=optax.identity()),
            embedding_optimizer=None,
            step=StepConfig(),
            comms=Comms(),
            frozen=(),
            step_parts=(),
        )
        devices = list(prepared.placement.mesh.devices.flat)

        def place(task: Task) -> CompiledStep:
            program = make_program(experiment, task)
            shape = MeshShape(**sizes)  # pyright: ignore[reportArgumentType]
            placement = Placement.create(shape, experiment.rules, devices, mesh_requirements(program))
            return CompiledStep(program, placement, axes)

        self.step = place(narrow)
        self._reading = PreparedRun(experiment, wide, prepared.data, self.step if narrow == wide else place(wide))
        self._state: TrainState | None = None

    def load(self, say: LogFn) -> None:
        """Read the weights to the devices; every process of a job calls it.

        Raises:
            CheckpointError: They can't be read.
        """
        say(f"{self.setting}: reading the weights of {self.source.init}")
        state = load_state(self._reading, lambda line: None)
        if self._reading.step is self.step:
            self._state = state
            return
        shapes, places = self.step.program.abstract.params, self.step.shardings.params

        def cast(params: Any) -> Any:
            return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, shapes)

        params = jax.jit(cast, out_shardings=places, donate_argnums=0)(state.params)
        self._state = self.step.init(self._reading.experiment.seed, (params, state.model_state))

    def evaluate(self, batch: Mapping[str, np.ndarray], *metrics: str) -> list[np.ndarray]:
        """Return metrics of each row, for any number of rows; every process of a job calls it.

        Args:
            batch: Leaves of shape (rows, ...).
        """
        assert self._state is not None
        count, parts = len(next(iter(batch.values()))), []
        held = self.step.held_rows(self.rows)
        for start in range(0, count, self.rows):
            heartbeat().report_alive()
            part = {name: _fill(leaf[start : start + self.rows], self.rows) for name, leaf in batch.items()}
            plain = part if held is None else {name: leaf[held.rows] for name, leaf in part.items()}
            values = self.step.evaluate(self._state, self.step.put(plain, held))["metrics"]
            parts.append([np.asarray(values[metric].value) for metric in metrics])
        return [np.concatenate(each)[:count] for each in zip(*parts, strict=True)]


def fold_axes(sizes: Mapping[str, int], supported: frozenset[str]) -> dict[str, int]:
    """Return a mesh of the same devices for evaluating rows: stages and axes that are not supported are a part of `fsdp`.

    >>> sizes = {"replica": 1, "stage": 2, "fsdp": 2, "expert": 1, "context": 2, "tensor": 1}
    >>> fold_axes(sizes, frozenset({"replica", "fsdp", "context"}))["fsdp"]
    4
    """
    folded = [axis for axis in MESH_AXES if axis == "stage" or axis not in supported]
    count = int(np.prod([sizes[axis] for axis in folded]))
    return {**sizes, **dict.fromkeys(folded, 1), "fsdp": sizes["fsdp"] * count}


def _fill(leaf: np.ndarray, rows: int) -> np.ndarray:
    """Return a leaf with rows of zeros at its end, up to a number of rows."""
    return np.concatenate([leaf, np.zeros((rows - len(leaf), *leaf.shape[1:]), leaf.dtype)])


def _check_tokens(prepared: PreparedRun, setting: str, address: str, source: ModelSource) -> None:
    """Check that a model's tokens are those of the run.

    Raises:
        RecipeError: They aren't.
    """
    tokenizer, size, expected = prepared.data.tokenizer, source.task.vocabulary_size, prepared.task.vocabulary_size
    if size != expected:
        raise RecipeError(
            f"{setting}: {address} has a vocabulary of {size} tokens, and task.model one of {expected}; it reads the tokens of "
            f"the answers, so choose a model with the same tokenizer, and set task.model.vocab_size to {size}"
        )
    if tokenizer is None or source.tokenizer is None:
        raise RecipeError(f"{setting}: {address} was stored without a tokenizer, so its tokens are not known")
    differing = tokenizer.find_difference(source.tokenizer)
    if differing is not None:
        raise RecipeError(
            f"{setting}: the tokenizer of {address} is not data.tokenizer: {differing}; it reads the tokens of the answers, so "
            f"choose a model with the same tokenizer"
        )


def _with_dtypes(task: Task, like: Task) -> tuple[Task, Task]:
    """Return a task with the precision of another one, as its weights are read, and as they are kept.

    Weights of a computation in bfloat16 are kept in bfloat16. One in float16, which not all tasks have, is in float32.

    Raises:
        RecipeError: As `Task.with_dtypes`.
    """
    dtype = "bfloat16" if like.compute_dtype == "bfloat16" else "float32"
    precision = like.matmul_precision if like.compute_dtype == "float32" else None
    wide = task.with_dtypes(dtype, None, precision)
    return wide, wide if dtype == "float32" else wide.with_dtypes(dtype, dtype, precision)
