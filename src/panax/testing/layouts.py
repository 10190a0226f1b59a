"""The contract of layouts: on every mesh that it supports, a task trains as on one device."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..core import Axes, Task, named_leaves, pair_axes
from ..core.params.logical import batch_row_axes, is_table
from ..mesh import MESH_AXES, MeshShape, Placement, Rules
from ..mesh.legality import find_problem
from ..optim import Optax, RowSgd, Schedule
from ..train import CompiledStep, Program, StepConfig
from ..train.compilation.mesh_requirements import mesh_requirements

RATE, STEPS = 0.05, 3
ROUNDINGS = 8.0
"""Maximum number of roundings of a term on its way forward and back, in units of one sum's error: see
`_tolerance`."""


@dataclasses.dataclass(frozen=True)
class TaskReport:
    """Result of `check_task`.

    Attributes:
        tolerance: Relative tolerance of a tensor's norm and of a loss.
        compared: Layouts that trained as one device did.
        left_out: Layouts that don't fit the task or the batch, with the reason.
    """

    tolerance: float
    compared: tuple[str, ...]
    left_out: Mapping[str, str]


class TrainedModel(NamedTuple):
    """The parameters before and after a few steps, the first gradient, and the losses."""

    first: dict[str, np.ndarray]
    gradient: dict[str, np.ndarray]
    last: dict[str, np.ndarray]
    losses: list[float]


def check_task(
    task: Task,
    batch: Mapping[str, Any],
    *,
    axes: Mapping[str, Axes] | None = None,
    layouts: Sequence[Mapping[str, int]] | None = None,
    rules: Rules | None = None,
    tolerance: float | None = None,
) -> TaskReport:
    """Train a task on several layouts, and compare each with one device.

    On each, the initial parameters are bitwise those of one device, the first gradient and the losses and
    parameters of a few steps are equal up to rounding, and the second step compiles nothing; no sum over
    devices is missing, if the task names its axes. Needs several devices:
    `XLA_FLAGS=--xla_force_host_platform_device_count=8` simulates them on CPU.

    Args:
        batch: One global batch, in the form in which a source returns it. Its rows must divide over the
            layouts.
        axes: The logical axes of each leaf of the batch; by default the task's, and of other leaves only rows
            are sharded.
        layouts: Mesh axis to size, for each layout; by default every axis that the task supports with 2
            devices, and most axes together.
        tolerance: By default the rounding of sums over the batch, in the dtype that the task computes in.

    Raises:
        AssertionError: A layout trains differently, and the message has the tensor and the distance; or no
            layout fits.
        LayoutError: A sum over devices is missing.
    """
    comparison = LayoutComparison(task, batch, axes=axes, rules=rules, tolerance=tolerance)
    devices = len(comparison.devices)
    compared: list[str] = []
    left_out: dict[str, str] = {}
    for sizes in _layouts(task, devices) if layouts is None else layouts:
        reason = comparison.explain_unfit(sizes)
        if reason is not None:
            left_out[layout_name(sizes)] = reason
            continue
        comparison.compare(sizes)
        compared.append(layout_name(sizes))
    assert compared, f"no layout fits the task and the batch on {devices} devices, so nothing was compared: {left_out}"
    return TaskReport(comparison.tolerance, tuple(compared), left_out)


class LayoutComparison:
    """Comparison of the training of a task on one device with that on several, a layout at a time.

    Attributes:
        tolerance: Relative tolerance of a tensor's norm and of a loss.
    """

    def __init__(
        self,
        task: Task,
        batch: Mapping[str, Any],
        *,
        axes: Mapping[str, Axes] | None = None,
        rules: Rules | None = None,
        tolerance: float | None = None,
        devices: Sequence[Any] | None = None,
    ) -> None:
        """Prepare the comparison. Arguments as in `check_task`; `devices` are all of JAX's by default."""
        self._task, self._rules = task, rules
        self._batch = {name: np.asarray(leaf) for name, leaf in batch.items()}
        self._axes = task.leaf_axes(axes or batch_row_axes(self._batch))
        self.tolerance = _tolerance(task, self._batch, self._axes) if tolerance is None else tolerance
        self.devices = tuple(jax.devices() if devices is None else devices)
        self._alone: dict[int, TrainedModel] = {}

    def train_on_one_device(self, micro_batches: int) -> "TrainedModel":
        """Train for a few steps on one device, with this number of micro-batches."""
        if micro_batches not in self._alone:
            self._alone[micro_batches] = _trained(self._compiled({}, None, micro_batches), self._batch)
        return self._alone[micro_batches]

    def explain_unfit(self, sizes: Mapping[str, int]) -> str | None:
        """Return the reason, as far as it is known without tracing, why a layout does not fit; None if it
        fits."""
        return _unfit(self._task, self._batch, self._axes, sizes, self._rules, len(self.devices))

    def compare(self, sizes: Mapping[str, int]) -> None:
        """Train on a layout that fits.

        Raises:
            AssertionError: The layout trains differently from one device; the message has the tensor and the
                distance.
            LayoutError: A sum over devices is missing.
        """
        count = 2 if sizes.get("stage", 1) > 1 else 1
        trained = _trained(self._compiled(sizes, self._rules, count), self._batch)
        _compare(layout_name(sizes), trained, self.train_on_one_device(count), self.tolerance)

    def _compiled(self, sizes: Mapping[str, int], rules: Rules | None, micro_batches: int) -> CompiledStep:
        shape = MeshShape(**{axis: sizes.get(axis, 1) for axis in MESH_AXES})  # pyright: ignore[reportArgumentType]
        placement = Placement.create(shape, rules, devices=self.devices[: math.prod(sizes.values())])
        return CompiledStep(_program(self._task, micro_batches), placement, self._axes)


