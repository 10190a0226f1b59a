"""A stand-in for reasoning-gym, of the same interface: its questions depend on the seed of hashes and on the size."""
