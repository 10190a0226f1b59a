"""Readers of the file formats that corpora come in."""
