"""The supervisor: starting, following and restarting a job's processes."""
