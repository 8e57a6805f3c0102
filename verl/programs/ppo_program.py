"""The part of PPO that is not its algorithm: state, samples, checkpoints, header and results, for the host."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch

from verl.algorithms.advantages import compute_advantage
from verl.algorithms.correction import rollout_gap_metrics
from verl.algorithms.kl import make_kl_controller
from verl.checkpoint.store import CheckpointWriter
from verl.config import PPOConfig
from verl.config.active_keys import trains_branches, uses_rewards
from verl.data_proto.batch_metrics import data_metrics, span_tokens, variety_metrics
from verl.data_proto.extras import EXPERTS as ROUTED_EXPERTS
from verl.data_proto.metrics import Metric, metric_values
from verl.data_proto.proto import DataProto
from verl.data_proto.sample_rows import observed_rows
from verl.distributions import load_part
from verl.manifest import FileRecord, record_of
from verl.parallel.serialize import record
from verl.programs.api import Program, RunContext, StepResult
from verl.programs.collect import Validator
from verl.programs.ppo_data import PPOData, load_data
from verl.programs.ppo_roles import PPORoles, ppo_roles
from verl.programs.specs import Traces
from verl.programs.stages import Stages
from verl.regular_files import sync_file
from verl.roles.api import Roles, RoleSpecs
from verl.roles.guards import Guards, RollBack, StepBatch
from verl.roles.rollout import sampling_params
from verl.tracking.console import StepMetrics
from verl.tracking.files import has, is_count, is_number, is_text, maybe
from verl.tracking.learning import CollapseWatch, SignalWatch
from verl.tracking.ledger.file import NAME as LEDGER
from verl.tracking.ledger.file import write_open
from verl.tracking.ledger.records import Offset, OpenSample, SegmentRecord, Snapshot
from verl.tracking.ledger.tracker import IN_CHECKPOINT, SampleTracker, start_ledger
from verl.tracking.ledger.writer import LedgerWriter
from verl.tracking.run_folder import Curves
from verl.tracking.summary import Result
from verl.tracking.timeline import SpanPhases

_TOKEN_BYTES = 16  # of an open sample in a checkpoint, with its log-prob

for _cls in (Offset, SegmentRecord, OpenSample, Snapshot):
    record(_cls)  # rank 0 broadcasts its snapshot


def start_samples(
    samples: SampleTracker, run: RunContext, checkpoint: Path | None, saved: Mapping[str, object] | None
) -> list[OpenSample]:
    """Samples and ledger of the run folder continue from what `checkpoint` recorded (`saved`), or start empty; may be called
    again to go back. Returns the samples that were open there. Raises CheckpointError as `start_ledger` does."""
    samples.close()
    path = run.folder / LEDGER
    snapshot = run.broadcast(start_ledger(path, checkpoint, saved) if run.is_rank_zero else None)
    assert snapshot is not None
    samples.start(snapshot, LedgerWriter(path) if run.is_rank_zero else None)
    return snapshot.waiting


def open_samples(samples: SampleTracker) -> dict[str, OpenSamplesWriter]:
    """The part of a checkpoint that holds the open samples: folder name -> its writer. Nothing on ranks other than 0, or when
    none are open."""
    has_any = samples.path is not None and samples.num_open()
    return {IN_CHECKPOINT.parent.name: OpenSamplesWriter(samples)} if has_any else {}


class OpenSamplesWriter:
    """Writes the samples that are open at the end of the last step into a checkpoint, so that the checkpoint can be used
    without its run folder. The ledger must have been committed."""

    def __init__(self, samples: SampleTracker):
        self.samples = samples

    def num_bytes(self) -> int:
        """About the size of the file."""
        return _TOKEN_BYTES * self.samples.num_open_tokens()

    def write(self, folder: Path) -> dict[str, FileRecord]:
        """See verl.checkpoint.store.CheckpointWriter."""
        folder.mkdir()
        target = folder / LEDGER
        assert self.samples.path is not None
        write_open(self.samples.path, target, self.samples.offset)
        sync_file(target)
        return {LEDGER: record_of(target)}


log = logging.getLogger(__name__)


def curves_of(scores: Mapping[str, str]) -> Curves:
    """`curves` of a program that samples; `scores` (metric -> label) are those of the samples of a step."""
    return {
        "mean reward": {**scores, "val/reward": "held-out, sampled", "val/greedy": "held-out, greedy"},
        "response length (tokens)": {"response_length/mean": ""},
        "turns of an episode": {"num_turns/mean": ""},
        "different responses (share)": {"response/distinct_ratio": ""},
        "entropy (nats)": {"actor/entropy": ""},
        "distance to the teacher": {"distillation/loss": ""},
        "KL": {
            "actor/ppo_kl": "to the old policy",
            "actor/kl_loss": "to the reference",
            "actor/reward_kl_penalty": "to the reference, in the reward",
        },
        "age of the samples (weight versions)": {"training/off_policy/trajectory_staleness/mean": ""},
    }


def greedy_curves(curves: Curves) -> Curves:
    """The curves of a run with greedy validation: val/reward and val/greedy are one."""
    panels = {}
    for title, names in curves.items():
        panels[title] = {name: label for name, label in names.items() if name != "val/greedy"}
        if "val/reward" in names:
            panels[title]["val/reward"] = "held-out, greedy"
    return panels


class PPOProgram(Program[PPOConfig]):
    """Subclasses define `train`. `samples` records the samples that have trained, and so the first prompt of the next step.
    Columns of the data end with the rewards, unless `reads_data` or functions of the user may read them later."""

    reads_data = False
    console_metrics: ClassVar[StepMetrics] = {
        "critic/score/mean": ("reward", "{:.3f}"),
        "actor/pg_loss": ("loss", "{:.3g}"),
        "actor/ppo_kl": ("kl", "{:.1e}"),
        "response_length/mean": ("length", "{:.1f}"),
        "response/distinct_ratio": ("distinct", "{:.2f}"),
        "num_turns/mean": ("turns", "{:.1f}"),
        "tool_call_counts/mean": ("calls", "{:.1f}"),
        "actor/entropy": ("entropy", "{:.3f}"),
        "actor/kl_loss": ("kl_ref", "{:.2g}"),
        "actor/reward_kl_penalty": ("kl_in_reward", "{:.2g}"),
        "distillation/loss": ("teacher", "{:.3g}"),
        "actor/grad_norm": ("grad", "{:.2f}"),
        "critic/vf_explained_var": ("explained", "{:.2f}"),
    }
    curves = curves_of({"critic/score/mean": "training"})
    span_phases: ClassVar[SpanPhases] = {
        "gen": ("rollout", "rollout"),
        "gen_max": ("rollout", "rollout"),
        "rollout_wait": ("rollout", None),  # for samples that are generated in parallel
        "reward": ("reward", None),  # for scores; the scorers report their own busy time
        "old_log_prob": ("training", "actor"),
        "update_actor": ("training", "actor"),
        "ref": ("training", "reference"),
        "teacher": ("training", "teacher"),
        "values": ("training", "critic"),
        "update_critic": ("training", "critic"),
        "adv": ("training", None),
        "update_weights": ("communication", None),
    }
    state_schema = {
        "weight_version": is_count,
        "kl_controller": has(value=is_number),
        "samples": maybe(has(run=is_text, step=is_count, cursor=is_count, num_trained=is_count, digest=is_text)),
        "sampler": maybe(has()),
        "stages": maybe(lambda states: isinstance(states, list) and all(map(has(), states))),
    }

    @classmethod
    def load_data(cls, config: PPOConfig, *, train: bool = True) -> PPOData:
        return load_data(config, train=train)

    @classmethod
    def roles(cls, config: PPOConfig, *, train: bool = True) -> RoleSpecs:
        return ppo_roles(config, train=train)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.reads_data |= not cls.__module__.startswith("verl.")  # a user's program may read any column

    def __init__(self, config: PPOConfig, data: PPOData, roles: Roles, run: RunContext):
        self.config = config
        self.data = data
        self.run = run
        self.roles_of_run = PPORoles.of(roles)
        self.samples = SampleTracker()
        steps = config.global_profiler.steps
        self.traces = Traces(config.global_profiler, list(roles.models.values())) if steps else None
        self.stages = Stages(config.algorithm.stages) if config.algorithm.stages else None
        self.weight_version = self._num_defaulted = 0
        self.branches = load_part("verl.agents.branches") if trains_branches(config) else None
        self.kl_controller = make_kl_controller(**asdict(config.algorithm.kl_ctrl))
        self.guards = Guards(config.trainer.guards, run.folder / "guards.jsonl" if run.is_rank_zero else None)
        self.signal = SignalWatch(config.data.max_response_length, config.actor_rollout_ref.rollout.n)
        self.collapse = CollapseWatch()
        if sampling_params(config.actor_rollout_ref.rollout, validation=True).temperature == 0:
            self.curves = greedy_curves(self.curves)  # type: ignore[misc]
        if data.validation is not None:
            self.validator = Validator(config, self.roles_of_run, data.validation, data.tokenizer, run.log_samples)

    def advantages(self, batch: DataProto) -> Sequence[torch.Tensor]:
        """Advantages and returns [row, response] by the estimator, which sees a row for each episode."""
        algorithm, rows = self.config.algorithm, batch if self.branches is None else self.branches.episodes(batch)
        credit: Sequence[torch.Tensor] = compute_advantage(
            algorithm.adv_estimator, {**dict(rows.batch.items()), **rows.non_tensor_batch}, config=algorithm,
            gamma=algorithm.gamma, lam=algorithm.lam, norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            gdpo_reward_keys=algorithm.gdpo_reward_keys, gdpo_reward_weights=algorithm.gdpo_reward_weights,
            step_advantage_w=algorithm.gigpo.step_advantage_w,
        )  # fmt: skip
        branches = self.branches
        return credit if branches is None else [branches.spread_over_conversations(batch, one) for one in credit]

    @abstractmethod
    def train(self, step: int) -> StepBatch:
        """One step; weight version and samples advance only as the step succeeds."""

    def send_weights(self, step: int) -> None:
        """Give the sampler the weights that step `step` has trained."""
        self.roles_of_run.weights.sync(self.weight_version)

    def restore(self, waiting: Sequence[OpenSample]) -> None:
        """Resume from a checkpoint with these open samples."""

    def step(self, step: int) -> StepResult:
        controller, version = self.kl_controller.state_dict(), self.weight_version
        stages = deepcopy(self.stages.state_dict()) if self.stages is not None else []
        try:
            with nullcontext() if self.traces is None else self.traces.of(step):
                result = self.train(step)
        except BaseException:
            self.kl_controller.load_state_dict(controller)
            self.weight_version = version
            self._load_stages(stages)
            raise
        if result.skipped:
            self.kl_controller.load_state_dict(controller)
        self._end_with_epochs(step)
        return self._step_result(result)

    def _end_with_epochs(self, step: int) -> None:
        """End the run with `step` if trainer.total_epochs passes are over; a group filter and stages take further prompts."""
        trainer, train = self.config.trainer, self.data.train
        if train is not None and trainer.total_training_steps is None:
            is_over = self.samples.cursor >= trainer.total_epochs * train.order.rows_per_epoch
            self.data.num_steps = min(self.data.num_steps, step) if is_over else self.data.num_steps

    def _step_result(self, result: StepBatch) -> StepResult:
        batch, limits = result.batch, self.config.data
        if self.data.train is not None and not result.skipped:
            self.data.train.update(batch)
        metrics = metric_values(result.metrics)
        metrics |= data_metrics(
            batch, max_prompt_length=limits.max_prompt_length, max_response_length=limits.max_response_length
        )
        metrics |= variety_metrics(batch)
        tokens = span_tokens(batch)
        metrics["training/weight_version"] = self.weight_version
        metrics["training/next_ordinal"] = self.samples.cursor
        num_defaulted, before = self.roles_of_run.reward.num_defaulted(), self._num_defaulted
        metrics["reward/num_defaulted"], self._num_defaulted = num_defaulted - before, num_defaulted
        return StepResult(
            metrics,
            num_tokens=tokens["adv"],  # of complete rows
            rows=lambda: observed_rows(batch, result.observed, self.data.tokenizer),
            span_tokens=tokens,
            skipped=result.skipped,
        )

    def validate(self, step: int) -> dict[str, float]:
        return self.validator.run(step)

    def fingerprint(self, metrics: Mapping[str, float]) -> object:
        """See Program: the responses. None if all have one reward above 0: a solved task no longer changes."""
        return self.validator.responses if metrics else None

    def state_dict(self) -> dict[str, object]:
        """See Program. The ledger is on the disk before the checkpoint, so that no checkpoint knows more than the ledger."""
        train = self.data.train
        return {
            "weight_version": self.weight_version,
            "kl_controller": self.kl_controller.state_dict(),
            "samples": self.samples.commit(),
            **({"sampler": sampler} if train and (sampler := train.state_dict(self.samples.cursor)) else {}),
            **({"stages": self.stages.state_dict()} if self.stages is not None else {}),
        }

    def load_state_dict(
        self, state: Mapping[str, Any] | None, checkpoint: Path | None, rolled_back: RollBack | None = None
    ) -> None:
        """See Program. After a RollBack, prompts before its `next_ordinal` do not train again."""
        if state is not None:
            self.weight_version = state["weight_version"]
            self.kl_controller.load_state_dict(state["kl_controller"])
            self._load_stages(state.get("stages", []))
            if self.data.train is not None:
                self.data.train.load_state_dict(state.get("sampler", {}))
        self.roles_of_run.weights.sync(self.weight_version)
        waiting = start_samples(self.samples, self.run, checkpoint, (state or {}).get("samples"))
        if rolled_back and (ordinal := rolled_back.next_ordinal) is not None:
            self.samples.skip_prompts((state or {})["step"] + 1, ordinal)
            log.warning("Prompt %d is next.", self.samples.cursor)
        self.restore(waiting)
        self._end_with_epochs((state or {}).get("step", 0))

    def _load_stages(self, states: Sequence[Mapping[str, object]]) -> None:
        if self.stages is not None and states:
            self.stages.load_state_dict(states)

    def move_records(self, folder: Path) -> None:
        """See Program: the ledger."""
        self.samples.move_to(folder / LEDGER)

    def checkpoint_writers(self) -> Mapping[str, CheckpointWriter]:
        """See Program: the samples that are open."""
        return open_samples(self.samples)

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        if uses_rewards(self.config):
            self.signal.record(step, metrics, is_last=step >= self.data.num_steps)
            self.collapse.record(step, metrics)

    def header(self) -> dict[str, object]:
        group, algorithm, data = self.config.actor_rollout_ref, self.config.algorithm, self.data
        roles = self.roles_of_run
        models = {"actor": roles.actor, "critic": roles.critic, "reference": roles.reference, **roles.teachers}
        learned = [f"{algorithm.adv_estimator}, {group.actor.policy_loss.loss_mode} loss"] * uses_rewards(self.config)
        if self.config.distillation.enabled:
            learned.append(f"distillation, {self.config.distillation.distillation_loss.loss_mode}")
        if algorithm.filter_groups.enable:
            learned.append("groups of equal rewards are replaced")
        training, held_out = (
            f"at temperature {t:g}" if (t := sampling_params(group.rollout, validation=of).temperature) else "greedy"
            for of in (False, True)
        )
        return {
            "algorithm": "; ".join(learned),
            "roles": ", ".join(["rollout", "reward", *(name for name, role in models.items() if role is not None)]),
            "training prompts": data.train.num_rows if data.train else 0,
            "validation prompts": data.validation.num_rows if data.validation else 0,
            "batch": f"{self.config.data.train_batch_size} prompts x {group.rollout.n} samples",
            "learning rate": f"{group.actor.optim.lr:g}",
            "samples": f"at most {self.config.data.max_response_length} tokens, {training} in training"
            + (f", {held_out} in validation" if data.validation else ""),
        }

    def results(self, before: Mapping[str, float], after: Mapping[str, float]) -> Sequence[Result]:
        """See Program: the held-out reward; with greedy validation there is one reward and not two."""
        is_sampled = sampling_params(self.config.actor_rollout_ref.rollout, validation=True).temperature > 0
        label = "held-out reward, sampled" if is_sampled else ""
        return (
            Result("reward", label, before.get("val/reward"), after.get("val/reward")),
            Result("greedy", "held-out reward, greedy", before.get("val/greedy"), after.get("val/greedy")),
        )

    def close(self) -> None:
        self.samples.close()


def without_experts(batch: DataProto) -> DataProto:
    """The batch for models other than the policy: their routers choose by themselves."""
    objects = {name: values for name, values in batch.non_tensor_batch.items() if name != ROUTED_EXPERTS}
    return DataProto(batch.batch, objects, batch.meta_info)


@contextmanager
def comparing(pair: Sequence[torch.Tensor], metrics: dict[str, Metric]) -> Iterator[None]:
    """Compare log-probs of trainer and sampler, if there are any, on a thread while weights travel; adds the metrics."""
    with ThreadPoolExecutor(1, "comparing") as pool:
        gap = pool.submit(rollout_gap_metrics, *pair) if pair else None
        try:
            yield
        finally:
            metrics.update(gap.result() if gap else {})
