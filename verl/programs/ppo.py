"""PPO and its critic-free family (GRPO, RLOO, ReMax, ...) as one program over roles.

    loader ──prompts──► rollout ──each sample as it ends──► reward
                           │                                  │
                           └────────── batch ◄─────scores─────┘
                                        │
          reference (KL terms only) ────┤ log-probs
          actor (only if they differ) ──┤ old log-probs
          critic (GAE only) ────────────┤ values
          teachers (distillation only) ─┤ their log-probs
                                        ▼
                     rewards - KL, correction, advantages      (small columns, here)
                                        │
                        critic.update ──┴── actor.update ──► weights.sync(version + 1)

The config chooses the functions of each phase; the runtime chooses the process of each role. Every phase runs under a span, and
a requested stop is honoured between phases, before any weight of the step has changed.
"""

from dataclasses import asdict, replace

import torch

from verl.algorithms.advantages.turns import turn_numbers
from verl.algorithms.correction import CORRECTION_SETTINGS, require_fresh, rollout_correction, rollout_gap_metrics
from verl.algorithms.filters import pf_ppo_indices
from verl.algorithms.kl import apply_kl_penalty
from verl.config import PPOConfig
from verl.data_proto.batch_metrics import chosen_values, scored_rows
from verl.data_proto.future import Future
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import names_of_samples
from verl.data_proto.token_values import compared_log_probs
from verl.programs.api import RunContext
from verl.programs.collect import Collector
from verl.programs.distillation import RowResponses, Teachers
from verl.programs.ppo_data import PPOData
from verl.programs.ppo_program import PPOProgram, comparing, without_experts
from verl.programs.ppo_roles import Needs, old_log_prob_source
from verl.roles.api import Roles
from verl.roles.guards import StepBatch
from verl.roles.updates import Updates
from verl.tracking.ledger.records import keys_of


