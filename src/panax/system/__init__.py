"""Services of the operating system: locks, folders that Panax owns, caches, the processor."""
