"""Recipes: functions that return an experiment, each with its command, hardware and expected result."""
