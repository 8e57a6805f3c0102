"""Hugging Face models and tokenizers from a folder or a hub name, built with our attention and checked before they
are used."""

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from verl.config import ModelConfig
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ModelError, is_failure, nearest
from verl.foreign_text import clean
from verl.models import folder as files
from verl.models.attention import ATTENTION_NAME
from verl.models.check import PADDED, check_attention, choose_forward, own_attention
from verl.models.delta_net import lay_out_delta_nets
from verl.models.heads import HEADS, WEIGHT_NAMES, HeadKind, ScalarHeadModel, is_further_head
from verl.models.hf_module import HFModule
from verl.models.intact import verified
from verl.models.padded import ForwardKind
from verl.models.processor import load_processor
from verl.models.quiet import loading, parse_config, quiet
from verl.models.randomness import turn_off
from verl.models.rope import check_rope, guard_rotations
from verl.models.routing import balancing_share
from verl.models.tokenizer import (
    check_token_ids,
    check_tokenizer_file,
    count_as_text,
    embedding_rows,
    eos_token_ids,
    model_type_of,
    num_appended,
    set_chat_template,
)
from verl.models.vision import FAMILIES, attention_of, is_vision_config
from verl.registry import load_module

log = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab*", "*tiktoken*")


def load_model(
    path: str | Path,
    head: str = "lm",
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
    gradient_checkpointing: bool = False,
) -> Any:
    """The model in folder `path`, or of that name on the hub (HF_HUB_OFFLINE is respected), with a head of
    verl.models.heads.HEADS. A scalar head is the folder's own if it has one, else a new one.

    Its forward has no randomness, and is checked on a few tokens. It is packed, through verl.models.attention with
    `layout=`, if the results agree with the family's own attention. Else it is the model's own forward over padded rows
    (verl.models.padded). Raises ModelError naming folder and cause.
    """
    kind, folder = HEADS.get(head), files.fetch(path, weights=True)
    with verified(folder):
        config = load_model_config(path, trust_remote_code, override_config)
        attention = (override_config or {}).get("attn_implementation")
        auto_class = _auto_class(kind, config)
        headers = files.read_headers(folder)
        files.check_counts(folder / "config.json", config.to_dict(), headers)
        with loading(path, config):
            skeleton = _on_meta(auto_class, config, dtype, trust_remote_code, attention)
        files.check_tensors(folder, headers, skeleton, dtype.itemsize)
        files.check_tied(folder, headers, skeleton)
        with loading(path, config):
            module = kind.wrap(_filled(auto_class, folder, config, skeleton, trust_remote_code))
            del skeleton
            if isinstance(module, ScalarHeadModel):
                _restore_head(module, folder)
        return _ready(module, path, device, gradient_checkpointing, attention)


def adopt_model(
    module: nn.Module,
    head: str = "lm",
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    gradient_checkpointing: bool = False,
) -> Any:
    """A causal language model that a user's code has built, in `dtype` and made ready as `load_model` does. Raises
    ModelError."""
    if head != "lm":
        raise ModelError(f"A model of your own code has no head {head!r}; save it, and name its folder.")
    name = type(module).__name__
    if not isinstance(module, transformers.PreTrainedModel):
        raise ModelError(
            f"{name} is not a transformers.PreTrainedModel. Derive the class from it: the forward must take token ids and give "
            "logits, and the config must have the size of the vocabulary."
        )
    with loading(name, module.config):
        if module._can_set_attn_implementation():
            module.set_attn_implementation(ATTENTION_NAME)
        return _ready(torch.nn.Module.to(module, dtype), name, device, gradient_checkpointing)


def _ready(
    module: nn.Module,
    path: str | Path,
    device: torch.device | str,
    gradient_checkpointing: bool,
    attention: str | None = None,
) -> nn.Module:
    """The module on its device, without randomness, with its weights and its forward checked."""
    if rates := _settle(module, gradient_checkpointing):
        listed = ", ".join(f"{key}={value}" for key, value in rates.items())
        log.info("Dropout is off, whatever config.json says (%s). With it log-probs differ from the sampler's.", listed)
    if share := balancing_share(module.config):
        log.warning("output_router_logits of config.json has no effect: no loss has the term of %s.", share)
    module.to(device)
    _require_finite(module, path)
    choose_forward(module, attention)
    size, dtype = num_parameters(module) / 1e6, str(next(module.parameters()).dtype).removeprefix("torch.")
    log.info("Loaded %s: %s, %.1f million parameters, %s.", path, type(module).__name__, size, dtype)
    return module


