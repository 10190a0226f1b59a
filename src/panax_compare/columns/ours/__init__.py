"""Columns of Panax, and of other libraries' models adapted to it."""
