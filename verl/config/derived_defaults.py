"""Keys that take the value of another key unless they are given themselves, and values derived from several keys."""

import importlib.util
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.config.rejection import REJECTION_KEYS, rejection_rules
from verl.config.schema import Derived
from verl.families import ADVANTAGES, ENVIRONMENT_PACKAGES
from verl.model_families import families_with

log = logging.getLogger(__name__)

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"
_MODEL = "actor_rollout_ref.model"


def _same(section: str, source: str, names: str) -> tuple[tuple[str, str], ...]:
    """Pairs of a key of `section` and the key of `source` that it follows, for each name in `names`."""
    return tuple((f"{section}.{name}", f"{source}.{name}") for name in names.split())


# (key, the key it follows); a followed key stands above its followers
_MEGATRON = (  # what roles share, since they share process groups
    "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size context_parallel_size "
    "expert_model_parallel_size "
    "expert_tensor_parallel_size sequence_parallel param_offload override_transformer_config"
)
PPO_FOLLOWS: tuple[tuple[str, str], ...] = (
    (f"{_ROLLOUT}.prompt_length", "data.max_prompt_length"),
    (f"{_ROLLOUT}.response_length", "data.max_response_length"),
    (f"{_ROLLOUT}.log_prob_use_dynamic_bsz", f"{_ACTOR}.use_dynamic_bsz"),
    (f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", f"{_ACTOR}.ppo_max_token_len_per_gpu"),
    (f"{_ROLLOUT}.prometheus.served_model_name", f"{_MODEL}.path"),
    *_same(_ROLLOUT, "trainer", "n_gpus_per_node"),
    *_same(f"{_ROLLOUT}.trace", "trainer", "project_name experiment_name"),
    (f"{_ACTOR}.rollout_n", f"{_ROLLOUT}.n"),
    (f"{_ACTOR}.checkpoint.load_contents", f"{_ACTOR}.checkpoint.save_contents"),
    *_same(_ACTOR, _MODEL, "use_remove_padding use_fused_kernels"),
    *_same(f"{_ACTOR}.fsdp_config", _ACTOR, "entropy_from_logits_with_chunking entropy_from_logits_chunk_size"),
    *_same(f"{_ACTOR}.fsdp_config", _ACTOR, "entropy_checkpointing pad_to_length"),
    (f"{_REF}.rollout_n", f"{_ROLLOUT}.n"),
    (f"{_REF}.log_prob_use_dynamic_bsz", f"{_ACTOR}.use_dynamic_bsz"),
    (f"{_REF}.log_prob_max_token_len_per_gpu", f"{_ACTOR}.ppo_max_token_len_per_gpu"),
    *_same(_REF, _ACTOR, "strategy use_torch_compile pad_to_length"),
    *_same(f"{_REF}.fsdp_config", f"{_ACTOR}.fsdp_config", "dtype master_rounding pad_to_length_bucket"),
    *_same(f"{_REF}.fsdp_config", f"{_ACTOR}.fsdp_config", "tensor_parallel_size expert_parallel_size"),
    *_same(f"{_REF}.fsdp_config", f"{_ACTOR}.fsdp_config", "ulysses_sequence_parallel_size"),
    *_same(f"{_REF}.megatron", f"{_ACTOR}.megatron", _MEGATRON),
    *_same(f"{_REF}.deepspeed", f"{_ACTOR}.deepspeed", "zero_stage offload_param"),
    ("critic.rollout_n", f"{_ROLLOUT}.n"),
    *_same(
        "critic", _ACTOR, "strategy ppo_mini_batch_size use_dynamic_bsz ppo_epochs shuffle checkpoint.save_contents"
    ),
    *_same("critic", _ACTOR, "loss_agg_mode loss_scale_factor"),
    *_same("critic.model", _MODEL, "path trust_remote_code"),
    *_same("critic.fsdp", f"{_ACTOR}.fsdp_config", "dtype master_rounding"),
    *_same("critic.megatron", f"{_ACTOR}.megatron", f"{_MEGATRON} use_distributed_optimizer optimizer_offload"),
    *_same("critic.deepspeed", f"{_ACTOR}.deepspeed", "zero_stage offload_optimizer offload_param config"),
    ("critic.forward_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"),
    ("critic.forward_micro_batch_size", "critic.ppo_micro_batch_size"),
    ("critic.forward_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size_per_gpu"),
    ("critic.checkpoint.load_contents", "critic.checkpoint.save_contents"),
    ("distillation.teacher_models.teacher_model.inference.temperature", f"{_ROLLOUT}.temperature"),
    ("data.gen_batch_size", "data.train_batch_size"),
    *_same("data", f"{_ROLLOUT}.multi_turn", "tool_config_path function_tool_path"),
    *_same("trainer", "actor_rollout_ref", "nccl_timeout"),
)
SFT_FOLLOWS: tuple[tuple[str, str], ...] = (
    ("data.seed", "trainer.seed"),
    ("checkpoint.load_contents", "checkpoint.save_contents"),
)

# null in verl/trainer/config, since programs also add them by +, which Hydra refuses for a key that has a value
COMPOSED_NULLS = ("data.gen_batch_size", "actor_rollout_ref.rollout.enable_sleep_mode")
COMPOSED_FOLDER = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"


def _folder(values: Mapping[str, object], set_keys: set[str]) -> Derived:
    if "trainer.default_local_dir" in set_keys:
        return {}
    folder = f"checkpoints/{values['trainer.project_name']}/{values['trainer.experiment_name']}"
    return {"trainer.default_local_dir": (folder, "follows trainer.project_name and trainer.experiment_name")}


def derive_sft(values: Mapping[str, object], set_keys: set[str]) -> Derived:
    """Keys of `verl sft` that are derived from several keys, or from the launcher. `set_keys`: keys the user set."""
    return (
        _folder(values, set_keys)
        | _launched(set_keys)
        | _adapter(values, set_keys, "model")
        | _plugins(values, "model")
        | _fallback(values, "engine.strategy", "")
        | _fused_adam(values, "optim")
        | _device(values)
    )


def _launched(set_keys: set[str]) -> Derived:
    """Nodes and devices as torchrun has started them."""
    world, local = (os.environ.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if not (world.isdecimal() and local.isdecimal()) or {"trainer.nnodes", "trainer.n_gpus_per_node"} & set_keys:
        return {}
    return {
        "trainer.nnodes": (int(world) // max(int(local), 1), "follows WORLD_SIZE"),
        "trainer.n_gpus_per_node": (int(local), "follows LOCAL_WORLD_SIZE"),
    }


def derive_ppo(values: Mapping[str, Any], set_keys: set[str]) -> Derived:
    """Keys of `verl train` that are derived from several keys. `set_keys` are the keys the user set."""
    derived = _folder(values, set_keys)
    if values["data.seed"] is None:
        derived["data.seed"] = (42, "default")
    batch, mini_batch = values["data.train_batch_size"], f"{_ACTOR}.ppo_mini_batch_size"
    if mini_batch not in set_keys and isinstance(batch, int) and batch < values[mini_batch]:
        derived[mini_batch] = (batch, "follows data.train_batch_size")
    val = f"{_ROLLOUT}.val_kwargs"
    temperature = values[f"{val}.temperature"]
    if f"{val}.do_sample" not in set_keys and isinstance(temperature, int | float) and temperature > 0:
        derived[f"{val}.do_sample"] = (True, f"follows {val}.temperature")
    derived |= _agent_loop(values, set_keys) | _routing(values, set_keys)
    turn_rewards = f"{_ROLLOUT}.agent.turn_rewards"
    if turn_rewards not in set_keys and values["algorithm.adv_estimator"] in ADVANTAGES.reading("turn_ids"):
        derived[turn_rewards] = (True, "follows algorithm.adv_estimator")
    derived |= _ahead(values, set_keys) | _device(values) | _drafts(values, set_keys)
    for model in (_MODEL, "critic.model"):
        derived |= _adapter(values, set_keys, model) | _plugins(values, model)
    derived |= _fused_adam(values, f"{_ACTOR}.optim") | _fused_adam(values, "critic.optim")
    strategies = {f"{_ACTOR}.strategy": "fsdp_config", f"{_REF}.strategy": "fsdp_config", "critic.strategy": "fsdp"}
    engine = values["model_engine"]
    if engine == "megatron" or engine in ELSEWHERE:
        derived |= {key: (engine, "follows model_engine") for key in strategies if key not in set_keys}
    if engine in ELSEWHERE and values["trainer.engine_fallback"] == "fsdp":
        derived["model_engine"] = ("dp", f"{FALLS_BACK}{engine}")
    for key, section in strategies.items():
        derived |= _fallback({**values, **{path: value for path, (value, _) in derived.items()}}, key, section)
    derived |= _rejection({**values, **{path: value for path, (value, _) in derived.items()}})
    if values["algorithm.adv_estimator"] in ADVANTAGES.reading("sum_pi_squared"):
        derived[f"{_ACTOR}.calculate_sum_pi_squared"] = (True, "follows algorithm.adv_estimator")
    return derived


def _agent_loop(values: Mapping[str, object], set_keys: set[str]) -> Derived:
    """The default agent loop for an environment, a runner or multi_turn."""
    key, environment = f"{_ROLLOUT}.agent.default_agent_loop", f"{_ROLLOUT}.agent.environment"
    is_package = str(values[environment]).partition(":")[0] in ENVIRONMENT_PACKAGES
    for source, loop in (
        (environment, "endpoint_agent" if is_package else "environment_agent"),
        (f"{_ROLLOUT}.agent.runner", "endpoint_agent"),
        (f"{_ROLLOUT}.multi_turn.enable", "tool_agent"),
    ):
        if key not in set_keys and values[source] not in (None, False):
            return {key: (loop, f"follows {source}")}
    return {}


def _routing(values: Mapping[str, object], set_keys: set[str]) -> Derived:
    """Records of rollout's experts, and their replay: each setting implies the other."""
    record, mode = f"{_ROLLOUT}.enable_rollout_routing_replay", f"{_ACTOR}.router_replay.mode"
    if mode not in set_keys and values[record] is True:
        return {mode: ("R3", f"follows {record}")}
    if record not in set_keys and values[mode] == "R3":
        return {record: (True, f"follows {mode}")}
    return {}


ELSEWHERE = ("fsdp_turbo", "veomni", "torchtitan", "automodel", "mindspeed", "mlite")  # engines that are not built
DEVICES_ELSEWHERE = ("npu", "xpu", "hpu", "mps", "tpu", "xla", "mlu", "musa", "rocm", "hip")
FALLS_BACK = "falls back from "  # begins the origin of a key that a fallback has set
_PACKAGES = {"megatron": "megatron.core", "deepspeed": "deepspeed"}
_SIZES = {  # of Megatron -> of FSDP2
    "tensor_model_parallel_size": "tensor_parallel_size",
    "context_parallel_size": "ulysses_sequence_parallel_size",
    "expert_model_parallel_size": "expert_parallel_size",
}


def _fallback(values: Mapping[str, Any], key: str, section: str) -> Derived:
    """FSDP2 with Megatron's sizes, in place of an engine that is not available, if trainer.engine_fallback asks for it."""
    engine, role = values[key], key.rpartition(".")[0]
    lacking = _lacking(values, role) if engine == "megatron" else ""
    is_there = engine not in ELSEWHERE and not lacking and not _is_missing(_PACKAGES.get(engine))
    if values["trainer.engine_fallback"] != "fsdp" or is_there:
        return {}
    origin, place = f"{FALLS_BACK}{engine}", ".".join(filter(None, (role, section)))
    sizes = {name: values[f"{role}.megatron.{name}"] for name in _SIZES} if engine == "megatron" else {}
    sizes = {name: size for name, size in sizes.items() if size != 1}
    stages = values[f"{role}.megatron.pipeline_model_parallel_size"] if engine == "megatron" else 1
    mapped = [f"{name}={size} as {_SIZES[name]}" for name, size in sizes.items()]
    mapped += [f"{stages} stages as data-parallel shards"] * (stages > 1)
    sizes_said = f", with {', '.join(mapped)}" if mapped else ""
    log.warning("%s=%s is not available%s: fsdp2 instead%s.", key, engine, lacking, sizes_said)
    return {key: ("fsdp2", origin), **{f"{place}.{_SIZES[name]}": (size, origin) for name, size in sizes.items()}}


def _lacking(values: Mapping[str, Any], role: str) -> str:
    """Words for a setting or model of a role that Megatron does not take here, to end a notice; empty without one."""
    if any(values.get(f"{r}.megatron.use_megatron_fsdp") is True for r in (_ACTOR, role)):
        return " with use_megatron_fsdp"
    key = {"critic": "critic.model.path", "engine": "model.path"}.get(role, f"{_MODEL}.path")
    try:
        config = json.loads((Path(values[key]).expanduser() / "config.json").read_text(encoding="utf-8"))
        family = config.get("text_config", config)["model_type"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return ""
    return "" if family in families_with("megatron") else f" for {family}"


def _device(values: Mapping[str, object]) -> Derived:
    """The existing device in place of a kind that is not available, if trainer.engine_fallback asks for it."""
    device = values["trainer.device"]
    if values["trainer.engine_fallback"] != "fsdp" or not isinstance(device, str):
        return {}
    if device.partition(":")[0] not in DEVICES_ELSEWHERE:
        return {}
    log.warning("trainer.device=%s is not available: auto instead.", device)
    return {"trainer.device": ("auto", f"{FALLS_BACK}{device}")}


def _fused_adam(values: Mapping[str, Any], optim: str) -> Derived:
    """torch's AdamW in place of the fused Adam of a package that is not installed, which has the same steps."""
    if values[f"{optim}.optimizer"] != "FusedAdam" or not _is_missing(package := values[f"{optim}.optimizer_impl"]):
        return {}
    log.warning("%s.optimizer_impl=%s is not installed: torch's AdamW instead, with the same steps.", optim, package)
    return {
        f"{optim}.{n}": (v, f"{FALLS_BACK}FusedAdam")
        for n, v in (("optimizer", "AdamW"), ("optimizer_impl", "torch.optim"))
    }


def _is_missing(package: str | None) -> bool:
    if package is None:
        return False
    top = importlib.util.find_spec(package.partition(".")[0])
    return top is None or importlib.util.find_spec(package) is None


def _adapter(values: Mapping[str, Any], set_keys: set[str], model: str) -> Derived:
    """Rank, scale, kind and modules of adapters to start from, as their adapter_config.json has them;
    nothing if lora_rank is set, or if there is no such file (a rule refuses that)."""
    source = f"{model}.lora_adapter_path"
    if not isinstance(values[source], str) or values[f"{model}.lora_rank"] != 0:
        return {}
    try:
        text = (Path(values[source]).expanduser() / "adapter_config.json").read_text(encoding="utf-8")
        saved = dict(json.loads(text))
    except (OSError, ValueError, TypeError):
        return {}
    names = {
        "lora_rank": "r",
        **{n: n for n in ("lora_alpha", "target_modules", "use_rslora", "use_dora", "modules_to_save")},
    }
    return {
        f"{model}.{key}": (saved[entry], f"follows {source}")
        for key, entry in names.items()
        if saved.get(entry) is not None and (key == "lora_rank" or f"{model}.{key}" not in set_keys)
    }


def _plugins(values: Mapping[str, object], model: str) -> Derived:
    """Modules of VERL_USE_EXTERNAL_MODULES, which existing releases import too, before its modules."""
    key, variable = f"{model}.external_lib", os.environ.get("VERL_USE_EXTERNAL_MODULES", "")
    value = values[key]
    parts = [variable, *(value if isinstance(value, list) else [value or ""])]
    names = [name.strip() for part in parts for name in str(part).split(",")]
    modules = list(dict.fromkeys(filter(None, names)))
    return {key: (modules, "follows VERL_USE_EXTERNAL_MODULES")} if variable else {}


def _drafts(values: Mapping[str, object], set_keys: set[str]) -> Derived:
    """Drafts by the policy's head, from the keys of the model."""
    mtp, drafts = f"{_MODEL}.mtp", f"{_ROLLOUT}.speculative"
    if not (values[f"{mtp}.enable"] and values[f"{mtp}.enable_rollout"]):
        return {}
    keys = {f"{drafts}.methods": ["mtp"], f"{drafts}.num_speculative_tokens": values[f"{mtp}.num_speculative_tokens"]}
    return {key: (value, f"follows {mtp}.enable_rollout") for key, value in keys.items() if key not in set_keys}


def _ahead(values: Mapping[str, object], set_keys: set[str]) -> Derived:
    """Depth of prefetching, and the correction that the age of samples or a sampler in fewer bits asks for."""
    derived: Derived = {}
    key, mode = f"{_ROLLOUT}.prefetch_num", values["trainer.v1.trainer_mode"]
    number = values[key]
    if key not in set_keys and mode in ("colocate_async", "separate_async"):
        source = f"trainer.v1.{mode}.num_warmup_batches"
        number = values[source]
        derived[key] = (number, f"follows {source}")
    correction, guard = "algorithm.rollout_correction", "trainer.guards.sampler_kl"
    without = {f"{_ROLLOUT}.quantization": None, f"{_ROLLOUT}.kv_cache_dtype": "auto"}
    quantized = next((key for key in without if values[key] != without[key]), None)
    is_ahead = isinstance(number, int) and number > 0
    settings: dict[str, object] = {}  # a key that is set leaves the others
    weights, rejection = f"{correction}.rollout_is", f"{correction}.rollout_rs"
    is_chosen = any(values[key] is not None for key in {weights, rejection} & set_keys)  # which then excludes the other
    if (is_ahead or quantized) and not values[f"{correction}.bypass_mode"] and not is_chosen:
        settings[weights] = "token"
        if quantized and rejection not in set_keys:
            settings |= {rejection: "token_k1", f"{rejection}_threshold": "0.1_10.0"}
    if quantized and not is_ahead:  # age adds to the KL
        settings |= {f"{guard}.limit": 0.1, f"{guard}.action": "stop"}
    source = f"follows {quantized or key}"
    return derived | {name: (value, source) for name, value in settings.items() if name not in set_keys}


def _rejection(values: Mapping[str, Any]) -> Derived:
    keys = [f"algorithm.rollout_correction.{name}" for name in REJECTION_KEYS]
    rules = rejection_rules(*(values[key] for key in keys))
    source = next((key for key in reversed(keys[2:]) if values[key] is not None), keys[0])
    return {k: (value, f"follows {source}") for k, value in zip(keys, rules, strict=False) if value != values[k]}
