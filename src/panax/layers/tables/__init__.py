"""Embedding tables: configuration, lookup and storage of several tables as one."""
