"""Builds the wheel of this folder's distribution from the modules of verl/distributions.py."""

import runpy
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
runpy.run_path(str(FOLDER.parents[1] / "setup.py"))["setup_part"](FOLDER)
