"""A part for each kind of layout: a small model trains on two devices as on one."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import numpy as np

from ...data.text.token_source import TEXT_AXES
from ...layers import MoE
from ...models import DecoderConfig, DecoderTask
from ...testing.layouts import STEPS, LayoutComparison, layout_name
from .comparison import full_precision
from .parts import Case, CaseSkipped, Figures, ResultMismatch

ROWS, LENGTH, VOCABULARY = 8, 64, 256

LAYOUTS: tuple[dict[str, int], ...] = (
    {},
    *({axis: 2} for axis in ("replica", "fsdp", "tensor", "context", "stage")),
    {"fsdp": 2, "tensor": 2},
)
"""Layouts of a dense model: each mesh axis with two devices, and two of them together. The first is a single
device."""

MIXTURE_LAYOUTS: tuple[dict[str, int], ...] = ({}, {"expert": 2})

CONFIG = DecoderConfig(
    vocab_size=VOCABULARY, max_length=LENGTH, embed=64, num_layers=2, heads=4, kv_heads=2, ffn=128, qk_norm=True
)
MIXTURE = dataclasses.replace(CONFIG, feed_forward=MoE(experts=4, active=2, ffn=64, balance=0.01))


def layout_cases() -> list[Case]:
    """Return one part for each layout of a dense decoder and of a mixture of experts."""
    cases = []
    for name, config, layouts in (("dense", CONFIG, LAYOUTS), ("mixture", MIXTURE, MIXTURE_LAYOUTS)):
        comparison = functools.cache(functools.partial(_comparison, DecoderTask(model=config)))
        for sizes in layouts:
            run = functools.partial(_compared if sizes else _alone, comparison, sizes)
            cases.append(Case("layout", f"{name}, {layout_name(sizes) or 'one device'}", run))
    return cases


def batch() -> dict[str, np.ndarray]:
    """Return a batch of random tokens with one document per row."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": np.ones((ROWS, LENGTH), np.float32),
        "segment": np.ones((ROWS, LENGTH), np.int32),
        "position": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH)).copy(),
    }


def _comparison(task: DecoderTask) -> LayoutComparison:
    return LayoutComparison(task, batch(), axes=TEXT_AXES, devices=jax.local_devices())


def _alone(comparison: Callable[[], LayoutComparison], sizes: Mapping[str, int]) -> Figures:
    with full_precision("float32"):
        losses = comparison().train_on_one_device(1).losses
    if not all(np.isfinite(losses)) or not losses[-1] < losses[0]:
        raise ResultMismatch(f"the losses of {STEPS} steps on one batch are {losses}; expected finite ones that fall")
    return {"loss": " -> ".join(f"{loss:.5f}" for loss in losses)}


def _compared(comparison: Callable[[], LayoutComparison], sizes: Mapping[str, int]) -> Figures:
    layout_comparison = comparison()
    reason = layout_comparison.explain_unfit(sizes)
    if reason is not None:
        raise CaseSkipped(reason)
    with full_precision("float32"):
        try:
            layout_comparison.compare(sizes)
        except AssertionError as error:
            raise ResultMismatch(str(error)) from error
    return {
        "compared": f"parameters, gradient and losses of {STEPS} steps",
        "tolerance": f"{layout_comparison.tolerance:.1g}",
    }
