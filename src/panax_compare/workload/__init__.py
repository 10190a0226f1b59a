"""Definition of the work that all columns do."""
