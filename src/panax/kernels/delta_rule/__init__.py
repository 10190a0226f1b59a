"""The gated delta rule: a definition, and a chunked version."""
