"""State-space scan: kernel and reference."""
