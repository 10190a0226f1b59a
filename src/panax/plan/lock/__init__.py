"""Locks: the cost of a step as a file that a repository commits, and its changes."""
