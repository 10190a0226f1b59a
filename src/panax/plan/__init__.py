"""Cost of a program before it runs: its communication, its memory, and compilation targets that are not
attached."""

from typing import TYPE_CHECKING

from ..core.lazy import lazy_getattr

if TYPE_CHECKING:
    from .collectives import Collective, CollectiveTotal, count_collectives, summarize_collectives
    from .search.targets import Hardware, parse_target, target_devices
    from .step import ProgramMemory, ProgramTooLargeError, StepPlan, plan_step, text_batch
    from .walk.traffic import Traffic, traffic_totals
    from .walk.walk import StepCost, walk_step

__getattr__ = lazy_getattr(
    __name__,
    {
        "collectives": ("Collective", "CollectiveTotal", "count_collectives", "summarize_collectives"),
        "step": ("ProgramMemory", "StepPlan", "ProgramTooLargeError", "plan_step", "text_batch"),
        "search.targets": ("Hardware", "parse_target", "target_devices"),
        "walk.traffic": ("Traffic", "traffic_totals"),
        "walk.walk": ("StepCost", "walk_step"),
    },
)

__all__ = [
    "Collective", "CollectiveTotal", "Hardware", "ProgramMemory", "ProgramTooLargeError", "StepCost", "StepPlan",
    "Traffic", "count_collectives", "parse_target", "plan_step", "summarize_collectives", "target_devices",
    "text_batch", "traffic_totals", "walk_step",
]  # fmt: skip
