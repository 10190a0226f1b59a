"""Contents of a run's folder: settings, and the restoration of earlier runs and models."""
