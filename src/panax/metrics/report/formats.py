"""Formats of figures for users."""

import math
import time
from collections.abc import Mapping
from typing import Any

from ..page.svg import number

MAX_SHOWN_CHARACTERS = 400
"""Maximum number of characters of a value from a file in a table."""


def format_duration(seconds: float | int | None, *, brief: bool = False) -> str:
    """Format a duration; in a shorter form if `brief`.

    >>> [format_duration(seconds) for seconds in (None, 0.25, 12.34, 125.0, 7300.0, 200000.0)]
    ['', '0.25 s', '12.3 s', '2 min 5 s', '2 h 2 min', '2 d 8 h']
    >>> format_duration(754.0, brief=True)
    '13 min'
    """
    if seconds is None or not math.isfinite(seconds):
        return ""
    if seconds < 60:
        return f"{seconds:.3g} s"
    rounded_seconds = round(seconds)
    if brief and 600 <= rounded_seconds < 3600:
        return f"{round(seconds / 60)} min"
    if rounded_seconds < 3600:
        return f"{rounded_seconds // 60} min {rounded_seconds % 60} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def format_hours(device_hours: float | int | None) -> str:
    """Format device-hours.

    >>> [format_hours(value) for value in (None, 5e-7, 0.00123, 12.345, 12345.6)]
    ['', 'below 0.001', '0.00123', '12.3', '12,346']
    """
    if device_hours is None:
        return ""
    if 0 < device_hours < 0.001:
        return "below 0.001"
    return f"{device_hours:,.0f}" if device_hours >= 1000 else f"{device_hours:.3g}"


def format_money(amount: float | int | None, currency: str) -> str:
    """Format a price.

    >>> format_money(1234.5, "USD"), format_money(0.0012, "EUR"), format_money(0.0, "EUR")
    ('1,234.50 USD', '0.0012 EUR', '0.00 EUR')
    """
    if amount is None:
        return ""
    return f"{amount:,.2f} {currency}" if amount >= 0.1 or amount == 0 else f"{amount:.2g} {currency}"


def format_energy(joules: float | int) -> str:
    """Format energy in a suitable unit.

    >>> format_energy(500.0), format_energy(90000.0), format_energy(7.2e9)
    ('500 J', '25 Wh', '2,000 kWh')
    """
    if joules < 3600:
        return f"{joules:.3g} J"
    return f"{joules / 3600:.3g} Wh" if joules < 3.6e6 else f"{number(joules / 3.6e6)} kWh"


def format_loss(value: float | int | None) -> str:
    """Format a loss.

    >>> format_loss(2.58431), format_loss(1.5e9), format_loss(0.0000123), format_loss(None)
    ('2.5843', '1.5e+09', '1.23e-05', '')
    """
    if value is None:
        return ""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.4g}"


def format_percent(share: float | int | None) -> str:
    """Format a fraction as a percentage.

    >>> format_percent(0.1234), format_percent(0.0005), format_percent(None)
    ('12.3 %', '0.05 %', '')
    """
    if share is None or not math.isfinite(share):
        return ""
    return f"{share:.1%}".replace("%", " %") if share >= 0.001 or share == 0 else f"{share * 100:.2g} %"


def format_time(seconds: float | int | None) -> str:
    """Format a date and time in UTC."""
    if seconds is None or not 0 < seconds < 2**36:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def format_value(value: Any) -> str:
    """Format a value from a file as short text; long ones are truncated.

    >>> format_value({"fsdp": 8, "tensor": 2}), format_value(["a", "b"]), format_value(None), format_value(True)
    ('fsdp 8, tensor 2', 'a, b', '', 'True')
    """
    if value is None:
        return ""
    if isinstance(value, Mapping):
        text = ", ".join(f"{key} {format_value(inner)}" for key, inner in list(value.items())[:64])
    elif isinstance(value, list | tuple):
        text = ", ".join(format_value(inner) for inner in value[:64])
    else:
        text = str(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[: MAX_SHOWN_CHARACTERS - 1] + "…"
