"""Prefixes that wrappers of PyTorch modules add to the names of their weights."""

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_forward_module.", "module.")
"""Prefixes of `torch.compile`, FSDP, activation checkpointing, DeepSpeed and Fabric, and (distributed) data
parallelism."""


def find_wrapper(names: set[str]) -> str | None:
    """Return the prefix that a wrapper has added to all of these names, or to some names if no user's module has
    that name; None without such a prefix."""
    for prefix in WRAPPERS:
        if names and all(name.startswith(prefix) for name in names):
            return prefix
        if prefix.startswith("_") and any(prefix in name for name in names):
            return prefix
    return None


def strip_wrapper_names(name: str) -> str:
    """Return a name without the prefixes of wrappers.

    >>> strip_wrapper_names("module._orig_mod.layers.0.weight"), strip_wrapper_names("layers.0._orig_mod.weight")
    ('layers.0.weight', 'layers.0.weight')
    """
    for prefix in WRAPPERS:
        name = name.replace(prefix, "") if prefix.startswith("_") else name.removeprefix(prefix)
    return name
