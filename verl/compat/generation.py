"""`main_generation` and `main_generation_server`: responses to the prompts of a data file, into a parquet file.

python -m verl.trainer.main_generation data.path=prompts.parquet data.output_path=answers.parquet model.path=MODEL
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.cli.main import run_guarded, run_verb
from verl.compat.commands import Arguments
from verl.data.dataset import RLHFDataset
from verl.errors import ConfigError

_HERE = "verl.compat.generation"
_ROLLOUT = "actor_rollout_ref.rollout"
# defaults of the older form, which has data.path; the newer form is the training config
_OLDER = {
    f"{_ROLLOUT}.n": 5,
    f"{_ROLLOUT}.temperature": 1.0,
    f"{_ROLLOUT}.top_k": 50,
    f"{_ROLLOUT}.top_p": 0.7,
    "data.max_prompt_length": 1536,
    "data.max_response_length": 512,
    "data.truncation": "right",
}


def main_generation(argv: Sequence[str]) -> int:
    """With `data.output_path`, write the rows of `data.path` (or `data.train_files`) with a column `responses`: a list of
    `data.n_samples` (or rollout.n) strings. Without it, run `verl generate`. Returns the exit code."""
    if not any(argument.lstrip("+").startswith("data.output_path=") for argument in argv):
        return run_verb("generate", argv)
    return run_guarded("generate", _generate, argv)


def _generate(argv: list[str]) -> int:
    from verl.cli.train import run_generate

    return run_generate(translate(argv))


def translate(argv: Sequence[str]) -> list[str]:
    """Translate the command line of `main_generation` to the command line of `verl generate`. Raises ConfigError."""
    arguments = Arguments(argv)
    arguments.drop_config_flags(("generation", "ppo_trainer"))
    output = str(arguments.take("data.output_path"))
    if not output.endswith(".parquet"):
        raise ConfigError(f"data.output_path={output} must end in .parquet: the rows are written with their responses.")
    older = "data.path" in arguments.texts
    arguments.take("data.val_files")  # main_generation has one file, under either name
    arguments.rename("data.path" if older else "data.train_files", "data.val_files")
    arguments.rename("data.n_samples", f"{_ROLLOUT}.n")
    arguments.rename("data.batch_size", "data.val_batch_size")
    for name in ("rollout", "actor", "model"):
        arguments.rename(f"{name}.", f"actor_rollout_ref.{name}.")
    arguments.rename(f"{_ROLLOUT}.prompt_length", "data.max_prompt_length")
    arguments.rename(f"{_ROLLOUT}.response_length", "data.max_response_length")
    for key, value in _OLDER.items() if older else ():
        arguments.default(key, value)
    if "reward.custom_reward_function.path" not in arguments.texts:
        # the rows need no reference answer, and nothing is scored
        arguments.default("data.custom_cls.path", _HERE)
        arguments.default("data.custom_cls.name", Prompts.__name__)
        arguments.default("reward.custom_reward_function.path", _HERE)
        arguments.default("reward.custom_reward_function.name", no_score.__name__)
        arguments.default("reward.num_workers", 1)
    if arguments.value(f"{_ROLLOUT}.temperature") == 0:
        if arguments.value(f"{_ROLLOUT}.n", 1) != 1:
            raise ConfigError("With temperature 0 all samples of a prompt are equal; set data.n_samples=1.")
        for name in ("temperature", "top_k", "top_p"):  # no effect on greedy decoding
            arguments.take(f"{_ROLLOUT}.{name}")
        arguments.default(f"{_ROLLOUT}.do_sample", False)
    return ["--output", output, *arguments.argv()]


class Prompts(RLHFDataset):
    """Rows of which only the prompt is read."""

    def __getitem__(self, item: int) -> dict[str, Any]:
        return {
            **super().__getitem__(item),
            self.config.reward_fn_key: "prompts",
            "reward_model": {"style": "model"},
            "extra_info": {},
        }


def no_score(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> float:
    """The score of every response when nothing is scored."""
    return 0.0
