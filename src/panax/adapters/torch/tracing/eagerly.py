"""Contexts that disable fast paths of PyTorch that can't be traced."""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@contextlib.contextmanager
def force_eager() -> Iterator[None]:
    """Run modules under `torch.compile` as plain code, attention without its fused path, cumulative means as
    tensors.

    In evaluation `nn.TransformerEncoder` packs rows that a mask shortens into nested tensors; the plain path
    computes the same.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    batch_norm: Any = nn.modules.batchnorm._BatchNorm
    usual = batch_norm.forward

    def forward(part: Any, x: torch.Tensor) -> torch.Tensor:
        if part.momentum is not None or not part.training or part.running_mean is None:
            return usual(part, x)
        return _cumulative(part, x)

    torch.backends.mha.set_fastpath_enabled(False)
    batch_norm.forward = forward
    try:
        with disable_compile():
            yield
    finally:
        batch_norm.forward = usual
        torch.backends.mha.set_fastpath_enabled(fast)


@contextlib.contextmanager
def disable_compile() -> Iterator[None]:
    """Run modules under `torch.compile` as plain code inside the context."""
    compiler: Any = sys.modules.get("torch._dynamo")
    if compiler is None:  # nothing is compiled; importing it takes a second
        yield
        return
    with (
        torch.compiler.set_stance("force_eager"),
        compiler.config.patch(error_on_nested_fx_trace=False),
        warnings.catch_warnings(),
    ):
        # These hooks are how `locate_errors` follows the running modules.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
        yield


def _cumulative(part: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute `BatchNorm(momentum=None)`, with running statistics that are means over all batches, without a
    Python number."""
    part._check_input_dim(x)
    part.num_batches_tracked.add_(1)
    share = 1.0 / part.num_batches_tracked.to(part.running_mean.dtype)
    mean, variance = part.running_mean.clone(), part.running_var.clone()
    out = F.batch_norm(x, mean, variance, part.weight, part.bias, True, 1.0, part.eps)
    part.running_mean.copy_((1 - share) * part.running_mean + share * mean)
    part.running_var.copy_((1 - share) * part.running_var + share * variance)
    return out
