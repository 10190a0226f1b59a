"""Processes of a node: its agent, the agent's workers, and their channel to the supervisor."""
