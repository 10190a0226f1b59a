"""What a program costs before it runs: its communication, its memory, and targets that are not attached."""

from typing import TYPE_CHECKING

from ..core.lazy import lazily

if TYPE_CHECKING:
    from .collectives import Collective, Total, count_collectives, summary
    from .search.targets import Hardware, parse_target, target_devices
    from .step import Memory, StepPlan, TooLarge, plan_step, text_batch
    from .walk.traffic import Traffic, traffic_totals
    from .walk.walk import StepCost, walk_step

__getattr__ = lazily(
    __name__,
    {
        "collectives": ("Collective", "Total", "count_collectives", "summary"),
        "step": ("Memory", "StepPlan", "TooLarge", "plan_step", "text_batch"),
        "search.targets": ("Hardware", "parse_target", "target_devices"),
        "walk.traffic": ("Traffic", "traffic_totals"),
        "walk.walk": ("StepCost", "walk_step"),
    },
)

__all__ = [
    "Collective", "Hardware", "Memory", "StepCost", "StepPlan", "TooLarge", "Total", "Traffic", "count_collectives",
    "parse_target", "plan_step", "summary", "target_devices", "text_batch", "traffic_totals", "walk_step",
]  # fmt: skip
