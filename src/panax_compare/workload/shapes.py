"""Model shapes of the built-in workloads."""

import dataclasses
from typing import Any

from panax.layers import MoE
from panax.models import DecoderConfig, VitConfig

from .settings import DEFAULT_SIZES, Settings

_DECODER: dict[str, Any] = {"norm_epsilon": 1e-5, "tied": False}

DECODERS: dict[str, tuple[DecoderConfig, int]] = {
    "tiny": (
        DecoderConfig(vocab_size=256, max_length=64, embed=64, num_layers=2, heads=4, kv_heads=2, ffn=128, **_DECODER),
        32,
    ),
    "60m": (
        DecoderConfig(vocab_size=32000, embed=512, num_layers=8, heads=8, kv_heads=4, ffn=1408, **_DECODER),
        256,
    ),
    "160m": (
        DecoderConfig(
            vocab_size=32000, max_length=2048, embed=768, num_layers=12, heads=12, kv_heads=4, ffn=2048, **_DECODER
        ),
        1024,
    ),
    "1b": (
        DecoderConfig(
            vocab_size=32000, max_length=4096, embed=2048, num_layers=16, heads=32, kv_heads=8, ffn=8192, **_DECODER
        ),
        2048,
    ),
    "8b": (
        DecoderConfig(
            vocab_size=128256, max_length=8192, embed=4096, num_layers=32, heads=32, kv_heads=8, ffn=14336, **_DECODER
        ),
        4096,
    ),
}
"""Llama's shape in several sizes, each with its usual row length. "8b" is Llama 3's; --layers makes it
fit."""

MIXTURES: dict[str, tuple[DecoderConfig, int]] = {
    "tiny": (
        DecoderConfig(
            vocab_size=256,
            max_length=64,
            embed=64,
            num_layers=2,
            heads=4,
            kv_heads=2,
            ffn=64,
            feed_forward=MoE(experts=4, active=2, balance=0.0),
            **_DECODER,
        ),
        32,
    ),
    "100m": (
        DecoderConfig(
            vocab_size=32000,
            embed=384,
            num_layers=6,
            heads=6,
            kv_heads=2,
            ffn=1024,
            feed_forward=MoE(experts=8, active=2, balance=0.0),
            **_DECODER,
        ),
        256,
    ),
    "8x7b": (
        DecoderConfig(
            vocab_size=32000,
            max_length=32768,
            embed=4096,
            num_layers=32,
            heads=32,
            kv_heads=8,
            ffn=14336,
            feed_forward=MoE(experts=8, active=2, balance=0.0),
            **_DECODER,
        ),
        2048,
    ),
}
"""Mixtral's shape, in the form of `DECODERS`."""


def decoder_shape(settings: Settings) -> tuple[DecoderConfig, int]:
    """Return the model of `decoder` or `moe`, and the length of a row."""
    sizes = DECODERS if settings.kind == "decoder" else MIXTURES
    config, usual = sizes[settings.size or DEFAULT_SIZES[settings.kind]]
    length = settings.sequence_length or usual
    return dataclasses.replace(
        config, num_layers=settings.layers or config.num_layers, max_length=max(length, config.max_length)
    ), length


def vit_shape(settings: Settings) -> VitConfig:
    """Return the model of `vit`."""
    if settings.size == "tiny":
        config = VitConfig(num_classes=10, image_size=32, patch=8, embed=64, num_layers=2, heads=4, ffn=128)
    else:
        config = VitConfig.of_size(settings.size or DEFAULT_SIZES["vit"], patch=14 if settings.size == "H" else 16)
    return dataclasses.replace(
        config,
        num_layers=settings.layers or config.num_layers,
        image_size=settings.image_size or config.image_size,
        patch=settings.patch_size or config.patch,
        num_classes=settings.classes or config.num_classes,
    )
