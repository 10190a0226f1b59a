"""Source line of an equation in the model's code, for error messages."""

import os
from pathlib import Path
from typing import Any

import equinox
import jax

_PASSED_OVER = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(jax.__file__).parent, Path(equinox.__file__).parent, Path(__file__).parents[1])
)


def source_line(equation: Any) -> str:
    """Return `file:line in function` of the innermost frame outside of JAX and `panax.spmd`, and the scope in
    the model.
    """
    if equation is None:
        return "an argument of the step"
    information = equation.source_info
    part = str(information.name_stack)
    suffix = f", in {part}" if part else ""
    frames = information.traceback.frames if information.traceback is not None else ()
    for frame in frames:
        if not frame.file_name.startswith((*_PASSED_OVER, "<")) and "jaxtyping" not in frame.file_name:
            return f"{frame.file_name}:{frame.line_num} in {frame.function_name}{suffix}"
    return f"'{equation.primitive.name}'{suffix}"
