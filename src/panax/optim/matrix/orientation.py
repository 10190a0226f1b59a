"""View of a parameter as a stack of wide matrices."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..parameter import Parameter


class TransposedView(NamedTuple):
    """A parameter as a stack of matrices, transposed if needed so that no matrix has more rows than columns.

    Attributes:
        stack_dims: The dimensions merged into the stack.
        rows: The dimensions merged into the rows, in the parameter's order.
        columns: The dimensions merged into the columns, in the parameter's order.
        transposed: True if the parameter's rows are the columns of this view.
        shape: Shape of one matrix.
    """

    stack_dims: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    transposed: bool
    shape: tuple[int, int]

    @classmethod
    def of(cls, parameter: Parameter) -> "TransposedView":
        """Orient the matrices of a parameter.

        Raises:
            ValueError: The parameter is not a matrix.
        """
        if parameter.matrix is None:
            raise ValueError(f"{parameter.name} with the axes {parameter.axes} is not a matrix")

        def sizes(dims: Sequence[int]) -> tuple[int, ...]:
            return tuple(parameter.shape[dim] for dim in dims)

        rows, columns = parameter.matrix
        # Square matrices are oriented too, so that those of equal shape and layout form one group in either direction.
        flips = (math.prod(sizes(columns)), sizes(columns)) < (math.prod(sizes(rows)), sizes(rows))
        if flips:
            rows, columns = columns, rows
        return cls(parameter.stack_dims, rows, columns, flips, (math.prod(sizes(rows)), math.prod(sizes(columns))))
