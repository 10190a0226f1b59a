"""Reports of a run: scalars, evaluation, hooks and history."""