class PPO(PPOProgram):
    """The phases of a step."""

    def __init__(self, config: PPOConfig, data: PPOData, roles: Roles, run: RunContext):
        super().__init__(config, data, roles, run)
        handles, self.spans = self.roles_of_run, run.spans
        self.actor, self.critic, self.reference = handles.actor, handles.critic, handles.reference
        self.needs, self.max_age = Needs.of(config), 0  # max_age: of a sample that trains, in versions of the weights
        exact = handles.rollout.exact_log_probs()
        self.old_log_probs = old_log_prob_source(config, self.needs, sampler_is_exact=exact)
        self.teachers = Teachers(config, handles.teachers) if config.distillation.enabled and handles.actor else None
        self.row_responses: RowResponses | None = None
        if config.distillation.on_policy_share < 1:
            self.row_responses = RowResponses(handles.rollout, config, data.tokenizer, lambda: self.weight_version)
            handles = replace(handles, rollout=self.row_responses)
        if data.train is not None:
            self.collector = Collector(config, handles, data.train, run, self.samples, self.stages, self.reads_data)

    def train(self, step: int) -> StepBatch:
        """One step; weight version and samples advance only as the step succeeds."""
        result, next_ordinal = self.collect(step)
        self.run.check_stop()
        if self.branches is not None:
            result.batch = self.branches.with_conversations(result.batch, self.data.tokenizer.pad_token_id or 0)
        with self.guards.step(step, result, next_ordinal):
            self.annotate(result)
            self.run.check_stop()
            self.guards.check_samples(result, needs_scores=self.needs.credit)
            self.assign_credit(result, step)
            self.run.check_stop()
            self.guards.check_credit(result)
            self.update(result, step)
        if result.skipped and self.collector.syncs:  # the engine has let go of the weights
            self.send_weights(step)
        if self.branches is not None:
            result.batch = self.branches.episodes(result.batch)
        self.samples.train(step, [] if result.skipped else keys_of(result.batch))
        return result

    def collect(self, step: int) -> tuple[StepBatch, int]:
        """Samples with scores, and the index of the next step's first prompt."""
        batch, metrics, next_ordinal = self.collector.collect(step, self.samples.cursor)
        if self.row_responses is not None and not self.row_responses.is_on_policy(step):
            batch.pop(["rollout_log_probs"])  # no sampler made these tokens
        return StepBatch(batch, metrics), next_ordinal

    def annotate(self, result: StepBatch) -> None:
        """Compute log-probs and values under the weights that made the samples. Roles on separate devices work at the same
        time: all calls start before the first result is waited for."""
        batch, reference, values, taught = result.batch, None, None, None
        columns = without_experts(batch)
        if self.teachers is not None:
            with self.spans("teacher"):
                taught = self.teachers.start(columns)
        if self.reference is not None:
            with self.spans("ref"):
                reference = self.reference.forward(columns, {"log_probs": "ref_log_prob"})
        if self.critic is not None:
            with self.spans("values"):
                values = self.critic.forward(columns, {"values": "values"})
        if self.old_log_probs == "recompute" and self.actor is not None:
            squared = {"sum_pi_squared": "sum_pi_squared"} if self.needs.sum_pi_squared else {}
            outputs = {"log_probs": "old_log_probs", "entropy": "entropys", **squared}
            with self.spans("old_log_prob"):
                batch.union(self.actor.forward(batch, outputs).get())
            entropy = chosen_values(batch.batch["entropys"], batch.batch["response_mask"])
            result.metrics["actor/entropy"] = Metric.mean(entropy.mean(), weight=entropy.numel())
        elif self.old_log_probs == "rollout":
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"].clone()
        if reference is not None:
            with self.spans("ref"):
                batch.union(reference.get())
        if values is not None:
            with self.spans("values"):
                batch.union(values.get())
        if taught is not None:
            with self.spans("teacher"):
                batch.union(taught())

    def assign_credit(self, result: StepBatch, step: int) -> None:
        """Scores to advantages: KL in reward, rollout correction, the estimator, PF-PPO's resampling."""
        with self.spans("adv"):
            algorithm, batch, columns = self.config.algorithm, result.batch, result.batch.batch
            columns["token_level_rewards"] = columns["token_level_scores"]
            if not self.needs.credit:
                columns["advantages"] = columns["returns"] = torch.zeros_like(columns["token_level_scores"])
                return
            if self.needs.turn_ids:  # of all sampled tokens, before the correction rejects some
                columns["turn_ids"] = turn_numbers(columns["response_mask"])
            if algorithm.use_kl_in_reward:
                result.metrics.update(self._penalise_kl(batch))
            if self.old_log_probs == "recompute":
                result.metrics.update(self._correct(batch))
            columns["advantages"], columns["returns"] = self.advantages(batch)
            if algorithm.use_pf_ppo:
                rule, generator = algorithm.pf_ppo, torch.Generator().manual_seed(step)
                scores, scored = columns["token_level_scores"].sum(dim=1), scored_rows(batch)
                rows = pf_ppo_indices(scores, rule.reweight_method, rule.weight_pow, generator, scored)
                result.batch = batch.select_idxs(rows)
            if self.stages is not None:
                result.batch = self.stages.credited(result.batch, step)

    def _penalise_kl(self, batch: DataProto) -> dict[str, Metric]:
        columns, controller, beta = batch.batch, self.kl_controller, self.kl_controller.value
        columns["token_level_rewards"], mean_kl = apply_kl_penalty(
            columns["token_level_scores"], columns["old_log_probs"], columns["ref_log_prob"], columns["response_mask"],
            beta=beta, kind=self.config.algorithm.kl_penalty,
        )  # fmt: skip
        controller.update(float(mean_kl), n_steps=int(columns["response_mask"].any(-1).sum()))
        return {"actor/reward_kl_penalty": Metric.last(mean_kl), "actor/reward_kl_penalty_coeff": Metric.last(beta)}

    def _correct(self, batch: DataProto) -> dict[str, Metric]:
        """Weigh or reject tokens if sampler and trainer differ too much; always measure the difference."""
        columns, section = batch.batch, asdict(self.config.algorithm.rollout_correction)
        rule = {name: section[name] for name in CORRECTION_SETTINGS}
        old, sampled, mask = columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"]
        correction = rollout_correction(old, sampled, mask, **rule)
        if correction.weights is not None:
            columns["rollout_is_weights"] = correction.weights
        columns["response_mask"] = correction.response_mask
        return {**correction.metrics, **rollout_gap_metrics(chosen_values(old, mask), chosen_values(sampled, mask))}

    def update(self, result: StepBatch, step: int) -> None:
        """The only phase that changes weights; the sampler carries the next version when it ends. Actor and critic train at the
        same time if they live on different devices."""
        batch, metrics = result.batch, result.metrics
        versions = batch.batch["weight_version"]
        require_fresh(versions, self.weight_version, self.max_age, lambda row: names_of_samples(batch)[row])
        critic: Future[Updates] | None = None
        if self.critic is not None:
            with self.spans("update_critic"):
                critic = self.critic.update(without_experts(batch), step)
        if self.actor is not None and step > self.config.trainer.critic_warmup:
            with self.spans("update_actor"):
                updates = self.actor.update(batch, step).get()
            values = self.guards.record(updates).metrics()
            metrics.update({name.replace("actor/distillation/", "distillation/"): m for name, m in values.items()})
            result.observed = updates.observed
        if critic is not None:
            with self.spans("update_critic"):
                metrics.update(self.guards.record(critic.get()).metrics())
        # recomputed log-probs were compared before
        with comparing(compared_log_probs(result.observed) if self.old_log_probs != "recompute" else (), metrics):
            self.guards.check_updates(result)
            with self.spans("update_weights"):
                self.weight_version += 1
                self.send_weights(step)
        metrics.setdefault("training/rollout_probs_diff_valid", Metric.min(0.0))
