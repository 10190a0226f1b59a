"""`Experiment`: all settings of a run, as one frozen value."""

import dataclasses
import inspect
import os
from typing import Any

from ..checkpoint import CheckpointConfig
from ..comms import Comms
from ..core import CollectingTask, Task
from ..core.errors import RecipeError, describe_type
from ..core.short_repr import format_value
from ..core.validation import Validated
from ..data import BatchRamp, RowNumbers, TextData
from ..generate.scoring import QuestionConfig
from ..hooks import Hook
from ..kernels import Kernels
from ..mesh import MeshShape, Rules
from ..metrics import Tracker
from ..optim import AdamW, Optimizer, RowOptimizer
from ..stores import redact_address
from ..train import StepConfig, StepPart
from .folder.addresses import PREFIXES, is_released


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Validated):
    """Evaluation on held-out data.

    Attributes:
        every: Steps between two evaluations; 0 evaluates at the end only.
        batches: At most this many held-out batches; 0 for all of them.
    """

    every: int = 100
    batches: int = 0

    def __post_init__(self) -> None:
        for name in ("every", "batches"):
            if getattr(self, name) < 0:
                raise RecipeError(f"evaluate.{name}={getattr(self, name)}; expected 0 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RollbackConfig(Validated):
    """Rollback to an earlier checkpoint, to skip batches that the run can't train on.

    Attributes:
        after: Number of skipped updates in a row after which the run rolls back; fewer than
            `step.max_skipped`. 0: never.
        max_rollbacks: Maximum number of rollbacks; then `step.max_skipped` ends the run.
    """

    after: int = 0
    max_rollbacks: int = 3

    def __post_init__(self) -> None:
        if self.after < 0 or self.max_rollbacks < 1:
            raise RecipeError(
                f"rollback.after={self.after}, rollback.max_rollbacks={self.max_rollbacks}; expected 0 or more, and 1 or more"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyConfig(Validated):
    """Repetition of steps on other devices, to find silent data corruption.

    Attributes:
        every: Steps between two checked steps; the first step after a start is checked as well. 0: never.
        max_rollbacks: Maximum number of rollbacks from corrupted steps; the next corrupted step ends the run.
    """

    every: int = 0
    max_rollbacks: int = 3

    def __post_init__(self) -> None:
        if self.every < 0 or self.max_rollbacks < 1:
            raise RecipeError(
                f"verify.every={self.every}, verify.max_rollbacks={self.max_rollbacks}; expected 0 or more, and 1 or more"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeConfig(Validated):
    """Measurement of devices and network while a run of several processes trains, for the supervisor to
    compare.

    Attributes:
        every: Steps between two probes. -1: every 10 steps, or so rarely that they take at most 1 % of the
            time. 0: never.
    """

    every: int = -1

    def __post_init__(self) -> None:
        if self.every < -1:
            raise RecipeError(
                f"probe.every={self.every}; expected a number of steps, 0 for never, or -1 to have it chosen"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Experiment(Validated):
    """All settings of a run: the task, its data, the optimizer, the mesh, and the folder of its checkpoints
    and logs.

    Attributes:
        name: The run's folder is `runs/name` unless `directory` is set; the task's name by default.
        task: The model with its objective.
        data: `TextData`, `ExampleData`, any `panax.core.Source`, a torch `DataLoader`, or a Python iterable
            of batches. A task that generates its data (`panax.core.CollectingTask`) takes none: its row
            indices are stored here.
        held_out: Evaluation data, if `data` does not hold out any itself: `TextData`, `ExampleData`, a finite
            source or an iterable of batches. It uses the tokenizer, the classes and the counted ids of
            `data`.
        optimizer: Optimizer of all parameters that are not tables.
        embedding_optimizer: Optimizer of the model's tables, which see only the rows that a batch looks up; None
            for `RowWiseAdagrad()` if it has tables.
        num_steps: Steps of the whole run, interruptions included.
        seed: Seed of initialization and of each step's random bits; `data.seed` is that of the data order.
        kernels: Choice of kernels; by default the fastest that applies, which the run reports.
        hooks: Called between steps, in this order; they may log, request an evaluation or a save, or stop the
            run.
        step_parts: Your own parts of the compiled step, such as noise in the gradients
            (`panax.train.StepPart`).
        trackers: Additional trackers, after the console, `metrics.jsonl` and TensorBoard.
        questions: Files of questions that the model is asked while it trains, and at the end.
        rollback: When the run rolls back to an earlier checkpoint because updates can't be applied.
        verify: How often a step is checked on other devices.
        probe: How often devices and network are measured while a supervised run of several processes trains.
        batch_ramp: How the global batch grows over the first steps.
        skip_batches: Numbers of batches to skip, from 1 in the data's order: if none is skipped, batch n is
            that of step n. `rollbacks.jsonl` in a run's folder lists those that its rollbacks have skipped.
        frozen: Prefixes of names of parameters that are not trained.
        init: Start from these weights: `hf:DIR`, a folder in Hugging Face's layout, `hf:ORG/NAME[@REVISION]`, a model of
            a hub that is in the local cache or can be downloaded, `peft:DIR`, an adapter in PEFT's layout with the
            base that it names, or `checkpoint:PLACE`, the folder or address of a checkpoint, or of a run (its best
            checkpoint). Empty: initialize from `seed`.
        directory: Folder of checkpoints and logs. Running the same command again resumes from there.
        log_every: Steps between two reports.
        profile: Write a profile of three steps from this one on; 0 for none.
        overfit_batches: Train on this many first batches alone, again and again, and evaluate on them: a
            model that can't memorize them has a bug. 0 for all the data.
        debug: Run un-jitted on one device: breakpoints, prints and NaN checks work inside the model.
    """

    task: Task
    name: str = ""
    data: Any = dataclasses.field(default_factory=TextData)
    held_out: Any = None
    optimizer: Optimizer = dataclasses.field(default_factory=AdamW)
    embedding_optimizer: RowOptimizer | None = None
    num_steps: int = 1000
    seed: int = 0
    step: StepConfig = dataclasses.field(default_factory=StepConfig)
    mesh: MeshShape = dataclasses.field(default_factory=MeshShape)
    rules: Rules = dataclasses.field(default_factory=Rules)
    comms: Comms = dataclasses.field(default_factory=Comms)
    evaluate: EvaluateConfig = dataclasses.field(default_factory=EvaluateConfig)
    questions: QuestionConfig = dataclasses.field(default_factory=QuestionConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    rollback: RollbackConfig = dataclasses.field(default_factory=RollbackConfig)
    verify: VerifyConfig = dataclasses.field(default_factory=VerifyConfig)
    probe: ProbeConfig = dataclasses.field(default_factory=ProbeConfig)
    batch_ramp: BatchRamp = dataclasses.field(default_factory=BatchRamp)
    skip_batches: tuple[int, ...] = ()
    kernels: Kernels = dataclasses.field(default_factory=Kernels)
    step_parts: tuple[StepPart, ...] = ()
    hooks: tuple[Hook, ...] = ()
    trackers: tuple[Tracker, ...] = ()
    frozen: tuple[str, ...] = ()
    init: str = ""
    directory: str = ""
    log_every: int = 10
    profile: int = 0
    overfit_batches: int = 0
    debug: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", getattr(self.task, "name", type(self.task).__name__.lower()))
        parts = self.name.split("/")
        if not self.name.isprintable() or "\\" in self.name or any(part.strip() in ("", ".", "..") for part in parts):
            raise RecipeError(
                f"name={self.name!r}; expected a folder's name, or names with / between them: the run is kept in runs/NAME. "
                f"Another place is given as directory"
            )
        if isinstance(self.task, CollectingTask):
            self._take_row_numbers(self.task)
        for field in ("data", "held_out"):
            value = getattr(self, field)
            if inspect.isroutine(value) or inspect.isclass(value):
                raise RecipeError(
                    f"{field} is the {'class' if inspect.isclass(value) else 'function'} {value.__name__}; expected its result: "
                    f"write {value.__name__}(...)"
                )
            if isinstance(value, str | os.PathLike):
                raise RecipeError(
                    f"{field}={str(value)!r} is a path; expected data: for texts write "
                    f"TextData(corpus=panax.data.make_corpus({str(value)!r}))"
                )
        if self.num_steps < 1:
            raise RecipeError(f"num_steps={self.num_steps}; expected 1 or more")
        if self.log_every < 1:
            raise RecipeError(f"log_every={self.log_every}; expected 1 or more")
        if min(self.evaluate.every, self.evaluate.batches, self.profile, self.overfit_batches) < 0:
            raise RecipeError(
                f"evaluate.every={self.evaluate.every}, evaluate.batches={self.evaluate.batches}, profile={self.profile}, "
                f"overfit_batches={self.overfit_batches}; expected 0 or more"
            )
        if self.rollback.after >= self.step.max_skipped:
            raise RecipeError(
                f"rollback.after={self.rollback.after} has no effect: step.max_skipped={self.step.max_skipped} skipped updates "
                f"in a row end the run before; expected fewer than that"
            )
        if self.comms.local_steps > 1 and self.verify.every:
            raise RecipeError(
                f"verify.every={self.verify.every} repeats steps of parameters that all devices share; with "
                f"comms.local_steps={self.comms.local_steps} replicas have separate ones: remove one of them"
            )
        if self.comms.delayed and self.rollback.after:
            raise RecipeError(
                f"rollback.after={self.rollback.after} skips the batches of updates that were skipped; with comms.delayed=True "
                f"an update is of the batch before: set rollback.after=0, or remove comms.delayed"
            )
        if self.debug and self.verify.every:
            raise RecipeError(
                f"verify.every={self.verify.every} repeats steps on other devices, and debug runs on one; remove one of them"
            )
        if min(self.skip_batches, default=1) < 1:
            raise RecipeError(
                f"skip_batches={self.skip_batches}; expected numbers from 1 on: batch n is that of step n"
            )
        if self.batch_ramp.parts and self.overfit_batches:
            raise RecipeError("batch_ramp divides batches, and overfit_batches counts them: remove one of them")
        if self.batch_ramp.end >= self.num_steps:
            raise RecipeError(
                f"batch_ramp lasts {self.batch_ramp.end} steps, and the run has {self.num_steps}; expected fewer, so that some "
                f"train on the whole batch"
            )
        if self.init and not self.init.startswith(PREFIXES):
            raise RecipeError(
                f"init={redact_address(self.init)!r}; expected hf:DIR with a folder of Hugging Face weights, hf:ORG/NAME, "
                f"peft:DIR with an adapter, checkpoint:PLACE, or nothing"
            )

        if is_released(self.init) and "://" in self.init:
            raise RecipeError(
                f"init={redact_address(self.init)!r}; expected a folder of this machine: download the weights first"
            )
        if "://" in self.directory:
            raise RecipeError(
                f"directory={redact_address(self.directory)!r}; expected a folder of this machine: logs are written there. "
                f"Checkpoints go to an object store by checkpoint.directory"
            )

    def _take_row_numbers(self, task: CollectingTask) -> None:
        """Set `data` and `held_out` to the indices of the rows that the task generates."""
        if not (isinstance(self.data, RowNumbers) or (isinstance(self.data, TextData) and self.data == TextData())):
            raise RecipeError(
                f"data is {describe_type(self.data)}, and {type(task).__name__} collects its own: remove data"
            )
        if not (self.held_out is None or isinstance(self.held_out, RowNumbers)):
            raise RecipeError(
                f"held_out is {describe_type(self.held_out)}, and {type(task).__name__} is evaluated by episodes: remove it"
            )
        if self.batch_ramp.parts or self.overfit_batches:
            raise RecipeError(f"batch_ramp and overfit_batches are of data, and {type(task).__name__} collects its own")
        object.__setattr__(self, "data", RowNumbers(batch_size=task.rows))
        object.__setattr__(self, "held_out", RowNumbers(batch_size=task.evaluation_rows, num_batches=1))

    def __repr__(self) -> str:
        return format_value(self)

    @property
    def folder(self) -> str:
        """Return the folder of checkpoints and logs; separate for `debug` and `overfit_batches`."""
        kind = f"{'-debug' if self.debug else ''}{'-overfit' if self.overfit_batches else ''}"
        return self.directory or f"runs/{self.name}{kind}"

    def dry_run_copy(self, folder: str) -> "Experiment":
        """Return a trial run of two steps, with an evaluation and a checkpoint after each, in `folder`.

        Its batches are full, which need the most memory. Of each file of questions, two are asked.
        """
        return dataclasses.replace(
            self,
            batch_ramp=BatchRamp(),
            directory=folder,
            num_steps=2,
            log_every=1,
            evaluate=EvaluateConfig(every=1, batches=1),
            questions=dataclasses.replace(self.questions, every=int(bool(self.questions.files)), limit=2),
            checkpoint=CheckpointConfig(every=1),
        )
