"""Messages about steps without effect: skipped updates, and a gradient of zero."""

import math
from collections.abc import Mapping

from ...core import CollectingTask
from ..experiment import Experiment
from ..preparation import PreparedRun


def describe_skipped_updates(number: int, values: Mapping[str, float]) -> str:
    """Format a message that updates were skipped, up to that of step `number`, with its scalars."""
    return (
        f"{values['skipped_in_a_row']:.0f} updates in a row were not finite or spiked, the last one at step {number} "
        f"with loss {values['loss']} and gradient norm {values['gradient_norm']}"
    )


def skipped_updates_advice(experiment: Experiment, values: Mapping[str, float]) -> str:
    """Return advice for too many skipped updates."""
    if values["loss"] == 0 and values["gradient_norm"] == 0:
        return (
            "nothing in these batches carries loss: look at them with `panax data show`. Answers may be cut away (raise "
            "data.sequence_length), or the mask may exclude every row"
        )
    ways, after = "lower optimizer.schedule.peak, or look for the cause with --debug", experiment.step.max_skipped // 2
    if experiment.rollback.after:
        return f"rollback.max_rollbacks={experiment.rollback.max_rollbacks} rollbacks are used up: {ways}"
    return f"{ways}; --rollback.after {after} would go back to a checkpoint and skip such batches" if after else ways


def zero_gradient_warning(prepared: PreparedRun, number: int, values: Mapping[str, float]) -> str | None:
    """Return a warning if the first step of this process has a gradient of zero; None if not, or if that can
    be right."""
    late = prepared.experiment.comms.delayed
    if isinstance(prepared.task, CollectingTask) or late or values.get("gradient_norm") != 0.0:
        return None
    if values.get("skipped_in_a_row"):
        return (
            f"warning: step {number}: nothing in its batch counts, so no update was made: the weight of each loss is 0 or below. "
            f"Look at the mask and at the weights of the loss"
        )
    return (
        f"warning: step {number}: the gradient is exactly 0 (the loss is {values.get('loss', math.nan):.4g}): the loss depends "
        f"on no parameter that trains. Look for jax.lax.stop_gradient, argmax, rounding, or a loss of the batch alone"
    )
