"""Starting a job's processes on one machine or many, following them, and starting them again: a supervisor, agents, engines.

Nothing here imports jax: it runs in the workers.
"""

from ..core.lazy import lazy_getattr

__getattr__ = lazy_getattr(
    __name__,
    {
        "job": ("Job", "RestartPolicy"),
        "launching": ("launch",),
        "engines": ("Resources", "engine_of"),
    },
)
