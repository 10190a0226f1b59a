"""The batches of a run that learns from its own answers: the data yields prompts, and the model answers them."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...checkpoint import raise_on_all_processes
from ...core import Position, TrainState
from ...core.batch_checks import ADVANTAGE_LEAF, MASK_LEAF
from ...core.errors import RecipeError
from ...data import PrefetchIterator
from ...data.teacher.teacher_rows import TEACHER_LEAVES
from ...generate import GenerationEngine
from ...generate.batching import Batching
from ...generate.engine import CHUNK
from ...job.agreement import is_process_zero
from ...job.heartbeat import heartbeat
from ...rollouts.collector import Collector, RolloutBatch
from ...rollouts.gae import add_value_advantages
from ...rollouts.journal import Journal
from ...rollouts.packing import pack_answers
from ...rollouts.prompts import PROMPT
from ...rollouts.rewards.pool import RewardPool
from ...rollouts.rows import make_rows, rollout_axes, split_updates
from ..feed import PREFETCH_BATCHES
from ..opened_data import LogFn
from ..preparation import PreparedRun
from ..recovery.interrupt import SignalHandler
from ..reporting.generation import TextModel, check_generates, create_engine
from ..reporting.report import RunReporter
from .action_scorer import ActionScorer
from .ahead_draws import AheadDraws, PromptBatch
from .answer_judges import AnswerJudges
from .row_shapes import choose_shapes
from .run_part import RunProgress
from .run_start import RunStart
from .step_batches import EvaluationStopped, MadeBatches, StepBatches, check_continues

STEPS = 8
"""Number of tokens by which answers are continued before the host sees them."""

PROMPT_TOKENS_AT_ONCE = 4096
"""Number of tokens of prompts that are run together: nobody waits for the next token of an answer."""

ROLLOUTS_WITHOUT_SIGNAL = 10
"""Number of rollouts in a row without signal after which the run warns."""

SHOWN_ANSWERS = 3
"""Number of answers that are logged as text with each record."""


class RolloutBatches(StepBatches[PromptBatch]):
    """Rollouts, drawn by the parameters that the step begins with, on the run's mesh."""

    def __init__(self, prepared: PreparedRun, report: RunReporter, interrupt: SignalHandler, say: LogFn):
        self._prepared, self._interrupt = prepared, interrupt
        rollouts = prepared.data.rollouts
        assert rollouts is not None
        self._report, self._say, self._settings = report, say, rollouts.settings
        self._scorer = ActionScorer(prepared, say)
        self._journal = Journal(Path(prepared.folder))
        self._drawn_by: tuple[Any, Any] | None = None
        self._is_compiled, self._without_signal = False, 0
        self._shapes = choose_shapes(prepared, self._settings.num_answers // self._settings.minibatches)
        with raise_on_all_processes():
            functions, count = rollouts.settings.functions, rollouts.settings.processes
            others = () if rollouts.environment is None else rollouts.environment.functions
            asks = is_process_zero() and (functions or others)
            self._pool = RewardPool(functions, count, others=others) if asks else None
        self._judges = AnswerJudges(prepared)
        score = self._judges.score if rollouts.settings.reward_models else None
        self._collector = Collector(rollouts, self._create_engine, self._pool, say, self._watch, score)
        self._ahead = AheadDraws(self._collector, self._journal) if self._settings.asynchronous else None

    def begin(self, run: RunProgress, start: RunStart) -> None:
        """Read the replies and rewards of later rollouts from the journal."""
        self._scorer.begin(run.state, start)
        self._judges.load(self._say)
        if is_process_zero():
            self._journal.read(run.drawn)
        if self._ahead is not None:
            self._ahead.begin(start.host)

    def to_host(self, run: RunProgress) -> Mapping[str, Any]:
        """Return the answers that are drawn for the next step, if there are some."""
        return {} if self._ahead is None else self._ahead.to_host(heartbeat().report_alive)

    def open(self, run: RunProgress, skipped: Collection[int]) -> PrefetchIterator[PromptBatch]:
        return PrefetchIterator(self._prompts(run.position, run.drawn, skipped), PREFETCH_BATCHES)

    def _prompts(self, position: Position | None, drawn: int, skipped: Collection[int]) -> Iterator[PromptBatch]:
        source = self._prepared.data.train
        for number, (batch, after) in enumerate(source.batches(position), start=drawn + 1):
            if number not in skipped:
                yield PromptBatch(batch[PROMPT].tolist(), after, number)

    def _watch(self) -> None:
        """Report that a draw makes progress, and abandon it if the run is to stop."""
        heartbeat().report_alive()
        # The other processes would wait for one that leaves in the middle of a draw.
        if self._interrupt.should_abandon_wait():
            raise EvaluationStopped

    def make(self, run: RunProgress, item: PromptBatch, following: Callable[[], PromptBatch | None]) -> MadeBatches:
        """Draw a rollout, and return the batches of its updates on the devices; none if the run is to stop meanwhile.

        Raises:
            DataError: A prompt is too long.
            TrainingError: A reward failed.
        """
        # The step before is done when its parameters are read; its scalars may end the run.
        self._report.flush()
        settings = self._settings
        with self._report.clock.measure("rollout"), self._drawing(run.state, run.state.params):
            try:
                rollout, last = self._draw(run.step, item, following)
            except EvaluationStopped:
                return MadeBatches([], run.position, run.drawn)
            scored = self._scorer.add_leaves(rollout.batch, run.state)
            valued, of_values = add_value_advantages(settings.gae, scored, rollout.rewards)
            leaves, of_teacher = self._judges.ask_teacher(valued)
            metrics = {**rollout.metrics, **of_values, **of_teacher}
            self._record(run.step + 1, dataclasses.replace(rollout, metrics=metrics), leaves)
            # Some were computed for the advantages alone.
            leaves = {name: leaves[name] for name in rollout_axes(self._prepared.task)}
        updates = split_updates(
            leaves, epochs=settings.epochs, minibatches=settings.minibatches, seeds=[settings.seed, last.number]
        )
        return MadeBatches([self._send(update) for update in updates], last.position, last.number)

    def _send(self, update: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Put the batch of an update on the devices."""
        step = self._prepared.step
        if self._shapes is not None:
            update = pack_answers(update, self._shapes)
        held = step.held_rows(len(update[MASK_LEAF]))
        if held is None:
            return step.put(update, owned=True)
        return step.put({name: leaf[held.rows] for name, leaf in update.items()}, held)

    def _draw(
        self, step: int, item: PromptBatch, following: Callable[[], PromptBatch | None]
    ) -> tuple[RolloutBatch, PromptBatch]:
        """Draw a rollout, with further batches of prompts if some have no signal; return the last of these too."""
        settings = self._settings
        if self._ahead is not None:
            is_last = step + settings.updates >= self._prepared.experiment.num_steps
            return self._ahead.make(step, item, following, is_last=is_last)
        parts = [self._collector.collect(item.number, step, item.prompts, self._journal)]
        while len(parts) <= settings.refills and sum(sum(part.signals(settings.samples)) for part in parts) < len(
            item.prompts
        ):
            heartbeat().report_alive()
            more = following()
            if more is None:
                break
            item = more
            parts.append(self._collector.collect(item.number, step, item.prompts, self._journal))
        return self._collector.assemble(parts), item

    def _record(self, number: int, rollout: RolloutBatch, leaves: Mapping[str, np.ndarray]) -> None:
        """Report a rollout, and warn if nothing can be learned from many in a row.

        Args:
            number: The first step that learns from it.
            leaves: The batch that it learns from.
        """
        experiment, samples = self._prepared.experiment, self._settings.samples
        has_signal = leaves[ADVANTAGE_LEAF].any() or any(name in leaves for name in TEACHER_LEAVES)
        self._without_signal = 0 if has_signal else self._without_signal + 1
        if self._without_signal == ROLLOUTS_WITHOUT_SIGNAL:
            self._say(
                f"warning: step {number}: in {ROLLOUTS_WITHOUT_SIGNAL} rollouts in a row, all answers to a prompt had the same "
                f"reward ({rollout.metrics.get('reward', math.nan):.4g} on average): nothing is learned. Look at the logged "
                f"answers; easier prompts, more samples, a reward for parts of the way or a better first model would help"
            )
        texts = {}
        if number % experiment.log_every == 0 or number == experiment.num_steps:
            assert self._prepared.data.rollouts is not None
            records = self._prepared.data.rollouts.records
            for place in range(0, samples * SHOWN_ANSWERS, samples)[: len(rollout.answers) // samples]:
                prompt, answer = records[rollout.indices[place]][PROMPT], rollout.answers[place]
                shown = f"{prompt}\n\n{answer.text}" if answer.episode is None else answer.episode.describe()
                rated = f"\n\nreward {rollout.rewards[place]:.4g}" if self._settings.rewards else ""
                texts[f"rollout/answer {place // samples}"] = f"{shown}{rated}"
        self._report.record_rollout(number, rollout.metrics, texts)

    def evaluate(self, state: TrainState, step: int, should_stop: Callable[[], bool]) -> Mapping[str, float] | None:
        """Answer the held-out prompts; `loss` is minus the mean reward of greedy answers, so that the best checkpoint is the one
        with the highest. Without rewards it is the divergence from the teacher of answers that are drawn.

        Raises:
            EvaluationStopped: The run is to stop.
        """
        source, limit = self._prepared.data.held_out, self._prepared.experiment.evaluate.batches
        if source is None:
            return None
        prompts: list[int] = []
        for number, (batch, _) in enumerate(source.batches(None)):
            if limit and number == limit:
                break
            # The rows that fill the last batch have no weight.
            prompts += batch[PROMPT][batch["loss_mask"] > 0].tolist()
        check_continues(should_stop)
        if self._ahead is not None:
            self._ahead.settle(lambda: check_continues(should_stop))
        with self._drawing(state, state.eval_params):
            answers, metrics = self._collector.evaluate(prompts)
        if "reward" in metrics:
            return {"loss": -metrics["reward"], **metrics}
        if self._settings.rewards:
            return {}
        every = np.ones(len(answers), bool)
        nothing = np.zeros(len(answers), np.float32)
        rows = make_rows(answers, nothing, every, self._settings.length, self._settings.kept)
        divergence = self._judges.measure_divergence(rows)
        return {"loss": divergence, "teacher/divergence": divergence, **metrics}

    @contextlib.contextmanager
    def _drawing(self, state: TrainState, params: Any) -> Iterator[None]:
        """Draw by these parameters inside."""
        self._drawn_by = params, state.model_state
        try:
            yield
        finally:
            self._drawn_by = None

    def _create_engine(self) -> GenerationEngine:
        prepared = self._prepared
        assert self._drawn_by is not None
        heartbeat().report_alive()
        model = TextModel(
            prepared.task,
            *self._drawn_by,
            prepared.data.tokenizer,
            prepared.placement,
            prepared.experiment.kernels,
        )
        settings = self._settings
        dtype = jnp.dtype(prepared.task.weight_dtype).name
        chunk = min(CHUNK, settings.prompt_tokens)
        batching = Batching(
            prompts=min(settings.batch_size, max(1, PROMPT_TOKENS_AT_ONCE // chunk)),
            samples=settings.samples,
            steps=STEPS,
            pieces=False,
        )
        compiles, self._is_compiled = not self._is_compiled, True
        return create_engine(
            model,
            rows=settings.rows,
            length=settings.length,
            dtype=dtype,
            chunk=chunk,
            batching=batching,
            kept=settings.kept,
            compiles=compiles,
        )

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        if self._pool is not None:
            self._pool.close()


def check_draws(prepared: PreparedRun) -> None:
    """Check that a task can draw the answers of its rollouts, before the first step.

    Raises:
        RecipeError: The task does not generate, or does not draw as it is trained, or its settings don't fit the rollouts.
        DataError: A prompt is too long.
    """
    rollouts, needs = prepared.data.rollouts, prepared.task.rollout_needs
    if rollouts is None:
        return
    experiment, settings = prepared.experiment, rollouts.settings
    if needs is None:
        raise RecipeError(
            f"{experiment.name}: data=RolloutData makes rows of answers with advantages, and this task does not learn from them; "
            f"set task.objective=PolicyGradient(), or with a teacher Distill()"
        )
    if needs.temperature != settings.temperature:
        raise RecipeError(
            f"data.temperature={settings.temperature} and task.objective.temperature={needs.temperature} differ; set both to one "
            f"value: the loss is of the probabilities that answers are drawn with"
        )
    if needs.kept != (settings.kept > 0):
        fix = (
            "task.objective.replay_sampling=True is of draws among some tokens: set data.top_k, or remove it"
            if needs.kept
            else f"data.top_k={settings.top_k} draws among some tokens, and the loss is of the probabilities of draws: "
            f"set task.objective.replay_sampling=True, or remove top_k"
        )
        raise RecipeError(f"{experiment.name}: {fix}")
    if settings.top_k > (prepared.task.vocabulary_size or settings.top_k):
        raise RecipeError(
            f"data.top_k={settings.top_k}; expected at most the vocabulary's {prepared.task.vocabulary_size}"
        )
    if needs.teacher != (settings.teacher is not None and settings.teacher.top_k > 0):
        fix = (
            "Distill reads a teacher's most likely tokens: set data.teacher=Teacher(model=..., top_k=64)"
            if needs.teacher
            else "data.teacher.top_k is read by task.objective=Distill() alone: set that, or remove top_k to rate actions"
        )
        raise RecipeError(f"{experiment.name}: {fix}")
    if (settings.updates > 1) != needs.old and not needs.teacher:
        raise RecipeError(
            f"data.epochs={settings.epochs} and data.minibatches={settings.minibatches} make {settings.updates} updates of a "
            f"rollout; set task.objective.several_updates={settings.updates > 1}"
        )
    if settings.asynchronous and needs.experts is not None:
        raise RecipeError(
            f"{experiment.name}: data.asynchronous keeps answers in checkpoints, which hold no experts; set "
            f"task.objective.replay_experts=False, or data.asynchronous=False"
        )
    if needs.values != (settings.gae is not None):
        fix = (
            "estimates values, and data.gae is not set: set data.gae=Gae()"
            if needs.values
            else "has no values, from which data.gae computes advantages: set a value_weight such as 0.5"
        )
        raise RecipeError(f"{experiment.name}: task.objective {fix}, or remove the other")
    if 0 < needs.max_actions < settings.max_actions:
        name = "data.tokens" if settings.environment is None else "the actions that data.environment allows"
        raise RecipeError(
            f"task.objective.max_answer={needs.max_actions} is less than {name}={settings.max_actions}; set it to that"
        )
    if experiment.num_steps % settings.updates:
        raise RecipeError(
            f"num_steps={experiment.num_steps} counts updates, of which each rollout has {settings.updates}; set a multiple of it"
        )
    prepared.task.check_rollouts()
    check_generates(TextModel(prepared.task, None, None, rollouts.tokenizer))
    for is_set, setting in (
        (experiment.comms.local_steps > 1, "comms.local_steps"),
        (experiment.comms.islands.count > 1, "comms.islands"),
        (experiment.batch_ramp.parts, "batch_ramp"),
        (experiment.debug, "debug"),
        (experiment.overfit_batches, "overfit_batches"),
        (experiment.held_out is not None, "held_out (data.held_out holds prompts out)"),
    ):
        if is_set:
            raise RecipeError(
                f"{experiment.name}: rollouts are drawn by one set of weights, for batches of one size, and evaluated by "
                f"prompts of their own; remove {setting}"
            )
    for index in range(len(rollouts.records)):
        rollouts.encode(index)
