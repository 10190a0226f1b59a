"""A step of a run, taken again: `panax.at`."""
