"""Vision transformers by size and patch, with their published parameter counts."""

from ..vision.vit_config import VitConfig

VIT_PRESETS: dict[str, VitConfig] = {
    "vit_ti16": VitConfig.of_size("Ti"),
    "vit_s16": VitConfig.of_size("S"),
    "vit_s32": VitConfig.of_size("S", patch=32),
    "vit_b8": VitConfig.of_size("B", patch=8),
    "vit_b16": VitConfig.of_size("B"),
    "vit_b32": VitConfig.of_size("B", patch=32),
    "vit_b16_384": VitConfig.of_size("B", image_size=384),
    "vit_l16": VitConfig.of_size("L"),
    "vit_l32": VitConfig.of_size("L", patch=32),
    "vit_h14": VitConfig.of_size("H", patch=14),
}
"""Configs of published vision transformers by name, for `preset:NAME`."""

VIT_PUBLISHED_PARAMETERS: dict[str, int] = {
    "vit_ti16": 5_717_416,
    "vit_s16": 22_050_664,
    "vit_s32": 22_878_952,
    "vit_b8": 86_576_872,
    "vit_b16": 86_567_656,
    "vit_b32": 88_224_232,
    "vit_b16_384": 86_859_496,
    "vit_l16": 304_326_632,
    "vit_l32": 306_535_400,
    "vit_h14": 632_045_800,
}
"""Counts with a head of 1,000 classes. B/16, B/32, L and H: torchvision's documentation of its weights
(vit_b16_384: its SWAG weights). For Ti, S and B/8, `timm`'s tables give millions only (5.72, 22.05, 22.88 and
86.58); the last digits are counted here."""
