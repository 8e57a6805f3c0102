"""Hugging Face models and tokenizers from a folder or a hub name, built with our attention and checked before they
are used."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from verl.config import ModelConfig
from verl.errors import ModelError, nearest
from verl.models.attention import ATTENTION_NAME
from verl.models.check import check_model
from verl.models.heads import HEADS, ScalarHeadModel
from verl.registry import load_module

log = logging.getLogger(__name__)

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
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

    Its attention goes through verl.models.attention, so it is called with `layout=`. Dropout is off. The model is
    checked: packed results for a few tokens equal those of the family's own attention. Raises ModelError naming
    folder and cause.
    """
    kind = HEADS.get(head)
    config = load_model_config(path, trust_remote_code, override_config)
    with _loading(path, config):
        module = kind.wrap(
            _from_pretrained(getattr(transformers, kind.auto_class), path, config, dtype, trust_remote_code)
        )
    if isinstance(module, ScalarHeadModel):
        _restore_head(module, path)
    _prepare(module, path, device, gradient_checkpointing)
    check_model(module)
    return module


def load_causal_lm(path: str | Path, **settings: Any) -> Any:
    """The causal language model in folder `path`; see load_model."""
    return load_model(path, "lm", **settings)


def _restore_head(module: ScalarHeadModel, path: str | Path) -> None:
    folder = Path(path).expanduser()
    if not (folder.is_dir() and module.load_head(folder)):
        log.info("%s has no scalar head; a new one is trained.", path)
    architecture = type(module.get_decoder()).__name__.removesuffix("Model") + module.architecture
    if hasattr(transformers, architecture):  # then the saved model opens with transformers' class of that name
        module.config.architectures, module.config.num_labels = [architecture], 1


