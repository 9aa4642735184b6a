"""Lets the tests of this folder import what they share (`harness`) under pytest's importlib mode."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
