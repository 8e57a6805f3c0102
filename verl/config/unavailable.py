"""What existing scripts can choose and this version cannot do yet. A row goes when its feature comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

NATIVE = "Use actor_rollout_ref.rollout.name=native, which needs nothing installed"
FSDP = "Use actor_rollout_ref.actor.strategy=fsdp"


@dataclass(frozen=True)
class Missing:
    path: str
    chosen: Callable[[Any], bool]
    what: str
    instead: str


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _set(value: Any) -> bool:
    return bool(value)


_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_FSDP = ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")

_ELSEWHERE = ("npu", "xpu", "hpu", "mps", "tpu", "xla", "mlu", "musa", "rocm", "hip")  # devices of other backends

MISSING: tuple[Missing, ...] = (
    Missing(f"{_ROLLOUT}.name", _is("trtllm"), "This rollout engine", NATIVE),
    Missing(f"{_ROLLOUT}.multi_turn.enable", _set, "Multi-turn rollout with tools", "Set it to False"),
    Missing(
        f"{_ROLLOUT}.agent.default_agent_loop",
        lambda v: v != "single_turn_agent",
        "An agent loop of one's own",
        "Use single_turn_agent",
    ),
    Missing(f"{_ROLLOUT}.agent.agent_loop_config_path", _set, "An agent loop of one's own", "Remove the key"),
    Missing(f"{_ROLLOUT}.quantization", _set, "Rollout with quantised weights", "Remove the key"),
    Missing(f"{_ROLLOUT}.enable_rollout_routing_replay", _set, "Routing replay for expert models", "Set it to False"),
    Missing("actor_rollout_ref.actor.strategy", _is("megatron"), "The Megatron engine (extra 'megatron')", FSDP),
    Missing("actor_rollout_ref.actor.strategy", _is("deepspeed"), "The DeepSpeed engine (extra 'deepspeed')", FSDP),
    Missing(
        "actor_rollout_ref.actor.strategy",
        _is("fsdp_turbo", "veomni", "torchtitan", "automodel", "mindspeed"),
        "This training engine",
        FSDP,
    ),
    Missing(
        "model_engine", lambda v: v not in ("dp", "fsdp"), "This training engine", "Use model_engine=dp, the default"
    ),
    Missing(
        "trainer.device",
        lambda v: v not in ("auto", "cpu", "cuda") and str(v).partition(":")[0] in _ELSEWHERE,
        "This kind of device",
        "Set trainer.device=auto, which takes a CUDA GPU where there is one, else the CPU",
    ),
    Missing("actor_rollout_ref.actor.qat.enable", _set, "Quantisation-aware training", "Remove the key"),
    *(Missing(f"{f}.qat.enable", _set, "Quantisation-aware training", "Remove the key") for f in _FSDP),
    Missing("actor_rollout_ref.hybrid_engine", lambda v: not v, "Rollout apart from training", "Set it to True"),
    *(Missing(f"{m}.mtp.enable", _set, "Multi-token prediction", "Set it to False") for m in (_MODEL, "critic.model")),
    Missing(
        "reward.sandbox_fusion.url", _set, "The code sandbox", "Remove the key: programs run in the box of the scorer"
    ),
    Missing(
        "reward.reward_manager.name",
        _is("remote", "rate_limited"),
        "This reward manager",
        "Use naive, batch, dapo or gdpo",
    ),
    Missing("distillation.enabled", _set, "On-policy distillation", "Set it to False"),
    Missing("skip.rollout.enable", _set, "Training on samples of a former run", "Set it to False"),
    Missing("skip.rollout_tq.enable", _set, "Training on samples of a former run", "Set it to False"),
    Missing("skip.async_rollout.enable", _set, "Training on samples of a former run", "Set it to False"),
    Missing("trainer.checkpoint_callback_class", _set, "A callback after a save", "Remove the key"),
    Missing("trainer.default_hdfs_dir", _set, "Saving to HDFS", "Set trainer.default_local_dir to a mounted folder"),
)

# Keys that existing releases have for a feature which is not available: pattern -> the one that reads them there. Choosing
# the feature is an error that names it; without it they change nothing there either.
ONLY_THERE: dict[str, str] = {
    **{
        f"{role}.{engine}.*": f"only the training engine {engine} reads it"
        for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
        for engine in ("veomni", "torchtitan", "automodel", "mindspeed", "fsdp_turbo")
    },
    "distillation.teacher_models.*": "only distillation reads it",
}

# Keys of features to come that have no place in the tree yet
ANNOUNCED: dict[str, str] = {
    "kv_cache_config.enable_paged_attention": "vLLM always pages its cache, the native engine manages its own; remove the key.",
}


def value_in(root: Any, path: str) -> Any:
    """The value at `path`, through free-form mappings too; None where there is none."""
    for name in path.split("."):
        root = root.get(name) if root is not None else None
    return root


def only_there(path: str) -> str:
    """Why a key of a feature that is not available has no effect here; "" for any other key."""
    return next((why for pattern, why in ONLY_THERE.items() if fnmatchcase(path, pattern)), "")


def missing_features(root: Any) -> list[tuple[str, str]]:
    """(key, sentence) for each feature that `root` chooses and this version has not."""
    return [
        (
            row.path,
            f"{row.what} is not available in this version ({row.path}={value_in(root, row.path)}). {row.instead}.",
        )
        for row in MISSING
        if value_in(root, row.path) is not None and row.chosen(value_in(root, row.path))
    ]