def layout_name(sizes: Mapping[str, int]) -> str:
    """Format the mesh axes of a layout with their sizes; empty for one device."""
    return " · ".join(f"{axis}={size}" for axis, size in sizes.items())


def _layouts(task: Task, devices: int) -> Iterator[dict[str, int]]:
    supported = [axis for axis in MESH_AXES if axis in task.mesh_axes]
    yield from ({axis: 2} for axis in supported)
    together = [axis for axis in ("fsdp", "tensor", "context", "expert", "replica") if axis in supported]
    together = together[: int(math.log2(devices))]
    if len(together) > 1:
        yield dict.fromkeys(together, 2)


def _unfit(
    task: Task,
    batch: Mapping[str, np.ndarray],
    axes: Mapping[str, Axes],
    sizes: Mapping[str, int],
    rules: Rules | None,
    devices: int,
) -> str | None:
    """Return the reason, as far as it is known without tracing, why a layout does not fit."""
    count = math.prod(sizes.values())
    if count > devices:
        return f"it takes {count} devices, and there {'is' if devices == 1 else 'are'} {devices}"
    micro_batches = 2 if sizes.get("stage", 1) > 1 else 1
    leaves = tuple((f"batch leaf {name!r}", axes[name], leaf.shape) for name, leaf in batch.items())
    needs = mesh_requirements(_program(task, micro_batches))
    return find_problem(
        dataclasses.replace(needs, batch=leaves), rules or Rules(), dict.fromkeys(MESH_AXES, 1) | dict(sizes)
    )


def _program(task: Task, micro_batches: int) -> Program:
    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(lambda g: -RATE * g, updates), {"gradient": updates}

    keeping = optax.GradientTransformation(lambda params: {"gradient": jax.tree.map(jnp.zeros_like, params)}, update)
    config = StepConfig(clip_norm=None, micro_batches=micro_batches)
    # Linear in a gradient, like the other: differences by rounding remain of that size.
    rows = RowSgd(schedule=Schedule(peak=RATE, decay="constant")) if _has_tables(task) else None
    optimizer = Optax(transformation=keeping)
    return Program.create(task, optimizer, num_steps=STEPS, config=config, embedding_optimizer=rows)


def _has_tables(task: Task) -> bool:
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    return any(is_table(axes) for _, _, axes in pair_axes(params, task.parameter_axes(params)))


def _trained(step: CompiledStep, batch: Mapping[str, np.ndarray]) -> TrainedModel:
    state, losses = step.init(0), []
    first, gradient, seconds = _host(state.params), {}, 0.0
    for number in range(STEPS):
        state, scalars = step(state, step.put(batch))
        losses.append(float(scalars["loss"]))
        if number == 0:
            gradient, seconds = _host(state.optimizer_state["gradient"]), step.compile_seconds
    assert step.compile_seconds == seconds, "the second step compiled again; the state's shapes or shardings change"
    return TrainedModel(first, gradient, _host(state.params), losses)


def _host(tree: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}


def _compare(layout: str, many: TrainedModel, one: TrainedModel, tolerance: float) -> None:
    for name, leaf in one.first.items():
        assert np.array_equal(many.first[name], leaf), (
            f"{layout}: the first {name} depends on the mesh; draw it by its name"
        )
    _assert_close(f"{layout}: the gradient", many.gradient, one.gradient, tolerance)
    for number, (loss, expected) in enumerate(zip(many.losses, one.losses)):
        assert abs(loss - expected) <= tolerance * (number + 1) * abs(expected), (
            f"{layout}: the loss of step {number} is {loss:.9g}, on one device {expected:.9g}; expected them within "
            f"{tolerance:.1g}. Look for a sum over devices that is missing, or made twice"
        )
    _assert_close(f"{layout}: after {STEPS} steps", many.last, one.last, tolerance * STEPS)


def _assert_close(label: str, actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    """Compare tensors by their norms. A tensor that is only rounding error is compared relative to all tensors
    together, from which the error results."""
    norm: Callable[[Any], float] = lambda leaf: float(np.linalg.norm(leaf.astype(np.float64)))  # noqa: E731
    noise = 2.0**-24 * math.sqrt(sum(norm(leaf) ** 2 for leaf in expected.values()))
    for name, leaf in expected.items():
        distance, allowed = norm(actual[name].astype(np.float64) - leaf), tolerance * norm(leaf) + noise
        assert distance <= allowed, (
            f"{label}, {name} is {distance:.3g} from one device's, which has a norm of {norm(leaf):.3g}; expected at most "
            f"{allowed:.3g}. Look for a sum over devices that is missing, or made twice, in code that reads it"
        )


def _tolerance(task: Task, batch: Mapping[str, np.ndarray], axes: Mapping[str, Axes]) -> float:
    """Return the tolerance for sums of the same terms in another order: each rounds by a unit, and the errors
    of n terms grow like sqrt(n)."""
    terms = max(
        math.prod(size for size, axis in zip(leaf.shape, axes[name]) if axis in ("batch", "seq"))
        for name, leaf in batch.items()
    )
    unit = float(jnp.finfo(task.weight_dtype).eps) / 2
    return ROUNDINGS * max(unit, 2.0**-24) * math.sqrt(terms)
