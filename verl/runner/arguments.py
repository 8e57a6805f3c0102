"""transformers.TrainingArguments, and the configs of TRL that extend it, as keys of the config tree."""

import copy
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from verl.config.roots.preference import ReferenceConfig
from verl.config.sections.algorithm import PreferenceLossConfig
from verl.config.sections.model import OWN_SCHEDULES, SCHEDULES
from verl.config.values import written
from verl.errors import ConfigError

PREFERENCES = ("dpo", "kto")
COMPARING = (*PREFERENCES, "reward")  # algorithms on completions that are better or worse
GIVEN_ROWS = ("sft", *COMPARING)  # algorithms that sample nothing
_OF_CONFIG = {
    "SFTConfig": "sft", "DPOConfig": "dpo", "KTOConfig": "kto", "RewardConfig": "reward", "GRPOConfig": "grpo",
    "RLOOConfig": "rloo", "PPOConfig": "ppo", "GKDConfig": "gkd",
}  # fmt: skip
_LOGGERS = ("tensorboard", "wandb", "mlflow", "swanlab", "clearml", "trackio")
_OPTIMIZERS = {
    "adamw_torch": "AdamW",
    "adamw_torch_fused": "AdamW",
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
}
_SCHEDULES = (*OWN_SCHEDULES, *SCHEDULES)
_LOSS_TYPES = {
    "grpo": "seq-mean-token-mean", "bnpo": "token-mean", "dapo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm",
}  # fmt: skip
_LEVELS = {"token": None, "sequence": "gspo"}  # importance_sampling_level -> loss_mode
_SCALED = {True: True, "group": True, False: False, "none": False}

# read here, by the callbacks of transformers, or by the runner
_READ = {
    "output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "seed",
    "data_seed", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "optim",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "logging_strategy", "logging_steps",
    "logging_first_step",
    "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "save_strategy", "save_steps", "save_total_limit",
    "report_to", "run_name", "project", "use_cpu", "bf16", "gradient_checkpointing", "neftune_noise_alpha", "fsdp",
    "train_sampling_strategy", "resume_from_checkpoint", "full_determinism", "save_only_model", "per_device_eval_batch_size",
    "max_length", "assistant_only_loss", "completion_only_loss", "model_init_kwargs", "eos_token", "pad_token",
    "disable_dropout", "trust_remote_code", "push_to_hub", "hub_model_id", "hub_private_repo", "hub_token", "hub_revision",
}  # fmt: skip
# change how the work is done or shown, and not its result
_WITHOUT_EFFECT = {
    "disable_tqdm", "log_level", "log_level_replica", "log_on_each_node", "logging_dir", "dataloader_num_workers",
    "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_in_order",
    "dataloader_drop_last", "dataloader_multiprocessing_context", "remove_unused_columns", "do_train", "do_eval", "do_predict",
    "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend",
    "ddp_timeout", "fsdp_config", "gradient_checkpointing_kwargs", "prediction_loss_only", "skip_memory_metrics",
    "torch_empty_cache_steps", "tf32", "torch_compile", "use_liger_kernel", "eval_accumulation_steps", "local_rank",
    "overwrite_output_dir", "use_cache", "dataset_num_proc", "average_tokens_across_devices", "include_num_input_tokens_seen",
    "padding_free", "ignore_data_skip", "label_names", "length_column_name",
    "activation_checkpointing", "logging_nan_inf_filter", "save_on_each_node", "log_completions", "num_completions_to_print",
    "log_unique_prompts", "use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_max_model_length",
    "vllm_tensor_parallel_size", "vllm_enable_sleep_mode", "hub_strategy", "hub_always_push",
}  # fmt: skip
_GRPO = {
    "num_generations", "max_completion_length", "max_prompt_length", "temperature", "top_p", "top_k", "beta",
    "epsilon", "epsilon_high", "delta", "importance_sampling_level", "loss_type", "num_iterations", "scale_rewards",
    "reward_weights", "steps_per_generation", "generation_batch_size",
}  # fmt: skip
# key of ours -> field of TRL's DPOConfig, with the same meaning
_LOSS_FIELDS = {
    "loss": "loss_type", "f_divergence": "f_divergence_type", "f_alpha": "f_alpha_divergence_coef",
    **{n: n for n in ("loss_weights", "beta", "label_smoothing", "ld_alpha", "use_weighting", "discopop_tau")},
}  # fmt: skip
# the reference's log-probabilities are always computed once: this changes no result
_DPO = {
    *_LOSS_FIELDS.values(), "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "precompute_ref_log_probs",
    "precompute_ref_batch_size", "pad_to_multiple_of",
}  # fmt: skip
_OF_ALGORITHM: dict[str, set[str]] = {
    "sft": {"loss_type", "dataset_text_field", "packing", "packing_strategy", "eval_packing"},
    "dpo": _DPO,
    "kto": {*_DPO, "desirable_weight", "undesirable_weight"},
    "reward": {"center_rewards_coefficient", "pad_to_multiple_of"},
    "gkd": {
        "temperature",
        "lmbda",
        "beta",
        "max_new_tokens",
        "teacher_model_name_or_path",
        "dataset_kwargs",
    },
}


# key -> the fields of args that give its value, by which the runner counts too
_COUNTS = {
    "actor_rollout_ref.rollout.n": ("num_generations",),
    "actor_rollout_ref.actor.ppo_mini_batch_size": ("per_device_train_batch_size", "gradient_accumulation_steps"),
    "data.train_batch_size": ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"),
    "trainer.total_training_steps": ("max_steps", "num_train_epochs"),
}
# args give these only if their field is set, or the runner reads them itself
_OF_SET_FIELDS = (
    "trainer.default_local_dir", "trainer.device", "engine.dtype", "actor_rollout_ref.actor.fsdp_config.dtype",
)  # fmt: skip


def algorithm_of(args: object, rows: Sequence[Mapping[str, object]], *, has_rewards: bool) -> str:
    """The algorithm of a config of TRL, by its class; else by rewards and the columns of `rows`."""
    algorithm = next((_OF_CONFIG[kind.__name__] for kind in type(args).__mro__ if kind.__name__ in _OF_CONFIG), None)
    if has_rewards:
        return algorithm if algorithm in ("ppo", "rloo") else "grpo"
    return algorithm or ("dpo" if rows and {"chosen", "rejected"} <= rows[0].keys() else "sft")


def refuse_arguments(args: object, data_collator: object, unread: Mapping[str, object]) -> None:
    """Raises ConfigError for arguments of a trainer of TRL that stand in another order here, and for those that have no meaning
    here and a value."""
    if not (args is None or hasattr(args, "output_dir")) or not (data_collator is None or callable(data_collator)):
        raise ConfigError(
            "RLRunner has the order of transformers' Trainer (model, args, data_collator), and some trainers of TRL have "
            "another one. Name the arguments behind model, such as args=, reward_funcs= and ref_model=."
        )
    if names := [name for name, value in unread.items() if value is not None]:
        raise ConfigError(
            f"RLRunner reads no argument {names[0]}. Leave it out, or set what it is for by RLRunner(config=[...]); "
            "docs/config.md has the keys."
        )


