"""docs/config.md, made from the declarations: `python -m verl.config.document docs/config.md`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from verl.config.command_defaults import DEFAULTS
from verl.config.loaded import scalar
from verl.config.presets import PRESETS
from verl.config.roots import SCHEMAS
from verl.config.schema import Leaf, Schema

HEADER = """# Every key of the configuration

This page is generated from `verl/config` (`python -m verl.config.document docs/config.md`); a test keeps it current.

A key is given as `section.key=value` on the command line or in a YAML file (`--config-path FILE`, or
`--config-path FOLDER --config-name NAME`). `+key=value` and `++key=value` mean the same where the key is known;
below a free-form key (type mapping) any name can be added. `~key` takes a key back to its default. The run
folder's `config.yaml` holds every value with its origin.

Each program has its own keys: {programs}.

## Acceptance of keys

| a key that | is |
|---|---|
| no release has | refused, with the nearest names |
| chooses a feature of the program's list *Not available in this version* | refused; keys below the feature are not mentioned |
| is not read by what was chosen, and leaving it out of the same config changes nothing in the existing verl either | noticed |
| only sizes memory or hardware, observes a run, or has its default or a neutral value, and is not read | noticed |
| asks for something that would not happen here (the list *Refused where not read*) | refused, with what happens instead |
| has a value that it cannot have, or contradicts another key | refused |

Refusals are one error that lists all of them, missing features first. Notices are listed at the start, one for each reason
with all its keys; `trainer.strict_config=True` makes errors of them. `verl check` shows both.
"""


def to_markdown() -> str:
    """docs/config.md."""
    programs = ", ".join(f"[{schema.title}](#{_anchor(schema.title)})" for schema in SCHEMAS.values())
    return "\n".join([HEADER.replace("{programs}", programs), *map(_program, SCHEMAS.values())]) + "\n"


def _anchor(title: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def _program(schema: Schema[object]) -> str:
    parts = [f"\n# {schema.title}"]
    by_section: dict[str, list[Leaf]] = {}
    for path, leaf in schema.leaves.items():
        by_section.setdefault(path.rpartition(".")[0], []).append(leaf)
    for section, rows in by_section.items():
        parts.append(f"\n## `{section}`\n\n{schema.sections[section]}\n" if section else "\n## At the root\n")
        used = [leaf for leaf in rows if not leaf.inert]
        if used:
            parts.append("| key | default | meaning |\n|---|---|---|")
            parts += [f"| `{_name(leaf)}` | {_default(schema, leaf)} | {_meaning(schema, leaf)} |" for leaf in used]
        for reason in dict.fromkeys(leaf.inert for leaf in rows if leaf.inert):
            keys = ", ".join(f"`{_name(leaf)}`" for leaf in rows if leaf.inert == reason)
            parts.append(f"\nNo effect here ({reason}): {keys}")
    return "\n".join([*parts, *_tables(schema)])


def _name(leaf: Leaf) -> str:
    return leaf.path.rpartition(".")[2]


def _default(schema: Schema[object], leaf: Leaf) -> str:
    source = dict(schema.follows).get(leaf.path)
    return f"follows `{source}`" if source else f"`{scalar(leaf.default)}`"


def _meaning(schema: Schema[object], leaf: Leaf) -> str:
    text, key = leaf.key.meaning, leaf.key
    if key.choices:
        text += " (" + ", ".join("null" if c is None else str(c) for c in key.choices) + ")"
    if key.bounds:
        text += f"; {key.bounds.words()}"
    for name, _ in leaf.conditions:
        text += f"; not read when {schema.condition(name).because}"
    return text.replace("|", "\\|")


def _tables(schema: Schema[object]) -> Iterator[str]:
    compat = schema.compat
    note = "Giving both with different values is an error. A row that ends with a dot renames all keys below it."
    yield _table("Other spellings", note, ("spelling", "key"), [(f"`{a.old}`", f"`{a.new}`") for a in compat.aliases])
    note = "Accepted, with a notice. A row that ends with a dot stands for all keys below it."
    removed = [(f"`{row.key}`", row.reason) for row in compat.removed]
    yield _table("Keys of older releases", note, ("key", "why it has no effect"), removed)
    missing = [(f"`{row.path}`", row.what, row.instead) for row in compat.unavailable]
    note = "Choosing one of these is an error."
    yield _table("Not available in this version", note, ("key", "what", "instead"), missing)
    note = "Each asks for something that would not happen. Every other key that is not read is only noticed."
    yield _table("Refused where not read", note, ("key", "why", "what to do"), _refused(schema))
    head = ("key", "theirs", "ours", "why")
    yield _table("Defaults that differ from existing releases", "Each has its reason.", head, compat.differences)


def _refused(schema: Schema[object]) -> list[tuple[str, str, str]]:
    """Keys that are refused where they are not read, and inert ones with another value than their default, by reason."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for path, leaf in schema.leaves.items():
        if leaf.inert and leaf.key.refused:
            by_reason.setdefault((leaf.inert, f"{leaf.key.refused}."), []).append(path)
        elif leaf.strict and not leaf.inert and leaf.conditions:
            fix = schema.condition(*leaf.conditions[-1]).fix
            by_reason.setdefault((leaf.strict, f"Remove it, or {fix}."), []).append(path)
    return [(_grouped(paths), why, fix) for (why, fix), paths in by_reason.items()]


