"""Writes verl/trainer/config from the classes of verl/config where the package is installed; pyproject.toml has the rest."""

import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from verl.config.groups import main  # noqa: E402 - the package is not installed yet

main([str(ROOT / "verl/trainer/config")])
setup()
