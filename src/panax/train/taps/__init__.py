"""Statistics of the values inside a compiled step, as further results of the same program."""
