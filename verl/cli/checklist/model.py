"""Checks of the model folder, its tokenizer, and the lengths that the model supports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from verl.cli.checklist import Subject
from verl.cli.checklist.resources import ModelShape
from verl.cli.report import Line
from verl.config import ModelConfig
from verl.config.active_keys import uses_critic
from verl.errors import ModelError


def check_model_files(subject: Subject) -> Iterator[Line]:
    """Config and weights of the policy, and of the critic if one trains."""
    from verl.models.load import load_external

    group, critic = subject.config.actor_rollout_ref, subject.config.critic
    load_external(group.model.external_lib)
    subject.policy = _shape(group.model)
    yield Line("pass", f"{group.model.path}: {_described(subject.policy)}")
    yield _weights(group.model.path)
    if uses_critic(subject.config):
        subject.critic = subject.policy if critic.model.path == group.model.path else _shape(critic.model)
        if critic.model.path != group.model.path:
            yield Line("pass", f"critic {critic.model.path}: {_described(subject.critic)}")
            yield _weights(critic.model.path)


def check_tokenizer(subject: Subject) -> Iterator[Line]:
    """The tokenizer loads, has a chat template, and has an end-of-sequence token."""
    from verl.models.load import load_tokenizer

    subject.tokenizer = load_tokenizer(subject.config.actor_rollout_ref.model)
    yield Line("pass", f"{type(subject.tokenizer).__name__} of {len(subject.tokenizer):,} tokens")
    if not getattr(subject.tokenizer, "chat_template", None):
        yield Line("warn", "no chat template: prompts must be plain strings")
    if subject.tokenizer.eos_token_id is None:
        yield Line("warn", "no end-of-sequence token: only the length and rollout.stop end a response")


def check_lengths(subject: Subject) -> Iterator[Line]:
    """Longest prompt plus response against the positions of the model."""
    rollout = subject.config.actor_rollout_ref.rollout
    total = rollout.prompt_length + rollout.response_length
    shown = f"{rollout.prompt_length} prompt + {rollout.response_length} response = {total} tokens"
    limit = subject.policy.max_positions if subject.policy else None
    if limit is not None and total > limit:
        yield Line(
            "fail", f"{shown}, but the model holds {limit}; lower data.max_prompt_length or data.max_response_length"
        )
    else:
        yield Line("pass", shown + (f", the model holds {limit}" if limit else ""))


def _shape(model: ModelConfig) -> ModelShape:
    import torch
    from transformers import AutoModelForCausalLM

    from verl.models.load import load_model_config, num_parameters

    config = load_model_config(model.path, model.trust_remote_code, model.override_config)
    try:
        with torch.device("meta"):  # shapes without memory
            module = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"No causal language model can be built from {model.path}/config.json: {error}") from error
    return ModelShape.of(num_parameters(module), config)


def _described(shape: ModelShape) -> str:
    return f"{shape.num_parameters / 1e6:,.1f} million parameters in {shape.num_layers} layers"


def _weights(path: str) -> Line:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return Line("info", f"{path} is a hub name; its weights are downloaded when the run starts")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return Line("fail", f"{folder} has no weights (*.safetensors); download or convert the model again")
    damaged = [f"{file.name}: {problem}" for file in files if (problem := _header_problem(file))]
    if damaged:
        return Line("fail", f"{folder}: {damaged[0]}. Download or convert the model again")
    size = sum(file.stat().st_size for file in files)
    return Line("pass", f"weights: {len(files)} file{'s' if len(files) > 1 else ''}, {size / 1e9:.2f} GB")


def _header_problem(file: Path) -> str:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            return "" if list(tensors.keys()) else "it holds no tensors"
    except (SafetensorError, OSError) as error:
        return f"damaged ({error})"
