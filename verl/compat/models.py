"""Functions over Hugging Face models, their inputs and tokenizers: `verl.utils.model`, `verl.utils.tokenizer`."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ModelError
from verl.models.check import largest_difference
from verl.models.folder import locate
from verl.models.load import load_model, num_parameters

log = logging.getLogger(__name__)


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Position of each token among the tokens that the mask keeps, [batch, sequence]; padding on the left has position 0."""
    return torch.clip(torch.cumsum(mask, dim=-1) - 1, min=0)


def get_model_size(model: torch.nn.Module, scale: str = "auto") -> tuple[float, str]:
    """(number, unit) of the parameters; the unit `scale` is B, M, K, "" (plain count) or "auto". Raises ValueError."""
    count, units = num_parameters(model), {"B": 1e9, "M": 1e6, "K": 1e3, "": 1.0}
    if scale == "auto":
        scale = next(unit for unit, size in units.items() if count >= size or not unit)
    if scale not in units:
        raise ValueError(f"scale={scale!r} is not auto, B, M, K or the empty string.")
    return count / units[scale], scale


def print_model_size(model: torch.nn.Module, name: str | None = None) -> None:
    """Log the number of parameters of a model; tied ones count once."""
    count, unit = get_model_size(model)
    log.info("%s has %.2f%s parameters.", name or type(model).__name__, count, unit)


def get_generation_config(model: str, trust_remote_code: bool = False) -> Any:
    """The GenerationConfig of a folder or hub name, or the config that its config.json implies; None without either."""
    import transformers

    try:
        return transformers.GenerationConfig.from_pretrained(locate(model))
    except OSError:
        pass
    try:
        config = transformers.AutoConfig.from_pretrained(locate(model), trust_remote_code=trust_remote_code)
        return transformers.GenerationConfig.from_model_config(config)
    except OSError:
        return None


def update_model_config(module_config: object, override_config_kwargs: Mapping[str, object]) -> None:
    """Set fields of a transformers config, in place; a mapping sets the fields of the sub-config of that name."""
    for key, value in override_config_kwargs.items():
        if isinstance(value, Mapping) and not isinstance(getattr(module_config, key, None), (dict, type(None))):
            update_model_config(getattr(module_config, key), value)
        else:
            setattr(module_config, key, value)


def check_model_consistency(
    model_path: str, module: Any = None, *, trust_remote_code: bool = False, tolerance: float = 1e-4
) -> dict[str, Any]:
    """Compare a loaded model with transformers' own of its folder: every parameter bit by bit, and log-probs of a few tokens to
    `tolerance`. `module` is the model of an engine, by default a new one in float32. Returns parameters, forward (packed,
    padded or logits) and largest_difference. Raises ModelError naming what differs."""
    import transformers

    loaded = load_model(model_path, trust_remote_code=trust_remote_code) if module is None else module
    settings = {"trust_remote_code": trust_remote_code, "attn_implementation": "eager", "dtype": loaded.dtype}
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
        locate(model_path), use_safetensors=True, **settings
    )
    held = dict(loaded.named_parameters())
    for name, value in reference.named_parameters():
        if name not in held or not torch.equal(held[name].detach().cpu(), value.detach()):
            raise ModelError(
                f"{name} of the loaded {type(loaded).__name__} is not what {model_path} holds. Load it again."
            )
    difference = largest_difference(loaded, reference.eval())
    if not difference <= tolerance:
        raise ModelError(
            f"The weights of {model_path} are loaded, but the log-probs of a forward pass differ from transformers' by "
            f"{difference:.2g}, more than {tolerance:.2g}. Look for changes of the module since it was loaded."
        )
    return {
        "parameters": num_parameters(loaded),
        "forward": getattr(loaded, "forward_kind", "packed"),
        "largest_difference": difference,
    }


def init_context() -> torch.device:
    """The context in which a `_build_model_optimizer` of the user's makes its module: parameters lie in host memory; the
    engine takes them from there to its devices."""
    return torch.device("cpu")


