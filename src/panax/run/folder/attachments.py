"""Names of the files that a run attaches to its checkpoints, from which its model can be built without the recipe."""

MODEL = "model.json"
TOKENIZER = "tokenizer.json"
CLASSES = "classes.json"
RELEASED = "released.json"
"""The config.json of the model from which a run began."""
