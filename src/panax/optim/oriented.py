"""A parameter as a stack of matrices."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from .parameter import Parameter


class TransposedView(NamedTuple):
    """A parameter as a stack of matrices with no more rows than columns.

    Attributes:
        copies: The dimensions that are put together to the stack.
        rows: The dimensions that are put together to the rows, in the parameter's order.
        flipped: The parameter's own rows are the columns here.
        shape: Of one matrix.
    """

    copies: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    flipped: bool
    shape: tuple[int, int]

    @classmethod
    def of(cls, parameter: Parameter) -> "TransposedView":
        """
        Raises:
            ValueError: It is not a matrix.
        """
        if parameter.matrix is None:
            raise ValueError(f"{parameter.name} with the axes {parameter.axes} is not a matrix")

        def sizes(dims: Sequence[int]) -> tuple[int, ...]:
            return tuple(parameter.shape[dim] for dim in dims)

        rows, columns = parameter.matrix
        # Of a square one, too, so that matrices of equal shape and layout come to one group whichever way they map.
        flips = (math.prod(sizes(columns)), sizes(columns)) < (math.prod(sizes(rows)), sizes(rows))
        if flips:
            rows, columns = columns, rows
        return cls(parameter.copies, rows, columns, flips, (math.prod(sizes(rows)), math.prod(sizes(columns))))
