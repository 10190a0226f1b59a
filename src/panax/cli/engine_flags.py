"""Flags of the commands that generate: the mesh, the dtype and the guesses of the engine."""

import argparse
from typing import Any

from ..generate import GenerationEngine
from ..mesh import MeshShape
from ..run.folder.trained_model import LoadedModel
from .parser import Parser

DTYPES = ("float32", "bfloat16")
MESH_FLAGS = {"tensor": "heads and widths", "expert": "experts, and rows,", "fsdp": "rows"}
"""The mesh axes of generation, and what each splits: other axes would split rows too."""


def add_engine_flags(parser: Parser) -> None:
    """Add the flags that `create_engine` reads."""
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of activations and caches (default: float32)"
    )
    parser.add_argument(
        "--drafts",
        type=int,
        default=0,
        metavar="N",
        help="guess N tokens from earlier ones and check them at once: faster for answers that repeat their prompt "
        "(default: 0)",
    )
    parser.add_argument("--base", help="folder or hub name of the model that adapters belong to, if it has moved")
    for axis, use in MESH_FLAGS.items():
        parser.add_argument(
            f"--mesh.{axis}",
            dest=f"mesh_{axis}",
            type=int,
            metavar="N",
            help=f"split {use} over N devices (default: 1)",
        )


def read_mesh(options: argparse.Namespace) -> MeshShape | None:
    """Return the mesh of a command; None without a flag for it."""
    axes: dict[str, Any] = {axis: size for axis in MESH_FLAGS if (size := getattr(options, f"mesh_{axis}")) is not None}
    return MeshShape(**{"fsdp": 1, **axes}) if axes else None


def create_engine(trained: LoadedModel, options: argparse.Namespace, **sizes: Any) -> GenerationEngine:
    """Create the engine of a command.

    Args:
        sizes: As for `LoadedModel.create_engine`.
    """
    return trained.create_engine(dtype=options.dtype, drafts=options.drafts, **sizes)
