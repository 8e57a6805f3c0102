"""docs/config.md, made from the declarations: `python -m verl.config.document docs/config.md`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from verl.config.active_keys import CONDITIONS
from verl.config.aliases import ALIASES
from verl.config.derived_defaults import FOLLOWS
from verl.config.differences import DIFFERENCES
from verl.config.removed_keys import GONE
from verl.config.tree import Leaf, leaves, sections
from verl.config.unavailable import MISSING
from verl.config.write import scalar

HEADER = """# Every key of the configuration

This page is generated from `verl/config` (`python -m verl.config.document docs/config.md`); a test keeps it current.

A key is given as `section.key=value` on the command line or in a YAML file (`--config-path FILE`, or
`--config-path FOLDER --config-name NAME`). `+key=value` and `++key=value` mean the same where the key is known;
below a free-form key (type mapping) any name can be added. `~key` takes a key back to its default. The run
folder's `config.yaml` holds every value with its origin.

## What becomes of a key

| a key that | is |
|---|---|
| no release has | refused, with the nearest names |
| chooses a feature of [this list](#not-available-in-this-version) | refused; keys below the feature are not mentioned |
| is not read by what was chosen, and leaving it out of the same config changes nothing in the existing verl either | noticed |
| only sizes memory or hardware, observes a run, or has its default or a neutral value, and is not read | noticed |
| asks for something that would not happen here ([this list](#refused-where-not-read)) | refused, with what happens instead |
| has a value that it cannot have, or contradicts another key | refused |

Refusals are one error that lists all of them, missing features first. Notices are listed at the start, one for each reason
with all its keys; `trainer.strict_config=True` makes errors of them. `verl check` shows both.
"""


def to_markdown() -> str:
    """docs/config.md."""
    parts = [HEADER]
    by_section: dict[str, list[Leaf]] = {}
    for path, leaf in leaves().items():
        by_section.setdefault(path.rpartition(".")[0], []).append(leaf)
    follows = dict(FOLLOWS)
    for section, rows in by_section.items():
        parts.append(f"\n## `{section}`\n\n{sections()[section]}\n" if section else "\n## At the root\n")
        used = [leaf for leaf in rows if not leaf.inert]
        if used:
            parts.append("| key | default | meaning |\n|---|---|---|")
            parts += [f"| `{_name(leaf)}` | {_default(leaf, follows)} | {_meaning(leaf)} |" for leaf in used]
        for reason in dict.fromkeys(leaf.inert for leaf in rows if leaf.inert):
            keys = ", ".join(f"`{_name(leaf)}`" for leaf in rows if leaf.inert == reason)
            parts.append(f"\nNo effect here ({reason}): {keys}")
    return "\n".join([*parts, _other_spellings(), _gone(), _not_available(), _refused(), _differences()]) + "\n"


def _name(leaf: Leaf) -> str:
    return leaf.path.rpartition(".")[2]


def _default(leaf: Leaf, follows: dict[str, str]) -> str:
    return f"follows `{follows[leaf.path]}`" if leaf.path in follows else f"`{scalar(leaf.default)}`"


def _meaning(leaf: Leaf) -> str:
    text = leaf.key.meaning
    if leaf.key.choices:
        text += " (" + ", ".join("null" if c is None else str(c) for c in leaf.key.choices) + ")"
    for name, _ in leaf.conditions:
        text += f"; not read when {CONDITIONS[name].because}"
    return text.replace("|", "\\|")


def _other_spellings() -> str:
    note = "Giving both with different values is an error. A row that ends with a point renames all keys below it."
    return _table("Other spellings", note, ("spelling", "key"), [(f"`{a.old}`", f"`{a.new}`") for a in ALIASES])


def _gone() -> str:
    note = "Accepted, with a notice. A row that ends with a point stands for all keys below it."
    return _table(
        "Keys of older releases", note, ("key", "why it has no effect"), [(f"`{g.key}`", g.reason) for g in GONE]
    )


def _not_available() -> str:
    rows = [(f"`{m.path}`", m.what, m.instead) for m in MISSING]
    return _table(
        "Not available in this version", "Choosing one of these is an error.", ("key", "what", "instead"), rows
    )


def _refused() -> str:
    """Keys that are refused where they are not read, and inert ones with another value than their default, by reason."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for path, leaf in leaves().items():
        if leaf.inert and leaf.key.refused:
            by_reason.setdefault((leaf.inert, f"{leaf.key.refused}."), []).append(path)
        elif leaf.key.strict and not leaf.inert and leaf.conditions:
            fix = "; or ".join(dict.fromkeys(CONDITIONS[name].fix for name, _ in leaf.conditions[-1:]))
            by_reason.setdefault((leaf.key.strict, f"Remove it, or {fix}."), []).append(path)
    rows = [(_grouped(paths), why, fix) for (why, fix), paths in by_reason.items()]
    note = "Each asks for something that would not happen. Every other key that is not read is only noticed."
    return _table("Refused where not read", note, ("key", "why", "what to do"), rows)


def _grouped(paths: list[str]) -> str:
    """Keys by section: `a.b.{c, d}`."""
    sections: dict[str, list[str]] = {}
    for path in paths:
        parent, _, name = path.rpartition(".")
        sections.setdefault(parent, []).append(name)
    shown = [f"{p}.{n[0]}" if len(n) == 1 else f"{p}.{{{', '.join(n)}}}" for p, n in sections.items()]
    return ", ".join(f"`{key}`" for key in shown)


def _differences() -> str:
    note = "Each has its reason."
    return _table("Defaults that differ from existing releases", note, ("key", "theirs", "ours", "why"), DIFFERENCES)


def _table(title: str, note: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return f"\n## {title}\n\n{note}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: list[str]) -> int:
    """Write docs/config.md to the path in `argv`."""
    Path(argv[0]).write_text(to_markdown(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
