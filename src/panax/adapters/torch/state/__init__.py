"""State that a trace must leave as it was: the module's tensors, Python values, random draws and surroundings."""
