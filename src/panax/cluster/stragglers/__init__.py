"""Detection of slow hosts and links from what a job's processes measure."""
