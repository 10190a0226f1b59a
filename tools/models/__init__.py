"""Pages of `docs/families`: a page for each family of models, from what its tables declare and from computed figures."""
