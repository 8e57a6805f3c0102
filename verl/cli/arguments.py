"""Command lines of the verbs that read a config: Hydra-style overrides, options that name a YAML file, and the run folder of a
command that names none: checkpoints/TASK-TIME-SETTINGS, found again by the same command."""

import argparse
import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl.cli.parser import Parser
from verl.config import PPO, LoadedConfig, PPOConfig, PreferenceConfig, RunConfig, Schema, load_config
from verl.config.command_defaults import DEFAULTS, FACES, Default, Face
from verl.config.diff import settings_of_work
from verl.config.presets import PRESETS, preset_settings
from verl.config.user_settings import COMMAND_LINE
from verl.errors import ConfigError
from verl.foreign_text import quoted

# schema -> the keys that most scripts set, shown by --help
_COMMON_PPO = (
    "actor_rollout_ref.model.path data.train_files data.val_files data.train_batch_size data.max_prompt_length "
    "data.max_response_length algorithm.adv_estimator actor_rollout_ref.actor.optim.lr "
    "actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.actor.use_kl_loss "
    "actor_rollout_ref.actor.policy_loss.loss_mode actor_rollout_ref.rollout.n actor_rollout_ref.rollout.temperature "
    "reward.custom_reward_function.path trainer.total_training_steps trainer.total_epochs trainer.save_freq "
    "trainer.test_freq trainer.default_local_dir trainer.logger"
).split()
_ROWS = "model.path data.train_files data.val_files data.train_batch_size data.max_length data.truncation".split()
_SCHEDULE = "trainer.total_epochs trainer.save_freq trainer.test_freq trainer.default_local_dir trainer.logger".split()
_ENGINE = "optim.lr optim.lr_scheduler_type engine.ulysses_sequence_parallel_size".split()
_PREFERENCE = "preference.loss preference.beta ref.model_path ref.precompute model.lora_rank optim.lr".split()
COMMON_KEYS = {
    "ppo": _COMMON_PPO,
    "sft": [*_ROWS, *_ENGINE, "sft.loss", *_SCHEDULE],
    "preference": [*_ROWS, *_PREFERENCE, *_SCHEDULE],
    "rm": [*_ROWS, *_ENGINE, *_SCHEDULE, "rm.loss", "rm.center_rewards_coefficient"],
}
_SHORTEST = {
    "ppo": "verl train --preset grpo actor_rollout_ref.model.path=Qwen/Qwen3-0.6B data.train_files=train.jsonl "
    "reward.custom_reward_function.path=my_reward.py"
}
_RUN_FOLDER = Default("trainer.default_local_dir", "checkpoints/TASK-TIME-SETTINGS")  # see with_run_folder
_SUBSECTIONS = tuple(f"actor_rollout_ref.{name}" for name in ("model", "actor", "rollout", "ref"))  # shown by --help


@dataclass
class ConfigArguments:
    """A parsed command line: `key=value` overrides, the YAML file, and the verb's own options."""

    schema: Schema[object]
    overrides: list[str]
    config_path: str | None
    config_name: str | None
    defaults: Face
    preset: Mapping[str, object]
    options: argparse.Namespace

    def load(self, *, check: bool = True) -> LoadedConfig[Any]:
        """The resolved config; raises ConfigError."""
        names = (self.config_path, self.config_name)
        loaded = load_config(
            self.overrides, *names, schema=self.schema, check=check, defaults=self.defaults, fallbacks=self.preset
        )
        origins, flat = loaded.origins, loaded.schema.flatten(loaded.config)
        changed = [key for key, value in self.preset.items() if flat[key] != value and origins[key] != "default"]
        if changed:
            values = ", ".join(f"{key}={quoted(flat[key], 80)} ({origins[key]})" for key in changed)
            loaded.notices.append(f"--preset {self.options.preset} gives way to {values}.")
        return loaded

    def set_by(self, option: str, key: str, value: object) -> None:
        """Add the override that `option` stands for. Raises ConfigError if another argument names the key too."""
        setting = self.load(check=False).settings.get(key)
        if setting is not None and setting.source == COMMAND_LINE:
            raise ConfigError(
                f"{setting.spelled}={quoted(setting.value, 80)} and {option} set the same. Give one of them."
            )
        self.overrides.append(f"{key}={value}")


def with_model(loaded: LoadedConfig[Any]) -> LoadedConfig[Any]:
    """`loaded`. Raises ConfigError if nothing names a model and the default of existing releases is no folder here."""
    key = "actor_rollout_ref.model.path" if loaded.schema is PPO else "model.path"
    default = loaded.schema.leaves[key].default
    if loaded.origins[key] == "default" and not Path(str(default)).expanduser().exists():
        example = _SHORTEST.get(
            loaded.schema.name, f"{loaded.schema.command} {key}=Qwen/Qwen3-0.6B data.train_files=train.jsonl"
        )
        raise ConfigError(f"Name a model: {key}=FOLDER, or a name of the Hugging Face Hub. The shortest run: {example}")
    return loaded


