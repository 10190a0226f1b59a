"""A figure that is not finite never wins and stands last, wherever it comes in the order."""

import itertools
import math

import pytest

from panax.core.finite_stats import max_finite, min_finite, sort_finite_first


@pytest.mark.parametrize("order", list(itertools.permutations([math.nan, 2.0, math.inf, 1.0, -math.inf])))
def test_in_every_order(order):
    assert min_finite(order) == 1.0
    assert max_finite(order) == 2.0
    assert sort_finite_first(order)[:2] == [1.0, 2.0]
    rest = [value for value in order if not math.isfinite(value)]
    assert list(map(str, sort_finite_first(order)[2:])) == list(map(str, rest))


def test_a_key_of_several_figures():
    rows = [("a", math.nan, 1), ("b", 2.0, 7), ("c", 2.0, 3)]
    assert min_finite(rows, key=lambda row: row[1:])[0] == "c"
    assert max_finite(rows, key=lambda row: row[1:])[0] == "b"
    assert [row[0] for row in sort_finite_first(rows, key=lambda row: row[1])] == ["b", "c", "a"]


def test_nothing_and_nothing_finite():
    assert min_finite([], default=None) is None and max_finite([], default=3) == 3
    assert math.isnan(min_finite([math.nan, math.inf])) and max_finite([-math.inf, math.nan]) == -math.inf
    for pick in (min_finite, max_finite):
        with pytest.raises(ValueError, match="no values to compare"):
            pick([])


def test_whole_numbers_beyond_floats_are_figures():
    assert max_finite([10**400, 5]) == 10**400