def load_tokenizer(model: ModelConfig | str | Path) -> Any:
    """The tokenizer of a model section (its path, or tokenizer_path; `custom_chat_template` as text or file) or of a
    folder.

    Has a pad token afterwards (the end-of-sequence token where the files name none). Raises ModelError.
    """
    if not isinstance(model, ModelConfig):
        model = ModelConfig(path=str(model))
    path = model.tokenizer_path or model.path
    source = locate(path)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        if os.path.isdir(source) and not any(next(Path(source).glob(p), None) for p in _TOKENIZER_FILES):
            raise ModelError(
                f"The folder {source} has no tokenizer (tokenizer.json); copy its files from where the model comes from, or "
                "set actor_rollout_ref.model.tokenizer_path to a folder that has them."
            ) from error
        raise ModelError(f"No tokenizer could be loaded from {path}{_offline(source)}: {_first_line(error)}") from error
    if model.custom_chat_template:
        template = Path(model.custom_chat_template).expanduser()
        is_file = len(model.custom_chat_template) < 4096 and "{" not in model.custom_chat_template
        if is_file and not template.is_file():
            raise ModelError(f"model.custom_chat_template={template} is neither a file nor a Jinja template.")
        tokenizer.chat_template = template.read_text(encoding="utf-8") if is_file else model.custom_chat_template
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ModelError(
                f"The tokenizer of {path} has neither a pad nor an end-of-sequence token; add one to its files."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def eos_token_ids(module: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a response: those of generation_config.json, config.json and the tokenizer, ascending."""
    found: set[int] = set()
    for source in (getattr(module, "generation_config", None), getattr(module, "config", None), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return tuple(sorted(found))


def num_parameters(module: nn.Module) -> int:
    """Parameters, tied ones counted once."""
    return sum(p.numel() for p in module.parameters())


def locate(path: str | Path) -> str:
    """A folder, checked to hold a config, or a hub name. Raises ModelError for a folder that is not there."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            saved = next(iter(sorted(folder.glob("**/huggingface/config.json"))), None)
            hint = (
                f"it holds checkpoints: give {saved.parent}" if saved else "give the folder that save_pretrained wrote"
            )
            raise ModelError(f"The folder {folder} has no config.json; {hint}.")
        return str(folder)
    if folder.is_file():
        convert = " (verl convert makes one of a .gguf file)" if folder.suffix == ".gguf" else ""
        raise ModelError(f"{folder} is a file; give the folder of a model{convert}.")
    text = str(path)
    if text.startswith(("/", "~", ".")) or text.count("/") > 1:
        siblings = [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise ModelError(f"The model folder {folder} does not exist{nearest(folder.name, siblings) or '.'}")
    return text


def load_model_config(path: str | Path, trust_remote_code: bool, override: dict[str, Any] | None) -> Any:
    """The transformers config of a folder or hub name, with `override` put in. Raises ModelError."""
    source = locate(path)
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"The configuration of {source} could not be read{_offline(source)}: {_first_line(error)}"
        ) from error
    for key, value in (override or {}).items():
        if key == "attn_implementation":
            log.info(
                "model.override_config.attn_implementation=%s is not used: verl brings its own exact attention.", value
            )
        elif key == "output_router_logits" and value:
            raise ModelError(
                "model.override_config.output_router_logits=True asks for the router's balancing loss, which verl does "
                "not train; remove it."
            )
        elif not hasattr(config, key) and value:
            hint = nearest(key, vars(config)) or ". Remove it, or name a field of the model's config.json."
            raise ModelError(
                f"actor_rollout_ref.model.override_config.{key}={value}: {type(config).__name__} has no such field{hint}"
            )
        elif not hasattr(config, key):
            log.info(
                "model.override_config.%s=%s has no effect: %s has no such field.", key, value, type(config).__name__
            )
        else:
            setattr(config, key, value)
    _require_text(path, config)
    return config


def _require_text(path: str | Path, config: Any) -> None:
    """Raise ModelError for a vision-language model of which transformers has no causal language model."""
    has_own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    known = type(config) in transformers.AutoModelForCausalLM._model_mapping
    if getattr(config, "vision_config", None) is not None and not known and not has_own_code:
        raise ModelError(
            f"The model at {path} ({(getattr(config, 'architectures', None) or [config.model_type])[0]}) is a vision-language "
            "model, which is not available in this version, with rows of text neither. Choose a text model, such as the one "
            "that it is built on."
        )


def _from_pretrained(factory: Any, path: str | Path, config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    source = locate(path)
    if os.path.isdir(source) and not any(next(Path(source).glob(pattern), None) for pattern in _WEIGHT_FILES):
        others = sorted(p.name for pattern in ("*.gguf", "*.bin", "*.pt") for p in Path(source).glob(pattern))
        hint = "download or convert the model again"
        if others:
            how = "verl convert" if others[0].endswith(".gguf") else "load it with transformers and save_pretrained it"
            hint = f"it has {others[0]}: convert it first ({how})"
        raise ModelError(f"The folder {source} has no weights (*.safetensors); {hint}.")
    module, report = factory.from_pretrained(
        source,
        config=config,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        use_safetensors=True,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        **_experts(dtype),
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"The weights in {source} lack {len(missing)} tensors that {type(module).__name__} needs, for example "
            f"{missing[0]}. The folder is incomplete or holds another architecture."
        )
    return module


@contextmanager
def _loading(path: str | Path, config: Any) -> Iterator[None]:
    """Quiet transformers while it loads, and turn its many errors into one sentence."""
    verbosity = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AssertionError) as error:
        architecture = (getattr(config, "architectures", None) or [type(config).__name__])[0]
        if getattr(config, "is_encoder_decoder", False):
            raise ModelError(
                f"{architecture} ({path}) is an encoder-decoder model; give a causal language model, such as Llama or Qwen."
            ) from error
        if "ignore_mismatched_sizes" in str(error):
            raise ModelError(
                f"The weights in {path} have other shapes than its config.json says; download or convert the model again."
            ) from error
        raise ModelError(
            f"{architecture} could not be loaded from {path}{_offline(str(path))}: {_first_line(error)}"
        ) from error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":  # defined in a compiled module, of no other base than Exception
            raise
        raise ModelError(
            f"A weight file in {path} is damaged: {_first_line(error)}. Download or convert it again."
        ) from error
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()


def empty_model(model: ModelConfig, head: str, dtype: torch.dtype, gradient_checkpointing: bool) -> Any:
    """The result of `load_model` on the meta device: all modules and shapes, no values. Raises ModelError."""
    kind = HEADS.get(head)
    config = load_model_config(model.path, model.trust_remote_code, model.override_config)
    factory = getattr(transformers, kind.auto_class)
    with _loading(model.path, config), torch.device("meta"):
        base = factory.from_config(
            config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=model.trust_remote_code,
            **_experts(dtype),
        )
        module = kind.wrap(base)
    _settle(module, gradient_checkpointing)
    return module


def model_without_numbers(model: ModelConfig, dtype: torch.dtype) -> Any:
    """The policy as `empty_model` gives it, with the generation_config.json of its folder, for engines that have weights of
    their own. Raises ModelError."""
    module = empty_model(model, "lm", dtype, False)
    with suppress(OSError):  # not every model has one
        module.generation_config = transformers.GenerationConfig.from_pretrained(locate(model.path))
    return module


def _prepare(module: Any, path: str | Path, device: torch.device | str, gradient_checkpointing: bool) -> None:
    _settle(module, gradient_checkpointing)
    module.to(device)
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    log.info(
        "Loaded %s: %s, %.1f million parameters, %s.", path, type(module).__name__, num_parameters(module) / 1e6, dtype
    )


def _settle(module: Any, gradient_checkpointing: bool) -> None:
    for part in module.modules():
        if isinstance(part, nn.Dropout):  # the sampler has none, and log-probs of both must agree
            part.p = 0.0
    if gradient_checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _experts(dtype: torch.dtype) -> dict[str, str]:
    """Experts are computed in one grouped product, which there is for every format but float64."""
    return {"experts_implementation": "eager"} if dtype == torch.float64 else {}


def load_external(external_lib: str | list[str] | None) -> None:
    """Import the modules of `model.external_lib` (comma-separated): they may register architectures."""
    names = external_lib.split(",") if isinstance(external_lib, str) else external_lib or []
    for name in names:
        load_module(name.strip())


def _offline(source: str) -> str:
    hint = " (HF_HUB_OFFLINE is set, so only folders and the local cache are looked at)"
    return hint if _is_offline() and not Path(source).expanduser().is_dir() else ""


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON")


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
