"""Log-probabilities of a rollout's actions by the trainer, before its first update, or by a reference model; and values."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ...core import TrainState
from ...core.batch_checks import BEHAVIOR_LEAF, EXPERTS_LEAF, OLD_LEAF, OLD_VALUE_LEAF, REFERENCE_LEAF
from ...core.errors import RecipeError
from ...core.task import LOG_PROBABILITIES, VALUES
from ...job.heartbeat import heartbeat
from ...rollouts.packing import SEGMENT, AnswerPlaces, count_positions
from ...rollouts.rows import AXES, EXPERTS_AXES, KEPT_AXES
from ...train import CompiledStep
from ..folder.initial_state import init_state
from ..opened_data import LogFn
from ..preparation import PreparedRun, make_program
from .row_shapes import choose_shapes
from .run_start import RunStart


class ActionScorer:
    """Evaluates the log-probabilities that the task's loss reads beside those of the sampler, and the values of actions."""

    def __init__(self, prepared: PreparedRun, say: LogFn):
        """
        Raises:
            RecipeError: The optimizer trains averages of the parameters, beside which they can't be evaluated.
        """
        self._prepared, self._say = prepared, say
        needs, rollouts = prepared.task.rollout_needs, prepared.data.rollouts
        assert needs is not None and rollouts is not None
        self._needs, self._settings = needs, rollouts.settings
        gae = rollouts.settings.gae
        self._reads_reference = needs.reference or (gae is not None and gae.kl_in_reward > 0.0)
        self._reference: Any = None
        self._is_needed = needs.old or needs.values or self._reads_reference
        if not self._is_needed:
            return
        self._shapes = choose_shapes(prepared, self._settings.num_answers)
        self._steps: dict[tuple[int, int], CompiledStep] = {}
        step = prepared.step
        assert isinstance(step, CompiledStep)
        if step.program.transformation.average is not None:
            raise RecipeError(
                f"{type(prepared.experiment.optimizer).__name__} evaluates an average of the parameters, and several updates "
                f"of a rollout, and a divergence from a reference, need the parameters themselves; choose another optimizer"
            )

    def begin(self, state: TrainState, start: RunStart) -> None:
        """Keep the parameters before the first step, if the loss reads a reference model."""
        if not self._reads_reference or self._reference is not None:
            return
        if start.step == 0:
            # A step is given its state, with these arrays.
            self._reference = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf.copy(), params))(state.params)
            return
        self._say("the reference model is the one with which the run began")
        self._reference = init_state(self._prepared, lambda line: None).params

    def add_leaves(self, batch: Mapping[str, np.ndarray], state: TrainState) -> dict[str, np.ndarray]:
        """Return a batch with the log-probabilities and values that the loss or its advantages are computed from; every
        process of a job calls it."""
        leaves = dict(batch)
        if not self._is_needed:
            return leaves
        heartbeat().report_alive()
        state = dataclasses.replace(state, averaged=None)
        like, places = batch[BEHAVIOR_LEAF], None
        if self._shapes is not None:
            places = AnswerPlaces.fill(count_positions(batch[SEGMENT]), self._shapes)
            batch = places.pack(batch)
        step = self._step_for(batch[BEHAVIOR_LEAF].shape)
        held = step.held_rows(len(batch[BEHAVIOR_LEAF]))
        plain = batch if held is None else {name: leaf[held.rows] for name, leaf in batch.items()}
        sent = step.put(plain, held)

        def evaluate(state: TrainState, batch: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
            made = self._evaluate(step, state, batch)
            return made if places is None else {name: places.unpack(leaf, like) for name, leaf in made.items()}

        if self._needs.old or self._needs.values:
            leaves |= evaluate(state, sent)
        if self._reads_reference:
            # The reference model uses the experts that it would choose, whatever the sampler did.
            free = {name: leaf for name, leaf in sent.items() if name != EXPERTS_LEAF}
            leaves[REFERENCE_LEAF] = evaluate(dataclasses.replace(state, params=self._reference), free)[OLD_LEAF]
        return leaves

    def _step_for(self, shape: tuple[int, int]) -> CompiledStep:
        """Return the evaluation of batches of this shape."""
        if shape not in self._steps:
            prepared, needs = self._prepared, self._needs
            assert prepared.placement is not None
            # The parameters, where the run's own evaluations take an average of them.
            experiment = dataclasses.replace(
                prepared.experiment, step=dataclasses.replace(prepared.experiment.step, ema_decay=None)
            )
            task = prepared.task.log_probability_task(*shape, temperature=needs.temperature, kept=needs.kept)
            axes = {**AXES, **(KEPT_AXES if needs.kept else {})}
            axes |= {} if needs.experts is None else {EXPERTS_LEAF: EXPERTS_AXES}
            self._steps[shape] = CompiledStep(make_program(experiment, task), prepared.placement, axes)
        return self._steps[shape]

    def _evaluate(self, step: CompiledStep, state: TrainState, batch: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
        """Return the log-probabilities of actions, and their values if the task estimates some."""
        metrics = step.evaluate(state, dict(batch))["metrics"]
        named = {OLD_LEAF: LOG_PROBABILITIES, **({OLD_VALUE_LEAF: VALUES} if self._needs.values else {})}
        dtype = batch[BEHAVIOR_LEAF].dtype
        return {leaf: np.asarray(metrics[name].value).astype(dtype) for leaf, name in named.items()}
