"""The tiny recipe with a larger model: steps of tenths of a second, which say something of a processor."""

import dataclasses

from tiny_recipe import tiny

from panax import Experiment
from panax.models import DecoderConfig, DecoderTask


def steady() -> Experiment:
    model = DecoderConfig(max_length=64, embed=256, num_layers=3, heads=4, ffn=1024, windows=(16,))
    return dataclasses.replace(tiny(), name="steady", task=DecoderTask(model=model))
