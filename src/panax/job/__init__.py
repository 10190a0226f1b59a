"""Joining a job of several processes: membership, rendezvous, agreement, heartbeats."""
