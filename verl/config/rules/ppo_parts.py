"""Keys of distillation, of policies and samplers that differ, and of routing replay that contradict one another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl.config.active_keys import WITHOUT, quantized_keys, runs_agents, runs_on_several_devices
from verl.config.rejection import parse_rejection
from verl.config.schema import Problem, error, warning
from verl.errors import ConfigError
from verl.families import engine_facts, needs_engine

if TYPE_CHECKING:
    from verl.config.roots.ppo import PPOConfig
    from verl.config.sections.distillation import DistillationConfig
    from verl.config.sections.rollout import RolloutConfig

DISTILLATION = "distillation"
_ROLLOUT = "actor_rollout_ref.rollout"
_CORRECTION = "algorithm.rollout_correction"
_TEACHER_KEYS = ("key", "model_path", "num_replicas", "inference")


def check_distillation(c: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """Teachers, and losses that do not go together."""
    distillation = c.distillation
    if distillation.enabled and c.algorithm.program != "ppo":
        yield error(
            "distillation.enabled",
            f"distillation.enabled=True is a term of the policy loss, which algorithm.program={c.algorithm.program} does not "
            "have. Set algorithm.program=ppo.",
        )
    if distillation.enabled:
        yield from _check_teachers(distillation)
        yield from _check_distance(c, distillation)


def _check_teachers(distillation: DistillationConfig) -> Iterator[Problem]:
    key, teachers = f"{DISTILLATION}.teacher_models", dict(distillation.other_teachers)
    for name, teacher in teachers.items():
        unknown = [k for k in teacher if k not in _TEACHER_KEYS] if isinstance(teacher, dict) else [name]
        if unknown:
            yield error(
                f"{DISTILLATION}.other_teachers",
                f"{key}.{name} has no key {unknown[0]!r}; a teacher has {', '.join(_TEACHER_KEYS)}.",
            )
            return
    if distillation.teacher_models.teacher_model.model_path is not None:
        teachers["teacher_model"] = distillation.teacher_models.teacher_model
    lacking = [name for name, teacher in teachers.items() if not teacher.get("model_path")]
    if distillation.stored_outputs:
        if teachers:
            yield error(
                key, f"{DISTILLATION}.stored_outputs=True takes the teacher's outputs from the rows. Remove {key}."
            )
    elif not teachers or lacking:
        path = f"{key}.{lacking[0] if lacking else 'teacher_model'}.model_path"
        yield error(path, f"{DISTILLATION}.enabled=True needs {path}, a folder or hub name.")
    keys = [teacher.get("key") for teacher in teachers.values()]
    if len(teachers) > 1 and (None in keys or len(set(keys)) < len(keys)):
        yield error(
            key,
            f"{key} has {len(teachers)} teachers, and the keys {keys}. Give each one a key of its own: the value of the field "
            f"{distillation.teacher_key!r} (distillation.teacher_key) of its rows.",
        )


def _check_distance(c: PPOConfig, distillation: DistillationConfig) -> Iterator[Problem]:
    loss, rollout = distillation.distillation_loss, c.actor_rollout_ref.rollout
    mode = f"{DISTILLATION}.distillation_loss.loss_mode"
    if loss.loss_mode in ("kl", "k1") and not loss.use_policy_gradient:
        yield error(
            mode,
            f"{mode}={loss.loss_mode} is linear in the log-probability of a sampled token, and the expectation of its gradient "
            f"is 0. Set {DISTILLATION}.distillation_loss.use_policy_gradient=True, or loss_mode=k2 or k3.",
        )
    listed = loss.loss_mode in ("forward_kl_topk", "jsd")
    if distillation.stored_outputs and (not listed or distillation.on_policy_share > 0):
        yield error(
            f"{DISTILLATION}.stored_outputs",
            f"{DISTILLATION}.stored_outputs=True has the teacher's most probable tokens for the responses of the rows. Set "
            f"{mode}=forward_kl_topk or jsd, and {DISTILLATION}.on_policy_share=0.",
        )
    if distillation.on_policy_share < 1:
        wrong = {
            "distillation.distillation_loss.use_task_rewards=False": loss.use_task_rewards,
            "distillation.distillation_loss.use_policy_gradient=False": loss.use_policy_gradient,
            "actor_rollout_ref.rollout.n=1": rollout.n != 1,
            "actor_rollout_ref.rollout.prefetch_num=0": rollout.prefetch_num != 0,
        }
        for fix in (fix for fix, holds in wrong.items() if holds):
            yield error(
                f"{DISTILLATION}.on_policy_share",
                f"{DISTILLATION}.on_policy_share={distillation.on_policy_share} trains on responses of the rows, which the "
                f"student has not sampled. Set {fix}.",
            )


_ACTOR = "actor_rollout_ref.actor"
_OF_GSPO = {"loss_agg_mode": "seq-mean-token-mean", "clip_ratio_low": "3e-4", "clip_ratio_high": "4e-4"}


def check_policy(c: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """Settings that let a loss train, but not as its paper does."""
    key, kl, actor = f"{_ACTOR}.policy_loss.loss_mode", f"{_ACTOR}.kl_loss_type", c.actor_rollout_ref.actor
    unset = [f"{_ACTOR}.{k}={v}" for k, v in _OF_GSPO.items() if f"{_ACTOR}.{k}" not in set_keys]
    if actor.policy_loss.loss_mode == "gspo" and unset:
        yield warning(
            key,
            f"{key}=gspo runs with defaults for ratios of tokens. GSPO (2507.18071) averages over sequences, whose ratios "
            f"seldom reach a clip of 0.2. Set {', '.join(unset)}.",
        )
    if actor.use_kl_loss and actor.kl_loss_type in ("kl", "k1"):
        yield warning(
            kl,
            f"{kl}={actor.kl_loss_type} is linear in the log-probability of a sampled token, and the expectation of its "
            f"gradient is 0. Set {kl}=low_var_kl, or k1+ for k1 with the gradient of k2.",
        )


def _is_interval(value: object) -> bool:
    """Whether `value` is a number above 0, or 'low_high'."""
    try:
        bounds = [float(part) for part in str(value).split("_")]
    except ValueError:
        return False
    return len(bounds) in (1, 2) and all(b > 0 for b in bounds) and bounds == sorted(bounds)


def check_correction(c: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """Importance weights and rejection between sampler and trainer."""
    correction = c.algorithm.rollout_correction
    veto, bounds = correction.rollout_token_veto_threshold, str(correction.rollout_rs_threshold).split(",")
    if correction.rollout_rs:
        try:
            rules = parse_rejection(correction.rollout_rs, correction.rollout_rs_threshold)
        except ConfigError as fault:
            yield error(f"{_CORRECTION}.rollout_rs_threshold", str(fault))
            rules = []
        named = len(rules) - (veto is not None)  # the rule of the veto is the last one
        lower = correction.rollout_rs_threshold_lower
        if rules and lower is not None and not (named == 1 and bounds[0].startswith(f"{lower}_")):
            yield error(
                f"{_CORRECTION}.rollout_rs_threshold_lower",
                f"{_CORRECTION}.rollout_rs_threshold_lower={lower} is the lower bound of one rule, whose upper bound is "
                "rollout_rs_threshold alone. Remove it, and write both bounds of a rule as rollout_rs_threshold=low_high.",
            )
    if not _is_interval(correction.rollout_is_threshold):
        yield error(
            f"{_CORRECTION}.rollout_is_threshold",
            f"{_CORRECTION}.rollout_is_threshold={correction.rollout_is_threshold} must be a number above 0 or low_high.",
        )
    reads = correction.bypass_mode or correction.rollout_is or correction.rollout_rs
    if reads and not c.actor_rollout_ref.rollout.calculate_log_probs:
        yield error(
            f"{_ROLLOUT}.calculate_log_probs",
            f"algorithm.rollout_correction needs the sampled log-probabilities. Set {_ROLLOUT}.calculate_log_probs=True.",
        )
    ahead = c.actor_rollout_ref.rollout.prefetch_num
    if correction.bypass_mode and correction.loss_type == "ppo_clip" and ahead:
        yield warning(
            f"{_CORRECTION}.bypass_mode",
            f"{_CORRECTION}.bypass_mode=True with {_ROLLOUT}.prefetch_num={ahead} clips the ratio to weights that are older by "
            "so many versions, so tokens that have moved get no gradient, and the run learns more slowly. Remove one of them.",
        )


def check_drafts(c: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """Drafts of tokens that one step verifies."""
    rollout = c.actor_rollout_ref.rollout
    facts = engine_facts(rollout.name)
    methods, drafts = f"{_ROLLOUT}.speculative.methods", rollout.speculative.methods
    limit, number = f"{_ROLLOUT}.speculative.num_speculative_tokens", rollout.speculative.num_speculative_tokens
    needed = {"drafts": bool(drafts), "drafts_mixed": len(drafts) > 1}
    needed |= {f"drafts_{method}": method in drafts for method in ("history", "mtp")}
    path = f"{_ROLLOUT}.speculative.model_path"
    if lacking := [fact for fact, is_needed in needed.items() if is_needed and not getattr(facts, fact)]:
        yield error(
            methods, f"{needs_engine(f'{methods}={drafts}', lacking[-1])}. Set {_ROLLOUT}.name, or other methods."
        )
    elif "model" in drafts and rollout.speculative.model_path is None:
        yield error(
            path, f"{methods}={drafts} needs {path}, a folder or hub name of a model with the policy's tokenizer."
        )
    elif {"model", "mtp"} <= set(drafts):
        yield error(
            methods, f"{methods}={drafts}: a draft model and the policy's head guess at the same places. Choose one."
        )
    elif drafts and not facts.verifies_invariance:
        yield warning(
            methods,
            f"With {methods}={drafts}, samples may differ from a run without drafts: {_ROLLOUT}.name={rollout.name} verifies "
            f"several tokens by other sums. The native engine's samples stay equal.",
        )
    head, mtp = "actor_rollout_ref.model.mtp", c.actor_rollout_ref.model.mtp
    for name, other, value, clashes in (
        ("enable_rollout", methods, drafts, "mtp" not in drafts),
        ("num_speculative_tokens", limit, number, mtp.num_speculative_tokens != number),
    ):
        if clashes and mtp.enable and mtp.enable_rollout and (key := f"{head}.{name}") in set_keys:
            yield error(key, f"{key}={getattr(mtp, name)} contradicts {other}={value}. Set one of them.")
    if drafts and rollout.enable_rollout_routing_replay:
        yield error(
            methods,
            f"{methods}={drafts} computes tokens that may be dropped, so the experts of "
            f"{_ROLLOUT}.enable_rollout_routing_replay=True cannot be recorded. Set it to False, or the methods to [].",
        )


def check_quantization(c: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """Weights and KV cache of the sampler in fewer bits."""
    rollout = c.actor_rollout_ref.rollout
    facts, wishes = engine_facts(rollout.name), quantized_keys(rollout)
    for key, value in wishes.items():
        fact = f"{'stores' if key.endswith('kv_cache_dtype') else 'quantizes'}_{value}"
        if not getattr(facts, fact, True):  # other values are refused as not available
            yield error(key, f"{needs_engine(f'{key}={value}', fact)}. Set {_ROLLOUT}.name, or {key}={WITHOUT[key]}.")
            continue
        if facts.is_service(rollout.service.url):
            yield error(
                key,
                f"{key}={value} is a setting of a server that the run starts, and {_ROLLOUT}.service.url names one that "
                f"runs. Remove the url, or set {key}={WITHOUT[key]}.",
            )
        num_ranks = rollout.tensor_model_parallel_size
        if facts.quantizes_int8 and num_ranks > 1:
            yield error(
                key,
                f"{key}={value} computes with undivided weights on this engine, and "
                f"{_ROLLOUT}.tensor_model_parallel_size={num_ranks} divides them. Set it to 1, or {key}={WITHOUT[key]}.",
            )
        if value == "int8" and not rollout.prepack_weights:
            yield error(
                key,
                f"{key}=int8 needs a copy of the weights, which {_ROLLOUT}.prepack_weights=False forbids. Remove one.",
            )
    if rollout.kv_cache_dtype == "int8" and rollout.quantization == "fp8":
        yield error(
            f"{_ROLLOUT}.kv_cache_dtype",
            f"{_ROLLOUT}.kv_cache_dtype=int8 needs the compiled decoder, and torch emulates {_ROLLOUT}.quantization=fp8. Set "
            "that to int8 or null.",
        )


def check_qat(c: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """A policy that trains in the numbers of its sampler."""
    group, key = c.actor_rollout_ref, "actor_rollout_ref.actor.qat.enable"
    if not group.actor.qat.enable:
        return
    fault, place = None, key
    expected = "int8" if (mode := group.actor.qat.mode) == "int8" else None
    if group.rollout.quantization != expected:
        place = "actor_rollout_ref.actor.qat.mode"  # a mode that is refused has no sampler
        fault = f"in {mode} needs a sampler with the same numbers. Set {_ROLLOUT}.quantization={expected or 'null'}"
    elif group.model.lora_rank or group.model.lora_adapter_path:
        fault = "trains the rounded weights themselves, and adapters train beside them. Remove the adapters"
    elif mode == "w4a16" and (wrong := next(filter(_is_no_pattern, group.actor.qat.ignore_patterns), None)) is not None:
        place = "actor_rollout_ref.actor.qat.ignore_patterns"
        fault = f"has {wrong!r} in ignore_patterns, and what follows re: is no regular expression. Repair it"
    elif (mode == "int8" and group.actor.strategy in ("megatron", "deepspeed")) or runs_on_several_devices(c):
        fault = "rounds the layers of a run on one device, and this run has several. Run on one"
    if fault:
        yield error(place, f"{key}=True {fault}, or set it to False.")


def _is_no_pattern(pattern: str) -> bool:
    try:
        re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
    except re.error:
        return True
    return False


def check_ahead(c: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """Samples made ahead of training, and responses that pause while weights change."""
    rollout = c.actor_rollout_ref.rollout
    facts = engine_facts(rollout.name)
    oldest = c.trainer.v1.sampler.max_off_policy_threshold
    if not 0 <= rollout.prefetch_num <= oldest:
        yield error(
            f"{_ROLLOUT}.prefetch_num",
            f"{_ROLLOUT}.prefetch_num={rollout.prefetch_num} makes samples that are so many weight versions old when they "
            f"train; it must lie between 0 and trainer.v1.sampler.max_off_policy_threshold={oldest}.",
        )
    if rollout.partial_rollout and rollout.stop:
        yield error(
            f"{_ROLLOUT}.partial_rollout",
            f"{_ROLLOUT}.partial_rollout=True does not go with stop strings, which may lie across two parts. Use "
            f"{_ROLLOUT}.stop_token_ids.",
        )
    in_flight, excluded = f"{_ROLLOUT}.in_flight_updates", (rollout.partial_rollout, rollout.stop)
    if rollout.in_flight_updates and not facts.pauses:
        yield error(
            in_flight,
            f"{needs_engine(f'{in_flight}=True', 'pauses')}. Set it to False; {_ROLLOUT}.partial_rollout=True cuts responses "
            "at fixed lengths on every engine.",
        )
    elif rollout.in_flight_updates and any((*excluded, runs_agents(c), rollout.enable_rollout_routing_replay)):
        yield error(
            in_flight,
            f"{in_flight}=True is for single turns without partial_rollout, enable_rollout_routing_replay and stop strings, "
            f"which may lie across a pause. Set it to False, or remove these; {_ROLLOUT}.stop_token_ids ends responses too.",
        )
    elif rollout.in_flight_updates and rollout.speculative.methods:
        yield error(
            in_flight,
            f"{in_flight}=True lets new weights enter between two decode steps, and drafts change the tokens of a step by "
            f"measured times, so samples would depend on time. Set it to False, or {_ROLLOUT}.speculative.methods=[].",
        )
    keeps = f"{_ROLLOUT}.keep_partial_kv_cache"
    if rollout.keep_partial_kv_cache and not facts.keeps_partial_kv:
        yield error(
            keeps,
            f"{needs_engine(f'{keeps}=True', 'keeps_partial_kv')}. Set it to False to compute earlier parts again.",
        )
    elif rollout.keep_partial_kv_cache and (runs_agents(c) or rollout.enable_rollout_routing_replay):
        yield error(
            keeps,
            f"{keeps}=True is for single turns without {_ROLLOUT}.enable_rollout_routing_replay. Set it to False to compute "
            "earlier parts again.",
        )


_MODE = "actor_rollout_ref.actor.router_replay.mode"
_RECORD = "actor_rollout_ref.rollout.enable_rollout_routing_replay"


def check_routing(c: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """Needs of router_replay.mode."""
    actor, rollout = c.actor_rollout_ref.actor, c.actor_rollout_ref.rollout
    mode = actor.router_replay.mode
    if rollout.enable_rollout_routing_replay and mode != "R3":
        yield error(_RECORD, f"{_RECORD}=True records experts for {_MODE}=R3, and the mode is {mode}. Set one of them.")
    if mode == "disabled":
        return
    if mode == "R2" and c.algorithm.rollout_correction.bypass_mode:
        yield error(
            _MODE,
            f"{_MODE}=R2 replays the pass for old log-probs, which algorithm.rollout_correction.bypass_mode=True leaves out. "
            "Set the mode to R3.",
        )
    if mode == "R3":
        yield from _check_rollout(c, rollout)


def _check_rollout(c: PPOConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    facts = engine_facts(rollout.name)
    if not facts.records_experts:
        yield error(
            _MODE,
            f"{needs_engine(f'{_MODE}=R3', 'records_experts')}. actor_rollout_ref.rollout.name={rollout.name} does not "
            "return them.",
        )
    if runs_agents(c):
        yield error(
            _MODE, f"{_MODE}=R3 does not go with agents, whose turns have no record of experts. Set the mode to R2."
        )
    if facts.records_experts and rollout.stop and not facts.records_stopped_experts:
        yield error(
            _MODE,
            f"{needs_engine(f'{_MODE}=R3 with stop strings', 'records_stopped_experts')}. Set actor_rollout_ref.rollout.name, "
            "or stop_token_ids in place of stop.",
        )
