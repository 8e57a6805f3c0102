"""Keys of shared sections that contradict one another: they hold wherever a section of the class stands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.active_keys import runs_on_several_devices, trains_on_several_devices, uses_critic
from verl.config.schema import Problem, SectionRule, error, value_at, warning
from verl.config.sections.deepspeed import DeepSpeedConfig, contradictions, read_ds_config
from verl.config.sections.fsdp import FSDPConfig, SFTEngineConfig
from verl.config.sections.megatron import MegatronConfig
from verl.config.sections.model import SCHEDULES, ModelConfig, OptimConfig
from verl.config.sections.rollout import CheckpointEngineConfig, RolloutConfig
from verl.config.sections.trainer import GlobalProfilerConfig, SeparateAsyncConfig, StepGuardsConfig, TrainerConfig
from verl.errors import ConfigError
from verl.families import engine_facts

if TYPE_CHECKING:
    from verl.config.roots.ppo import PPOConfig

# Megatron's memory settings can be left out without changing a result; anything else there would be lost
_OFFLOAD_SETTINGS = set(
    "optimizer_cpu_offload optimizer_offload_fraction offload_fraction overlap_cpu_optimizer_d2h_h2d pin_cpu_grads "
    "pin_cpu_params use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype "
    "fp8_recipe".split()
)
_LAYERS = "the model's config decides what its layers compute, as in every engine"
_FP8 = "layers multiply in the compute dtype, which is more exact than FP8"
_FLOAT16 = ("float16", "fp16", "half")
_LEAST_RATE = 1e-9  # a step of Adam is as long as its rate, and float32 values of 0.02, as of weights, are 2e-9 apart
_LEAST_LORA_RATE = 2e-6
_MOST_DECAY = 0.01  # of each weight in a step
_MAX_LAYERS, _MAX_COUNT = 10_000, 2**31  # in a model's config.json: of layers, of anything


def _check_model(path: str, model: ModelConfig, root: PPOConfig) -> Iterator[Problem]:
    key = f"{path}.lora_adapter_path"
    read = path != "critic.model" or uses_critic(root)
    if model.lora_adapter_path and model.lora_rank <= 0 and read:  # adapters bring their rank (derived_defaults.py)
        yield error(
            key,
            f"{key}={model.lora_adapter_path} is no folder with adapters (adapter_config.json with a rank r). Correct it, "
            "or remove it to train without them.",
        )
    rollout = value_at(root, f"{path.removesuffix('.model')}.rollout")
    if getattr(rollout, "adapters_by_name", False):
        key = f"{path.removesuffix('.model')}.rollout.adapters_by_name"
        if model.lora_rank <= 0:
            yield error(key, f"{key}=True sends adapters, and there are none. Set {path}.lora_rank, or remove it.")
        elif unread := [name for name in ("use_dora", "modules_to_save", "quantization") if getattr(model, name)]:
            yield error(
                key,
                f"{key}=True is for plain adapters on the weights of the model's files. Remove it or {path}.{unread[0]}.",
            )
    if model.quantization and read:
        key, fault = f"{path}.quantization", None
        if model.lora_rank <= 0:
            fault = f"holds the base of adapters in four bits, and there are none. Set {path}.lora_rank, or remove it"
        elif model.use_dora:
            fault = f"does not work with {path}.use_dora, which reads the lengths of the weights. Set one of them"
        elif runs_on_several_devices(root):
            fault = "trains on one device, and this run has several. Remove it, or run on one"
        if fault:
            yield error(key, f"{key}={model.quantization} {fault}.")
    if model.mtp.enable and model.mtp.enable_train and read:
        key, fault = f"{path}.mtp.enable_train", ""  # on one device each strategy is the local engine
        if trains_on_several_devices(root):
            fault = "only a policy on one device does, and this one has several"
        elif path == "critic.model":
            fault = "a critic has none"
        elif model.lora_rank or model.lora_adapter_path:
            fault = "a run with adapters does not"
        if fault:
            yield error(key, f"{key}=True trains the policy's head for further tokens: {fault}. Set it to False.")
    for name, value in (model.override_config or {}).items():
        limit = _MAX_LAYERS if "layer" in name else _MAX_COUNT
        if isinstance(value, int) and abs(value) > limit:
            key = f"{path}.override_config"
            yield error(key, f"{key}.{name}={value} is more than any model has; it is at most {limit:,}.")


def _check_optim(path: str, optim: OptimConfig, root: object) -> Iterator[Problem]:
    key = f"{path}.override_optimizer_config"
    for name in sorted(set(optim["override_optimizer_config"] or {}) - _OFFLOAD_SETTINGS)[:1]:
        yield error(key, f"{key}.{name} is not read: only the keys of {path} set this optimizer. Remove it.")
    if optim.min_lr > optim.lr > 0:  # a rate of 0 or less is refused by its bound
        yield error(f"{path}.min_lr", f"{path}.min_lr={optim.min_lr} is above {path}.lr={optim.lr}. Lower it.")
    yield from _rates_without_effect(path, optim, root)
    kind, key = optim.lr_scheduler_type, f"{path}.lr_scheduler_kwargs"
    for name in sorted(set(optim.lr_scheduler_kwargs) - set(arguments := SCHEDULES.get(kind, ())))[:1]:
        if arguments:
            yield error(key, f"{key}.{name} is no argument of {kind}, which takes {', '.join(arguments)}. Remove it.")
    if kind == "warmup_stable_decay" and "num_decay_steps" not in optim.lr_scheduler_kwargs:
        yield error(
            key, f"{path}.lr_scheduler_type={kind} needs {key}.num_decay_steps, the steps of the decay. Set it."
        )


def _rates_without_effect(path: str, optim: OptimConfig, root: Any) -> Iterator[Problem]:
    """Rates that teach nothing, and a decay that leaves nothing of the weights."""
    role = path.rpartition(".")[0].removesuffix(".actor")
    model = value_at(root, f"{role}.model" if role else "model")
    if getattr(model, "lora_rank", 0) > 0 and optim.lr < _LEAST_LORA_RATE:
        yield warning(
            f"{path}.lr",
            f"{path}.lr={optim.lr:g} hardly moves adapters (lora_rank={model.lora_rank}), which usually take 1e-5 to 1e-3. "
            "Raise it.",
        )
    elif optim.lr < _LEAST_RATE and "SGD" not in optim.optimizer:
        yield warning(f"{path}.lr", f"{path}.lr={optim.lr:g} is less than float32 weights can change. Raise it.")
    warmup, steps = optim.lr_warmup_steps or 0, value_at(root, "trainer.total_training_steps")
    if steps is not None and warmup > steps and optim.total_training_steps <= 0:
        yield warning(
            f"{path}.lr_warmup_steps",
            f"{path}.lr_warmup_steps={warmup} is longer than the run (trainer.total_training_steps={steps}): its rate reaches "
            f"{steps / warmup:.0%} of {path}.lr. Lower the first.",
        )
    share = optim.lr * optim.weight_decay  # of each weight that a step takes away
    if share > _MOST_DECAY and ("AdamW" in optim.optimizer or optim.optimizer == "SGD"):
        level = error if share >= 1 else warning
        yield level(
            f"{path}.weight_decay",
            f"{path}.weight_decay={optim.weight_decay:g} takes {share:.3g} times each weight in a step (lr={optim.lr:g}); a "
            "usual share is below 1e-4. Lower it.",
        )


def _check_trainer(path: str, trainer: TrainerConfig, root: object) -> Iterator[Problem]:
    if not trainer.default_local_dir.strip():
        yield error(
            "trainer.default_local_dir",
            "trainer.default_local_dir is empty, which would be the current folder. Name a folder, or leave the key out.",
        )
    if fault := _fault_of_place(Path(trainer.default_local_dir).expanduser()):
        yield error(
            "trainer.default_local_dir",
            f"trainer.default_local_dir={trainer.default_local_dir} {fault}. Set another folder for this run.",
        )
    yield from _check_push(trainer)
    key, source = "trainer.resume_from_path", trainer.resume_from_path
    if trainer.resume_mode != "resume_path":
        return
    if source is None:
        yield error(key, f"trainer.resume_mode=resume_path needs {key}, a folder global_step_N.")
    elif "global_step_" not in (folder := Path(source).expanduser()).name or not folder.is_dir():
        yield error(key, f"{key}={source} is not an existing folder named global_step_N.")


def _check_push(trainer: TrainerConfig) -> Iterator[Problem]:
    if not trainer.push_to_hub:
        return
    if not trainer.hub_model_id:
        key = "trainer.hub_model_id"
        yield error(key, f"trainer.push_to_hub=True needs {key}, the name owner/name of a repository.")
    if isinstance(trainer.save_freq, int) and trainer.save_freq <= 0:
        yield error(
            "trainer.save_freq",
            "trainer.push_to_hub=True uploads the last checkpoint, and "
            "without trainer.save_freq there is none. Set that above 0.",
        )


def _fault_of_place(folder: Path) -> str:
    """Reason why a run may not write to `folder`; "" if it may."""
    try:
        folder = folder.resolve()
        if (folder / "config.json").is_file():
            return "is the folder of a model (it has a config.json), which the run would write to"
        for place in (folder, *folder.parents):
            if place.name.startswith("global_step_") and (place / "manifest.json").is_file():
                return f"is in the checkpoint {place}, which new files would damage"
    except (OSError, RuntimeError, ValueError):  # no name of a folder; opening it says so
        pass
    return ""


def _check_guards(path: str, guards: StepGuardsConfig, root: PPOConfig) -> Iterator[Problem]:
    save_freq = root.trainer.save_freq
    ahead = value_at(root, "actor_rollout_ref.rollout.prefetch_num") or 0
    for name, guard in guards.items():
        if not hasattr(guard, "action"):
            continue
        key = f"{path}.{name}.action"
        rolls_back = guard.action == "rollback" and (name == "nonfinite" or guard.limit is not None)
        if rolls_back and isinstance(save_freq, int) and save_freq <= 0:
            yield error(
                key,
                f"{key}=rollback goes back to the newest checkpoint, and trainer.save_freq={save_freq} saves none. Set "
                "trainer.save_freq above 0.",
            )
        if rolls_back and ahead > 0:
            yield error(
                key,
                f"{key}=rollback is not available where samples are made ahead of training "
                f"(actor_rollout_ref.rollout.prefetch_num={ahead}). Choose skip or stop.",
            )
        if name == "ratio" and guard.limit is not None and 0 < guard.limit <= 1:
            yield error(
                f"{path}.ratio.limit",
                f"{path}.ratio.limit={guard.limit} is a probability ratio or its inverse, which is never below 1; choose "
                "one above 1.",
            )


def _check_separate_async(path: str, separate: SeparateAsyncConfig, root: PPOConfig) -> Iterator[Problem]:
    every, v1 = separate.parameter_sync_step, root.trainer.v1
    if every == 1 or v1.trainer_mode != "separate_async":
        return
    key, placed, rollout = f"{path}.parameter_sync_step", root.trainer.placement, root.actor_rollout_ref.rollout
    apart = "rollout" in placed and not set(placed["rollout"]) & set(placed.get("actor", ()))
    if not rollout.nnodes and not apart:
        yield error(
            key,
            f"{key}={every} needs a rollout on separate devices: on the devices of the actor there is one set of weights. Set "
            f"actor_rollout_ref.rollout.nnodes or trainer.placement, or {key}=1.",
        )
    oldest, age = v1.sampler.max_off_policy_threshold, rollout.prefetch_num + every - 1
    if age > oldest:
        yield error(
            key,
            f"{key}={every} and actor_rollout_ref.rollout.prefetch_num={rollout.prefetch_num} make samples up to {age} weight "
            f"versions old, more than trainer.v1.sampler.max_off_policy_threshold={oldest}. Lower the first, or raise "
            "the last.",
        )
    save_freq = root.trainer.save_freq
    if isinstance(save_freq, int) and save_freq > 0 and save_freq % every:
        yield warning(
            key,
            f"trainer.save_freq={save_freq} is no multiple of {key}={every}, so a resumed run samples with newer weights and "
            f"differs from the unbroken run. Set trainer.save_freq to a multiple of {every}.",
        )


def _check_profiler(path: str, profiler: GlobalProfilerConfig, root: object) -> Iterator[Problem]:
    if profiler.tool not in (None, "torch", "torch_memory"):
        text = f"No effect: {path}.tool={profiler.tool} (traces are torch.profiler's, whatever the tool)"
        yield Problem("notice", f"{path}.tool", text)


def _check_deepspeed(path: str, deepspeed: DeepSpeedConfig, root: object) -> Iterator[Problem]:
    role = value_at(root, path.rpartition(".")[0])
    if role.strategy != "deepspeed":
        return
    optim = getattr(role, "optim", None) or getattr(root, "optim", None) or OptimConfig()
    try:
        sentences = contradictions(
            deepspeed,
            read_ds_config(deepspeed.config),
            bfloat16=None,
            clip_grad=optim.clip_grad,
            optimizer=optim.optimizer,
        )
        yield from (error(f"{path}.config", f"{path}: {sentence}") for sentence in sentences)
    except ConfigError as caught:
        yield error(f"{path}.config", str(caught))


def _check_megatron(path: str, megatron: MegatronConfig, root: object) -> Iterator[Problem]:
    role = value_at(root, path.rpartition(".")[0])
    if role.strategy == "megatron":
        yield from (error(path, f"{path}: {sentence}") for sentence in megatron.contradictions())
        unread = [] if _follows_actor(path, megatron, root) else megatron.unread_settings()
        fp8 = [name for name in unread if name.startswith("fp8")]
        for names, why in ((sorted(set(unread) - set(fp8)), _LAYERS), (fp8, _FP8)):
            if names:
                listed = f"{path}.override_transformer_config.{{{', '.join(names)}}}"
                yield Problem("notice", path, f"No effect: {listed} ({why})")


def _follows_actor(path: str, megatron: MegatronConfig, root: object) -> bool:
    """Whether the settings of layers are the actor's: its notice names them already."""
    first = "actor_rollout_ref.actor.megatron"
    if path == first or not hasattr(root, "actor_rollout_ref"):
        return False
    actor_value = value_at(root, first)
    return bool(actor_value.override_transformer_config == megatron.override_transformer_config)


