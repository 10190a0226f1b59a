"""Figures and tables as text for a terminal."""

from collections.abc import Collection, Sequence


def align_columns(rows: Sequence[Sequence[str]], left: int | Collection[int] = 1) -> list[str]:
    """Format rows as aligned columns: some flush left, the others flush right.

    Args:
        left: Number of first columns that are flush left, or the indices of the columns that are.

    >>> align_columns([("a", "10"), ("bcd", "2")])
    ['a    10', 'bcd   2']
    """
    flush_left = range(left) if isinstance(left, int) else left
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            cell.ljust(width) if i in flush_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def format_bytes(count: int) -> str:
    """Format a number of bytes in a suitable unit.

    >>> format_bytes(3 * 2**20)
    '3.0 MiB'
    """
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def format_elapsed(seconds: float) -> str:
    """Format a time of a part of a run in a suitable unit.

    >>> format_elapsed(0.00021), format_elapsed(0.012), format_elapsed(3.2), format_elapsed(600.0)
    ('210 µs', '12 ms', '3.2 s', '10 min')
    """
    if seconds >= 90:
        return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 100 else f"{seconds * factor:.0f} {unit}"
    raise AssertionError("the last unit takes all")


def format_rate(bytes_per_second: float) -> str:
    """Format bytes per second in a suitable unit.

    >>> format_rate(12.5e6), format_rate(450e9)
    ('12.5 MB/s', '450 GB/s')
    """
    return _in_units(bytes_per_second, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def format_flop_rate(flops: float) -> str:
    """Format the rate of a device's work in a suitable unit.

    >>> format_flop_rate(989e12)
    '989 TFLOP/s'
    """
    return _in_units(flops, ("FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"))


def _in_units(value: float, units: Sequence[str]) -> str:
    index = 0
    while value >= 999.5 and index < len(units) - 1:
        value, index = value / 1000, index + 1
    return f"{value:.3g} {units[index]}"
