"""Images: sources, decoding and augmentation."""
