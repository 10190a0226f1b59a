"""Launching of a job's processes on one machine or many, their supervision, and their restarts: a supervisor,
agents, engines.

Nothing here imports jax: it runs in the workers.
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
