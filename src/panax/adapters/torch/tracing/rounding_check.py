"""Comparison where rounding alone decides: the traced graph in PyTorch's own arithmetic, with JAX's side
taken at each kink.

A ReLU with an input that is zero up to rounding, a pool of two equal values or a comparison at its threshold
goes one way in one library and another way in the other. Both are right, but the gradients before it then differ by
more than rounding. In this case PyTorch computes the traced graph again, and each deciding operation gets JAX's
operands instead of its own if the two are equal up to rounding (`CLOSE`, relative to the operand's largest value).
Other operations, and operands that differ by more, stay PyTorch's, so that a wrong formula, forward or backward,
is still detected. A separate check verifies that graph and module agree: without that exchange, PyTorch must get
the same results from the graph as from the module.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch.fx import Interpreter, Node

from ..state.random_ops import ReplayDrawsMode
from .graph import TracedProgram
from .values import as_numpy

aten = torch.ops.aten

TIE_TOLERANCE = 1e-5
"""Difference up to which two operands count as the same number, relative to the largest. Sums in another
order make 1e-7 to 1e-6."""

DISCONTINUOUS_OPS = {
    aten.threshold_backward, aten.leaky_relu_backward, aten.hardtanh_backward, aten.hardswish_backward,
    aten.hardsigmoid_backward, aten.elu_backward, aten.sign, aten.sgn, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge,
    aten.isin, aten.max_pool2d_with_indices, aten.max_pool3d_with_indices, aten.adaptive_max_pool2d, aten.adaptive_max_pool3d,
    aten.max, aten.min, aten.amax, aten.amin, aten.argmax, aten.argmin, aten.sort, aten.topk, aten.argsort, aten.kthvalue,
    aten.median, aten.floor, aten.ceil, aten.round, aten.trunc, aten.bucketize, aten.searchsorted, aten.maximum, aten.minimum,
    aten.cummax, aten.cummin, aten.relu, aten.clamp, aten.clamp_min, aten.remainder, aten.fmod, aten.floor_divide,
    aten._to_copy,
}  # fmt: skip
"""Operations that take one side or another of a value, so that rounding of their operands decides."""


def run_graph_in_torch(
    program: TracedProgram, inputs: Mapping[str, torch.Tensor], key: jax.Array, *, decided_by_jax: bool
) -> dict[str, np.ndarray]:
    """Compute the gradients of the trained parameters from the traced graph, with PyTorch's kernels.

    Args:
        inputs: Parameters, buffers and leaves of the batch by name.
        decided_by_jax: True to pass JAX's operands to the deciding operations, if both operands are equal up to
            rounding.
    """
    traced = program.traced
    names = [*traced.parameters, *traced.buffers, *traced.leaves]
    tensors = [inputs[name].detach().clone() for name in names]
    ones = [torch.ones(()) for _ in program.inputs[len(names) :]]
    operands = _operands(program, tensors, key) if decided_by_jax else {}
    module = torch.fx.GraphModule(dict(traced.constants), traced.graph)
    with torch.no_grad(), ReplayDrawsMode(key):
        outputs: Sequence[Any] = _Deciding(module, operands).run(*tensors, *ones)
    return {name: as_numpy(g) for name, g in zip(traced.trained, outputs[program.num_outputs :])}


def is_discontinuous(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "overloadpacket", None) in DISCONTINUOUS_OPS


def _operands(program: TracedProgram, tensors: Sequence[torch.Tensor], key: jax.Array) -> dict[str, np.ndarray]:
    """Compute in JAX the operands of all deciding operations, by the node's name."""
    operand_nodes = {
        each
        for node in (*program.forward, *program.backward)
        if is_discontinuous(node)
        for each in node.all_input_nodes
        if _is_floating(each)
    }

    def run(arrays: list[Any]) -> dict[str, Any]:
        values: dict[Node, Any] = dict(zip(program.inputs, arrays))
        values.update((node, jax.numpy.ones(())) for node in program.inputs[len(arrays) :])
        for node in (*program.forward, *program.backward):
            values[node] = program._call(node, values, key)
        return {node.name: values[node] for node in operand_nodes}

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
        return jax.device_get(jax.jit(run, compiler_options=options)([as_numpy(tensor) for tensor in tensors]))


def _is_floating(node: Node) -> bool:
    dtype = getattr(node.meta.get("val"), "dtype", None)
    return dtype is not None and dtype.is_floating_point


class _Deciding(Interpreter):
    """Interpreter of a graph, with other operands for the deciding operations."""

    def __init__(self, module: torch.fx.GraphModule, operands: Mapping[str, np.ndarray]):
        super().__init__(module)
        self._operands = operands

    def run_node(self, n: Node) -> Any:
        if not is_discontinuous(n):
            return super().run_node(n)
        kept = {each: self.env[each] for each in n.all_input_nodes if each.name in self._operands}
        for each, value in kept.items():
            self.env[each] = _nearly(value, self._operands[each.name])
        try:
            return super().run_node(n)
        finally:
            self.env.update(kept)


def _nearly(value: torch.Tensor, other: np.ndarray) -> torch.Tensor:
    """Return `other`'s elements where they equal `value`'s up to rounding, otherwise `value`'s."""
    found = torch.from_numpy(np.array(other, np.float32)).to(value.dtype)
    near = (
        (found - value).abs() <= TIE_TOLERANCE * value.abs().max()
        if value.numel()
        else torch.zeros_like(value, dtype=torch.bool)
    )
    return torch.where(near, found, value)
