"""Checks of the model folder, its tokenizer, and the lengths that the model supports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.cli.arguments import with_model
from verl.cli.checklist import Subject
from verl.cli.report import Line, fail, info, passed, warn
from verl.config import ModelConfig
from verl.config.active_keys import runs_on_several_devices, uses_critic
from verl.errors import ModelError, VerlError
from verl.families import ROLLOUT_ENGINES
from verl.models.shapes import ModelShape

if TYPE_CHECKING:
    from torch import nn


def check_model_files(subject: Subject) -> Iterator[Line]:
    """Config and weights of the policy, and of the critic if one trains."""
    from verl.engines.sharding import wrapped_classes
    from verl.models.decoder.weights import why_modules
    from verl.models.load import load_external

    with_model(subject.loaded)
    model = subject.model
    load_external(model.external_lib)
    module, subject.policy = _skeleton(model, subject)
    if runs_on_several_devices(subject.config):
        wrapped_classes(module, subject.engine.wrap_policy.transformer_layer_cls_to_wrap or ())
    yield passed(f"{model.path}: {_described(subject.policy)}")
    if why := why_modules(module):
        yield info(f"transformers' modules compute its layers, since {why}")
    yield from _refused(subject, module)
    yield _weights(model.path, module)
    if subject.loaded.schema.name == "ppo" and uses_critic(subject.config):
        critic = subject.config.critic.model
        module, subject.critic = _skeleton(critic, subject)
        if critic.path != model.path:
            yield passed(f"critic {critic.path}: {_described(subject.critic)}")
            yield _weights(critic.path, module)


def _refused(subject: Subject, module: Any) -> Iterator[Line]:
    """The refusals of the start for this model."""
    from verl.models.further_heads import read_head

    mtp, rollout = subject.model.mtp, None
    if subject.loaded.schema.name == "ppo":
        rollout = subject.config.actor_rollout_ref.rollout
    try:
        if rollout is not None and (device := subject.device) is not None:
            engine = ROLLOUT_ENGINES.get(rollout.name).for_module(module)
            engine.require_model(module, rollout, device)
        if mtp.enable and mtp.enable_train and Path(subject.model.path).expanduser().is_dir():
            read_head(module, subject.model.path, "model.mtp.enable_train=False")
    except VerlError as error:
        yield fail(str(error))


def check_tokenizer(subject: Subject) -> Iterator[Line]:
    """The tokenizer loads, has a chat template, and has an end-of-sequence token."""
    from verl.distributions import load_part
    from verl.models.load import load_tokenizer
    from verl.models.tokenizer import check_vocabulary

    subject.tokenizer = load_tokenizer(subject.model)
    yield passed(f"{type(subject.tokenizer).__name__} of {len(subject.tokenizer):,} tokens")
    stop_ids = subject.config.actor_rollout_ref.rollout.stop_token_ids if subject.loaded.schema.name == "ppo" else ()
    if subject.policy and (warning := check_vocabulary(subject.policy.vocab, subject.tokenizer, stop_ids)):
        yield warn(warning)
    if subject.loaded.schema.name == "ppo":
        drafts = subject.config.actor_rollout_ref.rollout.speculative
        if "model" in drafts.methods and drafts.model_path is not None:
            load_part("verl.rollout.native.drafts.model").require_tokens_of(subject.tokenizer, drafts.model_path)
    if not getattr(subject.tokenizer, "chat_template", None):
        yield warn("no chat template: rows must be plain strings, not messages")
    if subject.tokenizer.eos_token_id is None:
        yield warn("no end-of-sequence token: only the length and rollout.stop end a response")


def check_sequence_lengths(subject: Subject) -> Iterator[Line]:
    """The longest sequence against the positions of the model."""
    if subject.loaded.schema.name != "ppo":
        total, keys = subject.config.data.max_length, "data.max_length"
        limits = "no limit of data.max_length" if total is None else f"sequences of at most {total} tokens"
    else:
        rollout = subject.config.actor_rollout_ref.rollout
        total = rollout.prompt_length + rollout.response_length
        keys = "data.max_prompt_length or data.max_response_length"
        limits = f"{rollout.prompt_length} prompt + {rollout.response_length} response = {total} tokens"
    limit = subject.policy.max_positions if subject.policy else None
    if limit is not None and total is not None and total > limit:
        yield fail(f"{limits}, but the model holds {limit}; lower {keys}")
    else:
        yield passed(limits + (f", the model holds {limit}" if limit else ""))


def _skeleton(model: ModelConfig, subject: Subject) -> tuple[Any, ModelShape]:
    """The model without values, for the layers that adapters take, and its shape."""
    from verl.models.load import empty_model, num_parameters
    from verl.models.lora import LoRASpec, adapted_layers
    from verl.parallel.device import compute_dtype, resolve_device

    dtype = compute_dtype(subject.engine.dtype, subject.device or resolve_device("cpu"))
    module = empty_model(model, "lm", dtype, False)  # shapes without memory
    if spec := LoRASpec.of(model):
        adapted_layers(module, spec)
    return module, ModelShape.from_config(module.config.get_text_config(), model.path, num_parameters(module))


def _described(shape: ModelShape) -> str:
    return f"{shape.num_parameters / 1e6:,.1f} million parameters in {shape.num_layers} layers"


def _weights(path: str, module: nn.Module) -> Line:
    from verl.models.folder import check_tied, read_headers

    folder = Path(path).expanduser()
    if not folder.is_dir():
        return info(f"{path} is a hub name; its weights are downloaded when the run starts")
    try:
        headers = read_headers(folder)
        check_tied(folder, headers, module)
    except ModelError as error:
        return fail(str(error))
    files = {header.file for header in headers.values()}
    size = sum((folder / file).stat().st_size for file in files)
    return passed(f"weights: {len(files)} file{'s' if len(files) > 1 else ''}, {size / 1e9:.2f} GB")
