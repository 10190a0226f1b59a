"""Sizes of the parts of a full check: on an accelerator as in training, on a CPU so that all of it takes a
minute or two."""

import dataclasses

from ...models import PRESETS, DecoderConfig

SHAPE = "llama3_8b"
"""Model of the benchmark, with as many layers as fit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of all parts.

    Attributes:
        positions: Length of the rows for kernels of attention and scans.
        heads: Query heads; a quarter as many key-value heads.
        rows: Rows of the matrices that are multiplied, and of all groups of a grouped matmul.
        width: Width of those matrices.
        saved: Model with a state that is saved and restored.
        trained: The model of the benchmark; its `num_layers` are the maximum.
        trained_as: Name of the model `trained`.
        tokens: Tokens in a row of the benchmark.
        rows_per_device: Rows of the benchmark's batch on each device.
        steps: Number of steps that are timed.
        seconds: Maximum time of the benchmark's steps, estimated from the rate of matrix multiplications;
            fewer layers are used if all of them would take longer. None: no limit.
        memory_share: Share of the free memory for the benchmark.
    """

    positions: int
    heads: int
    head_dim: int
    rows: int
    width: int
    saved: DecoderConfig
    trained: DecoderConfig
    trained_as: str
    tokens: int
    rows_per_device: int
    steps: int
    seconds: float | None
    memory_share: float


def _model(embed: int, vocab_size: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab_size, embed=embed, num_layers=4, heads=embed // 64, kv_heads=embed // 128, ffn=4 * embed
    )


_EIGHTH = dataclasses.replace(PRESETS[SHAPE], embed=512, heads=4, kv_heads=1, ffn=1792, vocab_size=16032, num_layers=8)

ACCELERATOR = Sizes(
    positions=1024,
    heads=8,
    head_dim=128,
    rows=4096,
    width=1024,
    saved=_model(1024, 32768),
    trained=PRESETS[SHAPE],
    trained_as=SHAPE,
    tokens=2048,
    rows_per_device=4,
    steps=10,
    seconds=None,
    memory_share=0.92,
)
"""Sizes of the full check on a GPU or TPU."""

CPU = Sizes(
    positions=128,
    heads=4,
    head_dim=64,
    rows=256,
    width=256,
    saved=_model(256, 4096),
    trained=_EIGHTH,
    trained_as=f"{SHAPE} at an eighth of its widths",
    tokens=256,
    rows_per_device=2,
    steps=5,
    seconds=40.0,
    memory_share=0.25,
)
"""Sizes of the full check on a CPU, for a run of minutes."""


def sizes_for(platform: str) -> Sizes:
    """Return the sizes for devices of a platform."""
    return CPU if platform == "cpu" else ACCELERATOR
