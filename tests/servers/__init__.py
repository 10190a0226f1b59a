"""Servers for tests, on 127.0.0.1 alone, which end by themselves: an S3 server, and a proxy that injects faults.

In tests: `from servers.fixtures import ...`. By hand, with `tests` on the path: `python -m servers --help`.
"""

from .faults import KINDS, WRONG_ANSWERS, Fault, Faults
from .proxy import FaultProxy
from .s3 import S3Server

__all__ = ["KINDS", "WRONG_ANSWERS", "Fault", "FaultProxy", "Faults", "S3Server"]
