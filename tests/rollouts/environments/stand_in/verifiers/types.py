"""States, which have the fields of their input too."""


class State(dict):
    def __getitem__(self, key):
        own = super().get("input", {})
        return own[key] if key in own else super().__getitem__(key)
