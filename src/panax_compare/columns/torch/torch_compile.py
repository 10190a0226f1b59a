"""PyTorch with forward and backward compiled by `torch.compile`; everything else as in `torch_eager`."""

from ...workload.compared_work import ComparedWork
from .. import RunningColumn
from .torch_eager import prepare as prepare_eager


def prepare(work: ComparedWork) -> RunningColumn:
    """Prepare the eager step with `torch.compile(loss_of)`."""
    return prepare_eager(work, compile=True)
