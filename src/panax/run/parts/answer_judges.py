"""Models that judge the answers of rollouts: a teacher, and reward models."""

import time
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from ...core import Task
from ...core.batch_checks import ADVANTAGE_LEAF, BEHAVIOR_LEAF, MASK_LEAF, OLD_LEAF
from ...core.errors import RecipeError
from ...core.task import LOG_PROBABILITIES, REWARD_SCORES, TOP_LOG_PROBABILITIES, TOP_TOKENS
from ...data.teacher.teacher_rows import TEACHER_LEAVES
from ...rollouts.answers import SampledAnswer
from ...rollouts.rows import KEPT_AXES, RATED_AXES, TEXT_AXES, make_text_rows
from ...rollouts.teacher import compare_with_teacher
from ..opened_data import LogFn
from ..preparation import PreparedRun
from .frozen_model import FrozenModel


class AnswerJudges:
    """The teacher and the reward models of a run's rollouts.

    Attributes:
        models: All of them, by the setting that names each.
    """

    def __init__(self, prepared: PreparedRun):
        """Prepare their evaluations; no weight is read.

        Raises:
            RecipeError, CheckpointError, LayoutError: As for `FrozenModel`.
        """
        rollouts, needs = prepared.data.rollouts, prepared.task.rollout_needs
        assert rollouts is not None and needs is not None
        self._settings = settings = rollouts.settings
        length = settings.length

        self._teacher, self._rated, teacher = None, RATED_AXES, settings.teacher
        if teacher is not None:
            top_k, size = teacher.top_k, prepared.task.vocabulary_size
            if size is not None and top_k > size:
                raise RecipeError(f"data.teacher.top_k={top_k}; expected at most the vocabulary's {size}")

            def rate_actions(task: Task, rows: int) -> Task:
                if not top_k:
                    return task.log_probability_task(rows, length, temperature=needs.temperature, kept=needs.kept)
                return task.top_log_probability_task(rows, length, top_k=top_k, temperature=needs.temperature)

            self._rated = {**RATED_AXES, **(KEPT_AXES if needs.kept else {})}
            self._teacher = FrozenModel(prepared, "data.teacher", teacher.model, rate_actions, self._rated)
        self._reward_models = [
            FrozenModel(
                prepared,
                f"reward {reward.name}",
                reward.run,
                lambda task, rows: task.reward_score_task(rows),
                TEXT_AXES,
            )
            for reward in settings.reward_models
        ]

    @property
    def models(self) -> Mapping[str, FrozenModel]:
        teacher = [] if self._teacher is None else [self._teacher]
        return {model.setting: model for model in (*teacher, *self._reward_models)}

    def load(self, say: LogFn) -> None:
        """Read the weights of all of them.

        Raises:
            CheckpointError: They can't be read.
        """
        for model in self.models.values():
            model.load(say)

    def score(self, answers: Sequence[SampledAnswer]) -> Float[np.ndarray, "answers models"]:
        """Return the reward of each answer by each reward model."""
        rows = make_text_rows(answers, self._settings.length)
        return np.stack([model.evaluate(rows, REWARD_SCORES)[0] for model in self._reward_models], axis=-1)

    def ask_teacher(self, leaves: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Return a batch with the teacher's advantages added to those from rewards, or with its most likely tokens; and figures
        to log."""
        teacher = self._settings.teacher
        if teacher is None:
            return dict(leaves), {}
        began = time.perf_counter()
        assert self._teacher is not None
        names = (LOG_PROBABILITIES, *((TOP_TOKENS, TOP_LOG_PROBABILITIES) if teacher.top_k else ()))
        by_teacher, *likely = self._teacher.evaluate({name: leaves[name] for name in self._rated}, *names)
        rated, divergence = _compare(leaves, by_teacher)
        made: dict[str, np.ndarray]
        if likely:
            tokens, values = likely
            # Rounding may give a log-probability just above 0.
            made = dict(zip(TEACHER_LEAVES, (tokens, np.minimum(values, np.float32(0))), strict=True))
        else:
            made = {ADVANTAGE_LEAF: (leaves[ADVANTAGE_LEAF] + teacher.weight * rated).astype(np.float32)}
        figures = {"teacher/divergence": divergence, "seconds/teacher": time.perf_counter() - began}
        return {**leaves, **made}, figures

    def measure_divergence(self, leaves: Mapping[str, np.ndarray]) -> float:
        """Return the mean estimate of the divergence from the teacher per action, in nats."""
        assert self._teacher is not None
        [by_teacher] = self._teacher.evaluate({name: leaves[name] for name in self._rated}, LOG_PROBABILITIES)
        return _compare(leaves, by_teacher)[1]


def _compare(leaves: Mapping[str, np.ndarray], by_teacher: np.ndarray) -> tuple[np.ndarray, float]:
    # Without log-probabilities by the trainer, those of the draw, which differ from them by rounding.
    by_student = leaves.get(OLD_LEAF, leaves[BEHAVIOR_LEAF])
    return compare_with_teacher(by_student, by_teacher, leaves[MASK_LEAF])


def find_second_models(prepared: PreparedRun) -> Mapping[str, FrozenModel]:
    """Return the models that judge the answers of a run's rollouts, by the setting that names each; no weight is read.

    Raises:
        RecipeError, CheckpointError, LayoutError: As for `FrozenModel`.
    """
    if prepared.data.rollouts is None or prepared.task.rollout_needs is None or prepared.placement is None:
        return {}
    return AnswerJudges(prepared).models
