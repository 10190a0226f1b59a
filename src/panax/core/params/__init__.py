"""Parameters: modules, their logical axes, selection by name, and random bits."""
