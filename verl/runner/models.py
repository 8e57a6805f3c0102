"""Models of a script: their weights and adapters of peft as files of a run, and the trained weights back in the module."""

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from verl.errors import ConfigError
from verl.models.foreign_entries import ADAPTER, uncomputed_entry
from verl.models.hf_module import HFModule
from verl.models.lora import CONFIG_FILE, WEIGHTS_FILE

# arguments of from_pretrained without effect here
_HOW = ("attn_implementation", "device_map", "low_cpu_mem_usage", "use_cache", "use_safetensors")


def load_script_model(path: str, arguments: Mapping[str, Any], *, is_reward_model: bool) -> Any:
    """The model of a folder or hub name, with a head for one score if it is a reward model."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if is_reward_model else AutoModelForCausalLM
    labels = {"num_labels": 1} if is_reward_model else {}
    return kind.from_pretrained(path, use_safetensors=True, **labels, **arguments)


def special_tokens(args: object) -> dict[str, str]:
    """The fields of a config of TRL that choose special tokens."""
    return {name: token for name in ("eos_token", "pad_token") if (token := getattr(args, name, None))}


def set_special_tokens(tokenizer: Any, module: Any, tokens: Mapping[str, str]) -> None:
    """Give tokenizer and model the special tokens. Raises ConfigError for a text that is no token."""
    for name, token in tokens.items():
        if token not in tokenizer.get_vocab():
            raise ConfigError(f"{name}={token!r} is no token of this model's vocabulary.")
        setattr(tokenizer, name, token)
    if "eos_token" in tokens:
        module.config.get_text_config().eos_token_id = module.config.eos_token_id = tokenizer.eos_token_id
        if getattr(module, "generation_config", None) is not None:
            module.generation_config.eos_token_id = tokenizer.eos_token_id


def push_model(module: Any, tokenizer: Any, args: Any, message: str) -> Any:
    """Upload model and tokenizer to the hub, as transformers' Trainer names the repository: huggingface_hub's CommitInfo."""
    name = args.hub_model_id or Path(args.output_dir).name
    where = {"token": args.hub_token, "private": args.hub_private_repo, "revision": args.hub_revision}
    tokenizer.push_to_hub(name, commit_message=message, **where)
    return module.push_to_hub(name, commit_message=message, **where)


def with_adapters(model: Any, peft_config: object, *, drops: bool = True) -> Any:
    """The module to train, with new adapters if `peft_config` is given. Raises ConfigError for adapters that verl has not, and
    for dropout in an algorithm that has none (not `drops`)."""
    if peft_config is not None:
        from peft import get_peft_model

        if is_peft(model):
            raise ConfigError("The model has adapters already, and peft_config would add others. Give one of them.")
        model = get_peft_model(model, peft_config)
    if not is_peft(model):
        return model
    if not hasattr(model, "get_base_model"):
        raise ConfigError(
            "The model has adapters by add_adapter. RLRunner takes peft adapters: model = peft.get_peft_model(model, config)."
        )
    (name, *more_names), config = model.active_adapters, model.peft_config[model.active_adapter]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA" or more_names:
        raise ConfigError(
            f"The model has adapters of type {', '.join([kind, *more_names])}; RLRunner trains a single one of type LORA. "
            "Merge the others, or train with peft's own trainers."
        )
    fields = {field: value for field, value in vars(config).items() if not field.startswith("_")}
    fields |= {"peft_type": kind, "init_lora_weights": True}  # the module has the weights behind any initialization
    if config.lora_dropout and not drops:
        raise ConfigError(
            f"LoraConfig.lora_dropout={config.lora_dropout} of adapter {name!r}: log-probs with dropout differ from the "
            "sampler's. Set lora_dropout=0 (--lora_dropout 0), or disable_dropout of the arguments."
        )
    heads = {"score", "classifier"} if config.task_type == "SEQ_CLS" else set()  # which peft adds by itself
    is_more = set(fields.get("modules_to_save") or ()) - heads
    wrong = "modules_to_save" if is_more else uncomputed_entry(fields, ADAPTER)
    if wrong:
        raise ConfigError(
            f"LoraConfig.{wrong}={getattr(config, wrong)!r} of adapter {name!r} has no meaning for RLRunner, whose adapters "
            "are LoRA, rsLoRA or DoRA on whole layers. Leave it out."
        )
    return model


def drops_inputs(args: object) -> bool:
    """Whether adapters keep their dropout; TRL's preference and reward trainers turn it off by default."""
    return not getattr(args, "disable_dropout", False)


