"""`task`: an unmodified `torch.nn.Module` and its loss as a task that Panax trains."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from ...core import Axes, Batch, DataChecks, is_debugging
from ...core.errors import RecipeError, describe_type, suggest_name
from ...kernels.compute_dtype import AUTO, resolve_dtype
from ..adapted_task import AdaptedTask, Model
from .gradient_check import check_gradients as check_against_torch
from .gradient_check import explain_too_large
from .kinds import classify_parameters
from .lowering import DTYPES
from .objective import Form, Objective, is_criterion
from .state.initialization import make_initializer
from .state.module_snapshot import preserve_generators, restore_after, swap_tensors
from .state.outside import refuse_changed
from .state.python_state import PythonState
from .state.random_ops import ReplayDrawsMode
from .state.weights import TensorArray, find_tensor_slots, find_unused_names, host_arrays, write_back
from .tracing.aten_trace import set_mode, trace
from .tracing.criteria import is_sum
from .tracing.graph import TracedProgram, to_jax_function
from .tracing.hooks import find_hooked_parameters
from .tracing.values import as_numpy

AUTOCAST = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@preserve_generators()
def task(
    module: Any,
    loss: Callable[..., Any] | None = None,
    example: Any = None,
    *,
    sharding: Mapping[str, Axes] | None = None,
    compute_dtype: str = "float32",
    weights: str | None = None,
    initialize: Callable[[Any], Any] | None = None,
    check: bool = True,
) -> AdaptedTask:
    """Adapt a PyTorch module, unchanged, as a task.

    It is traced forward and backward by PyTorch's own autograd, for the shapes of each batch; a module that
    can't be traced correctly is rejected with an error that names the module and the line. `task.trained(state)`
    returns the module with its trained weights.

    Args:
        module: A `torch.nn.Module` on the CPU, or on the meta device with `weights` or `initialize`. In
            `eval()` it is trained in `train()`; modules set to `eval()` by the user inside a module in
            `train()` stay so.
        loss: `loss(module, batch)`; or a criterion such as `nn.CrossEntropyLoss()`, for batches of inputs and
            targets; None if the module returns its own, as those of `transformers` do with labels. It returns
            a scalar (the mean over the batch's rows, which are its weight), a pair (sum, weight), a mapping
            of names to these, or one of those with a mapping of metrics.
        example: A batch in the form of the data: its leaves, their dtypes, and shapes to check with.
        sharding: Patterns of parameter names (`*` matches any text) to logical axes, instead of the automatic
            ones.
        compute_dtype: "float32", "bfloat16" or "float16"; below float32 the forward runs under
            `torch.autocast`, and parameters stay as they are. In float16 the loss is scaled
            (`step.loss_scale`). "auto": bfloat16 if the attached devices have instructions for it, otherwise
            float32.
        weights: Safetensors (a file or a folder) with the values of tensors on the meta device; each device
            reads its slices.
        initialize: `initialize(module)` writes every parameter and buffer of a module on the meta device, for
            example `lambda module: module.init_weights()`; it is traced, and drawn in shards from the run's
            seed.
        check: Compare loss, gradients and buffers with PyTorch's own on the example first, and reject the
            module if they disagree.

    Raises:
        RecipeError: The module, the loss or the example can't be used.
    """
    _refuse_module(module)
    _refuse_sparse_gradients(module)
    leaves, form = _example(example)
    if loss is not None and is_criterion(loss) and len(leaves) != 2:
        raise RecipeError(
            f"loss is a criterion, called as criterion(module(inputs), targets), and the example has {len(leaves)} leaves "
            f"({', '.join(leaves)}); pass a function loss(module, batch) instead"
        )
    compute_dtype = resolve_dtype(compute_dtype)
    if compute_dtype not in AUTOCAST:
        raise RecipeError(f"compute_dtype={compute_dtype!r}; {suggest_name(compute_dtype, (*AUTOCAST, AUTO))}")
    if initialize is not None and weights is not None:
        raise RecipeError("initialize= and weights= are both given; pass only one of them, the source of the weights")
    programs = _Programs(module, Objective(loss, form), leaves, AUTOCAST[compute_dtype], watches=check)
    with restore_after(module, loss, unless_successful=True):
        initializer = None if initialize is None else make_initializer(module, initialize)
        initial = None if initializer is not None else host_arrays(module, weights)
        program = programs.of({name: tuple(leaf.shape) for name, leaf in leaves.items()}, train=True)
        notes = _notes(module, program)
        unchecked = "check=False"
        if check:
            unchecked = explain_too_large(module)
            if unchecked is None:
                check_against_torch(module, programs.objective, leaves, program, autocast=programs.autocast)
            else:
                warnings.warn(f"{type(module).__name__} was not compared with PyTorch: {unchecked}", stacklevel=2)
        if weights is not None and (unused_names := find_unused_names(module, weights)):
            notes.append(f"not of the module, in {weights}: {', '.join(unused_names[:5])} ({len(unused_names)} in all)")
        if unchecked is not None:
            notes.append(f"not compared with PyTorch: {unchecked}")
    known = classify_parameters(module)

    def rebuild(params: Any, state: Any) -> nn.Module:
        if programs.watches:
            programs.refuse_moved()
        # Another run of this task starts from the same values as the first one.
        for array in () if initial is None else (*initial[0].values(), *initial[1].values()):
            if isinstance(array, TensorArray):
                array.copy_values()
        return write_back(module, params, state)

    model = Model(
        name=type(module).__name__,
        initial=initial,
        create=initializer,
        evaluate=programs.evaluate,
        rebuild=rebuild,
        kind_of=known.get,
        one_pass=_one_pass(module),
        frozen=tuple(name for name in program.traced.parameters if name not in program.traced.trained),
        notes=tuple(notes),
        compute_dtype=compute_dtype,
        sums=is_sum(loss),
    )
    return AdaptedTask(model, sharding)


class _Programs:
    """The programs of one module, traced for each new shape of a batch."""

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        leaves: Mapping[str, torch.Tensor],
        autocast: torch.dtype | None,
        *,
        watches: bool,
    ):
        """
        Args:
            watches: Raise if a tensor outside of the module was changed since the first trace.
        """
        self.module, self.objective, self.autocast, self.watches = module, objective, autocast, watches
        # Shapes, dtypes and strides only.
        self.examples = {
            name: torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
            for name, leaf in leaves.items()
        }
        self.dtypes = {name: leaf.dtype for name, leaf in leaves.items()}
        self._programs: dict[Any, TracedProgram] = {}

    def of(self, shapes: Mapping[str, tuple[int, ...]], *, train: bool) -> TracedProgram:
        signature = (tuple(sorted(shapes.items())), train)
        if signature not in self._programs:
            if self.watches:
                self.refuse_moved()
            leaves = {name: _strided_like(example, shapes[name]) for name, example in self.examples.items()}
            traced = trace(self.module, self.objective, leaves, train=train, autocast=self.autocast)
            self._programs[signature] = TracedProgram.create(traced)
        return self._programs[signature]

    def refuse_moved(self) -> None:
        """Raise if a tensor that is a constant of the programs has been changed since the trace."""
        for program in self._programs.values():
            refuse_changed(program.traced.outside)

    def evaluate(self, params: Any, state: Any, batch: Batch, key: jax.Array, train: bool) -> tuple[Any, Any]:
        """Return the losses and metrics as (sum, weight), and the buffers afterwards."""
        self._check(batch)
        if is_debugging():
            return self._run_module(params, state, batch, key, train)
        program = self.of({name: tuple(leaf.shape) for name, leaf in batch.items()}, train=train)
        traced = program.traced
        trained = tuple(params[name] for name in traced.trained)
        untrained = [params[name] for name in traced.parameters if name not in traced.trained]
        others = (*untrained, *(state[name] for name in traced.buffers), *(batch[name] for name in traced.leaves))
        outputs = to_jax_function(program)(trained, others, jax.random.key_data(key))
        pairs = list(zip(outputs[::2], outputs[1::2]))
        losses = dict(zip(traced.losses, pairs))
        metrics: dict[str, Any] = dict(zip(traced.metrics, pairs[len(losses) :]))
        buffers = dict(zip(traced.buffers, outputs[2 * (len(losses) + len(metrics)) :]))
        if program.guards:
            metrics["faults"] = DataChecks(outputs[-1], tuple(guard.text for guard in program.guards))
        return (losses, metrics), buffers

    def _check(self, batch: Batch) -> None:
        missing = self.dtypes.keys() ^ batch.keys()
        if missing:
            raise RecipeError(
                f"the batch has the leaves {sorted(batch)}, the module was adapted to {sorted(self.dtypes)}; pass batches "
                "like the example"
            )
        for name, leaf in batch.items():
            if np.dtype(DTYPES[self.dtypes[name]]) != leaf.dtype:
                raise RecipeError(
                    f"batch[{name!r}] is {leaf.dtype}, the example's was {str(self.dtypes[name]).removeprefix('torch.')}; "
                    "give batches "
                    f"like the example"
                )

    def _run_module(self, params: Any, state: Any, batch: Batch, key: jax.Array, train: bool) -> tuple[Any, Any]:
        """Run the module itself on real values, for debugging: breakpoints and prints in its code work."""
        tensors = {name: torch.from_numpy(np.array(value)) for name, value in {**params, **state}.items()}
        leaves = {name: torch.from_numpy(np.array(leaf)).to(self.dtypes[name]) for name, leaf in batch.items()}
        casting = torch.autocast("cpu", dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None)
        tensors_by_slot = {place: tensors[name] for place, name in find_tensor_slots(self.module).items()}
        aliases = PythonState(self.module, self.objective.loss).aliases
        with (
            swap_tensors(self.module, tensors_by_slot, aliases),
            set_mode(self.module, train),
            torch.no_grad(),
            ReplayDrawsMode(key),
            casting,
        ):
            terms = self.objective(self.module, self.objective.batch_of(leaves))
            buffers = dict(self.module.named_buffers())
        losses, metrics = (
            {name: tuple(jax.numpy.asarray(as_numpy(part)) for part in pair) for name, pair in pairs.items()}
            for pairs in (terms.losses, terms.metrics)
        )
        return (losses, metrics), {name: jax.numpy.asarray(as_numpy(buffers[name])) for name in state}


def _strided_like(example: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor without values, with the memory order of the example's dimensions: code may call
    `is_contiguous()`."""
    if tuple(example.shape) == shape:
        return example
    if example.ndim != len(shape) or example.is_contiguous() or 0 in example.stride():
        return torch.empty(shape, dtype=example.dtype, device="meta")
    order = sorted(range(len(shape)), key=lambda dim: -example.stride(dim))
    whole = torch.empty([shape[dim] for dim in order], dtype=example.dtype, device="meta")
    return whole.permute([order.index(dim) for dim in range(len(shape))])


def _one_pass(module: nn.Module) -> str | None:
    hooked = find_hooked_parameters(module)
    return (
        f"{', '.join(hooked)} has a hook on its accumulated gradient, which PyTorch calls after each part"
        if hooked
        else None
    )


def _refuse_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise RecipeError(
            f"module is {describe_type(module)}; expected a torch.nn.Module"
            + (f" instance: call {module.__name__}(...)" if isinstance(module, type) else "")
        )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise RecipeError(
                f"{name} is not initialized yet (a lazy module); run the module once on a batch, then adapt it: module(example)"
            )
        if tensor.layout != torch.strided:
            raise RecipeError(
                f"{name} is a sparse tensor ({tensor.layout}), and there are none here; keep it dense (.to_dense()), or as "
                f"indices and values that the forward gathers and adds up (index_add)"
            )
        if tensor.device.type not in ("cpu", "meta"):
            raise RecipeError(
                f"{name} is on {tensor.device}; adapt it on the CPU (module.cpu()), JAX brings it to its own devices"
            )
        if tensor.dtype not in DTYPES:
            raise RecipeError(
                f"{name} is {tensor.dtype}, which has no counterpart here; known: {', '.join(map(str, DTYPES))}"
            )


def _refuse_sparse_gradients(module: nn.Module) -> None:
    for path, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise RecipeError(
                f"module {path or '(root)'} ({type(part).__name__}) has sparse=True, and gradients are dense here; build it with "
                f"sparse=False, which trains alike under SGD, Adam and AdamW"
            )


def _example(example: Any) -> tuple[dict[str, torch.Tensor], Form]:
    if example is None:
        raise RecipeError(
            "example=None; pass a batch like those of the data: the module is traced for its shapes and dtypes"
        )
    form = Form.of(example)
    leaves = {}
    for name, leaf in form.leaves(example).items():
        if not isinstance(leaf, torch.Tensor):
            try:
                leaf = torch.from_numpy(np.asarray(leaf))
            except TypeError as error:
                raise RecipeError(
                    f"leaf {name!r} of the example is {describe_type(leaf)}; expected tensors or arrays in a mapping, a "
                    "tuple or a list"
                ) from error
        if leaf.ndim == 0:
            raise RecipeError(
                f"leaf {name!r} of the example is a scalar; expected a tensor with the batch as its first dimension"
            )
        leaves[name] = leaf.detach()
    rows = {name: leaf.shape[0] for name, leaf in leaves.items()}
    if len(set(rows.values())) != 1:
        raise RecipeError(f"the example's leaves differ in their first dimension ({rows}); expected one batch size")
    return leaves, form


def _notes(module: nn.Module, program: TracedProgram) -> list[str]:
    traced = program.traced
    fixed = [name for name, p in module.named_parameters() if not p.requires_grad]
    unused = [name for name in traced.parameters if name not in traced.trained and name not in fixed]
    notes = []
    if fixed:
        notes.append(f"{len(fixed)} parameters have requires_grad=False and stay as they are")
    if unused:
        notes.append(
            f"the loss does not depend on {', '.join(unused[:5])}: not trained, as in PyTorch, which gives them the "
            f"gradient None"
        )
    if traced.outside:
        names = "; ".join(constant.name for constant in traced.outside[:3])
        notes.append(
            f"constants of every step, which a loop can't change: {len(traced.outside)} of the tensors that the loss "
            "reaches and the "
            f"module does not own ({names})"
        )
    if program.doubles:
        notes.append(f"float64 is computed in float32: {', '.join(program.doubles[:5])}")
    if not module.training:
        notes.append("the module was in eval(); it is trained in train()")
    return notes
