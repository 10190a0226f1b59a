"""What crosses the slow network: compressed reductions with error feedback."""

from .settings import Comms, Islands
from .wires import WIRES, Cast, Coded, Wire, register_wire

__all__ = ["WIRES", "Cast", "Coded", "Comms", "Islands", "Wire", "register_wire"]
