"""Mesh axes of arrays, compilation targets, and the requirements of tasks on a mesh."""
