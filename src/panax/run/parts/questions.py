"""Scores of the model on files of questions: every few steps, and at the end of a run."""

import jax

from ...core.errors import PanaxError, RecipeError
from ...generate import GenerationEngine
from ...generate.scoring import TaskResult, score_questions
from ...generate.scoring.scorer import make_requests
from ...job.heartbeat import heartbeat
from ..opened_data import LogFn
from ..preparation import PreparedRun
from ..recovery.emergency_save import EmergencySave
from ..recovery.interrupt import SignalHandler
from ..reporting.generation import TextModel, check_generates, create_engine
from ..reporting.question_scores import QuestionScores
from ..reporting.report import RunReporter
from .phases import RunPhase
from .run_part import RunPart, RunProgress, is_step_due
from .run_start import RunStart


class PeriodicQuestions(RunPart):
    """Asks the model the questions of some files.

    The model generates on the run's mesh. In a job of many processes all of them take part, and the first one reports.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        report: RunReporter,
        interrupt: SignalHandler,
        emergency: EmergencySave,
        say: LogFn,
    ):
        self._prepared, self._report, self._say = prepared, report, say
        self._interrupt, self._emergency = interrupt, emergency
        self._config = prepared.experiment.questions
        # Read once: a run compares its scores, and a file may be changed while it trains.
        self._questions = self._config.read()
        self._is_checked = not self._questions
        self._scored_step: int | None = None

    def begin(self, run: RunProgress, start: RunStart) -> None:
        """Check that the engine can be created and can be asked, before the first step.

        Raises:
            RecipeError: No question of a file can be asked, or the engine's settings don't fit the model.
        """
        self._scored_step = None
        if self._is_checked:
            return
        heartbeat().phase("compile")
        engine, tokenizer = self._create_engine(run), check_generates(self._model(run))
        for name, questions in self._questions.items():
            errors = []
            for question in questions:
                try:
                    make_requests(engine, tokenizer, question, self._config.sampling, chat=self._config.chat)
                except PanaxError as error:
                    errors.append(str(error))
            if len(errors) == len(questions):
                raise RecipeError(f"no question of {name} can be asked; the first: {errors[0]}")
            if errors:
                self._say(
                    f"{len(errors)} of {len(questions)} questions of {name} can't be asked, and no score counts them; the "
                    f"first: {errors[0]}"
                )
        self._is_checked = True

    def after_step(self, run: RunProgress) -> None:
        if self._questions and run.takes_steps and is_step_due(self._config.every, run.step):
            with self._emergency.on_error(run, "the scoring of questions"):
                self._score(run)

    def at_end(self, run: RunProgress) -> None:
        """Score the last state, unless the run was cut off; if that fails, save it first."""
        ended = run.phase in (RunPhase.COMPLETE, RunPhase.STOPPED)
        if self._questions and ended and self._scored_step != run.step:
            with self._emergency.on_last_error(run):
                self._score(run)

    def _score(self, run: RunProgress) -> None:
        self._report.flush()
        with self._report.ledger.measure("evaluation"):
            heartbeat().phase("evaluate")
            try:
                results = self._ask(run)
            except _ScoringStopped:
                name = "a signal" if self._interrupt.signal is None else self._interrupt.signal.name
                self._say(f"the scoring of questions after step {run.step} is abandoned: {name} received")
                return
        self._scored_step = run.step
        self._report.record_question_scores(run.step, QuestionScores(results))

    def _ask(self, run: RunProgress) -> dict[str, TaskResult]:
        engine, tokenizer = self._create_engine(run), check_generates(self._model(run))
        results = {}
        for name, questions in self._questions.items():
            # With many processes, they agree to stop between two files.
            if self._interrupt.should_stop():
                raise _ScoringStopped
            results[name] = score_questions(
                engine,
                tokenizer,
                questions,
                self._config.sampling,
                chat=self._config.chat,
                answers=self._config.answers,
                on_progress=self._watch,
            )
        return results

    def _watch(self) -> None:
        heartbeat().report_alive()
        # The other processes would wait for one that leaves in the middle of a file.
        if jax.process_count() == 1 and self._interrupt.should_abandon_wait():
            raise _ScoringStopped

    def _create_engine(self, run: RunProgress) -> GenerationEngine:
        """Create an engine of the current parameters. Its programs are compiled for the first one; its caches are freed
        before training continues."""
        return create_engine(self._model(run), rows=self._config.rows, length=self._config.length or None)

    def _model(self, run: RunProgress) -> TextModel:
        prepared = self._prepared
        return TextModel(
            prepared.task,
            run.state.eval_params,
            run.state.model_state,
            prepared.data.tokenizer,
            prepared.placement,
            prepared.experiment.kernels,
        )


class _ScoringStopped(Exception):
    """Exception that abandons the questions, because the run is to stop."""
