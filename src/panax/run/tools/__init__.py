"""Commands around runs: searches, sweeps and hardware checks."""
