"""Joining a job of several processes: membership, rendezvous, agreement, signs of life."""
