"""Finds the reward functions of these tests in the processes that call them too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "rewards"))
