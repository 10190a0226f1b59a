"""Other frameworks' models and weights, each in a room of its own that imports its library when used."""
