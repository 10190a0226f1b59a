"""Partition of the parameters into fragments that are synchronized at different steps (streaming DiLoCo).

Each fragment is synchronized once in `local_steps` steps. The synchronizations are spread over these steps, so
that at most one fragment is sent at once. A fragment consists of every n-th layer of the layer stacks, for n
fragments; other arrays are not divided, and are assigned so that fragments have similar sizes.

Source: arXiv:2501.18512.
"""

import dataclasses
import math
from collections.abc import Mapping

from ..core.layout.layout import Layout
from ..core.params.logical import Role, axis_for_role
from ..core.protocols import Axes
from .settings import Comms

FragmentSlice = slice | None
"""Part of an array: some of its layers, or None for all of it."""

FragmentSlices = Mapping[str, FragmentSlice]
"""Parameter name to the part that belongs to a fragment."""


@dataclasses.dataclass(frozen=True)
class OuterSync:
    """Communication of replicas after a step.

    Attributes:
        sent_fragments: Fragments for which an outer step is taken.
        received_fragments: Fragments for which each replica adopts the result.
        is_full: True to adopt the result unmixed, regardless of `mixing`, at the final synchronization.
    """

    sent_fragments: tuple[int, ...]
    received_fragments: tuple[int, ...]
    is_full: bool = False


def outer_sync_after(number: int, last: int, comms: Comms) -> OuterSync | None:
    """Return the synchronization due after a step, or None.

    Args:
        number: Number of the step, starting at 1.
        last: Number of the run's last step, after which all parameters are synchronized.

    >>> streaming = Comms(local_steps=4, fragments=2, overlap_steps=1)
    >>> syncs = ((number, outer_sync_after(number, 99, streaming)) for number in range(1, 8))
    >>> [(number, sync.sent_fragments, sync.received_fragments) for number, sync in syncs if sync]
    [(2, (0,), ()), (3, (), (0,)), (4, (1,), ()), (5, (), (1,)), (6, (0,), ()), (7, (), (0,))]
    """
    everything = tuple(range(comms.fragments))
    if number == last:
        return final_outer_sync(comms)
    turns = [(fragment + 1) * comms.local_steps // comms.fragments for fragment in everything]

    def due(at: int) -> tuple[int, ...]:
        return tuple(f for f in everything if at >= turns[f] and (at - turns[f]) % comms.local_steps == 0)

    sends, takes = due(number), due(number - comms.overlap_steps)
    return OuterSync(sends, takes) if sends or takes else None


def final_outer_sync(comms: Comms) -> OuterSync:
    """Return the final synchronization, of all fragments."""
    everything = tuple(range(comms.fragments))
    return OuterSync(everything, everything, is_full=comms.overlap_steps > 0)


def assign_fragments(
    parameters: Mapping[str, tuple[tuple[int, ...], Axes]], layout: Layout, count: int
) -> tuple[dict[str, FragmentSlice], ...]:
    """Return the parts that belong to each fragment.

    Args:
        parameters: Trainable parameters, name to (shape, logical axes).
        count: Number of fragments.
    """
    fragments: tuple[dict[str, FragmentSlice], ...] = tuple({} for _ in range(count))
    fragment_sizes = [0] * count
    unsplit_sizes: dict[str, int] = {}
    for name, (shape, axes) in parameters.items():
        stacked = bool(axes) and axes[0] == axis_for_role(Role.LAYERS) and not layout.storage(axes, shape)[0]
        if count > 1 and stacked and shape[0] % count == 0:
            for fragment in range(count):
                fragments[fragment][name] = slice(fragment, None, count)
        else:
            unsplit_sizes[name] = math.prod(shape)
    for name in sorted(unsplit_sizes, key=lambda name: (-unsplit_sizes[name], name)):
        least = min(range(count), key=lambda fragment: (fragment_sizes[fragment], fragment))
        fragments[least][name] = None
        fragment_sizes[least] += unsplit_sizes[name]
    return fragments
