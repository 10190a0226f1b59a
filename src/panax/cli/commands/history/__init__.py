"""Commands that go back to a step of a run."""
