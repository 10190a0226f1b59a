"""Conversations to train on: reading them, rendering them by a chat template, and loss on the answers."""
