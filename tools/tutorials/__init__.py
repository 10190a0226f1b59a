"""Tutorials: a page and a notebook from one source that is executed once."""
