"""Optimizers that update local shards: each device updates its shard of every parameter and communicates only
what depends on other shards.

Like the gradients, the update is part of the step's manual program (decision 0005): nothing is left to a
partitioner, and an optimizer's collectives appear in the trace, where they are counted. A new optimizer is a
dataclass that declares the state of a parameter (`state_specs`) and the update of one parameter (`step`).
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...core.errors import RecipeError
from ...core.layout.layout import current_layout
from ...core.params.axes import named_leaves, path_name
from ...core.params.selection import LayerParameters
from ...core.protocols import Axes
from ...kernels.precision import accumulation_dtype
from ...kernels.quantized import QuantizedArray, quantize, round_stochastically
from ...spmd.sharding_marks import ValueState, check_sharding
from ..decay import uses_weight_decay
from ..factors import factor_by_layer, select_factors
from ..optimizer import Optimizer, check_epsilon
from ..parameter import Parameter
from ..transformation import ParameterSpecs, Renewal, Transformation
from .codes import BLOCK, LEAST, check_blocks, quantized_zeros, state_leaf_axes
from .shard import ParameterShard, partition_spec, shard_map_over_params

Arrays = Mapping[str, Any]
Factors = Mapping[str, Any]
"""Parameter name to a factor: a scalar, or an array with one factor per stacked layer."""

StateByKind = dict[str, dict[str, jax.Array]]
"""Parameter name to its optimizer state, by state name."""

COUNT = "count"


class StateSpec(NamedTuple):
    """Spec of one optimizer-state array of a parameter.

    Attributes:
        shape: The global shape.
        axes: Its logical axes; it is sharded like a parameter with these axes.
        moment: True if it is stored in the dtype of the setting `moments`.
        signed: True if it may be negative.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: Axes
    moment: bool = True
    signed: bool = True

    @classmethod
    def like(cls, parameter: Parameter, *, signed: bool = True) -> "StateSpec":
        return cls(parameter.shape, parameter.dtype, parameter.axes, signed=signed)


