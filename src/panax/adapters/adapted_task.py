"""`AdaptedTask`: another library's model as a `Task`, built from the few functions that differ."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from ..core import Axes, Batch, Evaluation, Task, TrainState, named_leaves
from ..core.errors import RecipeError
from ..core.task import Gradients
from ..spmd import accumulate_grads
from .layouts import Kind, automatic_axes, infer_meaning_axes
from .losses import read_loss
from .placement import device_put_tree, zeros_tree

Params = Any
State = Any
EvaluateFn = Callable[[Params, State, Batch, jax.Array, bool], tuple[Any, State]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """Another library's model as pure functions. Parameters and state are any pytrees of arrays.

    Attributes:
        name: Default name of its runs.
        evaluate: `(params, state, batch, key, train) -> (returned, state)`: the value of the user's loss for
            a batch, in any form that `read_loss` accepts, and the state afterwards.
        rebuild: `(params, state) -> model`: converts NumPy arrays back to the library's own form.
        create: `key -> (params, state)`, run inside a jitted function; None if `initial` is set.
        initial: Parameters and state as host arrays, if the model brings its weights.
        axes: Logical axes by parameter name, if the model names them.
        kind_of: Parameter name to its kind, for automatic layouts.
        frozen: Names of the parameters that the model holds fixed.
        notes: Notes for the user about how the model was adapted.
        one_pass: Why a batch must be one forward and backward pass; None if it may be split into
            micro-batches.
        compute_dtype: The dtype of the model's matmuls; in float16 its loss is scaled.
        sums: True if the loss is a sum over the batch's rows, which micro-batches add up, and not a mean.
    """

    name: str
    evaluate: EvaluateFn
    rebuild: Callable[[Params, State], Any]
    create: Callable[[jax.Array], tuple[Params, State]] | None = None
    initial: tuple[Params, State] | None = None
    axes: Mapping[str, Axes] = dataclasses.field(default_factory=dict)
    kind_of: Callable[[str], Kind | None] = lambda path: None
    frozen: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    one_pass: str | None = None
    compute_dtype: str = "float32"
    sums: bool = False

    def __post_init__(self) -> None:
        assert (self.create is None) != (self.initial is None)


class AdaptedTask(Task):
    """A model of another library, trained in the same way as a built-in model.

    The model is written for global arrays. XLA partitions it over replica, fsdp, tensor and expert; the expert axis
    also shards rows and stored weights.

    Attributes:
        name: The model's name, in lower case.
        notes: Notes about how the model was adapted.
    """

    mesh_axes = frozenset({"replica", "fsdp", "expert", "tensor"})

    _parts = 1
    """Number of micro-batches over which a loss that is a sum is accumulated."""

    def __init__(self, model: Model, sharding: Mapping[str, Axes] | None = None):
        """
        Args:
            sharding: Patterns of parameter names (`*` matches any text) to logical axes,
                instead of those that the model names or that follow from its shapes.

        Raises:
            RecipeError: A pattern matches no parameter or does not fit the one it matches, or there is no
                parameter.
        """
        self.model = model
        self.name = model.name.lower()
        self.compute_dtype = model.compute_dtype
        self.notes = model.notes
        self.frozen_parameters = tuple(model.frozen)
        params, _ = jax.eval_shape(self.init, jax.random.key(0))
        shapes = {name: tuple(leaf.shape) for name, leaf in named_leaves(params).items()}
        if not shapes:
            raise RecipeError(f"{model.name} has no parameters; there is nothing to train")
        self._axes = automatic_axes(shapes, model.kind_of, model.axes, sharding or {})
        self._meanings = {
            path: infer_meaning_axes(path, shape, model.kind_of(path), model.axes.get(path))
            for path, shape in shapes.items()
        }

    @property
    def scales_loss(self) -> bool:
        return self.compute_dtype == "float16"

    def init(self, key: jax.Array) -> tuple[Params, State]:
        if self.model.initial is not None:
            return zeros_tree(self.model.initial)
        assert self.model.create is not None
        with use_standard_promotion():
            return self.model.create(key)

    def load_initial(self, shardings: tuple[Any, Any]) -> tuple[Params, State] | None:
        return None if self.model.initial is None else device_put_tree(self.model.initial, shardings)

    def loss(self, params: Params, state: State, batch: Batch, key: jax.Array, train: bool) -> Evaluation:
        leaves = {name: leaf for name, leaf in batch.items() if name != "row"}
        rows = next(iter(leaves.values())).shape[0]
        if "row" in batch:
            key = jax.random.fold_in(key, batch["row"][0])
        with use_standard_promotion():
            returned, after = self.model.evaluate(params, state, leaves, key, train)
            losses, metrics = read_loss(returned, rows)
        if self._parts > 1:
            # The weights add up to the whole batch's rows, over which such a loss is not a mean.
            losses = {name: dataclasses.replace(each, sum=each.sum * self._parts) for name, each in losses.items()}
        if not train:
            return Evaluation(losses, state, metrics)
        specs_before, specs_after = (
            {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in named_leaves(tree).items()}
            for tree in (state, after)
        )
        if specs_before != specs_after:
            changed = sorted(
                name for name in {*specs_before, *specs_after} if specs_before.get(name) != specs_after.get(name)
            )
            changes = ", ".join(
                f"{name} from {specs_before.get(name, 'nothing')} to {specs_after.get(name, 'nothing')}"
                for name in changed
            )
            raise RecipeError(
                f"{self.model.name}: the loss changes the structure of the model's state, {changes}; create all of it "
                f"at initialization, and keep its shapes and dtypes"
            )
        return Evaluation(losses, after, metrics)

    def gradients(
        self, params: Params, state: State, micro_batches: Batch, key: jax.Array, trainable: Any
    ) -> Gradients:
        count = jax.tree.leaves(micro_batches)[0].shape[0]
        if self.model.one_pass is not None and count > 1:
            raise RecipeError(f"step.micro_batches={count}: {self.model.one_pass}; set step.micro_batches=1")
        task = self
        if self.model.sums and count > 1:
            task = copy.copy(self)
            task._parts = count
        return accumulate_grads(task, params, state, micro_batches, key, trainable)

    def parameter_axes(self, params: Params) -> Any:
        return jax.tree.structure(params).unflatten([self._axes[name] for name in named_leaves(params)])

    def semantic_axes(self, params: Params) -> Any:
        return jax.tree.structure(params).unflatten([self._meanings[name] for name in named_leaves(params)])

    def trained(self, state: TrainState) -> Any:
        """Return the model in its own library's form, with the weights (and statistics) of `state`.

        If a run averages its parameters (`step.ema_decay`, `ScheduleFreeAdamW`), the averages are used, as in
        evaluations, exports and `init="checkpoint:..."`.
        """
        params, model_state = jax.device_get((state.eval_params, state.model_state))
        return self.model.rebuild(params, model_state)


@contextlib.contextmanager
def use_standard_promotion() -> Iterator[None]:
    """Use the promotion rules of other libraries inside the context, even if stricter ones are set."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