def get_init_weight_context_manager(use_meta_tensor: bool = True, mesh: object = None) -> Any:
    """`init_context`, as other releases make it; every rank builds full tensors here, so that both arguments are ignored."""
    return init_context


def convert_weight_keys(state_dict: dict[str, Tensor], model: object) -> dict[str, Tensor]:
    """`state_dict` with the names of the model's checkpoint files, by the inverse of
    `model._checkpoint_conversion_mapping`; unchanged for a model without one."""
    renames = getattr(model, "_checkpoint_conversion_mapping", None)
    if not renames:
        return state_dict
    # anchors and look-aheads of the patterns are no part of a name
    inverse = [(new, re.sub(r"\(.*\)", "", old.lstrip("^"))) for old, new in renames.items()]
    renamed = {}
    for key, value in state_dict.items():
        for pattern, replacement in inverse:
            key, count = re.subn(pattern, replacement, key)
            if count:
                break
        renamed[key] = value
    return renamed


def extract_multi_modal_inputs(
    batch_data: Sequence[Mapping[str, object]], indices: Sequence[int] | None = None
) -> dict[str, Any]:
    """The model inputs (pixel values, grids) of several rows joined along their first axis; rows with `image_bound` keep
    lists, one entry a row. `indices` choose rows; those beyond the end are ignored."""
    rows = list(batch_data) if indices is None else [batch_data[i] for i in indices if i < len(batch_data)]
    rows = [getattr(row, "data", row) for row in rows]  # rows of a TensorDict are wrapped
    inputs: dict[str, list[Any]] = {}
    for row in rows:
        for key, value in row.items():
            if value is not None:
                inputs.setdefault(key, []).append(value)
    if any("image_bound" in row for row in rows):
        return dict(inputs)
    return {key: torch.cat(values, dim=0) for key, values in inputs.items()}


# -- verl.utils.tokenizer ----------------------------------------------------------------------------------------------------


def hf_tokenizer(
    name_or_path: str,
    correct_pad_token: bool = True,
    correct_gemma2: bool = True,
    trust_remote_code: bool = False,
    **_other: object,
) -> Tokenizer:
    """The tokenizer of a folder or hub name, with a pad token. Raises ModelError."""
    from verl.config import ModelConfig
    from verl.models.load import load_tokenizer

    return load_tokenizer(ModelConfig(path=name_or_path, trust_remote_code=trust_remote_code))


def hf_processor(name_or_path: str, trust_remote_code: bool = False, **settings: object) -> Any:
    """The processor of a folder or hub name; None for a text-only model. Raises ModelError for a missing folder."""
    import transformers

    source = locate(name_or_path)
    try:
        processor = transformers.AutoProcessor.from_pretrained(source, trust_remote_code=trust_remote_code, **settings)
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        log.info("%s has no processor: %s", name_or_path, str(error).splitlines()[0])
        return None
    # for a text-only model AutoProcessor falls back to the tokenizer
    return processor if isinstance(processor, transformers.ProcessorMixin) else None


def normalize_token_ids(tokenized_output: object) -> list[int]:
    """Token ids as a flat list, from any result of `apply_chat_template(tokenize=True)`: a list, an array, a batch of one,
    or a mapping with `input_ids`. Raises TypeError for any other value."""
    ids = tokenized_output
    if isinstance(ids, Mapping):
        ids = ids["input_ids"]
    elif hasattr(ids, "input_ids"):
        ids = ids.input_ids
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    ids = list(ids) if isinstance(ids, (list, tuple)) else ids
    if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], (list, tuple)):
        ids = list(ids[0])
    if not isinstance(ids, list) or not all(hasattr(i, "__index__") for i in ids):
        raise TypeError(f"Token ids are a flat list of integers, not {type(tokenized_output).__name__}: {ids!r:.80}")
    return [int(i) for i in ids]
