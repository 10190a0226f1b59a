"""A module with its loss, traced to one graph of ATen operations; PyTorch's own autograd writes the backward
part.

Two passes. The first records the operations that PyTorch executes on fake tensors, which have shapes and no
values: autograd has been applied, custom backwards, `no_grad`, hooks and all. The second makes in-place
operations and views functional and decomposes operations that are not core ATen. The model is never run on real
values, so it may be larger than the host's memory.
"""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils._pytree import tree_leaves

from ....core.errors import RecipeError
from ..lowering import TRACING_REPLACEMENTS, ReplacementMode, decompositions
from ..objective import Objective
from ..rejection import (
    MODULE_KEY,
    ModuleTracker,
    locate_errors,
    refuse_changed_constants,
    refuse_changes,
    refuse_leaks,
    refuse_shared_memory,
    refuse_values,
    refuse_views,
)
from ..state.module_snapshot import clear_fake_caches, restore_after, retry_interrupted, swap_tensors
from ..state.outside import UserConstant, find_user_constants, refuse_outside
from ..state.python_state import PythonState
from ..state.randomness import INSTEAD, RAISED_ERRORS, forbid_python_draws
from ..state.surroundings import SEED_ADVICE, forbid_side_inputs
from ..state.weights import find_tensor_slots
from .eagerly import force_eager
from .hooks import apply_accumulation_hooks, follow_hooks
from .regions import mark_checkpoint_regions

BACKWARD_KEY = "panax_backward"
"""Key, in a node's `custom` metadata, of the operations of the backward pass."""


@dataclasses.dataclass(frozen=True)
class TracedGraph:
    """A graph, and the names of its inputs and outputs, in order.

    Attributes:
        graph: Inputs are parameters, buffers, leaves of the batch and one cotangent for each loss; outputs
            are the sums and weights of losses, then of metrics, the buffers afterwards, and a gradient for
            each trained parameter.
        constants: Tensors that the graph refers to by name.
        losses: Names of the losses.
        metrics: Names of the metrics.
        trained: Names of the parameters that have a gradient.
        outside: The user's tensors outside the module that are constants of the graph.
    """

    graph: torch.fx.Graph
    constants: Mapping[str, torch.Tensor]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    leaves: tuple[str, ...]
    losses: tuple[str, ...]
    metrics: tuple[str, ...]
    trained: tuple[str, ...]
    outside: tuple[UserConstant, ...] = ()


def trace(
    module: nn.Module,
    objective: Objective,
    leaves: Mapping[str, torch.Tensor],
    *,
    train: bool,
    autocast: torch.dtype | None,
) -> TracedGraph:
    """Trace the loss (and, for training, its gradients) for batches of these shapes.

    Args:
        leaves: The leaves of a batch, fake or real; only shapes and dtypes are read.
        autocast: The lower precision of `torch.autocast`; None to disable it.

    Raises:
        RecipeError: The module uses a feature that can't be traced; the message names the module and the
            line.
    """
    with restore_after(module, objective.loss) as before:
        try:
            return _trace(module, objective, leaves, before, train=train, autocast=autocast)
        finally:
            retry_interrupted(clear_fake_caches)


