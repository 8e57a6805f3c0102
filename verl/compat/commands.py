"""Commands of other releases by the verbs here: `main_ppo`, `sft_trainer`, `model_merger`, the fully asynchronous and the
one-step-off trainer; and their command lines.

The asynchronous program generates `rollout.prefetch_num` batches ahead, each with the newest weights at its start, on the
rollout's own devices if `rollout.nnodes` is above 0 (verl/programs/ppo_async.py).
"""

import logging
import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from verl.cli.main import run_guarded, run_verb
from verl.cli.model_folders import run_export
from verl.cli.parser import Parser
from verl.config.values import parse_override
from verl.errors import ConfigError

RELEASE = ("--defaults", "release")


def _run_as_release(verb: str, argv: Sequence[str]) -> int:
    """Run a verb with the defaults of existing releases: the exit code."""
    return run_verb(verb, [*RELEASE, *argv], whole_process=True)


# fn(arguments) -> exit code. The launcher or trainer.n_gpus_per_node decides about Ray
main_ppo, sft_trainer, preference_trainer, rm_trainer = (
    partial(_run_as_release, verb) for verb in ("train", "sft", "preference", "rm")
)


def fsdp_sft_trainer(argv: Sequence[str]) -> int:
    """`verl sft` with the keys and defaults of the older `sft_trainer.yaml`: the exit code."""
    named = any(argument.split("=", 1)[0] in ("--config-name", "-cn") for argument in argv)
    return sft_trainer(argv if named else ["--config-name", "sft_trainer", *argv])


# -- verl.model_merger ---------------------------------------------------------------------------------------------------

_NO_EFFECT = ("--tie-word-embedding", "--is-value-model", "--use_cpu_initialization", "--trust-remote-code")


def model_merger(argv: Sequence[str]) -> int:
    """`python -m verl.model_merger merge|test` as `verl export`: a checkpoint holds its model as a Hugging Face folder
    already."""
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
        return parse_override(f"{key}={self.texts[key]}").value if key in self.texts else default

    def take(self, key: str, default: object = None) -> object:
        """`value`, and remove the key."""
        value = self.value(key, default)
        self.texts.pop(key, None)
        return value

    def rename(self, old: str, new: str) -> None:
        """Rename a key that is given, unless the new one is too; names that end with a dot rename all keys below."""
        for key in [k for k in self.texts if k == old or (old.endswith(".") and k.startswith(old))]:
            text = self.texts.pop(key)
            self.texts.setdefault(new + key[len(old) :], text)

    def default(self, key: str, value: object) -> None:
        """A value for a key that is not given."""
        self.texts.setdefault(key, str(value))

    def drop_config_flags(self, config_names: Iterable[str] | None = None) -> None:
        """Remove --config-path, --config-name and their short forms; with `config_names` only if they name one."""
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
        flags = [word for flag in self.flags for word in flag]
        return [*flags, *self._deleted, *(f"{key}={text}" for key, text in self.texts.items())]


log = logging.getLogger(__name__)

_ROLLOUT = "actor_rollout_ref.rollout"
_CONFIG_NAMES = ("fully_async_ppo_trainer", "one_step_off_ppo_trainer", "ppo_trainer")
_MEGATRON_NAMES = tuple(name.replace("ppo_", "ppo_megatron_") for name in _CONFIG_NAMES)
# keys of asynchronous training without effect -> reason
_NO_MEANING = {
    "async_training.use_trainer_do_validate": "validation samples on the rollout's devices",
    "async_training.concurrent_samples_per_replica": "max_num_seqs bounds the number of concurrent samples",
    "async_training.use_rollout_log_probs": "algorithm.rollout_correction sets the correction between sampler and trainer",
    "async_training.compute_prox_log_prob": "algorithm.rollout_correction sets the correction between sampler and trainer",
    "data.gen_batch_size": "prompts are generated one by one",
}
_OFF = ("async_training.use_dynamic_resource_scheduling",)


def main_fully_async(argv: Sequence[str]) -> int:
    """`python -m verl.experimental.fully_async_policy.fully_async_main`: the exit code of `verl train`."""
    return run_guarded("train", lambda arguments: _train(fully_async(arguments)), argv)


