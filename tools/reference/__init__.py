"""The pages of the API reference, collected from the sources."""
