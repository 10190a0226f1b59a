"""The state in which training begins, and its logical axes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...core import StepGuard, TrainState, pair_axes
from ...core.state import init_averages
from ...optim import Transformation
from ..mup import WidthFactors
from ..parts.step_part import StepPart
from .trained_params import TrainedParams


@dataclasses.dataclass(frozen=True)
class FirstState:
    """What determines the state in which training begins.

    Attributes:
        has_average: True if an average of the parameters is kept.
        loss_scale: The first loss scale; None for a task that does not scale its loss.
        widths: Changes to the first parameters of a wider model; None for none.
        own_parts: The user's parts of the step.
    """

    trained: TrainedParams
    transformation: Transformation
    has_average: bool
    loss_scale: float | None
    widths: WidthFactors | None
    own_parts: tuple[StepPart, ...]

    def create(self, key: jax.Array, initial_values: tuple[Any, Any] | None = None) -> TrainState:
        """Create the state, with the parameters and model state in `initial_values` if there are any."""
        init_key, run_key = jax.random.split(key)
        params, model_state = self.trained.task.init(init_key) if initial_values is None else initial_values
        if self.widths is not None and initial_values is None:
            params = self.widths.scale_params(params)
        dense = jax.tree.map(lambda p, keep: p if keep else None, params, self.trained.dense)
        tables, states = self.trained.tables, {part.name: part.init_state(dense) for part in self.own_parts}
        return TrainState(
            step=jnp.int32(0),
            params=params,
            model_state=model_state,
            optimizer_state=self.transformation.init(dense),
            key=run_key,
            guard=StepGuard.create(self.loss_scale),
            averaged=init_averages(dense) if self.has_average else None,
            tables=None if tables is None else tables.init_state(params),
            parts={name: state for name, state in states.items() if state is not None} or None,
        )

    def axes(self, abstract: TrainState) -> TrainState:
        """Return the logical axes of this state, a tuple at each leaf."""
        trained, averaged, states = self.trained, None, None
        leaves = zip(pair_axes(trained.params, trained.axes), jax.tree.leaves(trained.dense))
        kept = [axes if keep else None for (_, _, axes), keep in leaves]
        if abstract.averaged is not None:
            averaged = jax.tree.structure(abstract.averaged).unflatten([axes for axes in kept if axes is not None])
        if abstract.parts is not None:
            dense = jax.tree.structure(abstract.params).unflatten(kept)
            states = {part.name: part.state_axes(dense) for part in self.own_parts if part.name in abstract.parts}
        parts = {
            "step": (),
            "params": trained.axes,
            "model_state": trained.task.state_axes(trained.model_state),
            "optimizer_state": self.transformation.axes(abstract.optimizer_state, trained.shapes),
            "key": (),
            "guard": jax.tree.map(lambda _: (), abstract.guard),
            "averaged": averaged,
            "tables": None if trained.tables is None else trained.tables.state_axes(),
            "parts": states,
        }
        named = [
            axes
            for field in dataclasses.fields(abstract)
            for axes in jax.tree.structure(getattr(abstract, field.name)).flatten_up_to(parts.get(field.name))
        ]
        # Unflatten instead of constructing, since these leaves are not arrays.
        return jax.tree.structure(abstract).unflatten(named)
