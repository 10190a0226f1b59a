"""Calls of users' functions in processes of this host: rewards, environments and tools."""
