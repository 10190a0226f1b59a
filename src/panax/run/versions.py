"""Versions of JAX that a checkpoint was saved under: a resumed run reports when they have changed."""

from collections.abc import Iterator
from importlib import metadata

from ..checkpoint import Checkpoint
from .opened_data import LogFn

VERSIONS = "versions"
"""Name under which a checkpoint stores the versions of libraries."""

_PACKAGES = ("jax", "jaxlib")


def jax_versions() -> dict[str, str]:
    """Return the versions of the packages that compile and run the step, by name."""
    return {name: metadata.version(name) for name in _PACKAGES}


def changed_versions(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield "jax 0.10.2 -> 0.12.0" for each package that has another version now.

    A checkpoint from before versions were recorded, or with versions that can't be read, yields nothing.
    """
    before = checkpoint.manifest.host.get(VERSIONS)
    for name, current in jax_versions().items():
        old = before.get(name) if isinstance(before, dict) else None
        if isinstance(old, str) and old != current:
            yield f"{name} {old} -> {current}"


def report_versions(checkpoint: Checkpoint, say: LogFn) -> None:
    """Report, in one line, if the checkpoint was saved under another JAX: the results of a resumed run may
    differ."""
    changed = ", ".join(changed_versions(checkpoint))
    if changed:
        say(
            f"changed since that checkpoint: {changed}; compiled programs may round differently, so the run may differ in the "
            f"last digits from one that was not interrupted"
        )
