"""Parts of a run: the work beside its steps, as a list of values with one protocol, and the run's phases."""
