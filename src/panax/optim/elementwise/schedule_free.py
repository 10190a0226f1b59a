"""Schedule-free AdamW, which evaluates an average of its iterates instead of decaying the learning rate
(arXiv:2405.15682)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...core.errors import RecipeError
from ...core.params.axes import named_leaves
from ...kernels.precision import accumulation_dtype
from ...kernels.quantized import QuantizedArray
from ..moments import SQUARE, bias_correction, check_decay_rates
from ..optimizer import check_epsilon
from ..parameter import Parameter
from ..schedule import CustomSchedule, Schedule
from ..sharded.codes import decode_state
from ..sharded.shard import ParameterShard
from ..sharded.sharded_optimizer import ShardedOptimizer, StateSpec, UpdateInputs

OFFSET, WEIGHT = "offset", "weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleFreeAdamW(ShardedOptimizer):
    """Schedule-free AdamW: gradients are taken between the base iterates and their average, which is
    evaluated and exported.

    State: the offset of the base iterate from each parameter, and the mean of squared gradients. The average
    is a third array (`TrainState.averaged`).

    Attributes:
        b1: Interpolation weight of the average at which gradients are taken; 1 is the average itself.
        schedule: A warm-up without decay.
    """

    steps_as_adam = True

    schedule: Schedule | CustomSchedule = Schedule(peak=2.5e-3, decay="constant")  # noqa: RUF009
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay_rates(b1=self.b1, b2=self.b2)
        check_epsilon(self.epsilon, least=0.0)
        if not self.b1:
            raise RecipeError("optimizer.b1=0; expected a share above 0: gradients are taken near the average")
        if isinstance(self.schedule, Schedule) and self.schedule.decay != "constant":
            raise RecipeError(
                f'optimizer.schedule.decay="{self.schedule.decay}": the average of ScheduleFreeAdamW replaces a decay; '
                f'set optimizer.schedule.decay to "constant", or use AdamW'
            )

    @property
    def average(self) -> Callable[[Any, Any], Any]:
        def average(params: Any, state: Any) -> Any:
            offsets = jax.tree.structure(params).unflatten([state[OFFSET][name] for name in named_leaves(params)])
            return jax.tree.map(self._average_of, params, offsets)

        return average

    def state_specs(self, parameter: Parameter) -> dict[str, StateSpec]:
        dims = len(parameter.shape)
        return {
            OFFSET: StateSpec.like(parameter),
            SQUARE: StateSpec.like(parameter, signed=False),
            WEIGHT: StateSpec((1,) * dims, "float32", (None,) * dims, moment=False),
        }

    def step(self, shard: ParameterShard, inputs: UpdateInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        dtype = inputs.gradient.dtype
        offset, square = (inputs.state[kind].astype(dtype) for kind in (OFFSET, SQUARE))
        square = self.b2 * square + (1 - self.b2) * jnp.square(inputs.gradient)
        direction = inputs.gradient / (jnp.sqrt(square / bias_correction(self.b2, inputs.num_updates)) + self.epsilon)
        weight = jnp.square(inputs.scheduled).astype(jnp.float32)
        weights = inputs.state[WEIGHT] + weight
        share = jnp.where(weights > 0, weight / jnp.where(weights > 0, weights, 1), 0).astype(dtype)
        # Both are offsets from the old parameter, so that differences of close values lose no digits.
        new_offset = offset - inputs.rate * (direction + inputs.decay * inputs.value)
        average = (1 - share) * self._average(offset) + share * new_offset
        change = (1 - self.b1) * new_offset + self.b1 * average
        return change, {OFFSET: new_offset - change, SQUARE: square, WEIGHT: weights}

    def _average(self, offset: jax.Array) -> jax.Array:
        """Convert the base iterate's offset to the average's: the parameter is between the two."""
        return -(1 - self.b1) / self.b1 * offset

    def _average_of(self, param: jax.Array, offset: jax.Array | QuantizedArray) -> jax.Array:
        wide = accumulation_dtype(param.dtype)
        return param.astype(wide) + self._average(decode_state(offset, wide))
