"""Commands of other releases by the verbs here: `main_ppo`, `sft_trainer`, `model_merger`; and their command lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from verl.cli.main import run_guarded, run_verb
from verl.cli.model_folders import run_export
from verl.cli.parser import Parser
from verl.config.values import parse_override
from verl.errors import ConfigError


def main_ppo(argv: Sequence[str]) -> int:
    """Run `verl train` as the whole process; returns the exit code."""
    return run_verb("train", argv, whole_process=True)


def sft_trainer(argv: Sequence[str]) -> int:
    """Run `verl sft` as the whole process; returns the exit code. The launcher or trainer.n_gpus_per_node decides about Ray."""
    return run_verb("sft", argv, whole_process=True)


def preference_trainer(argv: Sequence[str]) -> int:
    """Run `verl preference` as the whole process; returns the exit code."""
    return run_verb("preference", argv, whole_process=True)


def rm_trainer(argv: Sequence[str]) -> int:
    """Run `verl rm` as the whole process; returns the exit code."""
    return run_verb("rm", argv, whole_process=True)


def fsdp_sft_trainer(argv: Sequence[str]) -> int:
    """`verl sft` with the keys and defaults of the older `sft_trainer.yaml`: the exit code."""
    named = any(argument.split("=", 1)[0] in ("--config-name", "-cn") for argument in argv)
    return sft_trainer(argv if named else ["--config-name", "sft_trainer", *argv])


# -- verl.model_merger ---------------------------------------------------------------------------------------------------

_NO_EFFECT = ("--tie-word-embedding", "--is-value-model", "--use_cpu_initialization", "--trust-remote-code")


def model_merger(argv: Sequence[str]) -> int:
    """`python -m verl.model_merger merge|test` as `verl export`: the exit code.

    There is nothing to merge: a checkpoint holds its model as a Hugging Face folder.
    """
    return run_guarded("merge", _merge, argv)


def _merge(argv: list[str]) -> int:
    arguments = _merger_parser().parse_args(argv)
    folder = Path(arguments.local_dir)
    folder = folder.parent if folder.name == "huggingface" else folder
    checkpoint, role = (folder.parent, folder.name) if folder.name in ("actor", "critic") else (folder, "actor")
    if arguments.operation == "test":
        if arguments.test_hf_dir is None:
            raise ConfigError(
                "test compares --local_dir with a Hugging Face folder; give that folder as --test_hf_dir FOLDER."
            )
        return run_export([str(checkpoint), arguments.test_hf_dir, "--role", role, "--compare"])
    if arguments.target_dir is None:
        raise ConfigError(
            f"merge writes a Hugging Face folder; add --target_dir FOLDER, or load {folder}/huggingface as it is."
        )
    if arguments.hf_upload_path is not None or arguments.private:
        raise ConfigError(
            "--hf_upload_path and --private upload the model, which is not available in this version. Leave them out, and "
            f"upload the folder afterwards: hf upload {arguments.hf_upload_path or 'NAME'} {arguments.target_dir}."
        )
    return run_export([str(checkpoint), arguments.target_dir, "--role", role])


def _merger_parser() -> Parser:
    parser = Parser(
        prog="verl.model_merger", description="Turn a checkpoint into a Hugging Face folder, or compare the two."
    )
    parser.add_argument("operation", choices=("merge", "test"))
    parser.add_argument(
        "--local_dir", required=True, help="folder global_step_N/actor or global_step_N/critic of a run"
    )
    parser.add_argument("--target_dir", help="folder to write (merge)")
    parser.add_argument("--test_hf_dir", help="Hugging Face folder to compare with (test)")
    parser.add_argument("--backend", help="no effect: every engine saves the same files")
    parser.add_argument("--hf_upload_path", help="not available")
    parser.add_argument("--private", action="store_true", help="not available")
    for flag in _NO_EFFECT:
        parser.add_argument(flag, action="store_true", help="no effect")
    return parser


# -- command lines -------------------------------------------------------------------------------------------------------

_CONFIG_FLAGS = ("--config-path", "--config-name", "--config-dir", "-cp", "-cn", "-cd")


class Arguments:
    """The `key=value` arguments of a command line by key, without the prefixes + and ++; flags such as --config-path are
    kept apart, each with its value."""

    def __init__(self, argv: Sequence[str]):
        self.flags: list[list[str]] = []  # [flag] or [flag, value]
        self.texts: dict[str, str] = {}  # key -> the text after the =
        self._deleted: list[str] = []
        rest = list(argv)
        while rest:
            argument = rest.pop(0)
            if argument.startswith("-"):
                has_value = "=" not in argument and rest and "=" not in rest[0] and not rest[0].startswith("-")
                self.flags.append([argument, rest.pop(0)] if has_value else [argument])
            elif argument.startswith("~"):
                self._deleted.append(argument)
            else:
                self.texts[parse_override(argument).key] = argument.partition("=")[2]

    def value(self, key: str, default: object = None) -> object:
        """The parsed value of a key."""
        return parse_override(f"{key}={self.texts[key]}").value if key in self.texts else default

    def take(self, key: str, default: object = None) -> object:
        """`value`, and remove the key."""
        value = self.value(key, default)
        self.texts.pop(key, None)
        return value

    def rename(self, old: str, new: str) -> None:
        """Rename a key that is given, unless the new one is given too; `old` and `new` ending with a dot rename all keys
        with that prefix."""
        for key in [k for k in self.texts if k == old or (old.endswith(".") and k.startswith(old))]:
            text = self.texts.pop(key)
            self.texts.setdefault(new + key[len(old) :], text)

    def default(self, key: str, value: object) -> None:
        """A value for a key that is not given."""
        self.texts.setdefault(key, str(value))

    def drop_config_flags(self, config_names: Iterable[str] | None = None) -> None:
        """Remove --config-path, --config-name and their short forms; with `config_names` only where they name one."""
        if config_names is None or self.flag("--config-name", "-cn").removesuffix(".yaml") in config_names:
            self.flags = [flag for flag in self.flags if flag[0].partition("=")[0] not in _CONFIG_FLAGS]

    def flag(self, *names: str) -> str:
        """The value of a flag, "" without it."""
        for flag, *value in self.flags:
            name, _, text = flag.partition("=")
            if name in names:
                return text or "".join(value)
        return ""

    def argv(self) -> list[str]:
        """The command line as it is now."""
        flags = [word for flag in self.flags for word in flag]
        return [*flags, *self._deleted, *(f"{key}={text}" for key, text in self.texts.items())]
