"""Text: corpora, tokenizers, token files, packing and mixtures."""
