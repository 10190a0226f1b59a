"""Number of rows of each batch from each part of a mixture: whole rows, always within one row of the
schedule.

A part's share of a batch is rarely a whole number. Its remainder is carried over, and each batch gives a part
the whole rows that are due by its end. The remaining rows go to the parts with the next row due earliest. The due
times are deadlines that a schedule of fractional rows would meet, and serving the earliest deadline first meets
them with whole rows too: the rows that a part has received and the sum of its weights differ by less than one row
after every batch, also while weights change.

Everything is counted in whole `UNITS_PER_ROW`s of a row, so nothing is rounded and all machines get the same result.

Source: earliest deadline first is optimal for unit tasks (Jackson, 1955); for proportional shares, Tijdeman,
"The chairman assignment problem" (1980).
"""

from collections.abc import Callable, Sequence

UNITS_PER_ROW = 2**32
"""One row."""

_LOOK_AHEAD = 4096


def apportion_shares(weights: Sequence[float], num_rows: int) -> list[int]:
    """Divide `num_rows` rows in the proportion of `weights`, in units; the sum is exact.

    >>> [share / UNITS_PER_ROW for share in apportion_shares([1.0, 3.0], 6)]
    [1.5, 4.5]
    """
    total = sum(weights)
    found = [int(num_rows * UNITS_PER_ROW * (weight / total)) for weight in weights]
    found[max(range(len(weights)), key=weights.__getitem__)] += num_rows * UNITS_PER_ROW - sum(found)
    return found


def apportion(deficits: Sequence[int], share: Callable[[int], Sequence[int]], num_rows: int) -> list[int]:
    """Return the number of whole rows of one batch for each part.

    Args:
        deficits: Units that each part has received too few so far; negative if it received too many. The sum
            is 0.
        share: Returns each part's units of the k-th batch from this one on.
        num_rows: Number of rows to assign.

    >>> apportion([0, 0], lambda k: apportion_shares([1.0, 3.0], 6), 6)
    [2, 4]
    """
    due = [before + increment for before, increment in zip(deficits, share(0), strict=True)]
    rows = [max(0, amount // UNITS_PER_ROW) for amount in due]
    num_remaining = num_rows - sum(rows)

    def lack(part: int) -> int:
        return due[part] - rows[part] * UNITS_PER_ROW

    # A part can be due too many rows only if weights changed between two batches; then the last to be due
    # waits.
    while num_remaining < 0:
        rows[min((part for part in range(len(rows)) if rows[part]), key=lack)] -= 1
        num_remaining += 1
    candidates = [part for part in range(len(due)) if lack(part) > 0]
    if num_remaining < len(candidates):
        candidates = _by_deadline(
            candidates, [UNITS_PER_ROW - lack(part) for part in range(len(due))], share, num_remaining
        )
    for part in candidates[:num_remaining]:
        rows[part] += 1
    while (num_remaining := num_rows - sum(rows)) > 0:
        rows[max(range(len(rows)), key=lack)] += 1
    return rows


def _by_deadline(parts: list[int], missing: list[int], share: Callable[[int], Sequence[int]], enough: int) -> list[int]:
    """Return the parts in the order in which their missing units become due; at least the first `enough` are in
    order."""
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
