"""Decoder language models: config, blocks, task and sampling."""
