"""Kernels for CPUs: C files, compiled on first use, and Intel's library, each chosen if it is the fastest in
timings."""
