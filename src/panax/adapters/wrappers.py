"""What wrappers of PyTorch modules put into the names of their weights."""

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_forward_module.", "module.")
"""Of `torch.compile`, FSDP, activation checkpointing, DeepSpeed and Fabric, and (distributed) data parallelism."""


def find_wrapper(names: set[str]) -> str | None:
    """What a wrapper has put into all of these names, or anywhere if no module of a user's is called so; None without one."""
    for prefix in WRAPPERS:
        if names and all(name.startswith(prefix) for name in names):
            return prefix
        if prefix.startswith("_") and any(prefix in name for name in names):
            return prefix
    return None


def strip_wrapper_names(name: str) -> str:
    """A name without what wrappers have put into it.

    >>> strip_wrapper_names("module._orig_mod.layers.0.weight"), strip_wrapper_names("layers.0._orig_mod.weight")
    ('layers.0.weight', 'layers.0.weight')
    """
    for prefix in WRAPPERS:
        name = name.replace(prefix, "") if prefix.startswith("_") else name.removeprefix(prefix)
    return name
