"""Pairs of answers, of which one is preferred: reading and encoding them, and rows that never part a pair."""
