"""Launching of a job's processes on one machine or many, their supervision, and their restarts: a supervisor,
agents, engines.

No module of this package imports jax, which only workers need.
"""

from ..core.lazy import lazy_getattr

__getattr__ = lazy_getattr(
    __name__,
    {
        "job": ("Job", "RestartPolicy"),
        "launcher": ("launch",),
        "engines": ("Resources", "make_engine"),
    },
)
