"""Write docs/api.md and docs/formulas.md from signatures and docstrings: python docs/make_api.py"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import verl
from verl.algorithms import preference_losses
from verl.algorithms.advantages import group
from verl.algorithms.kl import kl_penalty
from verl.algorithms.policy_losses import selection
from verl.algorithms.reduce import agg_loss
from verl.families import ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES

API = """# Reference of the Python API

This page is generated from the docstrings of the package (`python docs/make_api.py`); a test keeps it
current. [From Python](python.md) is the guide, and [config](config.md) has every key that `config` and further keywords take.
"""
GROUPS = {  # every name of verl.__all__
    "Train": ("train", "sft", "preference", "dpo", "kto", "orpo", "simpo", "cpo", "reward_model"),
    "Evaluate and generate": ("evaluate", "generate"),
    "Step by step": ("Trainer", "Session"),
    "Read a run": ("Run",),
    "Configs": ("load_config",),
    "Parts of a run": ("Stage", "DataProto", "DataProtoItem", "DataParallelConfig"),
    "Compatibility": ("RLRunner", "Controller", "ExperienceBuffer"),  # of verl-compat
}
ARGUMENT = re.compile(r"^(\w+(?:, \w+)*): ", re.MULTILINE)
PAPER = re.compile(r"\b\d{4}\.\d{5}\b")  # on arXiv
WIDTH = 100  # of a signature in one line

FORMULAS = """# Formulas of estimators and losses

This page is generated from the docstrings of the functions (`python docs/make_api.py`); a test keeps it
current. [Algorithms](algorithms.md) has the keys that choose a function.
"""
FAMILIES = {  # title -> registry, and the modules whose docstrings define the symbols
    "Advantage estimators: `algorithm.adv_estimator`": (ADVANTAGES, (group,)),
    "Policy losses: `actor_rollout_ref.actor.policy_loss.loss_mode`": (POLICY_LOSSES, (selection,)),
    "Means of token losses: `loss_agg_mode`": (None, (agg_loss,)),
    "KL estimators: `kl_loss_type`, `kl_penalty`": (None, (kl_penalty,)),
    "Preference losses: `preference.loss`": (PREFERENCE_LOSSES, (preference_losses,)),
}


def api_page() -> str:
    parts = [API]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        parts += [entry for name in names for entry in entries(f"verl.{name}", getattr(verl, name))]
    return "\n".join(parts)


def formulas_page() -> str:
    parts = [FORMULAS]
    for title, (family, sources) in FAMILIES.items():
        parts += [f"## {title}\n", *(as_text(source) for source in sources)]
        names: dict[Any, list[str]] = {}  # some functions have two names
        for name in family.built_in if family else ():
            names.setdefault(family.get(name), []).append(f"`{name}`")
        parts += [f"### {', '.join(texts)}\n\n{as_text(function)}" for function, texts in names.items()]
    return "\n".join(parts)


def as_text(value: Any) -> str:
    """The docstring as it stands, after links to its papers."""
    docstring = inspect.getdoc(value) or ""
    papers = () if isinstance(value, ModuleType) else dict.fromkeys(PAPER.findall(docstring))
    links = ", ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in papers)
    return "\n\n".join([*([links] if links else []), f"```text\n{docstring}\n```\n"])


PAGES = {"api.md": api_page, "formulas.md": formulas_page}


def entries(name: str, value: Any) -> Iterator[str]:
    """The Markdown of a function, or of a class and its public members."""
    if isinstance(value, partial):
        texts = [f"{key}={setting!r}" for key, setting in settings(value).items()]
        text = f"`verl.{value.func.__name__}` with {f'`{texts[0]}`' if texts else 'its default loss'}."
        yield entry(f"### `{name}`", signature(name, value), text)
        return
    yield entry(f"### `{name}`", signature(name, value), inspect.getdoc(value) or "")
    for member, owner in members(value) if inspect.isclass(value) else ():
        attribute = inspect.getattr_static(owner, member)
        place = f"{name.partition('.')[2]}.{member}"
        if isinstance(attribute, property):
            yield entry(f"#### `{place}`", "", inspect.getdoc(attribute) or "")
        else:
            yield entry(f"#### `{place}`", signature(place, getattr(owner, member)), inspect.getdoc(attribute) or "")


def members(cls: type) -> Iterator[tuple[str, type]]:
    """Public methods and properties with a docstring, and the class that defines each."""
    names: dict[str, type] = {}
    for owner in cls.__mro__:
        for name, value in vars(owner).items() if owner.__module__.startswith("verl.") else ():
            if not name.startswith("_") and (
                callable(value) or isinstance(value, property | classmethod | staticmethod)
            ):
                names.setdefault(name, owner)
    yield from ((name, owner) for name, owner in names.items() if inspect.getdoc(getattr(owner, name)))


def signature(name: str, value: Any) -> str:
    """The call in Python, with a line for each parameter where one line would be long."""
    full = inspect.signature(value)
    parameters = [shortened(p) for p in full.parameters.values() if p.name not in ("self", "cls", *settings(value))]
    call = name + unquoted(str(full.replace(parameters=parameters)))
    if len(call) <= WIDTH:
        return call
    lines = [unquoted(str(parameter)) for parameter in parameters]
    if first := next((p for p in parameters if p.kind is p.KEYWORD_ONLY), None):
        lines.insert(parameters.index(first), "*")
    return "\n".join([f"{name}(", *(f"    {line}," for line in lines), f"){call.rpartition(')')[2]}"])


def shortened(parameter: inspect.Parameter) -> inspect.Parameter:
    """`parameter` with `...` for a default that no source text names."""
    has_text = isinstance(parameter.default, str | int | float | tuple | None) or parameter.default is parameter.empty
    return parameter if has_text else parameter.replace(default=...)


def unquoted(text: str) -> str:
    """`text` with annotations as the source has them, which are texts or types with their modules."""
    text = re.sub(r"\b(collections\.abc|typing|verl(\.[a-z_]+)+)\.(?=[A-Z])", "", text)
    text = re.sub(r"(: |-> )(['\"])(.*?)\2(?=[,)]| =|$)", r"\1\3", text)
    return text.replace("Ellipsis", "...")


def settings(value: Any) -> dict[str, Any]:
    """The arguments that a partial function sets."""
    return value.keywords if isinstance(value, partial) else {}


def entry(heading: str, call: str, docstring: str) -> str:
    block = f"```python\n{call}\n```\n\n" if call else ""
    return f"{heading}\n\n{block}{as_markdown(docstring)}\n"


def as_markdown(docstring: str) -> str:
    """Paragraphs of lines `argument: text` become lists, and names of pages links."""
    paragraphs = [
        re.sub(ARGUMENT, r"- `\1`: ", part) if re.match(ARGUMENT, part) else part for part in docstring.split("\n\n")
    ]
    text = "\n\n".join(paragraphs).replace("as of `Trainer`", "as of [`verl.Trainer`](#verltrainer)")
    text = re.sub(r"(?<![`\w/])(verl/[\w/]+\.py)", r"`\1`", text)
    return re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", text)


if __name__ == "__main__":
    for file, page in PAGES.items():
        Path(__file__).with_name(file).write_text(page(), encoding="utf-8")
