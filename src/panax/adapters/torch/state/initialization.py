"""Initialization of a module on the meta device by the user's own function, straight into shards.

The function that initializes the module is traced on fake tensors, and runs in one jitted function, so that no
complete weight is ever on the host or on one device. The distributions are PyTorch's, the random bits come from
JAX's key.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ....core.errors import RecipeError
from ..rejection import locate_errors
from ..tracing.aten_trace import TracedGraph, to_functional
from ..tracing.graph import TracedProgram
from .module_snapshot import swap_tensors
from .weights import find_tensor_slots

Draw = Callable[[jax.Array], tuple[dict[str, Any], dict[str, Any]]]


def make_initializer(module: nn.Module, initialize: Callable[[Any], Any]) -> Draw:
    """Return a function of a key that draws all parameters and buffers, as `initialize(module)` writes them.

    Raises:
        RecipeError: A tensor is not on the meta device, or `initialize` leaves a tensor unwritten, or can't be
            traced.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in tensors.items():
        if not tensor.is_meta:
            raise RecipeError(
                f"initialize= draws tensors on the meta device, but {name} is on {tensor.device}; build the whole "
                f"module under torch.device('meta')"
            )
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tied = find_tensor_slots(module)

    def run() -> list[torch.Tensor]:
        fresh = {}
        for name, tensor in tensors.items():
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            fresh[name] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        with swap_tensors(module, {place: fresh[name] for place, name in tied.items()}), torch.no_grad():
            initialize(module)
            after = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            return [after[name].detach() for name in tensors]

    with mode, locate_errors(module), _without_rejection():
        traced = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)()
        graph = to_functional(traced, (), module)
    outputs: Sequence[Any] = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    for name, node in zip(tensors, outputs):
        if _is_unwritten(node):
            raise RecipeError(f"initialize= leaves {name} as it is, empty; write every parameter and buffer in it")
    constants = {node.target: getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    program = TracedProgram.create(TracedGraph(graph.graph, constants, (), tuple(tensors), (), (), (), ()))

    def draw(key: jax.Array) -> tuple[dict[str, Any], dict[str, Any]]:
        values = dict(zip(tensors, program.run_forward((), key)[0]))
        params, state = dict(module.named_parameters()), dict(module.named_buffers())
        return {name: values[name] for name in params}, {name: values[name] for name in state}

    return draw


@contextlib.contextmanager
def _without_rejection() -> Iterator[None]:
    """Draw truncated normals by the inverse distribution: PyTorch's rejection sampling loops over values."""
    module: Any = nn.init
    usual = module._no_grad_trunc_normal_

    def by_inverse(tensor: torch.Tensor, mean: Any, std: Any, a: Any, b: Any, generator: Any = None) -> torch.Tensor:
        low, high = (torch.erf(torch.tensor((edge - mean) / (std * 2**0.5))) for edge in (a, b))
        uniform = torch.empty_like(tensor).uniform_(0, 1)
        drawn = torch.erfinv(low + uniform * (high - low)) * (std * 2**0.5) + mean
        return tensor.copy_(drawn.clamp(a, b))

    module._no_grad_trunc_normal_ = by_inverse
    try:
        yield
    finally:
        module._no_grad_trunc_normal_ = usual


def _is_unwritten(node: Any) -> bool:
    """Return True for memory that has not been written."""
    while node.op == "call_function" and node.target in _PASSING:
        node = node.args[0]
    return node.op == "call_function" and "empty" in str(node.target)


_PASSING = {torch.ops.aten.detach.default, torch.ops.aten.detach_copy.default, torch.ops.aten.alias.default}
