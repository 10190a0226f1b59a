"""Compiled programs: kept on disk, shared by the processes of a job, and called back from."""
