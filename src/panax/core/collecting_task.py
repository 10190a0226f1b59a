"""`CollectingTask`: a task that generates its own data with its parameters, inside the compiled step."""

import abc
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from .batch_checks import ROW_LEAF
from .errors import RecipeError
from .measures import Metrics
from .protocols import Batch, ModelState, Params
from .task import Task


class CollectionResult(NamedTuple):
    """Result of one rollout (`collect`).

    Attributes:
        experience: The data from which update batches are drawn; any pytree. It is constant during the
            updates, and dropped after them unless it is also part of `kept`.
        kept: The part of the model state that updates neither read nor change, such as environments and
            replay buffers; it is not carried through them.
        state: The rest of the model state, which `loss` reads and may change.
        metrics: Metrics of the collection. A failed `DataChecks` prevents all updates, and the run stops.
    """

    experience: Any
    kept: Mapping[str, Any]
    state: Mapping[str, Any]
    metrics: Metrics


class CollectingTask(Task):
    """A task with steps that collect data and then make several updates from it, as in reinforcement
    learning.

    One step is one compiled call: `rollouts_per_step` times `collect`, each followed by `updates` updates by the
    experiment's optimizer. An update differentiates the `loss` of a `minibatch`, with the features of all updates:
    clipping, the guard, frozen parameters, averages. An agent therefore defines how it acts and what it
    minimizes, and needs no loop.

    Everything carried from step to step (environments, running statistics, replay buffers, target networks)
    is model state, a mapping at the top level: it is sharded by `state_axes`, saved in checkpoints and
    restored. Leaves with one entry per environment have `environment` as their first logical axis.

    The batch passed to the step has a single leaf, `row`: the global index of each environment, sharded like
    the rows of any batch. Random bits derived from `key` and this index are the same on every mesh and after
    every interruption.

    The optimizer's schedule counts updates, not steps: a run has `num_steps * rollouts_per_step * updates` of them.
    `TrainState.step` counts steps; `loss` gets a different key for each update.
    """

    mesh_axes = frozenset({"replica", "fsdp", "expert"})

    @property
    @abc.abstractmethod
    def rows(self) -> int:
        """Return the number of environments over all devices."""

    @property
    @abc.abstractmethod
    def evaluation_rows(self) -> int:
        """Return the number of rows of an evaluation: `loss` outside of training receives them as the leaf
        `row`."""

    @property
    def rollouts_per_step(self) -> int:
        """Return the number of rollouts per step."""
        return 1

    @property
    @abc.abstractmethod
    def updates(self) -> int:
        """Return the number of updates after each collection."""

    @property
    def may_stop_early(self) -> bool:
        """Return True if updates may stop early within a step, for example at a KL target (`should_continue`)."""
        return False

    @property
    def updates_per_step(self) -> int:
        return self.rollouts_per_step * self.updates

    @abc.abstractmethod
    def collect(self, params: Params, state: ModelState, batch: Batch, key: jax.Array) -> CollectionResult:
        """Act in the environments and return the collected experience.

        Args:
            batch: Its leaf `row` has the shape (environment,).
            key: Different for each collection of a run.
        """

    @abc.abstractmethod
    def minibatch(self, experience: Any, state: ModelState, index: jax.Array, key: jax.Array) -> Batch:
        """Return the batch of update `index` after a collection.

        Args:
            index: From 0 to `updates` - 1.
            key: The collection's key, the same for all of its updates.
        """

    def should_continue(self, scalars: Mapping[str, Any]) -> jax.Array:
        """Return True to apply an update with these losses and metrics; False ends the updates until the next
        collection.
        """
        raise NotImplementedError

    def update_state(self, params: Params, state: ModelState) -> ModelState:
        """Return the state after an update to these parameters, for example with target networks moved toward
        them.
        """
        return state

    def load_initial(self, shardings: tuple[Any, Any]) -> tuple[Params, ModelState] | None:
        """Return None, since `init` draws the initial state; check that the state fits in memory."""
        self.check_memory(shardings[1])
        return None

    def check_memory(self, shardings: Any, runs: tuple[int, ...] = ()) -> None:
        """Check that the model state fits in device memory; called before the first state is created.

        Args:
            shardings: Shardings of the model state, one per leaf.
            runs: Sizes of additional leading axes if several runs are stacked.

        Raises:
            RecipeError: The state does not fit; the message names the excess and the setting to lower.
        """

    def check_rows(self, batch: Batch) -> None:
        """Check that the batch has one row per environment.

        Raises:
            RecipeError: The batch has a different number of rows.
        """
        if batch[ROW_LEAF].shape != (self.rows,):
            raise RecipeError(
                f"{type(self).__name__} has {self.rows} environments, and the batch has {batch[ROW_LEAF].shape[0]} "
                "rows; leave the "
                f"experiment's data out: this task makes its own"
            )
