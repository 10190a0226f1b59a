"""`StepPart`: something optional that a training step does, and the values that parts pass on to each other.

A step has these phases. In each, the parts that override its method act in the order of the program's list:

    view        the inputs of the loss: the batch, and the parameters at which gradients are computed
    gradients   gradients after their sum over devices, before anything is measured
    facts       what decides on the update: the norm, and whether this batch may change the parameters
    decide      whether the update is applied
    update      from gradients to new parameters; an update that is not applied leaves all of this unchanged
    after       the next state, whether the update was applied or not, and the scalars to report; here parts act in
                reverse order, so that the first change to the batch is undone last
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax

from ...comms.delayed_gradients import Terms
from ...comms.reduction import Residuals
from ...core import Axes, Batch, Gradients, StepGuard, TrainState


class StepInputs(NamedTuple):
    """Inputs of the loss.

    Attributes:
        axes: Logical axes of each leaf of the batch; None if only rows are sharded.
        params: The parameters at which gradients are computed.
        memos: Values that parts keep for their later phases, by the part's name.
    """

    state: TrainState
    batch: Batch
    axes: Mapping[str, Axes] | None
    params: Any
    memos: Mapping[str, Any]

    def remember(self, part: "StepPart", memo: Any) -> "StepInputs":
        """Return these inputs with a memo of a part."""
        return self._replace(memos={**self.memos, part.name: memo})


class StepFacts(NamedTuple):
    """Facts about a step once its gradients are known, from which its update is decided.

    Attributes:
        state: The state before the step.
        trained: Its trained dense parameters, None elsewhere.
        result: Gradients summed over devices, losses, metrics and the model's next state.
        owed: The next residuals of compressed sums.
        terms: This batch's own gradients, if `result` has those of the batch before.
        memos: Those of `StepInputs`.
        loss: The sum of all losses.
        norm: The norm of the whole gradient.
        loss_is_finite: False to skip an update because of its loss.
        batch_teaches: True if something in this batch counts, and its checks found no fault.
        teaches: The same of the batch that the gradients are of.
        usual: False to skip the update as a spike.
        counted: False for a step that had no gradients to apply, which the guard does not count.
        behind: Number of steps by which gradients are late.
        scalars: Scalars to report.
        finite: True if gradients and loss are finite; like `applied`, False until the decision.
        applied: True if the update is applied.
        guard: State of the guard: the next one after the decision.
    """

    state: TrainState
    trained: Any
    result: Gradients
    owed: Residuals
    terms: Terms | None
    memos: Mapping[str, Any]
    loss: jax.Array
    norm: jax.Array
    loss_is_finite: jax.Array | bool
    batch_teaches: jax.Array
    teaches: jax.Array
    guard: StepGuard
    usual: jax.Array | bool = True
    counted: jax.Array | bool = True
    behind: jax.Array | int = 0
    scalars: Mapping[str, Any] = {}
    finite: jax.Array | bool = False
    applied: jax.Array | bool = False

    @property
    def updates(self) -> jax.Array:
        """Number of updates applied before this one."""
        return self.state.step - self.state.guard.skipped

    def report(self, **scalars: Any) -> "StepFacts":
        """Return these facts with further scalars to report."""
        return self._replace(scalars={**self.scalars, **scalars})


class DenseUpdate(NamedTuple):
    """An update being made. A skipped one changes nothing of this.

    Attributes:
        gradients: Of the trained dense parameters; None once they are used.
        params: The trained dense parameters.
        averaged: Their average; None if there is none.
        parts: State of parts, by name.
    """

    gradients: Any
    params: Any
    model_state: Any
    optimizer_state: Any
    averaged: Any
    owed: Residuals
    parts: Mapping[str, Any] | None

    def with_part_state(self, part: "StepPart", state: Any) -> "DenseUpdate":
        """Return this update with another state of a part."""
        return self._replace(parts={**(self.parts or {}), part.name: state})


class StepOutcome(NamedTuple):
    """The end of a step.

    Attributes:
        state: The next state.
        trained: Its trained dense parameters, None elsewhere.
        scalars: Scalars to report.
    """

    state: TrainState
    trained: Any
    scalars: Mapping[str, Any]

    def report(self, **scalars: Any) -> "StepOutcome":
        """Return this outcome with further scalars to report."""
        return self._replace(scalars={**self.scalars, **scalars})


class StepPart:
    """Something optional that a step does. Subclasses are frozen dataclasses of settings; each method returns its
    argument unless overridden.

    Attributes:
        name: Name of its state and memo; unique in a program.
        before: Name of the part of Panax before which a user's part stands.
    """

    name: ClassVar[str] = ""
    before: ClassVar[str] = "optimizer"

    def init_state(self, params: Any) -> Any:
        """Return its first state, arrays by name; None for a part without state.

        Args:
            params: The trained dense parameters, None elsewhere.
        """
        return None

    def state_axes(self, axes: Any) -> Any:
        """Return the logical axes of its state, given those of the trained dense parameters, None elsewhere."""
        return None

    def view(self, inputs: StepInputs) -> StepInputs:
        """Change the inputs of the loss."""
        return inputs

    def gradients(self, result: Gradients) -> Gradients:
        """Change the gradients, before their norm is taken."""
        return result

    def facts(self, facts: StepFacts) -> StepFacts:
        """Change what decides on the update."""
        return facts

    def decide(self, applied: jax.Array, facts: StepFacts) -> jax.Array:
        """Return whether the update is applied, given the decision so far."""
        return applied

    def update(self, update: DenseUpdate, facts: StepFacts) -> DenseUpdate:
        """Change gradients, parameters, or state that a skipped update leaves unchanged."""
        return update

    def after(self, outcome: StepOutcome, facts: StepFacts) -> StepOutcome:
        """Change the next state, also after a skipped update."""
        return outcome


def replace_state(outcome: StepOutcome, **fields: Any) -> StepOutcome:
    """Return an outcome with other fields of its state."""
    return outcome._replace(state=dataclasses.replace(outcome.state, **fields))
