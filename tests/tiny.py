"""A decoder small enough to compile in seconds, with every part that can go wrong across layouts."""

import numpy as np

from panax.models import DecoderConfig, DecoderTask
from panax.optim import AdamW, Schedule

CONFIG = DecoderConfig(
    vocab_size=96,
    max_length=32,
    embed=32,
    num_layers=3,
    heads=4,
    kv_heads=2,
    ffn=64,
    windows=(8, 0),
    qk_norm=True,
    post_norms=True,
    attention_bias=True,
    logit_soft_cap=30.0,
    dropout=0.1,
)
ROWS, LENGTH = 16, 32
AXES = dict.fromkeys(("tokens", "targets", "loss_mask", "segment", "position"), ("batch", "seq"))
ADAMW = AdamW(schedule=Schedule(peak=1e-2, decay="constant"))


def task(**changes) -> DecoderTask:
    return DecoderTask(model=CONFIG, **changes)


def batch(seed: int = 0, rows: int = ROWS, length: int = LENGTH) -> dict[str, np.ndarray]:
    """Random tokens in two packed documents a row, some padding, a random loss mask."""
    rng = np.random.default_rng(seed)
    cut = rng.integers(4, length - 4, rows)
    at = np.arange(length)[None]
    segment = np.where(at < cut[:, None], 1, 2)
    segment = np.where(at >= length - 3, 0, segment)
    return {
        "tokens": rng.integers(0, CONFIG.vocab_size, (rows, length)).astype(np.int32),
        "targets": rng.integers(0, CONFIG.vocab_size, (rows, length)).astype(np.int32),
        "loss_mask": ((rng.random((rows, length)) < 0.8) & (segment > 0)).astype(np.float32),
        "segment": segment.astype(np.int32),
        "position": np.where(at < cut[:, None], at, at - cut[:, None]).astype(np.int32),
    }
