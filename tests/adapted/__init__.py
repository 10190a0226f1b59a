"""One small model of each framework, for tests/contracts/test_tasks.py; adapted.case shows how one is written."""
