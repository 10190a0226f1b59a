"""Measurements and settings of PyTorch for a comparison: waiting, memory, precision, the speed of a matmul.
Not code that a user would write."""

import time
from collections.abc import Callable
from typing import Any

import torch

from ...measure.cores import usable_cores
from ...workload.compared_work import Batch, ComparedWork
from ...workload.precision import Precision
from .. import RunningColumn

PRODUCT = 2048
"""Number of rows and columns of the matmul that is timed."""


def make_running_column(
    work: ComparedWork,
    device: str,
    module: torch.nn.Module,
    put: Callable[[Batch], Any],
    step: Callable[[Any], Any],
    loss: Callable[[Any], torch.Tensor],
) -> RunningColumn:
    """Build a PyTorch column, and set the work's precision of matmuls.

    Args:
        loss: Computes the loss of a batch, as `step` does.
    """
    set_precision(work.precision)
    if device == "cpu":
        torch.set_num_threads(usable_cores())

    def wait(loss: torch.Tensor) -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        elif device == "xla":
            import torch_xla  # pyright: ignore[reportMissingImports]

            torch_xla.sync(wait=True)

    def evaluate(batch: Any) -> torch.Tensor:
        module.eval()
        with torch.no_grad():
            value = loss(batch)
        module.train()
        return value

    return RunningColumn(
        put=put,
        step=step,
        evaluate=evaluate,
        wait=wait,
        device=torch.cuda.get_device_name() if device == "cuda" else device,
        peak_bytes=lambda: torch.cuda.max_memory_allocated() if device == "cuda" else None,
        product=lambda: measure_matmul_rate(work.precision, device),
    )


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name."""
    return getattr(torch, name)


def set_precision(precision: Precision) -> None:
    """Allow TF32 only if it is the requested precision."""
    torch.backends.cuda.matmul.allow_tf32 = precision is Precision.TF32
    torch.backends.cudnn.allow_tf32 = precision is Precision.TF32


def measure_matmul_rate(precision: Precision, device: str) -> float:
    """Measure the FLOP/s of the fastest of a few square matmuls."""
    a = torch.randn(PRODUCT, PRODUCT, device=device).to(torch_dtype(precision.computed))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, a)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * PRODUCT**3 / min(seconds)
