"""Code of every module that verl/compat/finder.py makes: names of the table, resolved on first use, and a command."""

import sys

from verl.compat.finder import CompatibilityModule, names_of, resolve, run

sys.modules[__name__].__class__ = CompatibilityModule
_MODULE: str = __spec__.name  # under `python -m`, __name__ is "__main__"
_NAMES = names_of(_MODULE)
__all__ = list(_NAMES)


def __getattr__(name: str) -> object:
    member = resolve(_MODULE, name, _NAMES)
    globals()[name] = member
    return member


def __dir__() -> list[str]:
    return sorted(_NAMES)


if __name__ == "__main__":
    raise SystemExit(run(_MODULE, sys.argv[1:]))
