"""Policy networks: perceptrons, a recurrent one, a decoder, and the interface by which any model is a
policy."""

from .decoder import DecoderPolicy
from .perceptron import Layers, PerceptronPolicy
from .policy import Carry, Policy, PolicyOutput, as_features, num_features
from .recurrent import RecurrentPolicy

__all__ = [
    "Carry", "DecoderPolicy", "Layers", "PerceptronPolicy", "Policy", "PolicyOutput", "RecurrentPolicy", "as_features",
    "num_features",
]  # fmt: skip
