"""Communication of a decoder's training step, by formula: from the algorithm, and not from a program. The walk is held to it."""
