"""Defaults of the commands `verl ...` and of `import verl`, where they differ from the defaults of existing releases.

Scripts of existing releases (`python -m verl.trainer.main_ppo` and its like) keep the defaults of config/sections, which suit
files that set every key. These suit a person who sets few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from verl.config.schema import Derived
from verl.config.sections.trainer import AFTER_EACH_EPOCH
from verl.families import ADVANTAGES

Face = Literal["command", "release"]
FACES: tuple[Face, ...] = ("command", "release")
ORIGIN = "default of verl's commands"  # and not of existing releases
BATCH = "data.train_batch_size"

_MODEL, _ESTIMATOR = "actor_rollout_ref.model", "algorithm.adv_estimator"
# cases in which a default holds, as docs/differences.md names them
_LORA, _GROUPS = "LoRA adapters train", "the estimator compares the samples of a prompt"
_ORPO = "`preference.loss=orpo`"


class Default(NamedTuple):
    """A default of one program. `applies`: the case in which it holds; "" always."""

    key: str
    value: Any
    applies: str = ""


_SCHEDULE = (
    Default("trainer.total_epochs", 1),
    Default("trainer.save_freq", AFTER_EACH_EPOCH),
    Default("trainer.test_freq", AFTER_EACH_EPOCH),
    Default("trainer.val_before_train", True),
)
# program -> its defaults; a later one of a key goes before an earlier one
DEFAULTS: Mapping[str, tuple[Default, ...]] = {
    "ppo": (
        Default(BATCH, 16),
        Default("data.val_files", []),
        Default("actor_rollout_ref.rollout.n", 8, _GROUPS),
        Default("actor_rollout_ref.actor.optim.lr", 1e-5, _LORA),
        *_SCHEDULE,
    ),
    "sft": (Default(BATCH, 32), Default("optim.lr", 1e-5), Default("optim.lr", 1e-4, _LORA), *_SCHEDULE),
    "preference": (
        Default(BATCH, 32),
        Default("optim.lr", 5e-7),
        Default("optim.lr", 8e-6, _ORPO),  # which has no reference, and fine-tunes too (arXiv 2403.07691)
        Default("optim.lr", 5e-6, _LORA),
        *_SCHEDULE,
    ),
    "rm": (Default(BATCH, 32), Default("optim.lr", 1e-5), Default("optim.lr", 1e-4, _LORA), *_SCHEDULE),
}


def command_defaults(
    program: str, values: Mapping[str, object], set_keys: set[str], num_rows: int | None = None
) -> Derived:
    """The defaults that hold for `values`, of keys that the user has not set. A batch has at most `num_rows` rows."""
    cases = {"", *_cases(values)}
    holding = {d.key: d.value for d in DEFAULTS[program] if d.applies in cases and d.key not in set_keys}
    derived: Derived = {key: (value, ORIGIN) for key, value in holding.items()}
    if num_rows is not None and num_rows < holding.get(BATCH, 0):
        derived[BATCH] = (num_rows, "the number of rows")
    return derived


def _cases(values: Mapping[str, object]) -> Iterator[str]:
    model = _MODEL if f"{_MODEL}.path" in values else "model"
    rank = values[f"{model}.lora_rank"]
    if (isinstance(rank, int) and rank > 0) or values[f"{model}.lora_adapter_path"]:
        yield _LORA
    if values.get(_ESTIMATOR) in ADVANTAGES.reading("index"):
        yield _GROUPS
    if values.get("preference.loss") == "orpo":
        yield _ORPO
