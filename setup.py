"""Chooses the modules of a wheel, and writes verl/trainer/config from the classes of verl/config. pyproject.toml has the rest.

`packages/PART/setup.py` calls `setup_part` for the wheel of a part (verl/distributions.py).
"""

import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from verl._version import __version__  # noqa: E402 - the package is not installed yet
from verl.distributions import CORE, owner_of  # noqa: E402


class BuildModules(build_py):
    """Leaves out the modules of a package that are of another distribution."""

    def run(self):
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)  # an earlier build leaves files that are gone
        super().run()

    def find_package_modules(self, package, package_dir):
        modules = super().find_package_modules(package, package_dir)
        return [found for found in modules if owner_of(".".join(found[:2])) == self.distribution.get_name()]


def setup_part(folder, *parts):
    """Run the build of the part of `packages/PART`, which needs the core and `parts`, all of one release."""
    modules = [path.relative_to(ROOT).with_suffix("").parts for path in (ROOT / CORE).rglob("*.py")]
    with TemporaryDirectory() as build:  # an earlier build leaves modules that are gone
        setup(
            version=__version__,
            install_requires=[f"{name}=={__version__}" for name in (CORE, *parts)],
            package_dir={"": os.path.relpath(ROOT, folder)},
            packages=sorted({".".join(names[:-1]) for names in modules if owner_of(".".join(names)) == folder.name}),
            cmdclass={"build_py": BuildModules},
            options={"build": {"build_base": build}, "egg_info": {"egg_base": build}},
        )


if __name__ == "__main__":
    from verl.compat.hydra_groups import main  # needs PyYAML, which a part is built without

    main([str(ROOT / "verl/trainer/config")])
    setup(cmdclass={"build_py": BuildModules})
