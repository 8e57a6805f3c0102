"""Defaults of the commands `verl ...` and of `import verl` that differ from the defaults of existing releases.

Scripts of existing releases (`python -m verl.trainer.main_ppo` and its like) keep the defaults of config/sections: their files
set every key. The defaults of this file suit a person who sets few keys.
"""

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
# cases of defaults, as docs/differences.md names them
_LORA, _GROUPS = "LoRA adapters train", "the estimator compares the samples of a prompt"
_ORPO, _OWN = "`preference.loss=orpo`", "the estimator is your own"
MAX_SMALL = 1024  # hidden size of a small model: a useful rate falls with the width (arXiv 2203.03466)
_SMALL = f"the model is at most {MAX_SMALL:,} wide"


class Facts(NamedTuple):
    """Knowledge of a run before its first step: the number of rows that train, and the model's hidden size."""

    num_rows: int | None = None
    width: int | None = None


NO_FACTS = Facts()


class Default(NamedTuple):
    """A default of one program. `applies`: the case of the default; "" always."""

    key: str
    value: Any
    applies: str = ""


_GROUP_SIZE = Default("actor_rollout_ref.rollout.n", 8, _GROUPS)
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
        _GROUP_SIZE,
        _GROUP_SIZE._replace(applies=_OWN),
        Default("actor_rollout_ref.actor.optim.lr", 5e-6, _SMALL),
        Default("actor_rollout_ref.actor.optim.lr", 1e-5, _LORA),
        *_SCHEDULE,
    ),
    "sft": (Default(BATCH, 32), Default("optim.lr", 1e-5), Default("optim.lr", 1e-4, _LORA), *_SCHEDULE),
    "preference": (
        Default(BATCH, 32),
        Default("optim.lr", 5e-7),
        Default("optim.lr", 8e-6, _ORPO),  # it has no reference, and fine-tunes too (arXiv 2403.07691)
        Default("optim.lr", 5e-6, _LORA),
        *_SCHEDULE,
    ),
    "rm": (Default(BATCH, 32), Default("optim.lr", 1e-5), Default("optim.lr", 1e-4, _LORA), *_SCHEDULE),
}


def command_defaults(
    program: str, values: Mapping[str, Any], set_keys: set[str], facts: Facts = NO_FACTS, face: Face = "command"
) -> Derived:
    """The defaults that hold for `values` and `facts`, of keys that the user has not set. A preset changes one default of
    existing releases: the size of a group, 1 there."""
    cases, defaults = {"", *_cases(values, facts)}, DEFAULTS[program] if face == "command" else (_GROUP_SIZE,)
    holding = {d.key: d.value for d in defaults if d.applies in cases and d.key not in set_keys}
    derived: Derived = {key: (value, ORIGIN) for key, value in holding.items()}
    if facts.num_rows and BATCH in holding:
        divisor = max(1, values["trainer.n_gpus_per_node"]) * values["trainer.nnodes"]  # 0: a node without GPUs
        divisor = holding[BATCH] if any(key.endswith("batch_size") for key in set_keys) else divisor
        if (size := _fitting_batch(facts.num_rows, holding[BATCH], divisor)) != holding[BATCH]:
            derived[BATCH] = (size, "the number of rows")
    return derived


def _fitting_batch(num_rows: int, limit: int, divisor: int) -> int:
    """The size of a batch: all rows up to `limit`. It is less if equal batches leave out fewer rows of an epoch, and the
    `divisor` (devices or another size) divides them."""
    if num_rows <= limit:
        return num_rows
    num_steps = -(-num_rows // limit)
    even = num_rows // num_steps
    return even if num_rows - even * num_steps < num_rows % limit and even % divisor == 0 else limit


def _cases(values: Mapping[str, Any], facts: Facts) -> Iterator[str]:
    model = _MODEL if f"{_MODEL}.path" in values else "model"
    rank = values[f"{model}.lora_rank"]
    if (isinstance(rank, int) and rank > 0) or values[f"{model}.lora_adapter_path"]:
        yield _LORA
    if values.get(_ESTIMATOR) in ADVANTAGES.reading("index"):
        yield _GROUPS
    if _ESTIMATOR in values and not ADVANTAGES.is_built_in(str(values[_ESTIMATOR])):
        yield _OWN
    if facts.width is not None and facts.width <= MAX_SMALL:
        yield _SMALL
    if values.get("preference.loss") == "orpo":
        yield _ORPO
