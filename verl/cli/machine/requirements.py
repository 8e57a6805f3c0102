"""Packages that verl needs: those that are missing, too old or broken, a sentence each. Needs none of them itself."""

from __future__ import annotations

import importlib.metadata
import traceback
from pathlib import Path

from verl.foreign_text import clean

_HEAVY = ("torch", "transformers")  # whose imports fail where their libraries do not fit the machine


def unmet_requirements() -> dict[str, str]:
    """Requirements of verl that this environment does not meet: requirement -> installed version."""
    try:
        from packaging.requirements import Requirement

        texts = importlib.metadata.requires("verl") or []
    except (ImportError, importlib.metadata.PackageNotFoundError):  # run from a checkout, not installed
        return {"verl": "not installed"}
    found = {}
    for text in texts:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        if version == "not installed" or not requirement.specifier.contains(version, prereleases=True):
            found[f"{requirement.name}{requirement.specifier}"] = version
    return found


def unmet_sentence(unmet: dict[str, str]) -> str:
    """The installation of what `unmet_requirements` has found."""
    wanted = " ".join(f"'{requirement}'" for requirement in unmet)
    found = ", ".join(f"{name} (here: {version})" for name, version in unmet.items())
    return f"unmet requirements: {found}. Install them: pip install {wanted}"


def broken_sentence(name: str, cause: str) -> str:
    """The repair of a package whose import fails."""
    return f"{name} cannot be imported: {cause}. Reinstall it: pip install --force-reinstall {name}"


def install_problem(error: BaseException) -> str:
    """A sentence for an error that a package explains which is missing, broken or too old; "" for any other."""
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("verl"):
        name = error.name.partition(".")[0]
        return f"the package {name} is not installed. Install it: pip install {name} (`verl doctor` looks for others)"
    if isinstance(error, ImportError | OSError):
        importing = [frame.filename for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
        names = [Path(file).parent.name for file in importing if file.endswith("__init__.py")]
        if broken := next((name for name in names if name in _HEAVY), ""):
            return broken_sentence(broken, clean(error))
    unmet = {name: version for name, version in unmet_requirements().items() if name != "verl"}
    return unmet_sentence(unmet) if unmet else ""
