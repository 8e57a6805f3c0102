"""`verl serve tinker model=PATH ...`: a training service for the official Tinker SDK."""

import argparse
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.cli.parser import Parser
from verl.config import PPOConfig, load_config
from verl.config.checks import verdict
from verl.config.keys import yaml_loader
from verl.config.loaded import LoadedConfig
from verl.errors import ConfigError, MissingExtraError, first_line
from verl.regular_files import read_user_text, require_regular

_ABOUT = "Serve a base model to clients of the Tinker SDK, who train LoRA adapters on it and sample from them."
_OPTIONS = {
    "model": "Hugging Face folder or name of the base model",
    "bases": "YAML file with several base models, in place of model=",
    "memory": "GB of memory for base models (default: each stays once it was used)",
    "name": "further name of the base model for clients (default: only its path and the folder's name)",
    "host": "address to listen at (default: 127.0.0.1, this machine only)",
    "port": "port to listen at (default: any that is free)",
    "folder": "folder for models and checkpoints (default: runs/tinker)",
    "adapters": "folder of folders that peft saved, for all tenants (tinker://imported-NAME/sampler_weights/peft)",
    "rank": "largest rank of an adapter (default: 64); 0: models train all their weights",
    "models": "most models of all clients together, without keys= (default: 64)",
    "keys": "file with SHA-256 sums of API keys, tenants and limits (default: any key is taken)",
    "tls_cert": "file with the certificate of the server, PEM (default: no TLS)",
    "tls_key": "file with the key of that certificate, PEM",
}


def run_serve(argv: list[str]) -> int:
    """Serve until Ctrl-C: the exit code."""
    names = "\n".join(f"  {name + '=...':<12}  {text}" for name, text in _OPTIONS.items())
    about, raw = f"{_ABOUT}\n\nsettings:\n{names}", argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="verl serve", description=about, formatter_class=raw)
    parser.add_argument("kind", nargs="?", metavar="tinker", help="the clients' protocol")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings above, and keys of docs/config.md")
    arguments = parser.parse_args(argv)
    if arguments.kind != "tinker":
        raise ConfigError(
            "`verl serve tinker model=PATH` is for clients of the Tinker SDK, the only protocol here. For chat completions, "
            "run `verl export RUN FOLDER`, then `vllm serve FOLDER`."
        )
    options, keys = _options(arguments.settings)
    if importlib.util.find_spec("tinker") is None:
        raise MissingExtraError("verl serve tinker", "tinker", "tinker")
    from verl.page.launch import listen
    from verl.tinker.bases import GB, BaseEntry
    from verl.tinker.server import serve_tinker
    from verl.tinker.tenants import TenantLimits, Tenants, read_tenants

    folder = Path(options.get("folder", "runs/tinker")).expanduser()
    keys = [f"trainer.default_local_dir={folder}", *keys]
    rank = _count("rank", options.get("rank", "64"))
    rows: list[dict[str, Any]] = read_bases(options["bases"]) if "bases" in options else [{"model": options["model"]}]
    entries = []
    for row in rows:
        settings = [f"{key}={value}" for key, value in row.get("settings", {}).items()]
        config = serving_config(row["model"], [*keys, *settings], row.get("rank", rank))
        entries.append(BaseEntry(config, _names(row), row.get("train", True)))
    entries[0].names.extend([options["name"]] if "name" in options else [])
    host, certificate = options.get("host", "127.0.0.1"), _certificate(options)
    if "keys" not in options and host not in ("127.0.0.1", "::1", "localhost"):
        raise ConfigError(f"host={host} lets other machines in, so give their API keys with keys=FILE.")
    if "keys" in options and "models" in options:
        raise ConfigError(
            "models= is for a service without keys. With keys=FILE, write models=N in the lines of the file."
        )
    limits = TenantLimits(models=_count("models", options["models"])) if "models" in options else TenantLimits()
    tenants = read_tenants(options["keys"]) if "keys" in options else Tenants(limits=limits)
    most_bytes = _amount("memory", options["memory"]) * GB if "memory" in options else float("inf")
    listening = listen(host, _count("port", options.get("port", "0")))

    def say(address: str) -> None:
        print(f"{address}\nSet TINKER_BASE_URL to this address and TINKER_API_KEY to tml-...; Ctrl-C ends.", flush=True)

    adapters = Path(options["adapters"]).expanduser() if "adapters" in options else None
    serve_tinker(entries, listening, folder, tenants, say, certificate, most_bytes, adapters)
    return 0


_ROW: dict[str, type | tuple[type, ...]] = {
    "model": str, "name": (str, list), "train": bool, "rank": int, "settings": dict,
}  # fmt: skip


