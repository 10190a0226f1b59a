"""Compiled programs: cached on disk, shared by the processes of a job, with callbacks to the host."""
