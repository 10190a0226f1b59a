"""A teacher's most likely tokens, stored beside a token file and joined to its batches."""
