"""Command lines of existing entry points, brought to our keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from verl.config.overrides import parse_override


class Arguments:
    """The `key=value` arguments of a command line by key, without the marks + and ++; flags such as --config-path stay
    apart, each with its value."""

    def __init__(self, argv: Sequence[str]):
        self.flags: list[str] = []
        self.texts: dict[str, str] = {}  # key -> what stands after the =
        self._deleted: list[str] = []
        rest = list(argv)
        while rest:
            argument = rest.pop(0)
            if argument.startswith("-"):
                self.flags.append(argument)
                if "=" not in argument and rest and "=" not in rest[0] and not rest[0].startswith("-"):
                    self.flags.append(rest.pop(0))
            elif argument.startswith("~"):
                self._deleted.append(argument)
            else:
                self.texts[parse_override(argument).key] = argument.partition("=")[2]

    def value(self, key: str, default: object = None) -> object:
        """The value of a key, of the type that it is written in."""
        return parse_override(f"{key}={self.texts[key]}").value if key in self.texts else default

    def take(self, key: str, default: object = None) -> object:
        """`value`, and the key is taken out."""
        found = self.value(key, default)
        self.texts.pop(key, None)
        return found

    def rename(self, old: str, new: str) -> None:
        """Another name for a key, where it is given and the new one is not; `old` and `new` ending with a dot rename all
        keys that begin so."""
        for key in [k for k in self.texts if k == old or (old.endswith(".") and k.startswith(old))]:
            text = self.texts.pop(key)
            self.texts.setdefault(new + key[len(old) :], text)

    def default(self, key: str, value: object) -> None:
        """A value for a key that is not given."""
        self.texts.setdefault(key, str(value))

    def drop_flags(self, names: Iterable[str]) -> None:
        """Take out flags with their values, in both forms (`--name value`, `--name=value`)."""
        kept, rest = [], list(self.flags)
        while rest:
            flag = rest.pop(0)
            name = flag.partition("=")[0]
            value = [rest.pop(0)] if "=" not in flag and rest and not rest[0].startswith("-") else []
            if name not in names:
                kept += [flag, *value]
        self.flags = kept

    def flag(self, *names: str) -> str:
        """The value of a flag, "" without it."""
        for place, flag in enumerate(self.flags):
            name, _, value = flag.partition("=")
            if name in names:
                return value or "".join(self.flags[place + 1 : place + 2])
        return ""

    def argv(self) -> list[str]:
        """The command line as it is now."""
        return [*self.flags, *self._deleted, *(f"{key}={text}" for key, text in self.texts.items())]
