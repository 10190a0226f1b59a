"""`CollectingTask`: a task that makes its own data with its own parameters, inside the compiled step."""

import abc
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from .errors import RecipeError
from .leaf_ranges import NUMBER
from .measures import Metrics
from .protocols import Batch, ModelState, Params
from .task import Task


class Collected(NamedTuple):
    """What one collection gives.

    Attributes:
        experience: What the batches of the updates are drawn from, any pytree. It is constant while updates are made, and
            dropped after them unless it is part of `kept` too.
        kept: The part of the model state that updates neither read nor change, such as environments and replay buffers: it does
            not travel through them.
        state: The rest of the model state, which `loss` sees and may change.
        metrics: Of the collection. A `DataChecks` that found something keeps all updates from being made, and the run stops.
    """

    experience: Any
    kept: Mapping[str, Any]
    state: Mapping[str, Any]
    metrics: Metrics


class CollectingTask(Task):
    """A task whose step collects data, and then makes several updates from it. How reinforcement learning trains.

    One step is one compiled call: `collections` times `collect`, each followed by `updates` updates by the experiment's
    optimizer. An update differentiates `loss` of what `minibatch` gives, with everything that an update has elsewhere:
    clipping, the guard, frozen parameters, averages. So an agent says how it acts and what it minimises, and has no loop of its
    own.

    What is carried from step to step (environments, running statistics, replay buffers, target networks) is model state, a
    mapping at its top: it lies on the mesh by `state_axes`, is saved in checkpoints, and resumes. Leaves with one entry for each
    environment have the logical axis `environment` first.

    The batch that the step is given has the leaf `row` alone: the number of each environment among all of them, laid out over the
    mesh as rows of any batch are. Random bits that are drawn from `key` and this number are the same on every mesh, and after
    every interruption.

    The optimizer's schedule counts updates, not steps: a run has `num_steps * collections * updates` of them. `TrainState.step`
    counts steps; in `loss` the key is another one for each update.
    """

    mesh_axes = frozenset({"replica", "fsdp", "expert"})

    @property
    @abc.abstractmethod
    def rows(self) -> int:
        """How many environments there are, all devices together."""

    @property
    @abc.abstractmethod
    def evaluation_rows(self) -> int:
        """How many rows an evaluation has: `loss` outside of training sees them as the leaf `row`."""

    @property
    def collections(self) -> int:
        """Collections in one step."""
        return 1

    @property
    @abc.abstractmethod
    def updates(self) -> int:
        """Updates after each collection."""

    @property
    def stops_early(self) -> bool:
        """Whether `goes_on` may be false."""
        return False

    @property
    def updates_per_step(self) -> int:
        return self.collections * self.updates

    @abc.abstractmethod
    def collect(self, params: Params, state: ModelState, batch: Batch, key: jax.Array) -> Collected:
        """Act, and say what was seen.

        Args:
            batch: Its leaf `row` is (environment,).
            key: Another one for each collection of a run.
        """

    @abc.abstractmethod
    def minibatch(self, experience: Any, state: ModelState, index: jax.Array, key: jax.Array) -> Batch:
        """The batch of update number `index` after a collection.

        Args:
            index: From 0 to `updates` - 1.
            key: The collection's, the same for all of its updates.
        """

    def goes_on(self, scalars: Mapping[str, Any]) -> jax.Array:
        """Whether an update with these losses and metrics is made; if not, none is made after it before the next collection."""
        raise NotImplementedError

    def updated(self, params: Params, state: ModelState) -> ModelState:
        """The state after an update that led to these parameters; where target networks follow."""
        return state

    def given(self, shardings: tuple[Any, Any]) -> tuple[Params, ModelState] | None:
        """None: `init` draws what a run begins with. What it keeps is then known to fit."""
        self.check_memory(shardings[1])
        return None

    def check_memory(self, shardings: Any, runs: tuple[int, ...] = ()) -> None:
        """Raise an error where what it keeps does not fit its devices' memory; called before the first state is made.

        Args:
            shardings: Of the model state, one for each leaf.
            runs: The sizes of further axes before a leaf's own, where several runs lie side by side.

        Raises:
            RecipeError: It does not fit; says by how much, and what to lower.
        """

    def check_rows(self, batch: Batch) -> None:
        """Raise an error where the data is not this task's own.

        Raises:
            RecipeError: It has another number of rows.
        """
        if batch[NUMBER].shape != (self.rows,):
            raise RecipeError(
                f"{type(self).__name__} has {self.rows} environments, and the batch has {batch[NUMBER].shape[0]} rows; leave the "
                f"experiment's data out: this task makes its own"
            )
