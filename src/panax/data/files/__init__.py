"""Files: finding, reading, caching and verifying them, here and in object stores."""