def read_bases(path: str) -> list[dict[str, Any]]:
    """The base models of a file, as rows of `model` and other entries of _ROW. Raises ConfigError that names the row."""
    text = read_user_text(path, "bases=")
    try:
        rows = yaml_loader()(text).get_single_data()
    except Exception as error:  # of libyaml or of Python's reader
        raise ConfigError(f"bases={path} cannot be read: {first_line(error)}.") from error
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"bases={path} is no list of base models. Write lines such as: - {{model: PATH}}")
    for number, row in enumerate(rows, 1):
        place = f"bases={path}, row {number}"
        if not isinstance(row, dict) or not isinstance(row.get("model"), str):
            raise ConfigError(f"{place} names no model. Write {{model: PATH}}.")
        if bad := [key for key, value in row.items() if not _is_entry(key, value)]:
            raise ConfigError(f"{place} has {bad[0]!r} with {row[bad[0]]!r}; a row has {', '.join(_ROW)}.")
    names = [name for row in rows for name in {row["model"], Path(row["model"]).name, *_names(row)}]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"bases={path} names {twice[0]!r} twice, a path, a folder or a name. Give each base model its own."
        )
    return rows


def _is_entry(key: object, value: object) -> bool:
    """Whether a row may have this entry."""
    if key == "rank":
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if key == "name":
        return isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value))
    return isinstance(key, str) and key in _ROW and isinstance(value, _ROW[key])


def _names(row: Mapping[str, Any]) -> list[str]:
    names = row.get("name", [])
    return [names] if isinstance(names, str) else names


_CLIENTS = tuple(  # what a run has, and clients of a service bring
    ["algorithm.", "critic.", "data.", "distillation.", "online.", "preference.", "rejection.", "reward."]
    + [f"actor_rollout_ref.rollout.{key}" for key in (
        "n", "temperature", "top_p", "top_k", "min_p", "do_sample", "stop", "stop_token_ids", "ignore_eos", "prompt_length",
        "response_length", "prefetch_num", "partial_rollout", "keep_partial_kv_cache", "in_flight_updates",
        "in_flight_keys", "val_kwargs.", "multi_turn.", "agent.",
    )]
    + [f"actor_rollout_ref.{key}" for key in (
        "ref.", "actor.optim.lr", "actor.ppo_mini_batch_size", "actor.ppo_epochs", "actor.shuffle", "actor.entropy_coeff",
        "actor.use_kl_loss", "actor.kl_loss_coef", "actor.kl_loss_type",
    )]
    + [f"trainer.{key}" for key in ("total_epochs", "total_training_steps", "save_freq", "test_freq", "guards.")]
)  # fmt: skip


def serving_config(model: str, keys: list[str], rank: int) -> PPOConfig:
    """The config of the service: `keys` of docs/config.md over its own values. Raises ConfigError, for keys that it does not
    read too."""
    values: dict[str, object] = {
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.lora_rank": rank,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 2048,
    }
    loaded: LoadedConfig[PPOConfig] = load_config(keys, values=[values], check=False)
    for path, setting in loaded.settings.items():
        if setting.source == "command line" and any(
            path == key or (key.endswith(".") and path.startswith(key)) for key in _CLIENTS
        ):
            raise ConfigError(f"{path} is not read by a training service: its clients choose that. Leave it out.")
        if (outcome := verdict(loaded, path, setting)).kind == "refused":
            raise ConfigError(outcome.reason)
    return loaded.config


def _options(settings: list[str]) -> tuple[dict[str, str], list[str]]:
    """The command's own settings, and the keys of the config."""
    pairs = [setting.partition("=") for setting in settings]
    if bad := [name for name, equals, _ in pairs if not equals]:
        raise ConfigError(f"{bad[0]!r} is no setting. Write key=value, such as model=PATH.")
    options = {name: value for name, _, value in pairs if name in _OPTIONS}
    if ("model" in options) == ("bases" in options):
        raise ConfigError(
            "verl serve tinker needs model=PATH, the folder of the base model, or bases=FILE for several."
        )
    return options, ["=".join((name, value)) for name, _, value in pairs if name not in _OPTIONS]


def _amount(name: str, text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = -1.0
    if not 0 < amount < float("inf"):
        raise ConfigError(f"{name}={text} is no number above 0.")
    return amount


def _count(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{name}={text} is no number from 0 on.")
    return int(text)


def _certificate(options: dict[str, str]) -> tuple[str, str] | None:
    """The files of the certificate and its key, both or none."""
    files = [options[name] for name in ("tls_cert", "tls_key") if name in options]
    if len(files) == 1:
        raise ConfigError("TLS needs two files: tls_cert=FILE and tls_key=FILE.")
    for file in files:
        require_regular(file, "TLS: the file")
    return (files[0], files[1]) if files else None