def _check_fsdp(path: str, engine: FSDPConfig, root: object) -> Iterator[Problem]:
    key, dtype = f"{path}.model_dtype", engine["model_dtype"]
    if dtype in _FLOAT16:
        yield error(
            key,
            f"{key}={dtype} would store master weights in float16; they are always float32. Remove it, and set "
            f"{path}.dtype=float16 to compute in float16.",
        )


def _check_rollout(path: str, rollout: RolloutConfig, root: object) -> Iterator[Problem]:
    key, dtype = f"{path}.dtype", rollout["dtype"]
    trained = f"{path.rpartition('.')[0]}.actor.fsdp_config.dtype"
    if dtype in _FLOAT16 and value_at(root, trained) not in _FLOAT16:
        yield error(
            key,
            f"{key}={dtype} differs from {trained}={value_at(root, trained)}, the dtype of samples too. Set "
            f"{trained}=float16, or remove the first.",
        )


def _check_checkpoint_engine(path: str, engine: CheckpointEngineConfig, root: PPOConfig) -> Iterator[Problem]:
    key = f"{path}.backend"
    if engine.backend not in ("naive", "delta") and engine_facts(root.actor_rollout_ref.rollout.name).takes_buckets:
        yield Problem(
            "error" if root.trainer.strict_config else "notice",
            key,
            f"{key}={engine.backend} has no effect: the placement chooses the way of weights, and the header of the run names "
            "it under `weights`. Only delta changes it.",
        )


SECTION_RULES: dict[type, SectionRule] = {
    ModelConfig: _check_model,
    OptimConfig: _check_optim,
    DeepSpeedConfig: _check_deepspeed,
    MegatronConfig: _check_megatron,
    FSDPConfig: _check_fsdp,
    SFTEngineConfig: _check_fsdp,
    RolloutConfig: _check_rollout,
    CheckpointEngineConfig: _check_checkpoint_engine,
    TrainerConfig: _check_trainer,
    GlobalProfilerConfig: _check_profiler,
    SeparateAsyncConfig: _check_separate_async,
    StepGuardsConfig: _check_guards,
}
