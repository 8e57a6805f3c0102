"""PPO and its critic-free kin (GRPO, RLOO, ReMax, ...) as one program over roles.

    loader ──prompts──► rollout ──each sample as it ends──► reward
                           │                                  │
                           └────────── batch ◄─────scores─────┘
                                        │
          reference (KL terms only) ────┤ log-probs
          actor (only if they differ) ──┤ old log-probs
          critic (GAE only) ────────────┤ values
                                        ▼
                     rewards - KL, correction, advantages      (small columns, here)
                                        │
                        critic.update ──┴── actor.update ──► rollout.publish(version + 1)

Which functions fill the boxes comes from the config; which process runs a role is the runtime's business. Every phase runs
under a span, and a requested stop is honoured between phases, before any weight of the step has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from verl.algorithms.advantages import compute_advantage
from verl.algorithms.correction import require_fresh, rollout_correction, rollout_gap_metrics
from verl.algorithms.filters import pf_ppo_indices
from verl.algorithms.kl import apply_kl_penalty
from verl.config import VerlConfig
from verl.data.loader import PromptLoader
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.programs.collect import Collector
from verl.programs.guards import Guards
from verl.programs.state import TrainerState
from verl.runtime.requirements import Needs, old_log_prob_source
from verl.runtime.roles import Roles
from verl.runtime.worker_group import wait
from verl.tracking.ledger.records import OpenSample, keys_of
from verl.tracking.ledger.tracker import SampleTracker
from verl.tracking.spans import Spans


@dataclass
class StepResult:
    batch: DataProto  # the rows that trained, with every column that was made for them
    metrics: dict[str, Metric] = field(default_factory=dict)
    skipped: str = ""  # why nothing of the batch has trained


class PPO:
    """`check_stop` is called between phases and raises to abandon the step. `samples` knows what has trained, and so where in
    the data the next step begins."""

    def __init__(
        self, config: VerlConfig, roles: Roles, loader: PromptLoader, spans: Spans, check_stop: Callable[[], None]
    ):
        self.config = config
        self.roles = roles
        self.spans = spans
        self.check_stop = check_stop
        self.samples = SampleTracker()
        self.collector = Collector(config, roles, loader, spans, check_stop, self.samples)
        self.guards = Guards(config.trainer.guards)
        self.needs = Needs.of(config)
        self.max_age = 0  # of a sample that trains, in versions of the weights
        self.old_log_probs = old_log_prob_source(
            config,
            self.needs,
            sampler_is_exact=roles.rollout.exact_log_probs(),
            rows_per_step=config.data.train_batch_size * config.actor_rollout_ref.rollout.n,
        )

    def step(self, state: TrainerState) -> StepResult:
        """One step; `state` (KL controller, weight version) and the samples move on only as the step succeeds."""
        result, next_ordinal = self.collect(state)
        self.check_stop()
        with self.guards.step(state, result, next_ordinal):
            self.annotate(result)
            self.check_stop()
            self.guards.check_samples(result)
            self.assign_credit(result, state)
            self.check_stop()
            self.guards.check_credit(result)
            self.update(result, state)
        self.samples.train(state.step, [] if result.skipped else keys_of(result.batch))
        return result

    def collect(self, state: TrainerState) -> tuple[StepResult, int]:
        """Samples with scores, and the ordinal of the next step's first prompt."""
        batch, metrics, next_ordinal = self.collector.collect(state.step, self.samples.cursor)
        return StepResult(batch, metrics), next_ordinal

    def settle(self) -> None:
        """All samples that have been asked for are in the ledger when this returns."""

    def restore(self, waiting: Sequence[OpenSample]) -> None:
        """Go on from a checkpoint, at which these samples were open."""

    def annotate(self, result: StepResult) -> None:
        """Log-probs and values under the weights that made the samples. Where roles live on devices of their own they work
        at the same time: all are asked before the first answer is waited for."""
        batch, roles = result.batch, self.roles
        reference = self._begin("ref", roles.reference, "log_probs", batch)
        values = self._begin("values", roles.critic, "values", batch)
        if self.old_log_probs == "recompute" and roles.actor is not None:
            with self.spans("old_log_prob"):
                batch.union(roles.actor.log_probs(batch, sum_pi_squared=self.needs.sum_pi_squared))
            entropy = batch.batch["entropys"][batch.batch["response_mask"]]
            result.metrics["actor/entropy"] = Metric.mean(entropy.mean(), weight=entropy.numel())
        elif self.old_log_probs == "rollout":
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"].clone()
        if reference is not None:
            batch.union(self._finish("ref", reference))
        if values is not None:
            batch.union(self._finish("values", values))

    def _begin(self, span: str, role: Any, method: str, *args: Any) -> Any:
        """The call's result or a future of it; None without the role."""
        if role is None:
            return None
        with self.spans(span):
            return getattr(role, method)(*args)

    def _finish(self, span: str, asked: Any) -> Any:
        with self.spans(span):
            return wait(asked)

    def assign_credit(self, result: StepResult, state: TrainerState) -> None:
        """Scores to advantages: KL in reward, rollout correction, the estimator, PF-PPO's resampling."""
        with self.spans("adv"):
            algorithm, batch = self.config.algorithm, result.batch
            columns = batch.batch
            columns["token_level_rewards"] = columns["token_level_scores"]
            if algorithm.use_kl_in_reward:
                result.metrics.update(self._penalise_kl(batch, state))
            if self.old_log_probs == "recompute":
                result.metrics.update(self._correct(batch))
            columns["advantages"], columns["returns"] = compute_advantage(
                algorithm.adv_estimator,
                {**dict(columns.items()), **batch.non_tensor_batch},
                config=algorithm,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
                gdpo_reward_keys=algorithm.gdpo_reward_keys,
                gdpo_reward_weights=algorithm.gdpo_reward_weights,
            )
            if algorithm.use_pf_ppo:
                rule, generator = algorithm.pf_ppo, torch.Generator().manual_seed(state.step)
                scores = columns["token_level_scores"].sum(dim=1)
                rows = pf_ppo_indices(scores, rule.reweight_method, rule.weight_pow, generator)
                result.batch = batch.select_idxs(rows)

    def _penalise_kl(self, batch: DataProto, state: TrainerState) -> dict[str, Metric]:
        columns, controller = batch.batch, state.kl_controller
        beta = controller.value
        columns["token_level_rewards"], mean_kl = apply_kl_penalty(
            columns["token_level_scores"], columns["old_log_probs"], columns["ref_log_prob"], columns["response_mask"],
            beta=beta, kind=self.config.algorithm.kl_penalty,
        )  # fmt: skip
        controller.update(float(mean_kl), n_steps=len(batch))
        return {"actor/reward_kl_penalty": Metric.last(mean_kl), "actor/reward_kl_penalty_coeff": Metric.last(beta)}

    def _correct(self, batch: DataProto) -> dict[str, Metric]:
        """Weigh or reject what the sampler drew too differently from the trainer; always measure how far they are."""
        columns, rule = batch.batch, asdict(self.config.algorithm.rollout_correction)
        for name in ("bypass_mode", "loss_type"):
            del rule[name]
        old, sampled, mask = columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"]
        found = rollout_correction(old, sampled, mask, **rule)
        if found.weights is not None:
            columns["rollout_is_weights"] = found.weights
        columns["response_mask"] = found.response_mask
        return {**found.metrics, **rollout_gap_metrics(old[mask], sampled[mask])}

    def update(self, result: StepResult, state: TrainerState) -> None:
        """The only phase that changes weights; the sampler carries the next version when it ends. Actor and critic train at
        the same time where they live on different devices."""
        roles, batch, metrics = self.roles, result.batch, result.metrics
        keys = list(batch.non_tensor_batch["sample_key"])
        require_fresh(batch.batch["weight_version"], state.weight_version, self.max_age, keys)
        trains = roles.actor is not None and state.step > self.config.trainer.critic_warmup
        critic = self._begin("update_critic", roles.critic, "update", batch, state.step)
        if trains:
            actor = self._begin("update_actor", roles.actor, "update", batch, state.step)
            found = self.guards.note(self._finish("update_actor", actor)).metrics()
            if self.old_log_probs == "recompute":  # then sampler and trainer were compared on all tokens already
                found = {name: m for name, m in found.items() if not name.startswith("training/rollout_")}
            metrics.update(found)
        if critic is not None:
            metrics.update(self.guards.note(self._finish("update_critic", critic)).metrics())
        self.guards.check_updates(result)
        metrics.setdefault("training/rollout_probs_diff_valid", Metric.min(0.0))
        with self.spans("update_weights"):
            state.weight_version += 1
            roles.rollout.publish(state.weight_version)