def parse(
    verb: str,
    about: str,
    argv: list[str],
    options: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    schema: Schema[RunConfig] = PPO,
    defaults: Face = "command",
) -> ConfigArguments:
    """Split `argv` into overrides and options (`options`: flag -> arguments of add_argument). `--help` prints the
    sections and the common keys with their defaults, and exits. Raises ConfigError."""
    parser = Parser(
        schema,
        prog=f"verl {verb}",
        usage=f"verl {verb} [options] key=value ...",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_key_help(schema, "release" if any(word.endswith("release") for word in argv) else defaults)
        if {"-h", "--help"} & set(argv)
        else None,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="like data.seed=7; + and ++ change nothing")
    parser.add_argument(
        "--config-path", "--config-dir", "-cp", "-cd", metavar="PATH", help="folder of --config-name, or a YAML file"
    )
    parser.add_argument(
        "--config-name", "-cn", metavar="NAME", help="YAML file without its suffix, in that folder or built in"
    )
    parser.add_argument("--log-dir", metavar="PATH", help="folder for a log file of each rank (trainer.log_dir)")
    parser.add_argument(
        "--defaults",
        choices=FACES,
        default=defaults,
        help="release: the defaults of existing releases (docs/differences.md)",
    )
    if schema is PPO:
        parser.add_argument("--preset", metavar="NAME", help=f"keys of an algorithm: {', '.join(PRESETS)}")
    for flag, settings in (options or {}).items():
        parser.add_argument(flag, **settings)
    arguments = parser.parse_intermixed_args(argv)
    names = (arguments.config_path, arguments.config_name)
    has_preset = schema is PPO and arguments.preset is not None
    keys = preset_settings(arguments.preset) if has_preset else {}
    parsed = ConfigArguments(schema, arguments.overrides, *names, arguments.defaults, keys, arguments)
    if arguments.log_dir is not None:
        parsed.set_by("--log-dir", "trainer.log_dir", arguments.log_dir)
    return parsed


def _key_help(schema: Schema[RunConfig], face: Face) -> str:
    from verl.config.sources import built_in_names

    listed = {path: meaning for path, meaning in schema.sections.items() if "." not in path or path in _SUBSECTIONS}
    width = max(map(len, listed))
    lines = ["sections:", *(f"  {path:<{width}}  {meaning}" for path, meaning in listed.items())]
    lines += ["", "common keys with their defaults (docs/config.md has all):"]
    defaults = (*DEFAULTS[schema.name], _RUN_FOLDER) if face == "command" else (_RUN_FOLDER,)
    for path in COMMON_KEYS[schema.name]:
        leaf, cases = schema.leaves[path], {d.applies: d.value for d in defaults if d.key == path}
        default = cases.pop("", leaf.default)
        text = "null" if default is None else str(default).replace(" ", "")
        lines += [f"  {path}={text}", f"      {leaf.key.meaning}", *(f"      {v} if {c}" for c, v in cases.items())]
    return "\n".join([*lines, "", f"built-in configs for --config-name: {', '.join(built_in_names(schema))}"])


_NAMES = ("trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name")


def with_run_folder(loaded: LoadedConfig[Any]) -> LoadedConfig[Any]:
    """`loaded` with a run folder and an experiment name, unless its user has given one or a launcher starts several processes:
    their clocks may differ. The newest folder of the same task and settings is taken again, so that the run resumes; keys of
    `trainer` and sizes may differ."""
    if any(name in loaded.settings for name in _NAMES) or "RANK" in os.environ:
        return loaded
    trainer = loaded.config.trainer
    work = {key: value for key, value in settings_of_work(loaded).items() if not key.startswith("trainer.")}
    digest = hashlib.sha256(json.dumps(work, sort_keys=True, default=str).encode()).hexdigest()[:6]
    task = _task(loaded)
    earlier = sorted(Path("checkpoints").glob(f"{task}-*-{digest}")) if trainer.resume_mode == "auto" else []
    folder = earlier[-1] if earlier else Path("checkpoints", f"{task}-{time.strftime('%Y%m%d-%H%M%S')}-{digest}")
    named = replace(trainer, default_local_dir=str(folder), experiment_name=folder.name)
    origins = loaded.origins | dict.fromkeys(
        ("trainer.default_local_dir", "trainer.experiment_name"), "named by the run"
    )
    return replace(loaded, config=replace(loaded.config, trainer=named), origins=origins)


def _task(loaded: LoadedConfig[RunConfig]) -> str:
    """The algorithm, as far as it is a name."""
    config = loaded.config
    if isinstance(config, PPOConfig):
        program = config.algorithm.program
        name = str(config.algorithm.adv_estimator) if program == loaded.schema.name else program
    elif isinstance(config, PreferenceConfig):
        name = str(config.preference.loss)
    else:
        name = loaded.schema.name
    return name if name.replace("_", "").isalnum() else loaded.schema.name
