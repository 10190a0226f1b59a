"""The site of docs/: `python -m tools.site`."""