def _trace(
    module: nn.Module,
    objective: Objective,
    leaves: Mapping[str, torch.Tensor],
    before: PythonState,
    *,
    train: bool,
    autocast: torch.dtype | None,
) -> TracedGraph:
    refuse_views(before)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    parameters = {name: _fake(mode, p).requires_grad_(p.requires_grad) for name, p in module.named_parameters()}
    buffers = {name: _fake(mode, b) for name, b in module.named_buffers()}
    batch = {name: _fake(mode, leaf) for name, leaf in leaves.items()}
    trace_record: dict[str, Any] = {
        "parameters": tuple(parameters),
        "buffers": tuple(buffers),
        "leaves": tuple(batch),
        "python": before,
    }
    stand_ins: dict[int, torch.Tensor] = {}
    joint = _joint(module, objective, trace_record, before, stand_ins, train=train, autocast=autocast)
    with mode:
        cotangents = [torch.ones(()) for _ in range(MAX_LOSSES)]
    inputs = [list(parameters.values()), list(buffers.values()), list(batch.values()), cotangents]

    def recorded() -> tuple[torch.fx.GraphModule, ModuleTracker, list[str]]:
        RAISED_ERRORS.clear()
        seeded = torch.get_rng_state()
        try:
            with (
                set_mode(module, train), locate_errors(module) as located, mark_checkpoint_regions(), force_eager(),
                preserve_node_meta(),
                forbid_python_draws(trace_record["python"].borrowed, lambda: located.where) as draws,
                forbid_side_inputs(trace_record["python"].borrowed, trace_record["python"].iterators, before.packages),
            ):  # fmt: skip
                make = make_fx(
                    joint, tracing_mode="fake", decomposition_table=TRACING_REPLACEMENTS, _allow_non_fake_inputs=True
                )
                made = make(*inputs)
                if RAISED_ERRORS:
                    # The model's own `except` took it for something else.
                    raise RAISED_ERRORS[0]
                return made, located, draws
        finally:
            RAISED_ERRORS.clear()
            clear_fake_caches()
            if not torch.equal(seeded, torch.get_rng_state()):
                trace_record["seeded"] = True

    first, _, draws = recorded()
    after, random_state = PythonState(module, objective.loss, stand_ins), random.getstate()
    refuse_leaks(after)
    if draws or after.diff(before):
        # A value set for the first time is a cache; one that changes each time is a count, which a compiled
        # step would freeze.
        trace_record["python"] = after
        first, located, draws = recorded()
        if draws and random.getstate() != random_state:
            raise RecipeError(f"{draws[0]}, {INSTEAD}")
        refuse_changes(after, PythonState(module, objective.loss, stand_ins), located)
    if "seeded" in trace_record:
        raise RecipeError(f"the forward sets the state of PyTorch's random generator, {SEED_ADVICE}")
    refuse_values(first)
    refuse_changed_constants(first, before)
    graph = to_functional(first, inputs, module)
    _refuse_changed_parameters(graph, tuple(parameters))
    if train:
        refuse_shared_memory(module, _written_buffers(graph, trace_record))
    constants = {node.target: _attribute(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    return TracedGraph(
        graph=graph.graph,
        constants=constants,
        parameters=trace_record["parameters"],
        buffers=trace_record["buffers"],
        leaves=trace_record["leaves"],
        losses=trace_record["losses"],
        metrics=trace_record["metrics"],
        trained=trace_record["trained"],
        outside=find_user_constants(constants.values(), before),
    )


def _joint(
    module: nn.Module,
    objective: Objective,
    trace_record: dict[str, Any],
    before: PythonState,
    stood_in: dict[int, torch.Tensor],
    *,
    train: bool,
    autocast: torch.dtype | None,
) -> Callable[..., list[torch.Tensor]]:
    """Return loss and gradients as one function of tensors, which writes the names of its results into
    `trace_record`.

    Args:
        stood_in: Filled with each parameter and buffer, by the id of its stand-in.
    """
    slots = find_tensor_slots(module)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    alive: list[torch.Tensor] = []  # so that no id is reused

    def joint(
        parameters: list[torch.Tensor],
        buffers: list[torch.Tensor],
        batch: list[torch.Tensor],
        cotangents: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        named = dict(zip(trace_record["parameters"], parameters))
        values = {**named, **dict(zip(trace_record["buffers"], buffers))}
        stood_in.update((id(value), tensors[name]) for name, value in values.items())
        alive.extend(values.values())
        if train:
            follow_hooks(module, named)
        stand_ins = {place: values[name] for place, name in slots.items()}
        replacing = ReplacementMode(named)
        with _casting(autocast), replacing, swap_tensors(module, stand_ins, trace_record["python"].aliases):
            terms = objective(module, objective.batch_of(dict(zip(trace_record["leaves"], batch))))
            after = [buffer for _, buffer in module.named_buffers()]
        trace_record["losses"], trace_record["metrics"] = tuple(terms.losses), tuple(terms.metrics)
        outputs = [part for pairs in (terms.losses, terms.metrics) for pair in pairs.values() for part in pair]
        detached = [part.detach() for part in outputs]
        if not train:
            trace_record["trained"] = ()
            return [*detached, *after]
        sums = [total for total, _ in terms.losses.values() if total.requires_grad]
        weights = [c for c, (total, _) in zip(cotangents, terms.losses.values()) if total.requires_grad]
        free = {name: p for name, p in named.items() if p.requires_grad}
        if not sums:
            raise RecipeError(_no_gradient(module, bool(free)))
        refuse_outside(sums, tensors, before)
        with annotate({BACKWARD_KEY: True}):
            with replacing:
                gradients = torch.autograd.grad(sums, list(free.values()), weights, allow_unused=True)
            gradients = apply_accumulation_hooks(module, free, dict(zip(free, gradients)))
        used = [(name, g) for name, g in zip(free, gradients) if g is not None]
        trace_record["trained"] = tuple(name for name, _ in used)
        return [*detached, *after, *(g for _, g in used)]

    return joint


MAX_LOSSES = 16
"""Number of cotangents among a graph's inputs; those that no loss uses are dropped."""


def _fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without values on the CPU, also for a tensor on the meta device."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return mode.from_tensor(tensor.detach())


def _casting(autocast: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)


@contextlib.contextmanager
def set_mode(module: nn.Module, train: bool) -> Iterator[None]:
    """Set the module to training (submodules that the user has set to `eval()` stay so) or evaluation inside
    the context."""
    flags = {part: part.training for part in module.modules()}
    if train and not module.training:
        module.train()
    elif not train:
        module.eval()
    try:
        yield
    finally:
        for part, flag in flags.items():
            part.training = flag


def to_functional(first: torch.fx.GraphModule, inputs: Sequence[Any], module: nn.Module) -> torch.fx.GraphModule:
    """Return the same graph without in-place operations and views, in core ATen.

    Raises:
        RecipeError: An operation is not available; the message names the module that uses it.
    """
    running: list[_DeclaredWrites] = []

    def again(*arguments: Any) -> Any:
        running.append(_DeclaredWrites(first))
        return running[-1].run(*arguments)

    flat = tree_leaves(inputs)
    with torch.no_grad(), preserve_node_meta():
        make = make_fx(
            functionalize(again, remove="mutations_and_views"),
            tracing_mode="fake",
            decomposition_table=decompositions(),
            _allow_non_fake_inputs=True,
        )
        with locate_errors(module, where=lambda: running[-1].where if running else None):
            return make(*[tensor.detach() for tensor in flat])


class _DeclaredWrites(torch.fx.Interpreter):
    """Interpreter of a graph that replaces operations with hidden writes by those with a schema that declares
    them.

    Attributes:
        where: The module of the running operation, as far as it is known.
    """

    where: str | None = None

    def run_node(self, n: torch.fx.Node) -> Any:
        self.where = (n.meta.get("custom") or {}).get(MODULE_KEY)
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.native_batch_norm.default:
            if args[3] is None:
                return torch.ops.aten._native_batch_norm_legit.no_stats(*args[:3], *args[5:], **kwargs)
            target = torch.ops.aten._native_batch_norm_legit.default
        return super().call_function(target, args, kwargs)


def _written_buffers(graph: torch.fx.GraphModule, trace_record: Mapping[str, Any]) -> set[str]:
    """Return the names of the buffers that a step changes."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    output: Any = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    first = 2 * (len(trace_record["losses"]) + len(trace_record["metrics"]))
    buffer_inputs = inputs[len(trace_record["parameters"]) :]
    written = {node.args[0] for node in graph.graph.nodes if node.target is torch.ops.aten.copy_.default}
    return {
        name
        for name, node, after in zip(trace_record["buffers"], buffer_inputs, output[first:])
        if after is not node or node in written
    }


def _attribute(graph: torch.fx.GraphModule, target: Any) -> torch.Tensor:
    value: Any = graph
    for part in str(target).split("."):
        value = getattr(value, part)
    return value


def _no_gradient(module: nn.Module, any_free: bool) -> str:
    if not any_free:
        return f"every parameter of {type(module).__name__} has requires_grad=False; there is nothing to train"
    return (
        "the loss does not depend on any trained parameter through differentiable operations: was it detached, computed under "
        "no_grad, or from integers?"
    )


def _refuse_changed_parameters(graph: torch.fx.GraphModule, names: tuple[str, ...]) -> None:
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.copy_.default and node.args[0] in inputs[: len(names)]:
            raise RecipeError(
                f"the forward changes the parameter {names[inputs.index(node.args[0])]!r} in place, which is left to the "
                "optimizer "
                f"here; change it in the optimizer, or make it a buffer"
            )
