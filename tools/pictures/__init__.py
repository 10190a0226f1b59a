"""Pictures of the pages, each made from runs by one command."""
