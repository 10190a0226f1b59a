"""README's picture: a run that is killed three times and continues on three other meshes."""

from pathlib import Path

from .commands import run


def draw_three_kills(folder: Path) -> dict[str, bytes]:
    """Run `benchmarks/three_kills.py`, which also fails if the two losses differ by more than rounding."""
    picture = folder / "three-kills.svg"
    run(["benchmarks/three_kills.py", "--picture", str(picture)])
    return {picture.name: picture.read_bytes()}
