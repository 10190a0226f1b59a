"""PyTorch with its forward and backward compiled by `torch.compile`; the rest as in `torch_eager`."""

from ..work import Work
from . import Running
from .torch_eager import prepare as prepare_eager


def prepare(work: Work) -> Running:
    """The eager step with `torch.compile(loss_of)`."""
    return prepare_eager(work, compile=True)
