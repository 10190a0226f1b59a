"""Settings that may change at a branch of a run, and why others may not."""

from ...checkpoint import Checkpoint
from ...core.errors import CheckpointError
from ..experiment import Experiment
from .previous_run import changed_settings

FIXED_AT_BRANCHES = dict(  # noqa: C408 - names of settings, not of axes
    task="the model, which the checkpoint's weights are of",
    data="the data and its order, in which branches must not differ",
    held_out="the held-out data, by which branches are compared",
    seed="the random bits, in which branches must not differ",
    init="the first weights; a branch begins with those of its parent",
    batch_ramp="the batches, in which branches must not differ",
    overfit_batches="the data, in which branches must not differ",
    comms="how gradients are summed, with residuals that the checkpoint has",
    frozen="the parameters that have moments in the checkpoint",
    step_parts="parts of yours with a state in the checkpoint",
)
"""Settings that a branch has from its parent, with what each decides; any other may change at a branch."""


def check_branch_settings(experiment: Experiment, checkpoint: Checkpoint) -> None:
    """Check that a branch differs from its parent's checkpoint only in settings that may change there.

    Raises:
        CheckpointError: Another setting differs; the message names it and the reason.
    """
    for line in changed_settings(experiment, checkpoint):
        reason = FIXED_AT_BRANCHES.get(line.partition(":")[0].partition(".")[0])
        if reason is not None:
            raise CheckpointError(
                f"a branch can't change {line}: this decides on {reason}. Start a separate run for it"
            )
