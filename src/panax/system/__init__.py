"""What the operating system gives: locks, folders that Panax owns, caches, the processor."""
