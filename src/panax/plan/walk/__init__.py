"""Memory, FLOPs and traffic of a step, read from its trace."""
