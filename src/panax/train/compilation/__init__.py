"""Compilation of a step's programs for a mesh: batches on the way to it, one program per shape, programs between steps."""