def init_arguments(args: object, is_path: bool, quantization: object = None) -> dict[str, Any]:
    """Arguments of from_pretrained in `model_init_kwargs` that change the model. Raises ConfigError for quantization, and for a
    model that the script has loaded."""
    if quantization is not None:
        raise ConfigError(
            "RLRunner reads no quantization_config. For weights in four bits below adapters, leave it out and set "
            "quantization of the model's section by config: docs/lora.md."
        )
    arguments = dict(getattr(args, "model_init_kwargs", None) or {})
    quantized = next((name for name in arguments if name == "quantization_config" or name.startswith("load_in_")), None)
    if quantized:
        raise ConfigError(f"model_init_kwargs: {quantized} is not available here. Leave it out: weights train in full.")
    if arguments and not is_path:
        raise ConfigError(
            "model_init_kwargs is for a model by its path; this script has loaded its model. Leave it out."
        )
    return {name: value for name, value in arguments.items() if name not in _HOW}


def is_peft(module: HFModule) -> bool:
    return bool(getattr(module, "peft_config", None))


def write_script_model(module: Any, folder: Path, *, drops: bool = True) -> dict[str, Any]:
    """Write the weights for from_pretrained, adapters in a subfolder; returns keys of the config's section `model`."""
    if not is_peft(module):
        module.save_pretrained(folder)
        return {"path": folder}
    base, adapter = module.get_base_model(), folder / "adapter"
    plain = {n: t for n, t in base.state_dict().items() if ".lora_" not in n and ".original_module." not in n}
    head = f".modules_to_save.{module.active_adapter}."
    weights = {n.replace(".base_layer.", ".").replace(head, "."): t for n, t in plain.items()}
    base.save_pretrained(folder, state_dict=weights)
    module.save_pretrained(adapter, selected_adapters=[module.active_adapter], save_embedding_layers=False)
    if module.active_adapter != "default":  # peft makes a folder for it
        adapter = adapter / module.active_adapter
    file = adapter / CONFIG_FILE
    # by their names: peft has further rules for the modules that get an adapter
    adapted = [name for name, part in base.named_modules() if module.active_adapter in getattr(part, "lora_A", ())]
    # `folder` has the weights behind any initialization, as of PiSSA
    changes: dict[str, Any] = {
        "target_modules": adapted,
        "base_model_name_or_path": str(folder),
        "init_lora_weights": True,
    }
    written = json.loads(file.read_text())
    if written.get("modules_to_save"):
        changes["modules_to_save"] = ["score"]  # a causal model has no classifier
    file.write_text(json.dumps({**written, **changes}))
    rate = module.peft_config[module.active_adapter].lora_dropout
    return {"path": folder, "lora_adapter_path": adapter, **({"lora_dropout": rate} if rate and drops else {})}


def write_merged(module: Any, folder: Path) -> Path:
    """Write the weights with adapters added to them, as one model."""
    copy.deepcopy(module).merge_and_unload().save_pretrained(folder)
    return folder


def take_weights(module: HFModule, role: Path) -> None:
    """Put the weights of a checkpoint's role into `module`: only the adapters' weights if it has adapters, else all."""
    from safetensors.torch import load_file

    if is_peft(module):
        parameters, suffix = dict(module.named_parameters()), f".{module.active_adapter}.weight"
        trained = load_file(role / "lora_adapter" / WEIGHTS_FILE)
        with torch.no_grad():
            for name, value in trained.items():
                place = name.removesuffix(".weight")
                head = f"{place}.modules_to_save{suffix}"
                parameters[head if head in parameters else place + suffix].copy_(value)
        return
    weights = {
        name: t for file in sorted((role / "huggingface").glob("*.safetensors")) for name, t in load_file(file).items()
    }
    mismatch = module.load_state_dict(weights, strict=False)
    assert not mismatch.unexpected_keys, mismatch.unexpected_keys


def saved(model: Any, folder: Path, tokenizer: Any = None) -> str | os.PathLike[str]:
    """A path as it is; a module and a tokenizer, written to `folder`, which is returned."""
    if isinstance(model, str | os.PathLike):
        return model
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder
