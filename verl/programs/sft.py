"""Supervised fine-tuning: one model, and the mean loss over the trained tokens of the global batch.

    rows ──tokens and masks──► batch ──► model.update ──► metrics
                                            (validation: model.forward)

All rows are tokenized before the first step, so that a bad or truncated row is known by then. The batch of a step is a
function of its number, so a run resumes from the weights and that number. Padding is never computed: micro-batches are
packed by tokens, and the sequences of a pack do not attend to each other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from verl.config.roots.sft import SFTConfig
from verl.data.conversations.dataset import ConversationDataset, ConversationLoader, load_conversations
from verl.data_proto.metrics import metric_values
from verl.engines.api import MicroBatching
from verl.models.load import load_tokenizer
from verl.parallel.placement import Placement
from verl.programs.api import Program, RollBack, RunContext, StepResult
from verl.programs.guards import Guards, RollBackPrompts, StepBatch
from verl.roles.api import Roles, RoleSpec, RoleSpecs
from verl.roles.objectives.nll import TokenObjective
from verl.tracking.files import is_count
from verl.tracking.summary import Result

log = logging.getLogger(__name__)

ROLE = "model"
_OUTPUTS = {"log_probs": "log_probs", "correct": "correct", "entropy": "entropy"}


@dataclass
class SFTData:
    """See ProgramData: tokenized rows. There are no data sources, since nothing is scored."""

    tokenizer: Any
    train: ConversationLoader | None = None
    validation: ConversationDataset | None = None
    num_steps: int = 1
    num_steps_per_epoch: int = 1
    data_sources: list[str] = field(default_factory=list)

    @property
    def has_validation(self) -> bool:
        return self.validation is not None


class SFT(Program):
    """Metrics of a step: train/{loss,grad_norm,lr,token_accuracy,entropy,global_tokens,total_tokens(B)}; of a validation:
    val/{loss,token_accuracy,entropy}, means over the trained tokens of all validation rows."""

    console_metrics: ClassVar[Mapping[str, tuple[str, str]]] = {
        "train/loss": ("loss", "{:.4f}"),
        "train/token_accuracy": ("accuracy", "{:.3f}"),
        "train/grad_norm": ("grad", "{:.2f}"),
        "train/lr": ("lr", "{:.2g}"),
    }
    curves = {
        "loss": {"train/loss": "training", "val/loss": "held-out"},
        "token accuracy": {"train/token_accuracy": "training", "val/token_accuracy": "held-out"},
        "entropy (nats)": {"train/entropy": "training", "val/entropy": "held-out"},
        "learning rate": {"train/lr": ""},
    }
    span_phases = {"batch": ("data", None), "update": ("training", ROLE)}
    state_schema = dict.fromkeys(("num_rows", "num_tokens_trained", "num_passed_over"), is_count)

    @classmethod
    def load_data(cls, config: SFTConfig, *, train: bool = True) -> SFTData:
        """Also raises DataError when there are fewer rows than a batch has."""
        data, trainer = config.data, config.trainer
        found = SFTData(load_tokenizer(config.model))
        seed = trainer.seed if data.seed is None else data.seed
        load = partial(load_conversations, tokenizer=found.tokenizer, settings=data)
        if data.val_files:
            found.validation = load(data.val_files, max_samples=data.val_max_samples)
        if train:
            selects = seed if data.shuffle else None
            rows = load(data.train_files, max_samples=data.train_max_samples, seed=selects)
            found.train = ConversationLoader(rows, data.train_batch_size, seed=seed, shuffle=data.shuffle)
            found.num_steps_per_epoch = found.train.num_steps_per_epoch
            found.num_steps = trainer.total_training_steps or trainer.total_epochs * found.num_steps_per_epoch
        return found

    @classmethod
    def roles(cls, config: SFTConfig, *, train: bool = True) -> RoleSpecs:
        data, trainer = config.data, config.trainer
        by_tokens, by_rows = data.max_token_len_per_gpu, data.micro_batch_size_per_gpu
        micro = MicroBatching(max_tokens=by_tokens) if data.use_dynamic_bsz else MicroBatching(max_rows=by_rows)
        spec = RoleSpec(
            ROLE,
            "lm",
            config.model,
            config.engine,
            config.optim if train else None,
            partial(TokenObjective, config.sft.loss),
            strategy=config.engine.strategy,
            engine_keys=("engine",),
            micro=micro,
            forward_micro=micro,
            checkpoint=config.checkpoint,
            checkpoints_to_keep=trainer.max_ckpt_to_keep,
            guards=trainer.guards,
            measure_every=trainer.test_freq if isinstance(trainer.test_freq, int) else 0,
        )
        return RoleSpecs((spec,), partial(Placement.colocated, (ROLE,), trainer.nnodes, trainer.n_gpus_per_node))

    def __init__(self, config: SFTConfig, data: SFTData, roles: Roles, run: RunContext):
        self.config, self.data, self.run = config, data, run
        self.model = roles.models[ROLE]
        self.guards = Guards(config.trainer.guards, run.folder / "guards.jsonl" if run.is_rank_zero else None)
        self.num_tokens = 0  # of all steps
        self.num_passed_over = 0  # batches that a rollback has left behind

    def step(self, step: int) -> StepResult:
        assert self.data.train is not None
        number = step + self.num_passed_over
        with self.run.spans("batch"):
            result = StepBatch(self.data.train.batch(number))
        self.run.check_stop()
        with self.guards.step(step, result, number):
            with self.run.spans("update"):
                updates = self.guards.record(self.model.update(result.batch, step).get())
            result.metrics.update(updates.metrics())
            self.guards.check_updates(result)
        num_tokens = int(result.batch.batch["attention_mask"].sum())
        self.num_tokens += num_tokens
        metrics = {_public_name(name): value for name, value in metric_values(result.metrics).items()}
        metrics |= {"train/global_tokens": num_tokens, "train/total_tokens(B)": self.num_tokens / 1e9}
        return StepResult(metrics, num_tokens, span_tokens={"update": num_tokens}, skipped=result.skipped)

    def validate(self, step: int) -> dict[str, float]:
        rows, size = self.data.validation, self.config.data.train_batch_size
        assert rows is not None
        sums, num_trained = dict.fromkeys(_OUTPUTS, 0.0), 0
        for start in range(0, len(rows), size):
            batch = rows.batch(range(start, min(start + size, len(rows))))
            outputs, mask = self.model.forward(batch, _OUTPUTS).get().batch, batch.batch["response_mask"]
            num_trained += int(mask.sum())
            sums = {name: total + float(outputs[name][mask].double().sum()) for name, total in sums.items()}
        log_prob, accuracy, entropy = (total / num_trained for total in sums.values())
        return {"val/loss": -log_prob, "val/token_accuracy": accuracy, "val/entropy": entropy}

    def state_dict(self) -> dict[str, Any]:
        assert self.data.train is not None
        return {
            "num_rows": len(self.data.train.dataset),
            "num_tokens_trained": self.num_tokens,
            "num_passed_over": self.num_passed_over,
        }

    def load_state_dict(
        self, state: Mapping[str, Any] | None, checkpoint: Path | None, rolled_back: RollBack | None = None
    ) -> None:
        assert self.data.train is not None
        if state is None:
            return
        self.num_tokens, self.num_passed_over = state["num_tokens_trained"], state["num_passed_over"]
        if isinstance(rolled_back, RollBackPrompts):  # the next step takes the batch after the one that failed
            self.num_passed_over = rolled_back.next_ordinal - state["step"]
        if len(self.data.train.dataset) != state["num_rows"]:
            log.warning(
                "%d rows train now, but %d trained when %s was saved: the following steps take other rows than an "
                "unbroken run.",
                len(self.data.train.dataset),
                state["num_rows"],
                checkpoint,
            )

    def header(self) -> dict[str, Any]:
        facts = {
            "loss": f"{self.config.sft.loss}, mean over the trained tokens of {self.config.data.train_batch_size} rows"
        }
        for name, rows in (
            ("training rows", self.data.train.dataset if self.data.train else None),
            ("validation rows", self.data.validation),
        ):
            if rows is not None:
                facts[name] = " ".join(sentence for summary in rows.summaries for sentence in summary.sentences())
        return facts

    def results(self, before: Mapping[str, float], after: Mapping[str, float]) -> Sequence[Result]:
        labels = {"loss": "held-out loss", "token_accuracy": "held-out token accuracy"}
        return [Result(n, label, before.get(f"val/{n}"), after.get(f"val/{n}")) for n, label in labels.items()]


def _public_name(metric: str) -> str:
    """model/loss as train/loss, the name that existing releases have; the host reads visible_update_ratio by its role."""
    return metric if metric.endswith("/visible_update_ratio") else metric.replace(f"{ROLE}/", "train/")