def load_causal_lm(path: str | Path, **settings: Any) -> HFModule:
    """The causal language model in folder `path`; see load_model."""
    return cast("HFModule", load_model(path, "lm", **settings))


def _restore_head(module: ScalarHeadModel, folder: Path) -> None:
    if not module.load_head(folder):
        log.info("%s has no scalar head; a new one is trained.", folder)
    architecture = type(module.get_decoder()).__name__.removesuffix("Model") + module.architecture
    if hasattr(transformers, architecture):  # then the saved model opens with transformers' class of that name
        module.config.architectures, module.config.num_labels = [architecture], 1


def load_tokenizer(model: ModelConfig | str | Path) -> Tokenizer:
    """The tokenizer of a model section (its path, or tokenizer_path; `custom_chat_template` as text or file) or of a
    folder.

    Has a pad token afterwards (the end-of-sequence token if the files name none, or one without an embedding),
    `num_embeddings`, the rows of the model's embedding (None: not known), and `processor`, the ImageProcessor of a
    vision-language model (None: the model reads text). Raises ModelError.
    """
    if not isinstance(model, ModelConfig):
        model = ModelConfig(path=str(model))
    path = model.tokenizer_path or model.path
    folder, num_embeddings = files.fetch(path, weights=False), embedding_rows(model)
    check_tokenizer_file(folder, num_embeddings)
    try:
        with quiet():
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=model.trust_remote_code
            )
    except BaseException as error:  # of a damaged file, from several libraries; the tokenizers library panics too
        if not is_failure(error):
            raise
        if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
            raise ModelError(
                f"The folder {folder} has no tokenizer (tokenizer.json); copy its files from where the model comes from, or "
                "set actor_rollout_ref.model.tokenizer_path to a folder that has them."
            ) from error
        if (folder / "config.json").exists():  # transformers reads it first
            load_model_config(path, model.trust_remote_code, None)
        raise ModelError(f"No tokenizer could be loaded from {path}: {files.reason(error)}.") from error
    if model.custom_chat_template:
        set_chat_template(tokenizer, model.custom_chat_template)
    if model.text_tokens:
        count_as_text(tokenizer, model.text_tokens)
    tokenizer.num_embeddings, tokenizer.num_appended = num_embeddings, num_appended(tokenizer)
    tokenizer.processor = load_processor(folder, model_type_of(model), tokenizer, model.trust_remote_code)
    if num_embeddings is not None:
        check_token_ids(tokenizer, str(path), num_embeddings)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= (num_embeddings or 1 << 31):
        if tokenizer.eos_token is None:
            raise ModelError(
                f"The tokenizer of {path} has neither a pad nor an end-of-sequence token; add one to its files."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return cast("Tokenizer", tokenizer)


def eos_token_ids_of(model: ModelConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """See eos_token_ids; from the files of a model that is not loaded. Raises ModelError."""
    config = load_model_config(model.path, model.trust_remote_code, model.override_config)
    parts = SimpleNamespace(config=config, generation_config=SimpleNamespace(**read_generation(model)))
    return eos_token_ids(parts, tokenizer)


def read_generation(model: ModelConfig) -> dict[str, Any]:
    file = files.fetch(model.path, weights=False) / "generation_config.json"
    return files.read_json_object(file) if file.is_file() else {}


def num_parameters(module: nn.Module) -> int:
    """Parameters, tied ones counted once."""
    return sum(p.numel() for p in module.parameters())


def load_model_config(path: str | Path, trust_remote_code: bool, override: dict[str, object] | None) -> Any:
    """The transformers config of a folder or hub name, with `override` put in. Raises ModelError."""
    folder = files.fetch(path, weights=False)
    entries = files.read_config(folder)
    files.check_eos(folder, entries)
    check_rope(folder / "config.json", {**entries, **(override or {})})
    try:
        config = parse_config(folder, entries, trust_remote_code)
    except Exception as error:  # the checks of a family's config are its own
        raise ModelError(f"The configuration of {folder} could not be read: {files.reason(error)}.") from error
    if type(config).__module__.startswith("transformers."):  # a class of the folder's own may read any entry
        files.check_acting_entries(
            folder / "config.json",
            {**entries, **{key: value for key, value in (override or {}).items() if key in entries}},
            type(config),
        )
    for key, value in (override or {}).items():
        section = config if hasattr(config, key) else config.get_text_config()  # of the language model, with a tower
        if key == "attn_implementation":
            check_attention(value)
        elif key == "output_router_logits" and value:
            raise ModelError(
                "model.override_config.output_router_logits=True asks for the router's balancing loss, which verl does "
                "not train; remove it."
            )
        elif not hasattr(section, key) and value:
            hint = nearest(key, vars(config)) or ". Remove it, or name a field of the model's config.json."
            raise ModelError(
                f"actor_rollout_ref.model.override_config.{key}={value}: {type(config).__name__} has no such field{hint}"
            )
        elif not hasattr(section, key):
            log.info(
                "model.override_config.%s=%s has no effect: %s has no such field.", key, value, type(config).__name__
            )
        else:
            setattr(section, key, value)
    _require_known_vision(path, config)
    return config


def _auto_class(kind: HeadKind, config: PreTrainedConfig) -> str:
    is_policy = kind.auto_class == "AutoModelForCausalLM"
    return "AutoModelForImageTextToText" if is_policy and is_vision_config(config) else kind.auto_class


def _require_known_vision(path: str | Path, config: PreTrainedConfig) -> None:
    """Raise ModelError for a vision-language model of no supported family and without a language model in transformers."""
    has_own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    has_language_model = type(config) in transformers.AutoModelForCausalLM._model_mapping or is_vision_config(config)
    if getattr(config, "vision_config", None) is not None and not has_language_model and not has_own_code:
        raise ModelError(
            f"The model at {path} ({(getattr(config, 'architectures', None) or [config.model_type])[0]}) is a vision-language "
            f"model of no supported family ({', '.join(FAMILIES)}). Choose one of these, or a text model, such as its language "
            "model."
        )


def _filled(
    auto_class: str, folder: Path, config: PreTrainedConfig, skeleton: HFModule, trust_remote_code: bool
) -> HFModule:
    """`skeleton`, a model on the meta device, with the weights of `folder`."""
    # below a scalar head, transformers takes "model.visual" of Qwen2-VL for a part of the language model
    below_head = {"key_mapping": {r"^model\.visual": "visual"}} if auto_class == "AutoModel" else {}
    module: HFModule
    module, report = getattr(transformers, auto_class).from_pretrained(
        str(folder),
        config=config,
        dtype=skeleton.dtype,
        attn_implementation=attention_of(config, skeleton.config._attn_implementation),
        use_safetensors=True,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        **below_head,
        **_experts(skeleton.dtype),
    )
    name = type(module).__name__
    missing, extra = sorted(report["missing_keys"]), sorted(set(report["unexpected_keys"]) - set(WEIGHT_NAMES))
    # constants of older releases are no weights
    extra = [name for name in extra if not re.search(r"inv_freq$|\.masked_bias$|\.attn\.bias$", name)]
    extra = [tensor for tensor in extra if not is_further_head(tensor, config)]
    if auto_class == "AutoModel":  # heads other than the role's
        extra = [tensor for tensor in extra if re.search(r"\.\d+\.", tensor)]
    if missing:
        raise ModelError(
            f"The weights in {folder} lack {len(missing)} tensors that {name} needs, for example {missing[0]}. The folder is "
            "incomplete or holds another architecture."
        )
    if extra:
        raise ModelError(
            f"The weights in {folder} hold {len(extra)} tensors that {name} has not, for example {clean(extra[0], 80)}. "
            "config.json belongs to another model, or the tensors have to be removed."
        )
    return module


def _require_finite(module: nn.Module, folder: str | Path) -> None:
    for name, parameter in module.named_parameters():
        # one pass over the memory; a sum that overflows is looked at again
        if not parameter.detach().sum(dtype=torch.float32).isfinite() and not parameter.isfinite().all():
            bad = parameter.numel() - int(parameter.isfinite().sum())
            raise ModelError(
                f"The weights in {folder} are damaged: {name} has {bad:,} NaN or infinite values of {parameter.numel():,}. "
                "Use an earlier checkpoint, or download or convert the model again."
            )


def empty_model(
    model: ModelConfig, head: str, dtype: torch.dtype, gradient_checkpointing: bool, forward: ForwardKind = "packed"
) -> Any:
    """The result of `load_model` on the meta device: all modules and shapes, no values. `forward`: the forward kind
    of the model with values. Raises ModelError."""
    kind, folder = HEADS.get(head), files.fetch(model.path, weights=False)
    config = load_model_config(model.path, model.trust_remote_code, model.override_config)
    if Path(model.path).expanduser() == folder:  # of a hub name, the weights may not be here
        files.check_counts(folder / "config.json", config.to_dict(), files.read_headers(folder))
    with loading(model.path, config):
        attention = (model.override_config or {}).get("attn_implementation")
        base = _on_meta(_auto_class(kind, config), config, dtype, model.trust_remote_code, attention)
        if forward != "packed" and base.config._attn_implementation == ATTENTION_NAME:
            base.set_attn_implementation(own_attention(base, attention))
        module = kind.wrap(base)
        _settle(module, gradient_checkpointing)
    module.forward_kind = forward
    return module


def meta_model(model: ModelConfig, dtype: torch.dtype) -> HFModule:
    """The policy on the meta device, with the generation_config.json of its folder, for engines that load their own weights.
    Raises ModelError."""
    module: HFModule = empty_model(model, "lm", dtype, False)
    folder = files.fetch(model.path, weights=False)
    if (folder / "generation_config.json").exists():
        module.generation_config = transformers.GenerationConfig.from_pretrained(str(folder))
    return module


def _on_meta(
    auto_class: str, config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool, attention: str | None = None
) -> Any:
    """A model of `auto_class` without values; with verl's attention, or with its own if its class takes no other and if
    `attention` asks for that."""
    factory = getattr(transformers, auto_class)
    settings = {"dtype": dtype, "trust_remote_code": trust_remote_code, **_experts(dtype)}
    with torch.device("meta"):
        if attention in PADDED:
            return factory.from_config(config, attn_implementation=attention, **settings)
        try:
            module = factory.from_config(config, attn_implementation=attention_of(config, ATTENTION_NAME), **settings)
            if type(module)._can_set_attn_implementation():
                return module
        except (ValueError, KeyError):  # a table of attention classes without ours
            return factory.from_config(config, attn_implementation="eager", **settings)
        return factory.from_config(config, attn_implementation=own_attention(module, attention), **settings)


def _settle(module: Any, gradient_checkpointing: bool) -> dict[str, float]:
    """Prepare all of the module except its values. Returns the dropout rates that its config had."""
    embedding, head = (_part(module, name) for name in ("get_input_embeddings", "get_output_embeddings"))
    if isinstance(embedding, nn.Embedding):
        embedding.padding_idx = None  # the padding token may be a token that trains, and nothing is computed at padding
    if hasattr(embedding, "weight") and hasattr(head, "weight"):
        module.config.tie_word_embeddings = head.weight is embedding.weight  # what readers of a checkpoint act on
    if gradient_checkpointing:
        try:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        except ValueError as error:
            log.warning("Activations are kept, not computed again: %s.", files.reason(error))
    for name, parameter in module.named_parameters():
        if name.endswith(".gate.weight"):  # transformers 5.24 keeps routers in float32; decoders take one dtype
            parameter.data = parameter.data.to(next(module.parameters()).dtype)
    guard_rotations(module)
    lay_out_delta_nets(module)
    return turn_off(module)


def _part(module: nn.Module, getter: str) -> object:
    try:
        return getattr(module, getter)()
    except (AttributeError, NotImplementedError):  # a module of a user's with a forward and nothing else
        return None


def _experts(dtype: torch.dtype) -> dict[str, str]:
    """Model settings without the grouped product of experts, since float64 lacks it."""
    return {"experts_implementation": "eager"} if dtype == torch.float64 else {}


def load_external(external_lib: str | list[str] | None) -> None:
    """Import the modules of `model.external_lib` (comma-separated): they may register architectures."""
    names = external_lib.split(",") if isinstance(external_lib, str) else external_lib or []
    for name in names:
        load_module(name.strip())
