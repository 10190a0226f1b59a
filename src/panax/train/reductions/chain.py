"""The reduction of a program, by its settings."""

from ...comms import Comms
from .compressed_sum import CompressedSum
from .delayed_sum import DelayedSum
from .plain_sum import PlainSum
from .reduction import Reduction


def choose_reduction(comms: Comms | None) -> Reduction:
    """Return the one reduction for the settings; None for plain sums.

    >>> from panax.comms import Comms
    >>> choose_reduction(Comms(delayed=True))  # doctest: +ELLIPSIS
    DelayedSum(comms=..., slow=PlainSum())
    """
    reduction: Reduction = PlainSum()
    if comms is not None and comms.compress:
        reduction = CompressedSum(comms, reduction)
    if comms is not None and comms.delayed:
        reduction = DelayedSum(comms, reduction)
    return reduction
