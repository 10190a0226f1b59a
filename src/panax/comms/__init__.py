"""Communication over slow networks: compressed gradient reductions with error feedback, delayed gradients,
local steps, and islands.
"""

from .settings import Comms, Islands
from .wires import WIRES, CastWire, QuantizedWire, Wire, register_wire

__all__ = ["WIRES", "CastWire", "Comms", "Islands", "QuantizedWire", "Wire", "register_wire"]
