"""Search for a mesh, and the hardware that it is searched for."""
