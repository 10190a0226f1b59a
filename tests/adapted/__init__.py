"""One small model of each framework, for tests/contracts/test_tasks.py; adapted.case says how one is written."""
