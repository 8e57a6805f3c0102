"""The data of a PPO run: tokenizer, training prompts and held-out prompts."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from verl.config import PPOConfig
from verl.config.active_keys import runs_agents, uses_rewards
from verl.data.dataset import PromptRows, load_dataset
from verl.data.loader import PromptLoader, ValidationLoader
from verl.data.order import order_of, prompts_per_generation
from verl.data.pictures import pictures_noted
from verl.data.prompts import PromptEncoder
from verl.data_proto.tokenizer import Tokenizer
from verl.distributions import load_part, require_part
from verl.errors import DataError, FewRowsError
from verl.families import engine_facts
from verl.foreign_text import quoted
from verl.models.foreign_entries import GENERATION, uncomputed_entries
from verl.models.load import eos_token_ids_of, load_model_config, load_tokenizer, read_generation
from verl.models.tokenizer import hidden_tags
from verl.programs.distillation import check_teachers
from verl.rewards.scorers.route import check_truth

log = logging.getLogger(__name__)


@dataclass
class PPOData:
    """See ProgramData. `train` is None in an evaluation, `validation` without data.val_files."""

    tokenizer: Tokenizer
    train: PromptLoader | None
    validation: ValidationLoader | None
    data_sources: list[str]
    num_steps: int = 1
    num_steps_per_epoch: int = 1
    inputs: dict[str, str] = field(default_factory=dict)
    num_rows: int | None = None  # that train, without a sampler

    @property
    def has_validation(self) -> bool:
        return self.validation is not None


def tokenizer_notices(config: PPOConfig, tokenizer: Tokenizer) -> list[str]:
    """Notices about special tokens that scorers do not see, and about a model without a token that ends responses."""
    rollout, model, notices = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, []
    if tags := hidden_tags(tokenizer):
        notices.append(
            f"{', '.join(tags)} are special tokens, which are left out of the text that reward functions and samples get. Set "
            f"actor_rollout_ref.model.text_tokens={tags} to keep them."
        )
    stops = {*eos_token_ids_of(model, tokenizer), *rollout.stop_token_ids}
    size = load_model_config(model.path, model.trust_remote_code, model.override_config).get_text_config().vocab_size
    if not rollout.stop and not any(token < size for token in stops):
        notices.append(
            "No token ends a response: the model and its tokenizer have no end-of-sequence token among the model's "
            f"{size:,} tokens, so every response is cut at data.max_response_length. Set eos_token_id in "
            "generation_config.json, or actor_rollout_ref.rollout.stop_token_ids."
        )
    entries = read_generation(model)
    if ignored := uncomputed_entries(entries, GENERATION):
        listed = ", ".join(f"{name}={quoted(entries[name], 40)}" for name in ignored)
        notices.append(
            f"generation_config.json has {listed}, which samples do not follow: keys of actor_rollout_ref.rollout decide, and "
            "log-probs are the model's."
        )
    return notices


def refuse_images(config: PPOConfig, rows: PromptRows) -> None:
    """Raise DataError if a judge would read rows with images as text."""
    model = config.reward.reward_model
    if model.enable and model.judge_template and rows.has_images:
        raise DataError(
            "Rows with images do not work with reward.reward_model.judge_template in this version: a judge reads text. Leave "
            "the key out."
        )


def scoring_of(config: PPOConfig) -> bool | Callable[[str, object], object]:
    """See PromptRows: whether rewards train, and the check of reference answers for a built-in scorer."""
    trains = uses_rewards(config)
    return check_truth if trains and not config.reward.custom_reward_function.path else trains


def known_loops(config: PPOConfig) -> frozenset[str]:
    """Names that the column agent_name may have; empty if the run has no agents."""
    if not runs_agents(config):
        return frozenset()
    require_part("verl.agents", "A run with agents (rollout.multi_turn, rollout.agent)")
    return frozenset(
        load_part("verl.agents.loops").load_loops(config.actor_rollout_ref.rollout.agent.agent_loop_config_path)
    )


def load_data(config: PPOConfig, *, train: bool = True, scored: bool | None = None) -> PPOData:
    """Read and check the data files; raises DataError or ConfigError before any model is loaded.

    `scored`: whether each row needs what selects and feeds a scorer (None: if the program reads rewards). A run takes
    trainer.total_training_steps, else at most total_epochs times the complete generations of an epoch.
    """
    data = config.data
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    if tokenizer.processor is not None:
        tokenizer.processor.keeps_files = engine_facts(config.actor_rollout_ref.rollout.name).holds_weights
    for sentence in tokenizer_notices(config, tokenizer):
        log.warning(sentence)
    encoder = PromptEncoder(tokenizer, data)
    checks: Any = {"agents": known_loops(config), "scored": scoring_of(config) if scored is None else scored}
    run_data = PPOData(tokenizer, None, None, [])
    sources: set[str] = set()
    if train:
        with pictures_noted(run_data.inputs, "data.train_files"):
            rows = load_dataset(data.train_files, tokenizer, data, max_samples=data.train_max_samples, **checks)
        refuse_images(config, rows)
        if len(rows) < data.train_batch_size:
            raise FewRowsError(len(rows), data.train_batch_size, f" of {data.train_files}")
        run_data.num_rows = None if data.sampler.class_path else len(rows)
        loader = run_data.train = PromptLoader(rows, encoder, order_of(rows, data), data.train_batch_size)
        steps = run_data.num_steps_per_epoch = max(1, loader.order.rows_per_epoch // prompts_per_generation(config))
        run_data.num_steps = config.trainer.total_training_steps or config.trainer.total_epochs * steps
        sources |= set(rows.data_sources)
        if config.distillation.enabled:
            check_teachers(config, tokenizer, rows)
    if data.val_files:
        with pictures_noted(run_data.inputs, "data.val_files"):
            rows = load_dataset(data.val_files, tokenizer, data, max_samples=data.val_max_samples, **checks)
        refuse_images(config, rows)
        run_data.validation = ValidationLoader(rows, encoder, data.val_batch_size or len(rows))
        sources |= set(rows.data_sources)
    run_data.data_sources = sorted(sources)
    return run_data
