"""What train, eval, generate and check share: Hydra-style overrides and the options that name a YAML file."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from verl.config import LoadedConfig, load_config

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


@dataclass
class ConfigArguments:
    overrides: list[str]
    config_path: str | None
    config_name: str | None
    options: argparse.Namespace

    def load(self, *, check: bool = True) -> LoadedConfig:
        """The resolved config; raises ConfigError."""
        return load_config(self.overrides, self.config_path, self.config_name, check=check)


def parse(verb: str, about: str, argv: list[str], *, options: tuple[tuple[str, dict], ...] = ()) -> ConfigArguments:
    """Split `argv` into overrides and options; `--help` prints the common keys with their defaults and exits."""
    parser = argparse.ArgumentParser(
        prog=f"verl {verb}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_key_table() if {"-h", "--help"} & set(argv) else None,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="a.b.c=value; +a.b=value and ++ work too")
    parser.add_argument("--config-path", "--config-dir", "-cp", help="folder of --config-name, or a YAML file")
    parser.add_argument("--config-name", "-cn", help="YAML file without its ending, there or among the built-in ones")
    for flag, settings in options:
        parser.add_argument(flag, **settings)
    found = parser.parse_intermixed_args(argv)
    return ConfigArguments(found.overrides, found.config_path, found.config_name, found)


def _key_table() -> str:
    from verl.config.sources import built_in_names
    from verl.config.tree import leaves

    known = leaves()
    rows = [f"  {path}={known[path].default}\n      {known[path].key.meaning}" for path in COMMON_KEYS]
    names = ", ".join(built_in_names())
    return "common keys and their defaults (all keys: docs/config.md):\n" + "\n".join(rows) + f"\n\nbuilt-in configs: {names}"
