"""What train, eval, generate and check share: Hydra-style overrides and the options that name a YAML file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from verl.config import PPO, LoadedConfig, load_config
from verl.errors import ConfigError, nearest

# the keys that most scripts set, shown by --help
COMMON_KEYS = (
    "actor_rollout_ref.model.path",
    "data.train_files",
    "data.val_files",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "algorithm.adv_estimator",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.temperature",
    "reward.custom_reward_function.path",
    "trainer.total_training_steps",
    "trainer.total_epochs",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.default_local_dir",
    "trainer.logger",
)


# Hydra's flags -> what to do
_ELSEWHERE = {
    **dict.fromkeys(("-m", "--multirun"), "start one command for each setting"),
    **dict.fromkeys(
        ("-c", "--cfg", "--info"), "`verl check key=value ...` looks at a config, docs/config.md has every key"
    ),
}


def _as_key(flag: str) -> str:
    """What to set instead of another trainer's flag, such as --num_generations; "" for an unknown one."""
    key = PPO.compat.other_trainers.get(flag.lstrip("-").replace("-", "_"), "") if flag.startswith("--") else ""
    return f"settings are given as key=value, and this one by {key}" if key else ""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ConfigErrors that name the nearest option."""

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split("=")[0].split()
        flag = unknown[0] if unknown and unknown[0].startswith("-") else ""
        takes_keys = any(action.dest == "overrides" for action in self._actions)
        if takes_keys and (instead := _ELSEWHERE.get(flag) or _as_key(flag)):
            raise ConfigError(f"There is no option {flag} here: {instead}.")
        hint = nearest(flag, self._option_string_actions) if flag else ""
        raise ConfigError(f"{message}{hint.removesuffix('?') or ''}. `{self.prog} --help` lists what there is.")


@dataclass
class ConfigArguments:
    """A command line of `key=value` overrides, where the YAML file is, and the verb's own options."""

    overrides: list[str]
    config_path: str | None
    config_name: str | None
    options: argparse.Namespace

    def load(self, *, check: bool = True) -> LoadedConfig:
        """The resolved config; raises ConfigError."""
        return load_config(self.overrides, self.config_path, self.config_name, check=check)


def parse(
    verb: str, about: str, argv: list[str], options: Mapping[str, Mapping[str, Any]] | None = None
) -> ConfigArguments:
    """Split `argv` into overrides and options (`options`: flag -> arguments of add_argument). `--help` prints the
    sections and the common keys with their defaults, and exits. Raises ConfigError."""
    parser = Parser(
        prog=f"verl {verb}",
        usage=f"verl {verb} [options] key=value ...",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_keys() if {"-h", "--help"} & set(argv) else None,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="a.b.c=value; +a.b=value and ++a.b=value too")
    parser.add_argument(
        "--config-path", "--config-dir", "-cp", "-cd", metavar="PATH", help="folder of --config-name, or a YAML file"
    )
    parser.add_argument(
        "--config-name", "-cn", metavar="NAME", help="YAML file without its ending, there or among the built-in ones"
    )
    for flag, settings in (options or {}).items():
        parser.add_argument(flag, **settings)
    found = parser.parse_intermixed_args(argv)
    return ConfigArguments(found.overrides, found.config_path, found.config_name, found)


def _keys() -> str:
    from verl.config.sources import built_in_names

    known = PPO.leaves
    top = {path: meaning for path, meaning in PPO.sections.items() if path.count(".") < 1 or path in _GROUPS}
    width = max(map(len, top))
    lines = ["sections:", *(f"  {path:<{width}}  {meaning}" for path, meaning in top.items())]
    lines += ["", "common keys with their defaults (docs/config.md has all):"]
    for path in COMMON_KEYS:
        lines += [f"  {path}={_shown(known[path].default)}", f"      {known[path].key.meaning}"]
    return "\n".join([*lines, "", f"built-in configs for --config-name: {', '.join(built_in_names(PPO))}"])


_GROUPS = tuple(f"actor_rollout_ref.{name}" for name in ("model", "actor", "rollout", "ref"))


def _shown(default: Any) -> str:
    return "null" if default is None else str(default).replace(" ", "")
