"""Sequence mixers other than attention."""
