"""How many rows of each batch come from each part of a mixture: whole rows, never one off the schedule or more.

A part's share of a batch is rarely a whole number. What it is owed is carried on, and each batch gives a part the whole
rows that are due by its end. The rows left go to the parts whose next row falls due soonest. Those are the deadlines of
a schedule that fractional rows would meet, and serving the earliest deadline first meets them in whole rows too: what a
part has had and what its weights add up to differ by less than one row after every batch, also while weights change.

All is counted in whole `UNITS_PER_ROW`s of a row, so nothing is rounded and no machine comes to another result.

Source: earliest deadline first is optimal for unit tasks (Jackson, 1955); for proportional shares, Tijdeman, "The
chairman assignment problem" (1980).
"""

from collections.abc import Callable, Sequence

UNITS_PER_ROW = 2**32
"""A row."""

_LOOK_AHEAD = 4096


def apportion_shares(weights: Sequence[float], num_rows: int) -> list[int]:
    """Divide `num_rows` rows in the proportion of `weights`, in units; the sum is exact.

    >>> [share / UNIT for share in apportion_shares([1.0, 3.0], 6)]
    [1.5, 4.5]
    """
    total = sum(weights)
    found = [int(num_rows * UNITS_PER_ROW * (weight / total)) for weight in weights]
    found[max(range(len(weights)), key=weights.__getitem__)] += num_rows * UNITS_PER_ROW - sum(found)
    return found


def apportion(owed: Sequence[int], share: Callable[[int], Sequence[int]], num_rows: int) -> list[int]:
    """Whole rows for each part of one batch.

    Args:
        owed: What each part has had too little so far, in units; negative where it had too much. The sum is 0.
        share: The units that are each part's of the k-th batch from this one on.
        num_rows: How many rows to give.

    >>> apportion([0, 0], lambda k: apportion_shares([1.0, 3.0], 6), 6)
    [2, 4]
    """
    due = [before + now for before, now in zip(owed, share(0), strict=True)]
    rows = [max(0, amount // UNITS_PER_ROW) for amount in due]
    left = num_rows - sum(rows)

    def lack(part: int) -> int:
        return due[part] - rows[part] * UNITS_PER_ROW

    # Only when weights were changed between two batches can too much be due; the last to be due then waits.
    while left < 0:
        rows[min((part for part in range(len(rows)) if rows[part]), key=lack)] -= 1
        left += 1
    begun = [part for part in range(len(due)) if lack(part) > 0]
    if left < len(begun):
        begun = _by_deadline(begun, [UNITS_PER_ROW - lack(part) for part in range(len(due))], share, left)
    for part in begun[:left]:
        rows[part] += 1
    while (left := num_rows - sum(rows)) > 0:
        rows[max(range(len(rows)), key=lack)] += 1
    return rows


def _by_deadline(parts: list[int], missing: list[int], share: Callable[[int], Sequence[int]], enough: int) -> list[int]:
    """The parts in the order in which the units they miss come together; at least the first `enough` of them."""
    missing, order = list(missing), []
    waiting = sorted(parts, key=missing.__getitem__)
    for ahead in range(1, _LOOK_AHEAD + 1):
        if len(order) >= enough:
            break
        coming = share(ahead)
        for part in waiting:
            missing[part] -= coming[part]
        order += [part for part in waiting if missing[part] <= 0]
        waiting = [part for part in waiting if missing[part] > 0]
    return order + waiting
