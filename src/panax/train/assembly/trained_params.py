"""The parameters of a task that train, and the optimizer for them."""

import dataclasses
from typing import Any

import jax

from ...core import Axes, Task, pair_axes
from ...core.params.selection import LayerParameters
from ...optim import Optimizer, RowOptimizer, Transformation
from ..frozen_params import Rows, freeze
from ..tables import TableUpdates


@dataclasses.dataclass(frozen=True)
class TrainedParams:
    """Abstract parameters of a task, and which of them train.

    Attributes:
        params: Shapes and dtypes of the parameters.
        model_state: Shapes and dtypes of the model's state.
        axes: Logical axes of the parameters.
        layers: Index of the stacked layers' parameters.
        trainable: Bools with the structure of the parameters: True where gradients exist.
        frozen_rows: For stacked parameters that train, the frozen layers.
        tables: The tables among the parameters; None if there are none.
    """

    task: Task
    params: Any
    model_state: Any
    axes: Any
    layers: LayerParameters
    trainable: Any
    frozen_rows: Rows | None
    tables: TableUpdates | None

    @classmethod
    def of(
        cls, task: Task, frozen: tuple[str, ...], embedding_optimizer: RowOptimizer | None, num_updates: int
    ) -> "TrainedParams":
        """Find the parameters of a task that train; arguments as in `Program.create`.

        Raises:
            RecipeError: A prefix in `frozen` matches no parameter, or there is no table for `embedding_optimizer`.
        """
        params, model_state = jax.eval_shape(task.init, jax.random.key(0))
        layers = task.layer_parameters(params)
        trainable, frozen_rows = freeze(params, frozen, task.frozen_parameters, layers)
        tables = TableUpdates.of(task, params, trainable, embedding_optimizer, num_updates)
        return cls(task, params, model_state, task.parameter_axes(params), layers, trainable, frozen_rows, tables)

    @property
    def dense(self) -> Any:
        """Bools with the structure of the parameters: True for trained parameters that are not tables."""
        return self.trainable if self.tables is None else self.tables.dense_mask(self.trainable)

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], Axes]]:
        """Name of each trained parameter that is not a table, to its shape and logical axes."""
        leaves = zip(pair_axes(self.params, self.axes), jax.tree.leaves(self.dense))
        return {name: (leaf.shape, axes) for (name, leaf, axes), keep in leaves if keep}

    def build_optimizer(self, optimizer: Optimizer, num_updates: int) -> Transformation:
        """Return the optimizer for these parameters."""
        axes = {name: axes for name, (_, axes) in self.shapes.items()}
        semantic = pair_axes(self.params, self.task.semantic_axes(self.params))
        meanings = {name: tuple(each) for name, _, each in semantic if name in axes}
        if meanings == {name: tuple(each) for name, each in axes.items()}:
            return optimizer.build(axes, num_updates, self.layers)
        return optimizer.build(axes, num_updates, self.layers, meanings)
