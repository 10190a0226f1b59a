"""A release: its checks, its distributions, and its tag."""
