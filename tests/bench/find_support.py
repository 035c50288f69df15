"""Importing it puts tests/support on the path, as tests/conftest.py does for the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