def _grouped(paths: list[str]) -> str:
    """Keys by section: `a.b.{c, d}`."""
    sections: dict[str, list[str]] = {}
    for path in paths:
        parent, _, name = path.rpartition(".")
        sections.setdefault(parent, []).append(name)
    shown = [f"{p}.{n[0]}" if len(n) == 1 else f"{p}.{{{', '.join(n)}}}" for p, n in sections.items()]
    return ", ".join(f"`{key}`" for key in shown)


def _table(title: str, note: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return f"\n## {title}\n\n{note}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


_DEFAULTS = re.compile("(?<=<!-- defaults -->\n).*?(?=\n<!-- end -->)", re.DOTALL)  # their place in docs/differences.md


def with_defaults(page: str) -> str:
    """docs/differences.md with the table of defaults that differ between commands and existing releases."""
    rows = [
        (
            f"`{schema.command}`",
            f"`{d.key}`",
            f"`{scalar(d.value)}`",
            d.applies,
            f"`{scalar(schema.leaves[d.key].default)}`",
        )
        for schema in SCHEMAS.values()
        for d in DEFAULTS[schema.name]
        if d.value != schema.leaves[d.key].default or d.applies
    ]
    lines = [("command", "key", "default", "if", "existing releases"), ("---",) * 5, *rows]
    return _DEFAULTS.sub("\n".join(f"| {' | '.join(line)} |" for line in lines), page)


_PRESETS = re.compile("(?<=<!-- presets -->\n).*?(?=\n<!-- end -->)", re.DOTALL)  # their place in docs/algorithms.md


def with_presets(page: str) -> str:
    """docs/algorithms.md with the table of presets."""
    rows = [
        (
            f"`{name}`",
            f"{preset.idea[0].upper()}{preset.idea[1:]} ([{preset.paper}](https://arxiv.org/abs/{preset.paper}))",
            ", ".join(f"`{key}={scalar(value)}`" for key, value in preset.settings.items()).replace('"', ""),
        )
        for name, preset in PRESETS.items()
    ]
    lines = [("preset", "what it does", "keys"), ("---",) * 3, *rows]
    return _PRESETS.sub("\n".join(f"| {' | '.join(line)} |" for line in lines), page)


TABLES = {"differences.md": with_defaults, "algorithms.md": with_presets}  # pages with a generated table


def main(argv: list[str]) -> int:
    """Write docs/config.md to the path in `argv`, and tables to other pages of its folder."""
    path = Path(argv[0])
    path.write_text(to_markdown(), encoding="utf-8")
    for name, updated in TABLES.items():
        if (page := path.with_name(name)).is_file():
            page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
