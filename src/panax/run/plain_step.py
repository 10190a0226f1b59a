"""A step for custom training loops: no recipe, no folder, no checkpoints; the loop is the user's."""

from collections.abc import Iterable, Mapping
from typing import Any

from ..comms import Comms
from ..core import Axes, DataChecks, Task, TrainState
from ..core.errors import DataError, RecipeError, describe_type
from ..core.params.logical import batch_row_axes
from ..data.loading.iterable import as_batch
from ..kernels import Kernels, choose_by_timing
from ..mesh import MeshShape, Placement, Rules
from ..optim import AdamW, Optimizer, RowOptimizer
from ..train import CompiledStep, Program, Scalars, StepConfig, StepPart, evaluate_sent
from ..train.compilation.mesh_requirements import mesh_requirements
from ..train.update import check_finite_update
from .tools.slow_axes import resolve_slow_axes


class PlainStep:
    """`state, metrics = step(state, batch)`, on any mesh; compiled at the first batch.

    The state is donated: the old one is gone after the call. Two steps may share parameters, one after the other
    (`with_params`): a generator's and a discriminator's, for example.

    Attributes:
        compiled: The step beneath, with its program, shardings and placement.
    """

    def __init__(self, compiled: CompiledStep):
        self.compiled = compiled
        self._unread: list[tuple[int, Scalars]] = []
        self._count = 0

    def init(self, seed: int = 0) -> TrainState:
        """Return the first state, initialized or taken from the model straight into its shards."""
        return self.compiled.init(seed)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Scalars]:
        """Take one step; returns before the devices are done.

        Args:
            batch: The whole global batch, in any form that `compile_step` accepts as its example.

        Returns:
            The next state, and scalars on the devices: `loss`, each loss and metric by name, `gradient_norm`, `learning_rate`.

        Raises:
            TrainingError: The batch has another shape than the first one.
            DataError: The previous step found its batch to be invalid, and was not applied; see `raise_faults`.
        """
        sent = self.compiled.put(self._own(batch), owned=True)
        state, scalars = self.compiled(state, sent)
        self._count += 1
        read = {
            name: x
            for name, x in scalars.items()
            if isinstance(x, DataChecks) or name in ("learning_rate", "parameter_norm")
        }
        # Those of the step before: reading this one's would wait for it.
        self.raise_faults()
        self._unread = [(self._count, read)]
        return state, {name: value for name, value in scalars.items() if not isinstance(value, DataChecks)}

    def raise_faults(self) -> None:
        """Wait for the last step, and raise if it found its batch to be invalid. The next step and `evaluate`
        do so, too.

        Raises:
            DataError: An index was out of range, or an integer too large, in the last step; it was not applied.
            TrainingError: The last update was not finite.
        """
        unread, self._unread = self._unread, []
        for number, scalars in unread:
            for value in scalars.values():
                if isinstance(value, DataChecks):
                    value.raise_if_failed(f"the batch of step {number}")
            check_finite_update(number, scalars)

    def evaluate(self, state: TrainState, batches: Iterable[Any]) -> dict[str, float]:
        """Compute losses and metrics over all `batches`, merged as sums and divided once; the state is not changed."""
        self.raise_faults()
        sent = (self.compiled.put(self._own(batch), owned=True) for batch in batches)
        return evaluate_sent(self.compiled, state, sent)

    def _own(self, batch: Any) -> Mapping[str, Any]:
        return self.compiled.program.task.convert_batch(as_batch(batch))


def compile_step(
    task: Task,
    example: Any,
    optimizer: Optimizer | None = None,
    *,
    mesh: MeshShape | None = None,
    rules: Rules | None = None,
    config: StepConfig | None = None,
    frozen: tuple[str, ...] = (),
    num_steps: int = 1000,
    axes: Mapping[str, Axes] | None = None,
    devices: Any = None,
    kernels: Kernels | None = None,
    comms: Comms | None = None,
    embedding_optimizer: RowOptimizer | None = None,
    step_parts: tuple[StepPart, ...] = (),
) -> PlainStep:
    """Compile a training step for a custom loop.

    Args:
        example: A batch in the form that the loop will use: a mapping, a tuple or a list of arrays, or one
            array.
        optimizer: By default AdamW with its default settings.
        mesh: By default one replica on every device.
        config: Micro-batches, clipping and the guard against updates that are not finite.
        frozen: Prefixes of names of parameters that are not trained.
        num_steps: Step at which the learning rate's decay ends.
        axes: The logical axes of each leaf of a batch; by default only rows are split.
        devices: JAX devices to use; None for all of them.
        kernels: Choice of kernels; by default the fastest that applies.
        comms: How gradients are reduced over the slow network; by default in float32.
        embedding_optimizer: Optimizer of tables; by default `RowWiseAdagrad` if the task has any.
        step_parts: Your own parts of the step, such as noise in the gradients.

    Raises:
        LayoutError: The task does not fit the mesh.
        DataError: The example is not a batch.
    """
    for name, value, kind in (("task", task, Task), ("optimizer", optimizer, Optimizer)):
        if not isinstance(value, kind) and not (name == "optimizer" and value is None):
            hint = Optimizer.hint_for(value) if kind is Optimizer else None
            raise RecipeError(
                f"{name} is {describe_type(value)}; expected a {kind.__name__}{f'; {hint}' if hint else ''}"
            )
    batch = as_batch(example)
    if axes is not None and axes.keys() != batch.keys():
        raise DataError(f"axes are given for {sorted(axes)}, the batch has {sorted(batch)}; make them agree")
    axes = task.convert_axes(batch_row_axes(batch) if axes is None else axes)
    batch = task.convert_batch(batch)
    choose_by_timing(devices=devices)
    rows = next(iter(batch.values())).shape[0]
    program = Program.create(
        task,
        (optimizer or AdamW()).scale_to_batch(rows),
        num_steps=num_steps,
        config=config,
        frozen=frozen,
        kernels=kernels,
        comms=comms,
        embedding_optimizer=embedding_optimizer,
        parts=step_parts,
    )
    placement = Placement.create(mesh or MeshShape(), rules or Rules(), devices, mesh_requirements(program))
    program = resolve_slow_axes(program, placement, None)
    return PlainStep(CompiledStep(program, placement, axes))
