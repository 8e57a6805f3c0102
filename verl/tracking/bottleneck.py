"""What bounds a run, and which keys would change it: from the timeline, the metrics and the config, without models.

found = find_bottleneck(timeline_rows, metrics_rows, config)
found.name      "rollout-bound"
found.advice    ["While it generates, nothing trains: ... actor_rollout_ref.rollout.prefetch_num=1 ..."]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAMES = {
    "rollout": "rollout-bound",
    "training": "training-bound",
    "reward": "reward-bound",
    "communication": "communication-bound",
    "validation": "validation-bound",
    "saving": "saving-bound",
    "other": "bound by work outside the phases",
}
_WORTH = 0.1  # of the time; advice about less than that is noise


@dataclass(frozen=True)
class Bottleneck:
    """`shares`: phase -> share of the time, largest first. `utilisation`: role -> share of the time in which it worked."""

    name: str
    shares: dict[str, float]
    utilisation: dict[str, float]
    step_s: float  # median, without validation and saving
    communication_s: float  # per step
    communication_bytes: float  # per step
    advice: list[str]


@dataclass(frozen=True)
class _Facts:
    shares: Mapping[str, float]
    spans: Mapping[str, float]  # span -> share of the step time
    metrics: Mapping[str, float]  # medians over the steps
    config: Mapping[str, Any]
    utilisation: Mapping[str, float]

    def key(self, path: str, default: Any = None) -> Any:
        node: Any = self.config
        for name in path.split("."):
            if not isinstance(node, Mapping) or name not in node:
                return default
            node = node[name]
        return default if node is None else node

    def metric(self, name: str, default: float = 0.0) -> float:
        return self.metrics.get(name, default)


def find_bottleneck(
    timeline: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> Bottleneck | None:
    """None before the first step has ended. The first step, which warms up, counts only while there are no three more."""
    rows = list(timeline[1:] if len(timeline) > 3 else timeline)
    if not rows:
        return None
    total = sum(row["seconds"] for row in rows) or 1.0
    phases = {name: sum(row["phases"].get(name, 0.0) for row in rows) / total for name in _phase_names(rows)}
    shares = dict(sorted(phases.items(), key=lambda item: -item[1]))
    trained = [row for row in metrics if row.get("step", 0) > 0][-len(rows) :]
    facts = _Facts(shares, _span_shares(trained), _medians(trained), config, _utilisation(rows, total))
    worst = next(iter(shares))
    return Bottleneck(
        name=NAMES[worst],
        shares=shares,
        utilisation=dict(facts.utilisation),
        step_s=statistics.median(_step_seconds(row) for row in rows),
        communication_s=sum(row["communication"]["seconds"] for row in rows) / len(rows),
        communication_bytes=sum(row["communication"]["bytes"] for row in rows) / len(rows),
        advice=advise(facts),
    )


def _phase_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["phases"]))


def _step_seconds(row: Mapping[str, Any]) -> float:
    return float(row["seconds"] - row["phases"].get("validation", 0.0) - row["phases"].get("saving", 0.0))


def _utilisation(rows: Sequence[Mapping[str, Any]], total: float) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row["roles"])
    return {name: sum(row["roles"].get(name, {}).get("busy_s", 0.0) for row in rows) / total for name in names}


def _medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, int | float))
    values = {name: [row[name] for row in rows if isinstance(row.get(name), int | float)] for name in names}
    return {name: statistics.median(found) for name, found in values.items()}


def _span_shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    total = sum(row.get("timing_s/step") or 0.0 for row in rows) or 1.0
    names = dict.fromkeys(name for row in rows for name in row if name.startswith("timing_s/"))
    return {n.removeprefix("timing_s/"): sum(row.get(n) or 0.0 for row in rows) / total for n in names}


# -- advice: each rule looks at the facts and says one sentence, or nothing

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
Rule = Callable[[_Facts], str | None]


def advise(facts: _Facts) -> list[str]:
    """Sentences about phases that take a tenth of the time or more, the largest phase first."""
    return [
        sentence
        for phase, share in facts.shares.items()
        if share >= _WORTH
        for rule in RULES.get(phase, ())
        if (sentence := rule(facts)) is not None
    ]


def _overlap(facts: _Facts) -> str | None:
    waits = facts.shares.get("reward", 0.0) + facts.shares.get("rollout", 0.0)
    hidden = min(waits, facts.shares.get("training", 0.0) + facts.shares.get("reward", 0.0))
    if facts.key(f"{_ROLLOUT}.prefetch_num", 0) or hidden < _WORTH:
        return None
    return (
        f"Generation, scoring and training take turns. With {_ROLLOUT}.prefetch_num=1 the next samples are made while these "
        f"train (at most {hidden:.0%} of the step where rollout has devices of its own; on one device what the scorer waits)."
    )


def _slots(facts: _Facts) -> str | None:
    slots, running = facts.key(f"{_ROLLOUT}.max_num_seqs", 0), facts.metric("rollout/max_running")
    samples = facts.key("data.train_batch_size", 0) * facts.key(f"{_ROLLOUT}.n", 1)
    if not slots or running < slots or samples <= slots:
        return None
    return (
        f"All {slots} generation slots are taken and {samples} samples want one. Raise {_ROLLOUT}.max_num_seqs as far as "
        "the KV cache has memory."
    )


def _tail(facts: _Facts) -> str | None:
    steps, running = facts.metric("rollout/num_decode_steps"), facts.metric("rollout/max_running")
    if not steps or not running:
        return None
    alive = facts.metric("rollout/num_generated_tokens") / steps
    if alive > 0.5 * running:
        return None
    return (
        f"Responses differ much in length: on average {alive:.0f} of {running:.0f} slots are decoding. Lower "
        f"data.max_response_length (now {facts.key('data.max_response_length', '?')}), or let long ones go on in the next "
        f"step with {_ROLLOUT}.prefetch_num=2 and {_ROLLOUT}.partial_rollout=True."
    )


def _clipped(facts: _Facts) -> str | None:
    share = facts.metric("response_length/clip_ratio")
    if share < 0.3:
        return None
    return (
        f"{share:.0%} of the responses run into data.max_response_length and are cut. If they should end earlier, say so in "
        "the prompt or punish length (reward.reward_manager.name=dapo, reward_kwargs.overlong_buffer_cfg)."
    )


def _more_devices(facts: _Facts) -> str | None:
    return f"More devices for generation: trainer.n_gpus_per_node, or {_ROLLOUT}.nnodes for devices of its own."


def _old_log_probs(facts: _Facts) -> str | None:
    share = facts.spans.get("old_log_prob", 0.0)
    if share < _WORTH:
        return None
    return (
        f"Old log-probs cost {share:.0%} of the step. They fall out of the update when a batch gets one optimizer step "
        f"({_ACTOR}.ppo_mini_batch_size={facts.key('data.train_batch_size', '?')}, ppo_epochs=1), and the sampler's own serve "
        "with algorithm.rollout_correction.bypass_mode=True."
    )


def _micro_batches(facts: _Facts) -> str | None:
    rows = facts.key(f"{_ACTOR}.ppo_micro_batch_size_per_gpu")
    if rows is None or facts.key(f"{_ACTOR}.use_dynamic_bsz", False):
        return None
    return (
        f"Micro-batches hold {rows} rows whatever their length. {_ACTOR}.use_dynamic_bsz=True cuts them by tokens "
        f"({_ACTOR}.ppo_max_token_len_per_gpu), so that products are large."
    )


def _checkpointing(facts: _Facts) -> str | None:
    if not facts.key("actor_rollout_ref.model.enable_gradient_checkpointing", False):
        return None
    return (
        "Activations are computed twice. Where they fit into memory, "
        "actor_rollout_ref.model.enable_gradient_checkpointing=False saves about a quarter of the update."
    )


def _reference(facts: _Facts) -> str | None:
    share = facts.spans.get("ref", 0.0)
    if share < _WORTH:
        return None
    return f"The reference policy costs {share:.0%} of the step; without a KL term ({_ACTOR}.use_kl_loss=False) it is gone."


def _scorers(facts: _Facts) -> str | None:
    workers, busy = facts.key("reward.num_workers", 1), facts.utilisation.get("reward", 0.0)
    waited = facts.shares.get("reward", 0.0)
    if facts.key("reward.reward_model.enable", False):
        return (
            "The reward model works while everybody waits. Raise reward.reward_model.rollout.max_num_batched_tokens, use "
            "rollout.dtype=bfloat16 where the device computes it, or give it devices (trainer.placement)."
        )
    if busy > 0.7 * waited:
        return f"All {workers} scorers are busy. Raise reward.num_workers (cores allow for more), or make the function faster."
    return "Scorers wait more than they work: one slow call holds up the batch. Lower reward.timeout_s, or look at its tail."


def _fewer_exchanges(facts: _Facts) -> str | None:
    return (
        "Weights and results travel for long. Let rollout share the actor's devices (trainer.placement), train more per "
        "step (data.train_batch_size), or look at the network that connects the devices."
    )


def _validation(facts: _Facts) -> str | None:
    every = max(int(facts.key("trainer.test_freq", 1)), 1)
    wanted = max(round(every * facts.shares["validation"] / 0.05), every + 1)
    return f"trainer.test_freq={wanted} (now {every}) or a smaller data.val_max_samples makes validation about a twentieth."


def _saving(facts: _Facts) -> str | None:
    every = max(int(facts.key("trainer.save_freq", 1)), 1)
    wanted = max(round(every * facts.shares["saving"] / 0.05), every + 1)
    return f"trainer.save_freq={wanted} (now {every}) makes saving about a twentieth of the time."


RULES: dict[str, tuple[Rule, ...]] = {
    "rollout": (_overlap, _slots, _tail, _clipped, _more_devices),
    "training": (_old_log_probs, _micro_batches, _checkpointing, _reference),
    "reward": (_scorers,),
    "communication": (_fewer_exchanges,),
    "validation": (_validation,),
    "saving": (_saving,),
}
