"""Assembly of a `Program` from a task, an optimizer and settings."""
