"""Formatting of figures for readers."""


def format_seconds(value: float | int | None) -> str:
    """Format a duration with three digits.

    >>> format_seconds(0.01234), format_seconds(2.5), format_seconds(75.0), format_seconds(None)
    ('12.3 ms', '2.50 s', '75.0 s', '')
    """
    if value is None:
        return ""
    if value < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:,.1f} s"


def format_size(value: float | int | None) -> str:
    """Format bytes in a suitable unit.

    >>> format_size(3 * 2**30), format_size(5 * 2**20), format_size(300 * 2**10)
    ('3.00 GiB', '5 MiB', '300 KiB')
    """
    if value is None:
        return ""
    if value < 2**20:
        return f"{value / 2**10:.0f} KiB"
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def format_rate(value: float | int | None) -> str:
    """Format a rate per second.

    >>> format_rate(3.217), format_rate(12345.6)
    ('3.22', '12,346')
    """
    if value is None:
        return ""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def format_percent(value: float | int | None) -> str:
    return "" if value is None else f"{value * 100:.1f} %"


def format_ratio(value: tuple[float, float, float] | None) -> str:
    """Format the median, with the minimum and the maximum.

    >>> format_ratio((1.234, 1.1, 1.4))
    '1.23 (1.10 to 1.40)'
    """
    return "" if value is None else f"{value[0]:.2f} ({value[1]:.2f} to {value[2]:.2f})"


def join_words(words: list[str]) -> str:
    """Format a list as part of a sentence.

    >>> join_words(["a", "b", "c"]), join_words([])
    ('a, b and c', 'none')
    """
    if len(words) < 2:
        return words[0] if words else "none"
    return f"{', '.join(words[:-1])} and {words[-1]}"
