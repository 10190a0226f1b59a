"""Numbers in the tables of an opened step."""

import math


def figure(value: float) -> str:
    """Format a number in four digits.

    >>> figure(0.00012345), figure(float("nan"))
    ('0.0001234', 'NaN')
    """
    return "NaN" if math.isnan(value) else f"{value:.4g}"


def percent(share: float) -> str:
    """Format a share; one that is not 0 never looks like it.

    >>> percent(0.0), percent(0.25), percent(1e-6)
    ('0 %', '25 %', '0.0001 %')
    """
    return f"{100 * share:.3g} %"
