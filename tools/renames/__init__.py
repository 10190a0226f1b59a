"""Renames of identifiers by a syntax tree and types, and the table that brings scripts up to date."""
