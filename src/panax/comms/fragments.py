"""Parameters in fragments, which agree at different steps (streaming DiLoCo).

Every fragment agrees once in so many local steps, and their turns are spread over these, so that the most bytes at once are a
fragment's. A fragment is every so-manieth layer of the stacks, and of what is in no stack whole arrays, dealt out by size.

Source: arXiv:2501.18512.
"""

import dataclasses
import math
from collections.abc import Mapping

from ..core.layout import Layout
from ..core.logical import Role, axis_of
from ..core.protocols import Axes
from .settings import Comms

Piece = slice | None
"""Of an array: some of its layers, or None for all of it."""

Pieces = Mapping[str, Piece]
"""What belongs to a fragment, by parameter."""


@dataclasses.dataclass(frozen=True)
class OuterSync:
    """What replicas do together after a step.

    Attributes:
        sends: Fragments of which an outer step is taken.
        takes: Fragments of which each replica takes over what was agreed on.
        whole: Takes it over as it is, whatever `mixing` says: where replicas meet for the last time.
    """

    sends: tuple[int, ...]
    takes: tuple[int, ...]
    whole: bool = False


def outer_sync_after(number: int, last: int, comms: Comms) -> OuterSync | None:
    """What is due after the step with this number, the first being 1; None where replicas stay apart.

    Args:
        last: The number of the run's last step, after which all agree.

    >>> streaming = Comms(local_steps=4, fragments=2, overlap_steps=1)
    >>> [(number, meeting.sends, meeting.takes) for number in range(1, 8) if (meeting := outer_sync_after(number, 99, streaming))]
    [(2, (0,), ()), (3, (), (0,)), (4, (1,), ()), (5, (), (1,)), (6, (0,), ()), (7, (), (0,))]
    """
    everything = tuple(range(comms.fragments))
    if number == last:
        return last_meeting(comms)
    turns = [(fragment + 1) * comms.local_steps // comms.fragments for fragment in everything]

    def due(at: int) -> tuple[int, ...]:
        return tuple(f for f in everything if at >= turns[f] and (at - turns[f]) % comms.local_steps == 0)

    sends, takes = due(number), due(number - comms.overlap_steps)
    return OuterSync(sends, takes) if sends or takes else None


def last_meeting(comms: Comms) -> OuterSync:
    """In which all agree on everything."""
    everything = tuple(range(comms.fragments))
    return OuterSync(everything, everything, whole=comms.overlap_steps > 0)


def fragments_of(
    parameters: Mapping[str, tuple[tuple[int, ...], Axes]], layout: Layout, count: int
) -> tuple[dict[str, Piece], ...]:
    """What belongs to each fragment.

    Args:
        parameters: Trainable ones, name to (shape, logical axes).
    """
    found: tuple[dict[str, Piece], ...] = tuple({} for _ in range(count))
    held = [0] * count
    whole: dict[str, int] = {}
    for name, (shape, axes) in parameters.items():
        stacked = bool(axes) and axes[0] == axis_of(Role.LAYERS) and not layout.storage(axes, shape)[0]
        if count > 1 and stacked and shape[0] % count == 0:
            for fragment in range(count):
                found[fragment][name] = slice(fragment, None, count)
        else:
            whole[name] = math.prod(shape)
    for name in sorted(whole, key=lambda name: (-whole[name], name)):
        least = min(range(count), key=lambda fragment: (held[fragment], fragment))
        found[least][name] = None
        held[least] += whole[name]
    return found