def main_one_step_off(argv: Sequence[str]) -> int:
    """`python -m verl.experimental.one_step_off_policy.main_ppo`: the exit code of `verl train`, one batch ahead."""
    return run_guarded("train", lambda arguments: _train(one_step_off(arguments)), argv)


def fully_async(argv: Sequence[str]) -> list[str]:
    """Translate overrides of the fully-asynchronous trainer to overrides of `verl train`. Raises ConfigError. It syncs weights
    after `trigger_parameter_sync_step` groups of `require_batches` x `ppo_mini_batch_size` prompts: that product is
    train_batch_size here. `rollout.total_rollout_steps` counts prompts. A `staleness_threshold` above 0 allows batches ahead: 1
    batch up to 1, 2 up to 2."""
    arguments = _asynchronous(argv)
    for key in _OFF:
        if arguments.take(key, False):
            raise ConfigError(
                f"{key}=True is not available in this version: the role of a device is fixed. Set it to False."
            )
    for key in [k for k in arguments.texts if k.startswith("async_training.dynamic_schedule_")]:
        arguments.take(key)
    for key, reason in _NO_MEANING.items():
        if key in arguments.texts:
            log.warning("No effect: %s=%s (%s).", key, arguments.take(key), reason)
    sync = _number(arguments, "async_training.trigger_parameter_sync_step", 4)
    groups = _number(arguments, "async_training.require_batches", 1)
    staleness = _number(arguments, "async_training.staleness_threshold", 0.1)
    mini_batch = arguments.value("actor_rollout_ref.actor.ppo_mini_batch_size", 256)
    prompts = int(sync * groups * int(str(mini_batch)))
    if arguments.value("data.train_batch_size", 0) == 0:
        arguments.texts["data.train_batch_size"] = str(prompts)
    total = arguments.take("rollout.total_rollout_steps")
    if total is not None:
        steps = max(1, int(str(total)) // int(str(arguments.value("data.train_batch_size"))))
        arguments.default("trainer.total_training_steps", steps)
    ahead = math.ceil(staleness)
    arguments.default(f"{_ROLLOUT}.prefetch_num", ahead)
    partial = arguments.take("async_training.partial_rollout")
    if partial is not None and ahead:
        arguments.default(f"{_ROLLOUT}.partial_rollout", partial)
    return _placed(arguments)


def one_step_off(argv: Sequence[str]) -> list[str]:
    """Translate overrides of the one-step-off trainer to overrides of `verl train`: one batch ahead."""
    arguments = _asynchronous(argv)
    arguments.default(f"{_ROLLOUT}.prefetch_num", 1)
    return _placed(arguments)


def _asynchronous(argv: Sequence[str]) -> Arguments:
    arguments = Arguments(argv)
    if arguments.flag("--config-name", "-cn").removesuffix(".yaml") in _MEGATRON_NAMES:
        arguments.default("model_engine", "megatron")
    arguments.drop_config_flags((*_CONFIG_NAMES, *_MEGATRON_NAMES))
    arguments.take("actor_rollout_ref.hybrid_engine")  # these commands imply False
    return arguments


def _placed(arguments: Arguments) -> list[str]:
    """`rollout.*` of these commands describes the rollout's own devices: by default one node of 8."""
    arguments.rename("rollout.total_epochs", "trainer.total_epochs")
    arguments.rename("rollout.test_freq", "trainer.test_freq")
    arguments.rename("rollout.", f"{_ROLLOUT}.")
    arguments.default(f"{_ROLLOUT}.nnodes", 1)
    if arguments.value(f"{_ROLLOUT}.nnodes"):
        arguments.default(f"{_ROLLOUT}.n_gpus_per_node", 8)
    return arguments.argv()


def _number(arguments: Arguments, key: str, default: float) -> float:
    value: object = arguments.take(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise ConfigError(f"{key}={value} must be a non-negative number.")
    return value


def _train(argv: list[str]) -> int:
    from verl.cli.train import run_train

    return run_train([*RELEASE, *argv], supervised=True)
