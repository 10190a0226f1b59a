"""Equations of a traced program, run again one by one, and the places in the source that they come from."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from ..core.jax_primitives import JaxprEqn

_LIBRARIES = (str(Path(jax.__file__).parent), str(Path(jax.__file__).parent.parent / "equinox"))


def run_equation(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Apply an equation's primitive to other operands of the same types.

    >>> traced = jax.make_jaxpr(lambda x: x * 2.0)(1.0)
    >>> [float(result) for result in run_equation(traced.eqns[0], (3.0, 2.0))]
    [6.0]
    """
    params = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        results = equation.primitive.bind(*operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def source_line(equation: JaxprEqn, general: Sequence[str] = ()) -> str:
    """Return the innermost line outside of JAX that traced an equation, as "FILE:LINE (FUNCTION)"; empty if it is not
    known.

    Args:
        general: Parts of paths, such as "panax/spmd/", of files that are passed over if another file has a line.

    >>> "(<lambda>)" in source_line(jax.make_jaxpr(lambda x: x * 2.0)(1.0).eqns[0])
    True
    """
    traceback = equation.source_info.traceback
    frames = [
        frame for frame in (() if traceback is None else traceback.frames) if not frame.file_name.startswith(_LIBRARIES)
    ]
    own = [frame for frame in frames if not any(part in frame.file_name for part in general)]
    for frame in own or frames:
        return f"{_short_path(frame.file_name)}:{frame.line_num} ({frame.function_name.rpartition('.')[2]})"
    return ""


def _short_path(path: str) -> str:
    """Return a path from its package on, without the folders of this machine."""
    parts = Path(path).parts
    for root in ("site-packages", "src"):
        if root in parts:
            return "/".join(parts[len(parts) - parts[::-1].index(root) :])
    return parts[-1]
