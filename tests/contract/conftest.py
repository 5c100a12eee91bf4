"""Puts the HTTP tests' folder on the path: its engine answers here too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "http"))
