"""Contracts that every built-in task passes, for the tests of any task."""

from .layouts import TaskReport, check_task

__all__ = ["TaskReport", "check_task"]
