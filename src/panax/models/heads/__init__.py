"""Heads on decoders that give one result for a text: its class, or a vector."""