class UpdateInputs(NamedTuple):
    """Inputs to one parameter's update: gradient, value, state, learning rate and weight decay, each a local
    shard.

    Attributes:
        gradient: This device's shard, in float32 or wider.
        value: The parameter's shard, in the same dtype.
        state: The state, as shards in their stored dtypes; quantized state is decoded to the gradient's dtype.
        rate: The learning rate times the factor of this parameter, or of each of its layers.
        decay: Weight decay times its factor; 0 if none applies.
        num_updates: Number of updates before this one, in the gradient's dtype.
        scheduled: The learning rate without the factor.
    """

    gradient: jax.Array
    value: jax.Array
    state: dict[str, jax.Array]
    rate: jax.Array
    decay: jax.Array | float
    num_updates: jax.Array
    scheduled: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedOptimizer(Optimizer):
    """An optimizer that updates local shards.

    Attributes:
        weight_decay: Multiplied by the learning rate; applied to weights and embeddings, never to norms or
            biases.
        lr_multipliers: Learning-rate multipliers by pattern: a parameter name or prefix, with `*`, or `layers.3`,
            `layers.0-5`, `layers.3.attention`. The last matching pattern wins.
        decay_multipliers: The same for weight decay; a norm or bias that matches is decayed too.
        moments: Dtype of the moments. same: the parameter's dtype. int8: 8-bit codes with one scale per 256
            elements (arXiv:2110.02861) for layers with at least 4,096 elements; smaller ones keep the
            parameter's dtype.
        rounding: Rounding of bfloat16 parameters. stochastic: round up or down at random, so that updates
            smaller than the spacing of bfloat16 are not lost (arXiv:2010.06192); identical on every mesh.
            Moments and averages in bfloat16 or in codes are always rounded stochastically: rounded to
            nearest, a value that decays by less than half a unit in the last place would never decrease.
    """

    steps_as_adam: ClassVar[bool] = False
    """True if update elements are about as large as the learning rate, independent of the gradient's
    scale."""

    epsilon_may_be_zero: ClassVar[bool] = False
    """True if a zero `epsilon` never divides by zero, even for a zero gradient."""

    weight_decay: float = 0.0
    lr_multipliers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    decay_multipliers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    moments: Literal["same", "float32", "bfloat16", "int8"] = "same"
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        if self.weight_decay < 0:
            raise RecipeError(f"optimizer.weight_decay={self.weight_decay}; expected 0 or more")
        for name in ("lr_multipliers", "decay_multipliers"):
            for pattern, factor in getattr(self, name).items():
                if factor < 0:
                    raise RecipeError(f"optimizer.{name}: {pattern!r} has the factor {factor}; expected 0 or more")

        if self.decay_multipliers and not self.weight_decay:
            raise RecipeError(
                "optimizer.decay_multipliers has no effect with weight_decay=0; set optimizer.weight_decay, or remove it"
            )

    @abc.abstractmethod
    def state_specs(self, parameter: Parameter) -> dict[str, StateSpec]:
        """Return the spec of each state array of a parameter, by name; state is initialized with zeros."""

    @abc.abstractmethod
    def step(self, shard: ParameterShard, inputs: UpdateInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Compute one parameter's update: the change to add to its shard, and its new state."""

    def step_all(
        self, shards: Mapping[str, ParameterShard], inputs: Mapping[str, UpdateInputs]
    ) -> dict[str, tuple[jax.Array, Any]]:
        """Compute the update of all parameters; by default, each independently."""
        return {name: self.step(shard, inputs[name]) for name, shard in shards.items()}

    @property
    def average(self) -> Callable[[Any, Any], Any] | None:
        """The function from updated parameters and state to the parameter average to evaluate instead, in
        float32 or wider; None if the parameters themselves are evaluated."""
        return None

    def renewal_due(self, number: int) -> bool:
        """Return True if `renew` runs after step `number`, counted from 1; by default never."""
        return False

    @property
    def renewal_description(self) -> str:
        """The renewal schedule as text."""
        return ""

    def renew(self, shards: Mapping[str, ParameterShard], states: Mapping[str, dict[str, jax.Array]]) -> StateByKind:
        """Recompute the part of the state that is renewed only every few steps, in a separate program.

        Args:
            states: Parameter name to its state.

        Returns:
            Parameter name to its renewed state arrays only.
        """
        raise NotImplementedError(f"{type(self).__name__} renews nothing")

    def adopt_renewed(self, number: int, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state after step `number`, with arrays renewed earlier moved to where updates read them
        from now on.

        By default updates read renewed arrays in place.
        """
        return state

    def check(self, axes: Mapping[str, Axes]) -> None:
        """Check that this optimizer applies to at least one parameter.

        Raises:
            RecipeError: The optimizer applies to no parameter; the message names the reason and an alternative.
        """

    def build(
        self,
        axes: Mapping[str, Axes],
        num_steps: int,
        layers: LayerParameters = MappingProxyType({}),
        meanings: Mapping[str, Axes] | None = None,
    ) -> Transformation:
        # `axes` determine shardings; `kinds` are what an array's dimensions mean, which distinguishes matrices from norms.
        kinds = axes if meanings is None else meanings
        self.check(kinds)
        if not self.epsilon_may_be_zero:
            check_epsilon(getattr(self, "epsilon", 1.0))
        learning_rate = self.learning_rate(num_steps)
        rates = select_factors("lr_multipliers", self.lr_multipliers, list(axes), layers)
        decay = select_factors("decay_multipliers", self.decay_multipliers, list(axes), layers)

        def described(params: Any) -> dict[str, Parameter]:
            return {
                name: Parameter.of(name, leaf, axes[name], kinds[name]) for name, leaf in named_leaves(params).items()
            }

        def init(params: Any) -> dict[str, Any]:
            state: dict[str, Any] = {COUNT: jnp.int32(0)}
            for name, parameter in described(params).items():
                for kind, spec in self.state_specs(parameter).items():
                    state.setdefault(kind, {})[name] = self._zeros(spec)
            self._check_types(params, state)
            return state

        def state_axes(state: Any, params: ParameterSpecs) -> Any:
            axes_by_kind: dict[str, Any] = {COUNT: ()}
            for name, (shape, leaf_axes) in params.items():
                # The sharding does not depend on the dtype.
                for kind, spec in self.state_specs(
                    Parameter(name, shape, "float32", leaf_axes, tuple(kinds[name]))
                ).items():
                    axes_by_kind.setdefault(kind, {})[name] = state_leaf_axes(state[kind][name], spec.axes)
            return axes_by_kind

        def update(gradients: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
            parameters = described(params)
            count = state[COUNT]
            # A user's schedule may mix dtypes, which strict promotion rejects.
            with jax.numpy_dtype_promotion("standard"):
                rate = jnp.asarray(learning_rate(count))
            arrays = _Arrays(
                named_leaves(gradients),
                named_leaves(params),
                {kind: leaves for kind, leaves in state.items() if kind != COUNT},
                {name: factor_by_layer(rates.get(name, []), 1.0, parameter) for name, parameter in parameters.items()},
                {
                    name: self.weight_decay
                    * factor_by_layer(decay.get(name, []), float(uses_weight_decay(kinds[name])), parameter)
                    for name, parameter in parameters.items()
                },
            )
            changes, new_state = self._on_mesh(parameters, arrays, rate, count)
            leaves, structure = jax.tree_util.tree_flatten_with_path(params)
            return structure.unflatten([changes[path_name(path)] for path, _ in leaves]), {
                COUNT: count + 1,
                **new_state,
            }

        def renewed(state: dict[str, Any], params: Any) -> dict[str, Any]:
            arrays = {kind: leaves for kind, leaves in state.items() if kind != COUNT}
            return {COUNT: state[COUNT], **self._renewed_on_mesh(described(params), arrays, state[COUNT])}

        # Only an optimizer that overrides `renew` has state to renew; for others, nothing is compiled.
        renewal = (
            None
            if type(self).renew is ShardedOptimizer.renew
            else Renewal(self.renewal_due, self.renewal_description, renewed, self.adopt_renewed)
        )

        def skipped(state: dict[str, Any], steps: int) -> dict[str, Any]:
            return {**state, COUNT: state[COUNT] + jnp.asarray(steps, state[COUNT].dtype)}

        return Transformation(init, update, state_axes, self.average, renewal, skipped)

    def _renewed_on_mesh(
        self, parameters: dict[str, Parameter], arrays: Mapping[str, Arrays], count: jax.Array
    ) -> dict[str, dict[str, Any]]:
        def local(arrays: Mapping[str, Arrays], count: jax.Array) -> dict[str, dict[str, Any]]:
            shards = {name: ParameterShard.of(parameter) for name, parameter in parameters.items()}
            read = {
                name: {kind: _readable(value, jnp.float32) for kind, value in _select_state(arrays, name).items()}
                for name in parameters
            }
            new_state = {kind: dict(values) for kind, values in arrays.items()}
            for name, new in self.renew(shards, read).items():
                declared = self.state_specs(parameters[name])
                for kind, value in new.items():
                    before = new_state[kind][name]
                    new_state[kind][name] = self._to_storage_format(
                        name, f"renewed {kind}", declared[kind], before, value, count
                    )
            return new_state

        specs, replicated = self._state_partition_specs(parameters, arrays), PartitionSpec()
        return shard_map_over_params(local, (specs, replicated), specs)(dict(arrays), count)

    def _state_partition_specs(
        self, parameters: Mapping[str, Parameter], arrays: Mapping[str, Arrays]
    ) -> dict[str, dict[str, PartitionSpec]]:
        specs: dict[str, dict[str, PartitionSpec]] = {kind: {} for kind in arrays}
        for name, parameter in parameters.items():
            for kind, one in self.state_specs(parameter).items():
                # Codes and scales are sharded alike.
                specs[kind][name] = partition_spec(one.axes, one.shape)
                check_blocks(f"{kind} of {name}", arrays[kind][name], one.axes)
        return specs

    def _on_mesh(
        self, parameters: dict[str, Parameter], arrays: "_Arrays", rate: jax.Array, count: jax.Array
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        def local(arrays: _Arrays, rate: jax.Array, count: jax.Array) -> tuple[dict[str, Any], dict[str, Any]]:
            shards = {name: ParameterShard.of(parameter) for name, parameter in parameters.items()}
            updates = self.step_all(shards, {name: arrays.inputs_of(name, rate, count) for name in parameters})
            changes: dict[str, Any] = {}
            new_state: dict[str, Any] = {kind: {} for kind in arrays.kept}
            for name, (change, after) in updates.items():
                shard, old = shards[name], arrays.values[name]
                if self._rounds(old.dtype):
                    old = old.astype(change.dtype)
                    # Return a change, as all optimizers do; added to the parameter, it gives exactly the rounded value.
                    change = _rounded(shard, "value", old + change, count).astype(change.dtype) - old
                changes[name] = _checked(shard, change)
                declared = self.state_specs(shard.parameter)
                for kind, value in after.items():
                    new_state[kind][name] = self._to_storage_format(
                        name, kind, declared[kind], arrays.kept[kind][name], value, count
                    )
            return changes, new_state

        places = {name: partition_spec(parameter.axes, parameter.shape) for name, parameter in parameters.items()}
        state_specs = self._state_partition_specs(parameters, arrays.kept)

        def of_layers(factors: Factors) -> dict[str, PartitionSpec]:
            return {name: PartitionSpec(*places[name][: min(factors[name].ndim, 1)]) for name in places}

        read = _Arrays(places, places, state_specs, of_layers(arrays.rates), of_layers(arrays.decays))
        replicated = PartitionSpec()
        return shard_map_over_params(local, (read, replicated, replicated), (places, state_specs))(arrays, rate, count)

    def _rounds(self, dtype: Any) -> bool:
        """Return True if parameters of this dtype are rounded stochastically."""
        return self.rounding == "stochastic" and dtype == jnp.bfloat16

    def _zeros(self, spec: StateSpec) -> Any:
        """Create the initial state array."""
        if spec.moment and self.moments == "int8":
            codes = quantized_zeros(spec.shape, spec.axes, spec.signed, spec.dtype)
            return jnp.zeros(spec.shape, spec.dtype) if codes is None else codes
        return jnp.zeros(spec.shape, self.moments if spec.moment and self.moments != "same" else spec.dtype)

    def _to_storage_format(
        self, name: str, kind: str, spec: StateSpec, before: Any, value: jax.Array, count: jax.Array
    ) -> Any:
        """Convert a new state array to the storage format of the previous one."""
        shard = ParameterShard.of(Parameter(name, spec.shape, spec.dtype, spec.axes))
        if isinstance(before, QuantizedArray):
            return quantize(value, before.format, before.block, shard.random_bits(kind, count), before.dtype)
        return (_rounded(shard, kind, value, count) if before.dtype == jnp.bfloat16 else value).astype(before.dtype)

    def _check_types(self, params: Any, state: dict[str, Any]) -> None:
        """Check that `moments` and `rounding` affect at least one array.

        Raises:
            RecipeError: A setting has no effect; the message names the fix.
        """
        state_leaves = [leaf for kind, leaves in state.items() if kind != COUNT for leaf in leaves.values()]
        in_codes = any(isinstance(leaf, QuantizedArray) for leaf in state_leaves)
        if self.moments != "same" and not state_leaves:
            raise RecipeError(
                f'optimizer.moments="{self.moments}" has no effect: {type(self).__name__} with these settings has no state for a '
                f"parameter; remove optimizer.moments"
            )
        if self.moments == "int8" and not in_codes:
            raise RecipeError(
                f'optimizer.moments="int8" has no effect: no state has {LEAST:,} elements for a layer, in whole '
                f'blocks of {BLOCK}; set it to "bfloat16", or remove it'
            )
        if self.rounding == "stochastic" and not in_codes and not any(map(self._rounds, _dtypes((params, state)))):
            raise RecipeError(
                'optimizer.rounding="stochastic" has no effect: neither parameters nor the optimizer state are in bfloat16 or '
                'quantized; set optimizer.moments or task.parameter_dtype to "bfloat16", or rounding to "nearest"'
            )


def _readable(stored: Any, dtype: Any) -> jax.Array:
    return stored.dequantize(dtype) if isinstance(stored, QuantizedArray) else stored


def _dtypes(tree: Any) -> set[Any]:
    return {leaf.dtype for leaf in jax.tree.leaves(tree)}


def _rounded(shard: ParameterShard, purpose: str, x: jax.Array, count: jax.Array) -> jax.Array:
    return round_stochastically(x.astype(jnp.float32), shard.random_bits(purpose, count))


class _Arrays(NamedTuple):
    """All inputs of an update by parameter name; the state by state name first."""

    gradients: Arrays
    values: Arrays
    kept: Mapping[str, Arrays]
    rates: Factors
    decays: Factors

    def inputs_of(self, name: str, rate: jax.Array, count: jax.Array) -> UpdateInputs:
        gradient, value = self.gradients[name], self.values[name]
        dtype = accumulation_dtype(value.dtype)
        state = {kind: _readable(value, dtype) for kind, value in _select_state(self.kept, name).items()}
        return UpdateInputs(
            gradient.astype(dtype),
            value.astype(dtype),
            state,
            rate.astype(dtype) * jnp.asarray(self.rates[name], dtype),
            jnp.asarray(self.decays[name], dtype),
            count.astype(dtype),
            rate.astype(dtype),
        )


def _select_state(states: Mapping[str, Arrays], name: str) -> dict[str, Any]:
    """Select the state of one parameter, by state name."""
    return {kind: arrays[name] for kind, arrays in states.items() if name in arrays}


def _checked(shard: ParameterShard, change: jax.Array) -> jax.Array:
    """Assert that a change is sharded like its parameter, for the check of traced steps (`spmd.checking`)."""
    layout = current_layout()
    if layout is None:
        return change
    split = set(shard.split_axes(range(len(shard.dim_axes))))
    holds = {axis: (ValueState.SPLIT,) if axis in split else (ValueState.WHOLE,) for axis in layout.sizes}
    return check_sharding(change, holds, f"the update of {shard.parameter.name}")
