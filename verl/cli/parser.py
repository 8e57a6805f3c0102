"""The argument parser of every verb; it needs the standard library only."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NoReturn

from verl.errors import ConfigError, nearest

if TYPE_CHECKING:
    from verl.config import RunConfig, Schema

# Hydra's options -> advice
_HYDRA_OPTIONS = {
    **dict.fromkeys(("-m", "--multirun"), "start one command for each setting"),
    **dict.fromkeys(
        ("-c", "--cfg", "--info"), "`verl check key=value ...` examines a config, and docs/config.md has every key"
    ),
}


class Parser(argparse.ArgumentParser):
    """An argument parser with ConfigErrors that name the nearest option, or a key of `schema` instead."""

    def __init__(self, schema: Schema[Any] | None = None, **settings: Any):
        super().__init__(allow_abbrev=False, **settings)
        self.schema = schema

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split("=")[0].split()
        flag = unknown[0] if unknown and unknown[0].startswith("-") else ""
        if self.schema is not None and (advice := _HYDRA_OPTIONS.get(flag) or _key_instead(flag, self.schema)):
            raise ConfigError(f"There is no option {flag} here: {advice}.")
        hint = nearest(flag, self._option_string_actions) if flag else ""
        raise ConfigError(f"{message}{hint.removesuffix('?') or ''}. `{self.prog} --help` lists the options.")


def _key_instead(flag: str, schema: Schema[RunConfig]) -> str:
    """The key for another trainer's flag, such as --num_generations; "" for an unknown one."""
    name = flag.removeprefix("--").replace("-", "_")
    key = schema.compat.other_trainers.get(name, "") if flag.startswith("--") else ""
    return f"settings are given as key=value, and this one by {key}" if key else ""
