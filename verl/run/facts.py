"""Defaults of our commands that follow the rows and the model of a run, and sentences about its steps."""

from verl.config import LoadedConfig, PPOConfig, with_fitting_defaults
from verl.config.command_defaults import Facts
from verl.config.roots import RunConfig
from verl.models.load import load_model_config
from verl.programs.api import ProgramData

_FEW_STEPS = 10


def with_facts(loaded: LoadedConfig[RunConfig], num_rows: int | None) -> LoadedConfig[RunConfig] | None:
    """`loaded` with defaults that fit `num_rows` rows that train and the model; None if it has them. Raises ModelError."""
    if loaded.defaults != "command":
        return None
    config = loaded.config
    model = config.actor_rollout_ref.model if isinstance(config, PPOConfig) else config.model
    hf = load_model_config(model.path, model.trust_remote_code, model.override_config).get_text_config()
    return with_fitting_defaults(loaded, Facts(num_rows, getattr(hf, "hidden_size", None)))


def num_rows_of(data: ProgramData) -> int | None:
    """The rows that train; None if the program or a sampler of the user does not say."""
    return getattr(data, "num_rows", None)


def about_steps(num_steps: int, num_rows: int | None, config: RunConfig) -> str:
    """The end of a sentence about the steps of a run: rows that no step of an epoch takes, or too few steps."""
    number = (num_rows or 0) % config.data.train_batch_size
    which = "other ones each time" if config.data.shuffle else "always the last ones"
    text = f"; an epoch leaves out {number} of the {num_rows:,} rows, {which}" if number else ""
    if num_steps < _FEW_STEPS and not config.trainer.total_training_steps:
        text += "; few for a model to learn: trainer.total_epochs takes the rows again"
    return text
