"""Checks that the settings of a step suit the task and each other."""

from ...comms import Comms
from ...core import Task
from ...core.errors import RecipeError
from ...optim import Optimizer, Transformation
from ..loss_scaling import check_effect
from ..update import StepConfig


def check_step_settings(
    task: Task, optimizer: Optimizer, transformation: Transformation, config: StepConfig, comms: Comms
) -> None:
    """Check the settings of a step, which don't depend on the mesh.

    Raises:
        RecipeError: One has no effect, or means something else for this task; the message names it.
    """
    check_rows_together(task, config, comms)
    if config.ema_decay is not None and transformation.average is not None:
        raise RecipeError(
            f"step.ema_decay={config.ema_decay}: {type(optimizer).__name__} averages the parameters itself; set "
            f"step.ema_decay to None"
        )
    check_effect(task.scales_loss, type(task).__name__, config.loss_scale, config.loss_scale_steps)
    if task.separate_runs and (config.clip_norm is not None or config.spike_factor is not None):
        raise RecipeError(
            f"step.clip_norm={config.clip_norm} and step.spike_factor={config.spike_factor} look at the gradients of all "
            f"runs of {type(task).__name__} as one; set both to None, and clip by task.clip_norm"
        )


def check_update_count(num_steps: int, updates_per_step: int) -> None:
    """Check that the number of updates fits 32 bits.

    Raises:
        RecipeError: The number does not fit; the message gives the maximum number of steps.
    """
    updates = num_steps * updates_per_step
    if updates >= 2**31:
        raise RecipeError(
            f"num_steps={num_steps:,} of {updates_per_step:,} updates each are {updates:,} updates, which are counted in 32 "
            f"bits; set at most {(2**31 - 1) // updates_per_step:,} steps"
        )


def check_rows_together(task: Task, config: StepConfig, comms: Comms | None) -> None:
    """Check that no setting splits the batch of a task with a loss that compares its rows.

    Raises:
        RecipeError: A setting splits the batch; the message names it.
    """
    if task.sums_over_rows:
        return
    settings = {"step.micro_batches": config.micro_batches}
    if comms is not None:
        settings |= {"comms.local_steps": comms.local_steps, "comms.islands.count": comms.islands.count}
    for name, value in settings.items():
        if value > 1:
            raise RecipeError(
                f"{name}={value}: the loss of {type(task).__name__} compares each row with all others of the batch, and a part "
                f"of it would give another loss; set {name} to 1, and more devices or a smaller batch for memory"
            )
