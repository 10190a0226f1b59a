"""Parts of a step that Panax doesn't have: each stands for a kind of feature."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from panax.core import named_leaves
from panax.train import DenseUpdate, StepFacts, StepInputs, StepOutcome, StepPart


@dataclasses.dataclass(frozen=True)
class GradientNoise(StepPart):
    """Noise in the gradients before they are clipped (arXiv:1511.06807), its variance falling with the steps."""

    scale: float = 0.1

    name: ClassVar[str] = "gradient_noise"
    before: ClassVar[str] = "clip_norm"

    def update(self, update: DenseUpdate, facts: StepFacts) -> DenseUpdate:
        std = self.scale / (1.0 + facts.state.step.astype(jnp.float32)) ** 0.275

        def noisy(number: int, g: jax.Array) -> jax.Array:
            return g + std * jax.random.normal(jax.random.fold_in(facts.state.step_key, number), g.shape, g.dtype)

        leaves, structure = jax.tree.flatten(update.gradients)
        return update._replace(gradients=structure.unflatten([noisy(i, g) for i, g in enumerate(leaves)]))


class MeanNorm(StepPart):
    """Reports a running mean of the gradient's norm over applied updates."""

    name: ClassVar[str] = "mean_norm"

    def init_state(self, params: Any) -> jax.Array:
        return jnp.float32(0.0)

    def state_axes(self, axes: Any) -> tuple[()]:
        return ()

    def update(self, update: DenseUpdate, facts: StepFacts) -> DenseUpdate:
        assert update.parts is not None
        return update.with_part_state(self, 0.9 * update.parts[self.name] + 0.1 * facts.norm)

    def after(self, outcome: StepOutcome, facts: StepFacts) -> StepOutcome:
        assert outcome.state.parts is not None
        return outcome.report(mean_norm=outcome.state.parts[self.name])


@dataclasses.dataclass(frozen=True)
class LowRankView(StepPart):
    """A correction of low rank with state of its own, trained by SGD at `rate`; the parameters themselves rest."""

    leaf: str
    rank: int = 2
    rate: float = 0.5

    name: ClassVar[str] = "low_rank"

    def init_state(self, params: Any) -> dict[str, jax.Array]:
        rows, columns = named_leaves(params)[self.leaf].shape
        a = jax.random.normal(jax.random.key(3), (rows, self.rank)) / rows**0.5
        return {"a": a, "b": jnp.zeros((self.rank, columns))}

    def state_axes(self, axes: Any) -> dict[str, Any]:
        return {"a": ("embed", None), "b": (None, "ffn")}

    def view(self, inputs: StepInputs) -> StepInputs:
        assert inputs.state.parts is not None
        state = inputs.state.parts[self.name]
        return inputs._replace(params={**inputs.params, self.leaf: inputs.params[self.leaf] + state["a"] @ state["b"]})

    def update(self, update: DenseUpdate, facts: StepFacts) -> DenseUpdate:
        assert update.parts is not None
        state, gradient = update.parts[self.name], update.gradients[self.leaf]
        moved = {
            "a": state["a"] - self.rate * gradient @ state["b"].T,
            "b": state["b"] - self.rate * state["a"].T @ gradient,
        }
        resting = jax.tree.map(jnp.zeros_like, update.gradients)
        return update._replace(gradients=resting).with_part_state(self, moved)


@dataclasses.dataclass(frozen=True)
class Teacher(StepPart):
    """A slow copy of the parameters, with its predictions as targets in the batch; it moves also when an update is skipped."""

    predict: Any
    decay: float = 0.9

    name: ClassVar[str] = "teacher"

    def init_state(self, params: Any) -> Any:
        return jax.tree.map(lambda p: 0.5 * p, params)

    def state_axes(self, axes: Any) -> Any:
        return axes

    def view(self, inputs: StepInputs) -> StepInputs:
        assert inputs.state.parts is not None
        targets = self.predict(inputs.state.parts[self.name], inputs.batch["x"])
        axes = {**(inputs.axes or {}), "targets": ("batch",) + (None,) * (targets.ndim - 1)}
        return inputs._replace(batch={**inputs.batch, "targets": targets}, axes=axes)

    def after(self, outcome: StepOutcome, facts: StepFacts) -> StepOutcome:
        assert outcome.state.parts is not None
        slow = outcome.state.parts[self.name]
        moved = jax.tree.map(lambda s, p: self.decay * s + (1 - self.decay) * p, slow, outcome.trained)
        state = dataclasses.replace(outcome.state, parts={**outcome.state.parts, self.name: moved})
        return outcome._replace(state=state).report(teacher_distance=jnp.sqrt(jnp.sum(jnp.square(moved["w"]))))


@dataclasses.dataclass(frozen=True)
class ReportedTeacher(StepPart):
    """A slow copy of the parameters that only reports its distance from zero."""

    name: ClassVar[str] = "teacher"

    def init_state(self, params: Any) -> Any:
        return jax.tree.map(lambda p: 0.5 * p, params)

    def state_axes(self, axes: Any) -> Any:
        return axes

    def update(self, update: DenseUpdate, facts: StepFacts) -> DenseUpdate:
        assert update.parts is not None
        slow = jax.tree.map(lambda s, p: 0.9 * s + 0.1 * p, update.parts[self.name], update.params)
        return update.with_part_state(self, slow)

    def after(self, outcome: StepOutcome, facts: StepFacts) -> StepOutcome:
        assert outcome.state.parts is not None
        squares = jax.tree.leaves(jax.tree.map(lambda s: jnp.sum(s * s), outcome.state.parts[self.name]))
        return outcome.report(teacher_norm=jnp.sqrt(sum(squares, jnp.float32(0.0))))


def float8_values(w: jax.Array, largest: jax.Array) -> jax.Array:
    """Round to float8 with a scale that is a power of two, by which a division is exact."""
    scale = jnp.ldexp(jnp.float32(1.0), jnp.ceil(jnp.log2(largest / 448.0)).astype(jnp.int32))
    return (w / scale).astype(jnp.float8_e4m3fn).astype(w.dtype) * scale


@dataclasses.dataclass(frozen=True)
class DelayedScaling(StepPart):
    """Weights as the loss sees them are rounded to float8, with the scale of the largest value of the last steps."""

    steps: int = 4

    name: ClassVar[str] = "float8"
    before: ClassVar[str] = "average"

    def init_state(self, params: Any) -> dict[str, jax.Array]:
        return {name: jnp.full(self.steps, jnp.abs(p).max()) for name, p in named_leaves(params).items()}

    def state_axes(self, axes: Any) -> dict[str, Any]:
        return dict.fromkeys(axes, (None,))

    def view(self, inputs: StepInputs) -> StepInputs:
        assert inputs.state.parts is not None
        state = inputs.state.parts[self.name]

        seen = {name: float8_values(w, state[name].max()) for name, w in inputs.params.items()}
        return inputs._replace(params=seen)

    def update(self, update: DenseUpdate, facts: StepFacts) -> DenseUpdate:
        assert update.parts is not None
        history = update.parts[self.name]
        newest = {
            name: jnp.concatenate([history[name][1:], jnp.abs(w).max()[None]]) for name, w in update.params.items()
        }
        return update.with_part_state(self, newest)
