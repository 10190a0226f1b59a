"""How gradients are summed over devices: one reduction for a program, composed of kinds with a file each."""
