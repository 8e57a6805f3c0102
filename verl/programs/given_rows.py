"""The part that programs on given rows share: SFT, preferences. One model, one optimizer step per batch of rows.

    rows ──tokens and masks──► batch ──► model.update ──► metrics
                                            (validation: model.forward)

All rows are tokenized before the first step, so that a bad or truncated row is known by then. The batch of a step is a
function of its number, so a run resumes from the weights and that number. Padding is never computed: micro-batches are
packed by tokens, and the sequences of a pack do not attend to each other.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from verl.config import GivenRowsConfig
from verl.config.sections.trainer import steps_between
from verl.data.conversations.dataset import ConversationDataset, ConversationLoader
from verl.data.files import Files
from verl.data.pictures import pictures_noted
from verl.data_proto.metrics import Metric, metric_values
from verl.data_proto.proto import DataProto
from verl.data_proto.sample_rows import from_first_trained, sample_rows
from verl.data_proto.token_values import add_token_columns
from verl.data_proto.tokenizer import Tokenizer
from verl.engines.api import MicroBatching
from verl.errors import DataError
from verl.models.load import load_model_config, load_tokenizer
from verl.models.rope import fixed_rotation, rotation_problem
from verl.parallel.placement import Placement
from verl.programs.api import Program, RunContext, StepResult
from verl.programs.specs import run_spec
from verl.roles.api import Objective, Roles, RoleSpec, RoleSpecs, settings_of
from verl.roles.guards import Guards, RollBack, StepBatch, StepGuard
from verl.tracking.files import Check, is_count
from verl.tracking.summary import Result

log = logging.getLogger(__name__)

ROLE = "model"
G = TypeVar("G", bound=GivenRowsConfig)


@dataclass
class GivenRows:
    """See ProgramData: tokenized rows. There are no data sources, since nothing is scored."""

    tokenizer: Tokenizer
    train: ConversationLoader | None = None
    validation: ConversationDataset | None = None
    num_steps: int = 1
    num_steps_per_epoch: int = 1
    data_sources: list[str] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)
    num_rows: int | None = None  # that train

    @property
    def has_validation(self) -> bool:
        return self.validation is not None


def line_of_step(measures: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """`console_metrics` with loss, `measures` (metric of training -> short name), gradient norm and learning rate."""
    console_lines = {f"train/{name}": (label, "{:.3f}") for name, label in measures.items()}
    return {
        "train/loss": ("loss", "{:.4f}"),
        **console_lines,
        "train/grad_norm": ("grad", "{:.2f}"),
        "train/lr": ("lr", "{:.2g}"),
    }


def with_held_out(name: str) -> dict[str, str]:
    """A panel of `curves`: the metric `name` in training and in validation."""
    return {f"train/{name}": "training", f"val/{name}": "held-out"}


class GivenRowsProgram(Program[G]):
    """Training of a model on given rows. Subclasses define `load_rows`, `objective`, `validate` and `loss_name`.

    Metrics of a step: train/{loss,grad_norm,lr,global_tokens,total_tokens(B)}, and train/* of the objective.
    """

    span_phases = {"batch": ("data", None), "update": ("training", ROLE)}
    # metric of a validation -> its row in the closing table; and the metrics that have one without a validation
    labels: ClassVar[Mapping[str, str]] = {}
    always: ClassVar[tuple[str, ...]] = ("loss",)
    state_schema: ClassVar[Mapping[str, Check]] = dict.fromkeys(
        ("num_rows", "num_tokens_trained", "num_passed_over"), is_count
    )

    @classmethod
    @abstractmethod
    def load_rows(
        cls,
        config: G,
        files: Files,
        tokenizer: Tokenizer,
        *,
        max_samples: int,
        seed: int | None,
        keep_going: bool = False,
    ) -> ConversationDataset:
        """The data set of `files`: `max_samples` rows that `seed` selects (-1: all; None: the first ones). With `keep_going`
        bad rows are counted, for `verl check`."""

    @classmethod
    @abstractmethod
    def objective(cls, config: G) -> Callable[[StepGuard], Objective]:
        """The function that makes the objective of the model from a StepGuard; see RoleSpec."""

    @abstractmethod
    def loss_name(self) -> str:
        """The loss, for the header."""

    @classmethod
    def load_data(cls, config: G, *, train: bool = True) -> GivenRows:
        """Also raises FewRowsError."""
        data, trainer = config.data, config.trainer
        loaded = GivenRows(load_tokenizer(config.model))
        seed = trainer.seed if data.seed is None else data.seed
        load = partial(cls.load_rows, config, tokenizer=loaded.tokenizer)
        if data.val_files:
            with pictures_noted(loaded.inputs, "data.val_files"):
                loaded.validation = load(data.val_files, max_samples=data.val_max_samples, seed=None)
        if train:
            with pictures_noted(loaded.inputs, "data.train_files"):
                rows = load(data.train_files, max_samples=data.train_max_samples, seed=seed if data.shuffle else None)
            loaded.train = ConversationLoader(rows, data.train_batch_size, seed=seed, shuffle=data.shuffle)
            loaded.num_rows = len(rows)
            loaded.num_steps_per_epoch = loaded.train.num_steps_per_epoch
            loaded.num_steps = trainer.total_training_steps or trainer.total_epochs * loaded.num_steps_per_epoch
        for dataset in (loaded.train.dataset if loaded.train else None, loaded.validation):
            for summary in dataset.summaries if dataset is not None else ():
                _require_lengths(config, summary.longest, summary.longest_place)
        return loaded

    @classmethod
    def roles(cls, config: G, *, train: bool = True) -> RoleSpecs:
        return specs_of(config, (model_spec(config, cls.objective(config), train=train),))

    def __init__(self, config: G, data: GivenRows, roles: Roles, run: RunContext):
        self.config, self.data, self.run = config, data, run
        self.model = roles.models[ROLE]
        self.guards = Guards(config.trainer.guards, run.folder / "guards.jsonl" if run.is_rank_zero else None)
        self.num_tokens = 0  # of all steps
        self.num_passed_over = 0  # batches that a rollback has left behind

    def batch(self, number: int) -> DataProto:
        """Batch `number` of the run, counted from 1, with every column that the objective reads."""
        assert self.data.train is not None
        return self.data.train.batch(number)

    def step(self, step: int) -> StepResult:
        number = step + self.num_passed_over
        with self.run.spans("batch"):
            result = StepBatch(self.batch(number))
        self.run.check_stop()
        with self.guards.step(step, result, number):
            with self.run.spans("update"):
                updates = self.guards.record(self.model.update(result.batch, step).get())
            result.metrics.update(updates.metrics())
            self.guards.check_updates(result)
        num_tokens = int(result.batch.batch["attention_mask"].sum())
        self.num_tokens += num_tokens
        metrics = public_metrics(result.metrics)
        metrics |= {"train/global_tokens": num_tokens, "train/total_tokens(B)": self.num_tokens / 1e9}
        return StepResult(
            metrics,
            num_tokens,
            rows=lambda: self.logged_rows(result.batch, updates.observed),
            span_tokens={"update": num_tokens},
            skipped=result.skipped,
        )

    def logged_rows(self, batch: DataProto, observed: Sequence[torch.Tensor]) -> list[dict[str, object]]:
        """The rows for samples/train: the few with tokens that the objective has observed (see FirstRows)."""
        if not observed:
            return []
        *keys, log_probs, entropy = observed
        add_token_columns(batch, keys, {"train_log_probs": log_probs, "entropys": entropy})
        observed_rows = (~batch.batch["train_log_probs"].isnan()).any(dim=1).nonzero().flatten()
        return self.row_facts(batch.select_idxs(observed_rows))

    def row_facts(self, batch: DataProto) -> list[dict[str, object]]:
        """The rows of a batch for samples/."""
        return from_first_trained(sample_rows(batch, self.data.tokenizer), self.data.tokenizer)

    def fingerprint(self, metrics: Mapping[str, float]) -> object:
        """See Program: the likelihoods of the held-out rows."""
        return dict(metrics) or None

    def held_out(self) -> Iterator[range]:
        """The validation rows, by batches."""
        assert self.data.validation is not None
        num_rows, size = len(self.data.validation), self.config.data.train_batch_size
        return (range(start, min(start + size, num_rows)) for start in range(0, num_rows, size))

    def results(self, before: Mapping[str, float], after: Mapping[str, float]) -> Sequence[Result]:
        names = [name for name in self.labels if name in self.always or f"val/{name}" in after]
        return [Result(n, self.labels[n], before.get(f"val/{n}"), after.get(f"val/{n}")) for n in names]

    def state_dict(self) -> dict[str, object]:
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
        if rolled_back and (number := rolled_back.next_ordinal) is not None:  # of the batch after the failed batch
            self.num_passed_over = number - state["step"]
        if len(self.data.train.dataset) != state["num_rows"]:
            log.warning(
                "%d rows train now, but %d trained when %s was saved: the following steps take other rows than an "
                "unbroken run.",
                len(self.data.train.dataset),
                state["num_rows"],
                checkpoint,
            )

    def header(self) -> dict[str, object]:
        facts: dict[str, object] = {"loss": self.loss_name(), "batch": f"{self.config.data.train_batch_size} rows"}
        for name, rows in (
            ("training rows", self.data.train.dataset if self.data.train else None),
            ("validation rows", self.data.validation),
        ):
            if rows is not None:
                facts[name] = " ".join(sentence for summary in rows.summaries for sentence in summary.sentences())
        return facts


def _require_lengths(config: GivenRowsConfig, longest: int, place: str) -> None:
    """Raise DataError for a row so long that it would change the rotations of shorter rows; warn of rows beyond the model's
    positions."""
    model = config.model
    hf = load_model_config(model.path, model.trust_remote_code, model.override_config).get_text_config()
    length, fixed = min(longest, config.data.max_length or longest), fixed_rotation(hf)
    if fixed is not None and length > fixed:
        raise DataError(f"{place}: a sequence has {length} tokens. {rotation_problem(hf)}")
    if length > (positions := getattr(hf, "max_position_embeddings", None) or length):
        log.warning(
            "The longest sequence has %d tokens (%s), more than max_position_embeddings of the model (%d): positions behind "
            "those are new to the model. data.max_length with data.truncation cuts sequences.",
            length,
            place,
            positions,
        )


def model_spec(
    config: GivenRowsConfig, objective: Callable[[StepGuard], Objective], *, train: bool, head: str = "lm"
) -> RoleSpec:
    """The model of a run by the sections model, engine, optim, data, checkpoint and trainer."""
    data, trainer = config.data, config.trainer
    by_tokens, by_rows = data.max_token_len_per_gpu, data.micro_batch_size_per_gpu
    micro = MicroBatching(max_tokens=by_tokens) if data.use_dynamic_bsz else MicroBatching(max_rows=by_rows)
    return RoleSpec(
        ROLE,
        head,
        config.model,
        config.engine,
        config.optim if train else None,
        objective,
        strategy=config.engine.strategy,
        settings=settings_of(config.engine),
        engine_keys=("engine",),
        micro=micro,
        forward_micro=micro,
        checkpoint=config.checkpoint,
        checkpoints_to_keep=trainer.max_ckpt_to_keep,
        guards=trainer.guards,
        measure_every=steps_between(trainer.test_freq),
    )


def specs_of(config: GivenRowsConfig, models: tuple[RoleSpec, ...]) -> RoleSpecs:
    """`models` on all devices of the run."""
    names, trainer = tuple(spec.name for spec in models), config.trainer
    return RoleSpecs(
        models,
        partial(Placement.colocated, names, trainer.nnodes, trainer.n_gpus_per_node),
        run_spec(trainer, config.ray_kwargs, trainer.nccl_timeout),
    )


def public_metrics(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """model/loss as train/loss, the name that existing releases have; the host reads visible_update_ratio by its role."""
    return {
        name if name.endswith("/visible_update_ratio") else name.replace(f"{ROLE}/", "train/"): value
        for name, value in metric_values(metrics).items()
    }
