"""Rewards: functions of one answer, called in processes with time limits."""
