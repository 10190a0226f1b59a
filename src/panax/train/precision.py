"""What a task computes in, and what float32 operands are multiplied in (`Task.compute_dtype`, `Task.matmul_precision`)."""

import contextlib
from collections.abc import Callable

import jax

from ..core import Task
from ..core.errors import RecipeError
from ..core.target import Target
from ..job.agreement import gather_texts
from ..kernels.compute_dtype import AUTO, dtype_for, reason_for_float32


def with_compute_dtype(task: Task, target: Target, say: Callable[[str], None], *, recorded: str = "") -> Task:
    """The task with the dtype that the devices are fast in, if it leaves that to them: the same one in every process of the job.

    Every process calls it. It is said, and so is a dtype that was set and is the slow one.

    Args:
        recorded: What the run has computed in so far; "" where there is no run yet.
    """
    slow = reason_for_float32(target)
    if task.compute_dtype != AUTO:
        if task.compute_dtype == "bfloat16" and slow:
            say(f"compute dtype  bfloat16, as set; {slow}: float32 is likely to be faster (task.compute_dtype)")
        return task
    if recorded:
        why = "as this run began" + (f", although {slow}" if recorded == "bfloat16" and slow else "")
        dtype = recorded
    else:
        found = gather_texts(dtype_for(target))
        dtype = "bfloat16" if set(found) == {"bfloat16"} else "float32"
        why = slow or f"{'this processor' if target.platform == 'cpu' else target} has instructions for it"
        if dtype == "float32" and not slow:
            why = f"process {found.index('float32')} of this job has no instructions for bfloat16"
    say(f"compute dtype  {dtype} (auto: {why})")
    return task.with_compute_dtype(dtype)


def check_precision(task: Task, target: Target) -> None:
    """Refuse a precision that the target does not have.

    Raises:
        RecipeError: Names those that it has.
    """
    wanted, offered = task.matmul_precision, target.matmul_precisions
    if wanted is not None and wanted not in offered:
        instead = '. task.compute_dtype="bfloat16" multiplies in bfloat16 there' if wanted == "bfloat16" else ""
        raise RecipeError(
            f'task.matmul_precision="{wanted}": {target} multiplies float32 in {" or ".join(offered)}; set it to one of these, '
            f"or to None for what the platform does by default{instead}"
        )


def matmuls_as_set(task: Task, target: Target) -> contextlib.AbstractContextManager[None]:
    """Trace what is inside with the precision that the task sets, where it sets one."""
    if task.matmul_precision is None:
        return contextlib.nullcontext()
    check_precision(task, target)
    return jax.default_matmul_precision(target.matmul_precisions[task.matmul_precision])


def precision_words(task: Task, target: Target) -> str | None:
    """What to say of it before a run begins; None where there is no choice, or nothing is in float32."""
    if task.matmul_precision is not None:
        return f"matmul precision  float32 is multiplied in {task.matmul_precision} (task.matmul_precision)"
    if len(target.matmul_precisions) < 2 or task.compute_dtype != "float32":
        return None
    return (
        f"matmul precision  float32 is multiplied in {target.default_matmul_precision}, the default of {target}; "
        f"task.matmul_precision sets it to {' or '.join(target.matmul_precisions)}"
    )
