"""What float32 operands are multiplied in, as a task sets it (`Task.matmul_precision`)."""

import contextlib

import jax

from ..core import Task
from ..core.errors import RecipeError
from ..core.target import Target


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
    if len(target.matmul_precisions) < 2 or getattr(task, "compute_dtype", "float32") != "float32":
        return None
    return (
        f"matmul precision  float32 is multiplied in {target.default_matmul_precision}, the default of {target}; "
        f"task.matmul_precision sets it to {' or '.join(target.matmul_precisions)}"
    )
