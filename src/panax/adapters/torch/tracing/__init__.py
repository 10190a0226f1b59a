"""Tracing of a module and its loss into one graph, with the checks on what the graph holds."""
