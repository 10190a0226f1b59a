"""What a comparison asks of PyTorch besides training: waiting, memory, precision, the speed of a product. No user's code."""

import time
from collections.abc import Callable
from typing import Any

import torch

from ...measure.cores import usable_cores
from ...work.work import Batch, ComparedWork
from .. import RunningColumn

PRODUCT = 2048
"""Rows and columns of the product whose speed is measured."""


def make_running_column(
    work: ComparedWork,
    device: str,
    module: torch.nn.Module,
    put: Callable[[Batch], Any],
    step: Callable[[Any], Any],
    loss: Callable[[Any], torch.Tensor],
) -> RunningColumn:
    """A column of PyTorch, with the precision of products set as the work says.

    Args:
        loss: Of a batch, as `step` computes it.
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
            found = loss(batch)
        module.train()
        return found

    return RunningColumn(
        put=put,
        step=step,
        evaluate=evaluate,
        wait=wait,
        device=torch.cuda.get_device_name() if device == "cuda" else device,
        peak_bytes=lambda: torch.cuda.max_memory_allocated() if device == "cuda" else None,
        product=lambda: measure_matmul_rate(work.precision, device),
    )


def set_precision(precision: str) -> None:
    """TF32 where it is asked for, and nowhere else."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def measure_matmul_rate(precision: str, device: str) -> float:
    """FLOP/s of the fastest of a few square products."""
    a = torch.randn(PRODUCT, PRODUCT, device=device).to(
        torch.bfloat16 if precision.startswith("bf16") else torch.float32
    )
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, a)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * PRODUCT**3 / min(seconds)
