"""Mixtures of corpora: documents of several parts, in proportions given by a schedule."""
