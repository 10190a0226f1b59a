"""What a program costs before it runs: its communication, its memory, and targets that are not attached."""

from typing import TYPE_CHECKING

from ..core.lazy import lazily

if TYPE_CHECKING:
    from .collectives import Collective, Total, count_collectives, summary
    from .step import Memory, StepPlan, TooLarge, plan_step, text_batch
    from .targets import Hardware, parse_target, target_devices

__getattr__ = lazily(
    __name__,
    {
        "collectives": ("Collective", "Total", "count_collectives", "summary"),
        "step": ("Memory", "StepPlan", "TooLarge", "plan_step", "text_batch"),
        "targets": ("Hardware", "parse_target", "target_devices"),
    },
)

__all__ = [
    "Collective", "Hardware", "Memory", "StepPlan", "TooLarge", "Total", "count_collectives", "parse_target", "plan_step",
    "summary", "target_devices", "text_batch",
]  # fmt: skip
