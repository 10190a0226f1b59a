"""Adapters of low rank in the files of PEFT."""
