"""Kernels for CPUs: C files, compiled on first use, and Intel's library, each chosen where timing finds it fastest."""
