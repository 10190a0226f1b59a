"""What a test of a task calls: the contracts that every built-in task passes, for anybody's."""

from .layouts import TaskReport, check_task

__all__ = ["TaskReport", "check_task"]
