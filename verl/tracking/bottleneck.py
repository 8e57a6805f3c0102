"""Bottleneck of a run and advice on config keys, from its timeline, metrics and config.

found = find_bottleneck(timeline_rows, metrics_rows, config)
found.name      "rollout-bound"
found.advice    ["While it generates, nothing trains: ... actor_rollout_ref.rollout.prefetch_num=1 ..."]
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl.config.schema import value_at
from verl.tracking.files import Json, is_number

NAMES = {
    "rollout": "rollout-bound",
    "training": "training-bound",
    "reward": "reward-bound",
    "communication": "communication-bound",
    "validation": "validation-bound",
    "saving": "saving-bound",
    "other": "bound by work outside the phases",
}
_MIN_SHARE = 0.1  # of the time; advice about less is noise
_LONG_WAIT = 0.25  # of a generation, in which at most a tenth of its groups is not complete
_LAST = "rollout/last_group"
_GATHER_MS = 5.0  # of an all-gather of parameters, as seed document 002 has it
_MANY_CUT = 0.3  # of the responses
_LONG_SCORES_S = 1.0  # of a step
_EMPTY_SHARE = 0.2  # of reserved memory or of blocks of the KV cache, as seed document 000 has it


@dataclass(frozen=True)
class Bottleneck:
    """`shares`: phase -> share of the time, largest first. `utilisation`: role -> share of the time in which it is busy."""

    name: str
    shares: dict[str, float]
    utilisation: dict[str, float]
    step_s: float  # median, without validation and saving
    communication_s: float  # per step
    communication_bytes: float  # per step
    advice: list[str]
    waits: list[str]  # for the last group: of the newest generation, and of the generation with the longest wait
    measured: dict[str, float]  # name in metrics.jsonl -> median; `verl show` prints them next to the phases


@dataclass(frozen=True)
class _Facts:
    shares: Mapping[str, float]
    spans: Mapping[str, float]  # span -> share of the step time
    metrics: Mapping[str, float]  # medians over the steps
    config: Json
    utilisation: Mapping[str, float]
    exchanging: float = 0.0  # share of the time in exchanges with other processes
    step_s: float = 0.0  # median

    def key(self, path: str, default: object = None) -> Any:
        value = value_at(self.config, path)
        return default if value is None or (is_number(default) and not is_number(value)) else value

    @property
    def num_devices(self) -> int:
        return int(self.key("trainer.nnodes", 1) * self.key("trainer.n_gpus_per_node", 1))

    def if_several(self, words: str) -> str:
        """`words` in a run of several devices, which can be divided otherwise."""
        return words if self.num_devices > 1 else ""

    def metric(self, name: str) -> float:
        return self.metrics.get(name, 0.0)

    @property
    def is_silent(self) -> bool:
        """Whether most steps have an advantage of 0 for all samples."""
        return self.metrics.get("critic/advantages/max") == self.metrics.get("critic/advantages/min") == 0.0


def find_bottleneck(timeline: Sequence[Json], metrics: Sequence[Json], config: Json) -> Bottleneck | None:
    """The largest phase of a run, with advice; None before the first step has ended. The first step, which includes warm-up,
    is left out once there are three more."""
    rows = list(timeline[1:] if len(timeline) > 3 else timeline)
    if not rows:
        return None
    total = sum(row["seconds"] for row in rows) or 1.0
    phases = {name: sum(row["phases"].get(name, 0.0) for row in rows) / total for name in _phase_names(rows)}
    shares = dict(sorted(phases.items(), key=lambda item: -item[1]))
    trained = [row for row in metrics if row.get("step", 0) > 0][-len(rows) :]
    exchanged_s = sum(row["communication"]["seconds"] for row in rows)
    besides = ("validation", "saving")
    step_s = statistics.median(row["seconds"] - sum(row["phases"].get(name, 0.0) for name in besides) for row in rows)
    facts = _Facts(
        shares, _span_shares(trained), _medians(trained), config, _utilisation(rows, total), exchanged_s / total, step_s
    )
    worst = next(iter(shares))
    return Bottleneck(
        name=NAMES.get(worst, f"{worst}-bound"),
        shares=shares,
        utilisation=dict(facts.utilisation),
        step_s=step_s,
        communication_s=exchanged_s / len(rows),
        communication_bytes=sum(row["communication"]["bytes"] for row in rows) / len(rows),
        advice=advise(facts),
        waits=_waits([row for row in metrics if is_number(row.get(f"{_LAST}/ended_s"))]),
        measured={name: facts.metrics[name] for name in MEASURED if name in facts.metrics},
    )


def _waits(rows: Sequence[Json]) -> list[str]:
    """A sentence about the newest row, and about the row with the largest share of waiting; `rows` name the last group."""
    named = [] if not rows else [rows[-1], max(reversed(rows), key=_wait_share)]
    return [
        f"step {row.get('step')}: prompt {row.get(f'{_LAST}/prompt') or 0:.0f} ended last, after {row[f'{_LAST}/ended_s']:.3g} "
        f"s; its longest response has {row.get(f'{_LAST}/tokens') or 0:,.0f} tokens. Nine tenths of the prompts had ended "
        f"after {row.get(f'{_LAST}/others_ended_s') or 0:.3g} s and waited for {_wait_share(row):.0%} of the generation"
        for row in (named[:1] if named[:1] == named[1:] else named)
    ]


def _wait_share(row: Json) -> float:
    """Share of a generation in which at most a tenth of the groups was not complete."""
    ended_s, others_s = row.get(f"{_LAST}/ended_s") or 0.0, row.get(f"{_LAST}/others_ended_s") or 0.0
    return float(1 - others_s / ended_s) if ended_s > 0 else 0.0


def beside_plan(timeline: Sequence[Mapping[str, object]], planned: Sequence[Mapping[str, object]]) -> str | None:
    """The measured step next to the step that `verl plan` predicted, and the phase that differs most; None without either.
    The first step of each is left out where there are more: it includes warm-up, and nothing is made ahead of it."""
    if not timeline or not planned:
        return None
    measured, plan = (_median_phases(rows[1:] or rows) for rows in (timeline, planned))
    step_s, planned_s = sum(measured.values()), sum(plan.values())
    names = dict.fromkeys([*plan, *measured])
    worst = max(names, key=lambda name: abs(measured.get(name, 0.0) - plan.get(name, 0.0)))
    return (
        f"planned were {planned_s:.3g} s a step, without validation and saving, measured {step_s:.3g} s "
        f"({step_s / max(planned_s, 1e-9) - 1:+.0%}); {worst} differs most: {measured.get(worst, 0.0):.3g} s instead of "
        f"{plan.get(worst, 0.0):.3g} s"
    )


def _median_phases(rows: Sequence[Json]) -> dict[str, float]:
    names = [name for name in _phase_names(rows) if name not in ("validation", "saving")]
    return {name: statistics.median(row["phases"].get(name, 0.0) for row in rows) for name in names}


def _phase_names(rows: Sequence[Json]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["phases"]))


def _utilisation(rows: Sequence[Json], total: float) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row["roles"])
    return {name: sum(row["roles"].get(name, {}).get("busy_s", 0.0) for row in rows) / total for name in names}


def _medians(rows: Sequence[Json]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, int | float))
    values = {name: [row[name] for row in rows if isinstance(row.get(name), int | float)] for name in names}
    return {name: statistics.median(column) for name, column in values.items()}


def _span_shares(rows: Sequence[Json]) -> dict[str, float]:
    total = sum(row.get("timing_s/step") or 0.0 for row in rows) or 1.0
    names = dict.fromkeys(name for row in rows for name in row if name.startswith("timing_s/"))
    return {n.removeprefix("timing_s/"): sum(row.get(n) or 0.0 for row in rows) / total for n in names}


# -- advice: each function yields sentences about the facts; keys and metrics that a program lacks give no advice

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_NEED_OLD_LOG_PROBS = [
    f"algorithm.{name}"
    for name in ("rollout_correction.rollout_is", "rollout_correction.rollout_rs", "use_kl_in_reward")
]


def advise(facts: _Facts) -> list[str]:
    """Advice on a run that learns nothing, on phases that take a tenth of the time or more, the largest phase first, and on the
    other measurements."""
    phases = [phase for phase, share in facts.shares.items() if share >= _MIN_SHARE and phase in RULES]
    return [*_signal(facts), *(sentence for phase in phases for sentence in RULES[phase](facts)), *_other(facts)]


def _signal(facts: _Facts) -> Iterator[str]:
    if facts.is_silent:
        cut = facts.metric("response_length/clip_ratio")
        yield (
            f"Most steps learn nothing: all samples of a prompt have the same reward (mean "
            f"{facts.metric('critic/score/mean'):.3g}). "
            + (
                f"{cut:.0%} of the responses are cut at data.max_response_length="
                f"{facts.key('data.max_response_length', '?')}, before an answer perhaps: raise it."
                if cut >= _MANY_CUT
                else "Read some in samples/ of the run folder: the reward function, the prompt or the task does not fit."
            )
        )


def _rollout(facts: _Facts) -> Iterator[str]:
    several = facts.num_devices > 1  # on one device generation and training take turns: only scores come meanwhile
    cut = facts.metric("response_length/clip_ratio")
    waited = facts.shares.get("reward", 0.0) + several * facts.shares.get("rollout", 0.0)
    hidden = min(waited, facts.shares.get("training", 0.0) + facts.shares.get("reward", 0.0))
    if not facts.key(f"{_ROLLOUT}.prefetch_num", 0) and hidden >= _MIN_SHARE:
        yield (
            f"Generation, scoring and training take turns. With {_ROLLOUT}.prefetch_num=1 the next samples are generated "
            f"ahead (saves at most {hidden:.0%} of a step"
            f"{' with separate rollout devices' if several else ', in which it waits for scores'})."
        )
    slots, running = facts.key(f"{_ROLLOUT}.max_num_seqs", 0), facts.metric("rollout/max_running")
    samples = facts.key("data.train_batch_size", 0) * facts.key(f"{_ROLLOUT}.n", 1)
    if slots and running >= slots and samples > slots:
        yield (
            f"All {slots} generation slots are in use for {samples} samples. Raise {_ROLLOUT}.max_num_seqs as far as the KV "
            "cache has memory."
        )
    steps, waiting = facts.metric("rollout/num_decode_steps"), _wait_share(facts.metrics)
    alive = facts.metric("rollout/num_generated_tokens") / (steps or 1)
    is_idle = bool(steps and running) and alive <= 0.5 * running
    if is_idle or waiting >= _LONG_WAIT:
        idle = f"on average {alive:.0f} of {running:.0f} slots are decoding" if is_idle else ""
        waits = f"most groups wait for the last one for {waiting:.0%} of a generation" if waiting >= _LONG_WAIT else ""
        parts = f"partial_rollout=True and {_ROLLOUT}.prefetch_num=2"
        if facts.key(f"{_ROLLOUT}.partial_rollout", False):
            ahead = facts.key(f"{_ROLLOUT}.prefetch_num", 0) + 1
            parts = f"prefetch_num={ahead}, which makes their parts shorter"
        lower = f"Lower data.max_response_length (now {facts.key('data.max_response_length', '?')}), or continue"
        yield (
            f"Response lengths vary widely: {' and '.join(filter(None, (idle, waits)))}. "
            f"{'Continue' if cut >= _MANY_CUT else lower} long ones in the next step with {_ROLLOUT}.{parts}."
        )
    if cut >= _MANY_CUT and not facts.is_silent:
        yield (
            f"{cut:.0%} of the responses reach data.max_response_length and are cut. Raise it for whole answers, or make them "
            "shorter by the prompt or a penalty (reward.reward_manager.name=dapo, reward_kwargs.overlong_buffer_cfg)."
        )
    if several and facts.shares.get("training", 0.0) <= facts.shares.get("rollout", 0.0):
        yield f"Use more devices for generation: trainer.n_gpus_per_node, or {_ROLLOUT}.nnodes for separate devices."


def _training(facts: _Facts) -> Iterator[str]:
    batch = facts.key("data.train_batch_size", "?")
    is_one_update = facts.key(f"{_ACTOR}.ppo_mini_batch_size") == batch and facts.key(f"{_ACTOR}.ppo_epochs", 1) == 1
    is_needed = is_one_update or any(map(facts.key, _NEED_OLD_LOG_PROBS))
    if (share := facts.spans.get("old_log_prob", 0.0)) >= _MIN_SHARE and not is_needed:
        bypass = ", or the sampler's are used with algorithm.rollout_correction.bypass_mode=True"
        yield (
            f"Old log-probs cost {share:.0%} of the step. The update computes them itself when a batch gets one optimizer step "
            f"({_ACTOR}.ppo_mini_batch_size={batch}, ppo_epochs=1)"
            f"{'' if facts.key(f'{_ROLLOUT}.prefetch_num', 0) else bypass}."  # samples ahead are of older weights
        )
    rows = facts.key(f"{_ACTOR}.ppo_micro_batch_size_per_gpu")
    if rows is not None and not facts.key(f"{_ACTOR}.use_dynamic_bsz", False):
        yield (
            f"Micro-batches hold {rows} rows of any length. {_ACTOR}.use_dynamic_bsz=True cuts them by tokens "
            f"({_ACTOR}.ppo_max_token_len_per_gpu), which makes larger matmuls."
        )
    reuses = facts.metric("actor/reused_activations_ratio") >= 1  # the sampler's, so that no forward is computed again
    if facts.key("actor_rollout_ref.model.enable_gradient_checkpointing", False) is True and not reuses:
        yield (
            "Activations are computed twice. If they fit into memory, "
            "actor_rollout_ref.model.enable_gradient_checkpointing=False saves about a quarter of the update, and =selective "
            "almost as much with two thirds of the memory."
        )
    if (share := facts.spans.get("ref", 0.0)) >= _MIN_SHARE:
        yield f"The reference policy costs {share:.0%} of the step; only a KL term needs it ({_ACTOR}.use_kl_loss=False)."


def _reward(facts: _Facts) -> Iterator[str]:
    if facts.key("reward.reward_model.enable", False):
        more = facts.if_several(", or give it devices (trainer.placement)")
        yield (
            "All roles wait for the reward model. Raise reward.reward_model.rollout.max_num_batched_tokens, or use "
            f"rollout.dtype=bfloat16 where the device supports it{more}."
        )
    elif facts.utilisation.get("reward", 0.0) > 0.7 * facts.shares.get("reward", 0.0):
        yield (
            f"All {facts.key('reward.num_workers', 1)} scorers are busy. Raise reward.num_workers if there are cores, or make "
            "the function faster."
        )
    elif facts.shares.get("reward", 0.0) * facts.step_s >= _LONG_SCORES_S:  # less is the way to the scorers' processes
        yield "Scorers are mostly idle: one slow call delays the batch. Lower reward.timeout_s, or find the slow samples."


def _communication(facts: _Facts) -> Iterator[str]:
    yield (
        "Transfers of weights and results are slow. Train more per step (data.train_batch_size)"
        f"{facts.if_several(', let rollout share the devices of the actor (trainer.placement), or check the network')}."
    )


def _other(facts: _Facts) -> Iterator[str]:
    if facts.exchanging >= _MIN_SHARE:
        yield (
            f"Exchange with other processes takes {facts.exchanging:.0%} of the time; below 10% is usual. Gather parameters "
            f"once for several micro-batches ({_ACTOR}.fsdp_config.use_3d_hybrid=True, "
            f"{_ACTOR}.fsdp_config.batch_group_size=4), use larger micro-batches, or shard over fewer devices "
            f"({_ACTOR}.fsdp_config.fsdp_size). verl doctor shows the links."
        )
    if (gather_ms := facts.metric("perf/all_gather_ms")) >= _GATHER_MS:
        yield (
            f"An all-gather of parameters takes {gather_ms:.1f} ms; below {_GATHER_MS:.0f} ms is usual. "
            f"{_ACTOR}.fsdp_config.forward_prefetch=True hides it behind computation on GPUs, "
            f"{_ACTOR}.fsdp_config.layer_per_group makes it fewer and larger. verl.utils.benchmark_nccl() measures the links."
        )
    if (share := facts.metric("perf/memory_fragmentation")) >= _EMPTY_SHARE:
        yield (
            f"{share:.0%} of the GPU memory that PyTorch reserves is not allocated. Set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and cut long prompts (data.max_prompt_length)."
        )
    share, size = facts.metric("rollout/kv_fragmentation"), facts.key(f"{_ROLLOUT}.kv_cache_config.block_size", 16)
    if share >= _EMPTY_SHARE and size > 16:
        yield f"{share:.0%} of the KV cache's blocks is empty. Lower {_ROLLOUT}.kv_cache_config.block_size (now {size})."
    waits = facts.spans.get("rollout_wait", 0.0)
    if facts.key(f"{_ROLLOUT}.prefetch_num", 0) and waits >= _MIN_SHARE:
        yield (
            f"Training waits for samples for {waits:.0%} of a step, though the queue has "
            f"{facts.metric('training/rollout_queue/qsize'):.0f} batches: generation is slower than training. "
            f"{facts.if_several('Give it more devices (trainer.placement, verl scale), or s') or 'S'}horten responses "
            "(data.max_response_length)."
        )


def _less_often(facts: _Facts, key: str, phase: str, or_else: str = "") -> Iterator[str]:
    """The share of `phase`, and the setting with which it takes a twentieth of the time."""
    share, setting = facts.shares[phase], facts.key(f"trainer.{key}")
    every = max(int(facts.key(f"trainer.{key}", 1)), 1)
    value = f"={max(round(every * share / 0.05), every + 1)} (now {every})"
    if isinstance(setting, str):  # after_each_epoch
        value = f" to more steps than an epoch has (now {setting})"
    head = f"{phase.capitalize()} takes {share:.0%} of the time. To bring it to about 5%, set trainer.{key}"
    yield f"{head}{value}{or_else}."


RULES: dict[str, Callable[[_Facts], Iterator[str]]] = {
    "rollout": _rollout,
    "training": _training,
    "reward": _reward,
    "communication": _communication,
    "validation": partial(_less_often, key="test_freq", phase="validation", or_else=", or lower data.val_max_samples"),
    "saving": partial(_less_often, key="save_freq", phase="saving"),
}
MEASURED = {
    "actor/reused_activations_ratio": "tokens whose activations training takes from generation {:.0%}",
    "perf/all_gather_ms": "all-gather of parameters {:.1f} ms",
    "perf/memory_fragmentation": "reserved GPU memory that is not allocated {:.0%}",
    "rollout/kv_fragmentation": "empty part of the KV cache's blocks {:.0%}",
    "rollout/saved_step_share": "decode steps that drafts saved {:.0%}",
    "training/rollout_queue/qsize": "batches in the queue {:.0f}",
}
