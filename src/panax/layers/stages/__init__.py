"""Tasks as stages of layers, and their pipelined execution."""