class Arguments:
    """`args` for `algorithm`, with `world_size` processes. Fields with their default give way to the `keys` of the script.
    Raises ConfigError for a field that was set and has no meaning."""

    def __init__(self, args: Any, algorithm: str, world_size: int, num_rows: int, keys: Mapping[str, str]):
        self.args, self.algorithm, self._keys = args, algorithm, keys
        self._default = type(args)(output_dir=args.output_dir, use_cpu=args.use_cpu, bf16=args.bf16, report_to="none")
        samples = args.per_device_train_batch_size * args.gradient_accumulation_steps * world_size
        num_generations = getattr(args, "num_generations", 8) if algorithm in ("grpo", "rloo") else 1
        self.num_generations = self._count("actor_rollout_ref.rollout.n", num_generations)
        if samples % self.num_generations:
            raise ConfigError(
                f"per_device_train_batch_size x gradient_accumulation_steps x processes is {samples}, no "
                f"multiple of num_generations={self.num_generations}. A step trains on whole groups; change one of them."
            )
        mini_batch_size, num_mini_batches = samples // self.num_generations, self._mini_batches()
        self.batch_size = self._count("data.train_batch_size", mini_batch_size * num_mini_batches)
        mini_batch_size = min(mini_batch_size, self.batch_size)
        self.mini_batch_size = self._count("actor_rollout_ref.actor.ppo_mini_batch_size", mini_batch_size)
        self.steps_per_epoch = num_rows // self.batch_size
        if not self.steps_per_epoch:
            raise ConfigError(
                f"A step takes {self.batch_size} rows (per_device_train_batch_size x gradient_accumulation_steps x processes), "
                f"and train_dataset has {num_rows}. Lower one of them."
            )
        # TRL counts optimizer steps; a step here is a generation with all its updates
        self.num_updates = num_mini_batches * getattr(args, "num_iterations", 1)
        steps = (
            args.max_steps / self.num_updates if args.max_steps > 0 else args.num_train_epochs * self.steps_per_epoch
        )
        self.max_steps = self._count("trainer.total_training_steps", math.ceil(steps))
        self._refuse()

    def _count(self, key: str, from_args: int) -> int:
        """The value of `key`, if no field of args was set that gives it."""
        value = self._keys.get(key, "")
        return int(value) if value.isdecimal() and all(map(self._is_default, _COUNTS[key])) else from_args

    def _is_default(self, field: str) -> bool:
        return _same(getattr(self.args, field, None), getattr(self._default, field, None))

    def gives_way(self, key: str, value: object) -> bool:
        """Whether `key` has its `value` from fields of args with their default."""
        if key in _COUNTS:
            return all(map(self._is_default, _COUNTS[key]))
        if key in _OF_SET_FIELDS:
            return False
        defaults = copy.copy(self)
        defaults.args = self._default
        return f"{key}={value}" in defaults.overrides()

    def _refuse(self) -> None:
        """Raise ConfigError for the first field that was set to another value than its default and is not read."""
        accepted = _READ | _WITHOUT_EFFECT | _OF_ALGORITHM.get(self.algorithm, _GRPO)
        for name in (field.name for field in fields(self.args)):
            if name not in accepted and not name.startswith("_") and not self._is_default(name):
                raise ConfigError(
                    f"{type(self.args).__name__}.{name}={getattr(self.args, name)!r} has no meaning for "
                    f"algorithm={self.algorithm!r} here, and would be left out. Remove it, or set what it is for by "
                    "RLRunner(config=[...]); docs/config.md has the keys."
                )

    def _mini_batches(self) -> int:
        """Mini-batches of the samples that are generated at once; TRL counts both sides in micro-batches."""
        steps, accumulated = getattr(self.args, "steps_per_generation", None), self.args.gradient_accumulation_steps
        if steps is not None and steps % accumulated:
            raise ConfigError(
                f"steps_per_generation={steps} is no multiple of gradient_accumulation_steps={accumulated}. An optimizer step "
                "trains on samples of one generation; change one of them."
            )
        return 1 if steps is None else int(steps // accumulated)

    @property
    def num_epochs(self) -> int:
        return int(-(-self.max_steps // self.steps_per_epoch))

    def overrides(self) -> list[str]:
        """The keys of the arguments, for load_config."""
        programs = {"sft": self._sft, "dpo": self._preference, "kto": self._preference, "reward": self._reward}
        programs["gkd"] = self._gkd
        program_keys = programs.get(self.algorithm, self._rl)()
        return [f"{key}={value}" for key, value in {**self._host(), **program_keys}.items() if value is not None]

    def _host(self) -> dict[str, object]:
        args = self.args
        named = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or [])
        loggers = ["file", *(name for name in named if name != "none"), *(() if args.disable_tqdm else ("console",))]
        unknown = [name for name in loggers if name not in (*_LOGGERS, "file", "console")]
        if unknown:
            raise ConfigError(f"report_to={unknown[0]} has no tracker here; there are {', '.join(_LOGGERS)}.")
        keep, section = "max_ckpt_to_keep", "checkpoint"
        if self.algorithm not in GIVEN_ROWS:
            keep, section = "max_actor_ckpt_to_keep", "actor_rollout_ref.actor.checkpoint"
        never = getattr(args.save_strategy, "value", args.save_strategy) == "no"  # except at the last step
        return {
            "trainer.default_local_dir": written(os.path.abspath(args.output_dir), is_path=True),
            "trainer.total_training_steps": self.max_steps,
            "trainer.logger": f"[{','.join(loggers)}]",
            "trainer.experiment_name": written(getattr(args, "run_name", None) or "huggingface"),
            "trainer.project_name": written(getattr(args, "project", None) or "huggingface"),
            "trainer.val_before_train": bool(getattr(args, "eval_on_start", False)),
            "trainer.device": "cpu" if args.use_cpu else None,
            f"trainer.{keep}": args.save_total_limit,
            f"{section}.save_contents": "[model]" if never or args.save_only_model else None,
        }

    def _optim(self, prefix: str) -> Iterator[tuple[str, object]]:
        args = self.args
        kind, schedule = str(getattr(args.optim, "value", args.optim)), args.lr_scheduler_type
        schedule = str(getattr(schedule, "value", schedule))
        for value, choices, field in ((kind, _OPTIMIZERS, "optim"), (schedule, _SCHEDULES, "lr_scheduler_type")):
            _choose(field, value, choices)
        yield f"{prefix}.lr", args.learning_rate
        yield f"{prefix}.optimizer", _OPTIMIZERS[kind]
        yield f"{prefix}.weight_decay", args.weight_decay
        yield f"{prefix}.clip_grad", args.max_grad_norm or math.inf
        yield f"{prefix}.lr_scheduler_type", schedule
        yield from self._schedule_arguments(prefix, schedule)
        yield f"{prefix}.lr_warmup_steps", 0 if schedule == "constant" else self._warmup_steps()
        if _OPTIMIZERS[kind] == "AdamW":
            yield f"{prefix}.betas", f"[{args.adam_beta1},{args.adam_beta2}]"

    def _schedule_arguments(self, prefix: str, schedule: str) -> Iterator[tuple[str, object]]:
        counts = ("num_decay_steps", "num_stable_steps", "timescale")  # in optimizer steps, as warmup_steps
        arguments = {
            name: math.ceil(value / self.num_updates) if name in counts and value else value
            for name, value in (self.args.lr_scheduler_kwargs or {}).items()
        }
        if schedule in OWN_SCHEDULES:  # their arguments are keys
            yield from ((f"{prefix}.{name}", value) for name, value in arguments.items())
        elif arguments:
            yield f"{prefix}.lr_scheduler_kwargs", json.dumps(arguments)

    def _warmup_steps(self) -> int:
        steps, ratio = self.args.warmup_steps or 0, getattr(self.args, "warmup_ratio", None) or 0.0
        return math.ceil(steps / self.num_updates if steps >= 1 else self.max_steps * (steps or ratio))

    def _given_rows(self) -> dict[str, object]:
        args = self.args
        _choose("train_sampling_strategy", getattr(args, "train_sampling_strategy", "random"), ("random", "sequential"))
        return {
            **dict(self._optim("optim")),
            "data.train_batch_size": self.batch_size,
            "data.use_dynamic_bsz": False,
            "data.micro_batch_size_per_gpu": min(args.per_device_train_batch_size, self.batch_size),
            "data.shuffle": False,  # the rows come in the order of transformers' sampler
            "data.max_length": getattr(args, "max_length", None) or "null",
            "data.truncation": "right",
            "data.train_on_line_end": type(args).__name__ in _OF_CONFIG,
            "trainer.seed": args.seed,
            "model.enable_gradient_checkpointing": args.gradient_checkpointing,
            "model.neftune_alpha": args.neftune_noise_alpha,
            "engine.dtype": "bfloat16" if args.bf16 else None,
        }

    def _sft(self) -> dict[str, object]:
        return {
            **self._given_rows(),
            "sft.loss": getattr(self.args, "loss_type", None),
            "data.text_key": getattr(self.args, "dataset_text_field", None),
        }

    def _reward(self) -> dict[str, object]:
        args = self.args
        return {
            **self._given_rows(),
            "data.micro_batch_size_per_gpu": 2 * args.per_device_train_batch_size,
            "data.truncation": "error",  # TRL leaves longer rows out
            "rm.center_rewards_coefficient": getattr(args, "center_rewards_coefficient", None),
        }

    def _gkd(self) -> dict[str, object]:
        """TRL compares at temperature 1 what it has sampled at another one; here both have one temperature."""
        args, actor, rollout = self.args, "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
        samples, distance = bool(args.lmbda), "distillation.distillation_loss"
        return {
            **dict(self._optim(f"{actor}.optim")),
            "algorithm.adv_estimator": "grpo",
            "data.train_batch_size": self.batch_size,
            "data.shuffle": False,  # the rows come in the order of transformers' sampler
            "data.seed": args.seed if args.data_seed is None else args.data_seed,
            "data.max_prompt_length": args.max_length or "null",
            "data.max_response_length": args.max_new_tokens,
            f"{rollout}.n": 1,
            f"{rollout}.temperature": args.temperature if samples else 1.0,
            f"{rollout}.seed": args.seed,
            f"{actor}.ppo_mini_batch_size": self.mini_batch_size,
            f"{actor}.loss_agg_mode": "token-mean",
            "distillation.enabled": True,
            "distillation.on_policy_share": args.lmbda,
            f"{distance}.loss_mode": "jsd",
            f"{distance}.jsd_beta": args.beta,
            f"{distance}.topk": -1,
            f"{distance}.use_task_rewards": False,
            f"{actor}.fsdp_config.dtype": "bfloat16" if args.bf16 else None,
            "actor_rollout_ref.model.enable_gradient_checkpointing": args.gradient_checkpointing,
        }

    def _preference(self) -> dict[str, object]:
        args, loss, ref = self.args, PreferenceLossConfig(), ReferenceConfig()
        settings = {key: getattr(args, name, None) for key, name in _LOSS_FIELDS.items()}
        settings |= {name: getattr(args, name, None) for name in ("desirable_weight", "undesirable_weight")}
        if self.algorithm == "kto":
            settings["loss"] = settings["loss"] or "kto"
        if isinstance(settings["loss"], list) and len(settings["loss"]) == 1:
            settings["loss"] = settings["loss"][0]
        keys = {f"preference.{name}": (value, getattr(loss, name)) for name, value in settings.items()}
        keys["ref.sync_steps"] = (getattr(args, "sync_ref_model", False) and args.ref_model_sync_steps, 0)
        keys["ref.mixup_alpha"] = (getattr(args, "ref_model_mixup_alpha", None), ref.mixup_alpha)
        # a default is left out, since a key that has no effect with this loss is refused
        changed = {key: value for key, (value, default) in keys.items() if value not in (None, default)}
        return {
            **self._given_rows(),
            "data.micro_batch_size_per_gpu": (1 + (self.algorithm == "dpo")) * args.per_device_train_batch_size,
            **{key: json.dumps(value) if isinstance(value, list) else value for key, value in changed.items()},
        }

    def _rl(self) -> dict[str, object]:
        args, actor, rollout = self.args, "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
        beta, loss, is_rloo = getattr(args, "beta", 0.0), getattr(args, "loss_type", None), self.algorithm == "rloo"
        level = getattr(args, "importance_sampling_level", "token")
        _choose("importance_sampling_level", level, _LEVELS)
        if loss is not None:
            _choose("loss_type", loss, _LOSS_TYPES)
        scaled = getattr(args, "scale_rewards", True)
        if scaled not in _SCALED:
            _choose("scale_rewards", scaled, ("group", "none"))
        return {
            **dict(self._optim(f"{actor}.optim")),
            "algorithm.adv_estimator": {"grpo": "grpo", "rloo": "rloo"}.get(self.algorithm, "gae"),
            "algorithm.norm_adv_by_std_in_grpo": _SCALED[scaled] if self.algorithm == "grpo" else None,
            "data.train_batch_size": self.batch_size,
            "data.seed": args.seed if args.data_seed is None else args.data_seed,
            "data.max_prompt_length": getattr(args, "max_prompt_length", None),
            "data.max_response_length": getattr(args, "max_completion_length", None),
            f"{rollout}.n": self.num_generations,
            f"{rollout}.temperature": getattr(args, "temperature", None),
            f"{rollout}.top_p": getattr(args, "top_p", None),
            f"{rollout}.top_k": getattr(args, "top_k", None) or None,
            f"{rollout}.seed": args.seed,
            f"{actor}.ppo_mini_batch_size": self.mini_batch_size,
            f"{actor}.ppo_epochs": getattr(args, "num_iterations", 1),
            f"{actor}.clip_ratio_low": getattr(args, "epsilon", None),
            f"{actor}.clip_ratio_high": getattr(args, "epsilon_high", None) or getattr(args, "epsilon", None),
            # TRL bounds the ratio of a negative advantage only on request
            f"{actor}.clip_ratio_c": getattr(args, "delta", None) or (math.inf if loss or is_rloo else None),
            f"{actor}.policy_loss.loss_mode": _LEVELS[level],
            f"{actor}.loss_agg_mode": "seq-mean-token-sum" if is_rloo else None if loss is None else _LOSS_TYPES[loss],
            f"{actor}.use_kl_loss": bool(beta) and not is_rloo,
            f"{actor}.kl_loss_coef": None if is_rloo else beta or None,
            "algorithm.use_kl_in_reward": True if is_rloo and beta else None,
            "algorithm.kl_ctrl.kl_coef": beta if is_rloo and beta else None,
            f"{actor}.fsdp_config.dtype": "bfloat16" if args.bf16 else None,
            "actor_rollout_ref.model.enable_gradient_checkpointing": args.gradient_checkpointing,
        }


def _choose(field: str, value: object, choices: Iterable[object]) -> None:
    if value not in choices:
        raise ConfigError(f"{field}={value} is not available here; there are {', '.join(map(str, choices))}.")


def _same(one: object, other: object) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return dict(one) == dict(other)
    return bool(one == other)
