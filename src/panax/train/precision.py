"""Compute dtype of a task, and precision of its float32 matmuls (`Task.compute_dtype`,
`Task.matmul_precision`)."""

import contextlib
from collections.abc import Callable

import jax

from ..core import Task
from ..core.errors import RecipeError
from ..core.layout.target import Target
from ..job.agreement import gather_texts
from ..kernels.compute_dtype import AUTO, default_dtype, reason_for_float32


def with_compute_dtype(task: Task, target: Target, say: Callable[[str], None], *, recorded: str = "") -> Task:
    """Resolve the compute dtype "auto" to the dtype that the devices run fast, the same in every process of
    the job.

    Must be called by every process. Logs the choice, and an explicit dtype if it is the slow one.

    Args:
        recorded: The run's compute dtype so far; "" for a new run.
    """
    slow = reason_for_float32(target)
    if task.compute_dtype != AUTO:
        if task.compute_dtype == "bfloat16" and slow:
            say(f"compute dtype  bfloat16, as set; {slow}: float32 is likely to be faster (task.compute_dtype)")
        return task
    if recorded:
        reason = "as this run began" + (f", although {slow}" if recorded == "bfloat16" and slow else "")
        dtype = recorded
    else:
        dtypes = gather_texts(default_dtype(target))
        dtype = "bfloat16" if set(dtypes) == {"bfloat16"} else "float32"
        reason = slow or f"{'this processor' if target.platform == 'cpu' else target} has instructions for it"
        if dtype == "float32" and not slow:
            reason = f"process {dtypes.index('float32')} of this job has no instructions for bfloat16"
    say(f"compute dtype  {dtype} (auto: {reason})")
    return task.with_compute_dtype(dtype)


def check_precision(task: Task, target: Target) -> None:
    """Check that the target supports the task's matmul precision.

    Raises:
        RecipeError: The target does not support the precision; the message names the supported ones.
    """
    precision, offered = task.matmul_precision, target.matmul_precisions
    if precision is not None and precision not in offered:
        instead = '. task.compute_dtype="bfloat16" multiplies in bfloat16 there' if precision == "bfloat16" else ""
        raise RecipeError(
            f'task.matmul_precision="{precision}": {target} multiplies float32 in {" or ".join(offered)}; set it to one of '
            f"these, or to None for the platform's default{instead}"
        )


def use_matmul_precision(task: Task, target: Target) -> contextlib.AbstractContextManager[None]:
    """Trace the enclosed code with the task's matmul precision, if set."""
    if task.matmul_precision is None:
        return contextlib.nullcontext()
    check_precision(task, target)
    return jax.default_matmul_precision(target.matmul_precisions[task.matmul_precision])


def describe_precision(task: Task, target: Target) -> str | None:
    """Describe the matmul precision before a run; None if there is no choice, or nothing is in float32."""
    if task.matmul_precision is not None:
        return f"matmul precision  float32 is multiplied in {task.matmul_precision} (task.matmul_precision)"
    if len(target.matmul_precisions) < 2 or task.compute_dtype != "float32":
        return None
    return (
        f"matmul precision  float32 is multiplied in {target.default_matmul_precision}, the default of {target}; "
        f"task.matmul_precision sets it to {' or '.join(target.matmul_precisions)}"
    )
