"""Preference optimization: DPO and its family on pairs, KTO on labelled completions, losses without a reference.

    rows ──tokens──► batch ──reference log-probs, statistics of the batch──► model.update ──► metrics
                                                        (validation: model.forward, the same objective)

The two completions of a pair are adjacent rows with one prompt; a packed forward computes the prompt once. They stay in one
micro-batch and on one rank. Statistics of the batch for a loss (KTO's KL estimate, the ranks of AOT) are computed here and
travel as a column, so that neither micro-batches nor ranks change a loss.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from verl.algorithms.preference_losses import is_paired, match_ranks
from verl.checkpoint.files import remove_tree
from verl.checkpoint.tensor_files import read_tensors, write_tensors
from verl.config.roots.preference import PreferenceConfig, has_reference_role
from verl.data.files import Files
from verl.data.preferences.dataset import (
    PreferenceDataset,
    PreferenceSequence,
    load_preferences,
    partners_of,
    sequence_batch,
)
from verl.data_proto.extras import media_of
from verl.data_proto.metrics import Metric, merge_metrics, metric_values
from verl.data_proto.proto import DataProto
from verl.data_proto.tokenizer import Tokenizer
from verl.engines.api import BatchTotals
from verl.engines.micro_batches import sizes_of
from verl.errors import DataError
from verl.manifest import put_in_place, record_of
from verl.models.load import eos_token_ids_of
from verl.parallel.balance import unit_ids
from verl.programs.api import RunContext, StepResult
from verl.programs.given_rows import GivenRows, GivenRowsProgram, line_of_step, model_spec, specs_of, with_held_out
from verl.roles.api import Broadcast, ModelHandle, Objective, Roles, RoleSpec, RoleSpecs
from verl.roles.guards import RollBack, StepGuard
from verl.roles.objectives.preference import PreferenceObjective, row_sums
from verl.tracking.files import is_count, is_number, is_text, maybe

log = logging.getLogger(__name__)

FILE = "reference_log_probs.safetensors"


class ReferenceLogProbs:
    """log pi_ref(y) of sequences by the role `model`. After `keep` or `read` they are looked up by the sequences' digests, and
    the model may change."""

    def __init__(self, model: ModelHandle, ld_alpha: float | None):
        self.model, self.ld_alpha = model, ld_alpha
        self._kept: dict[bytes, float] | None = None
        self.digest: str | None = None  # of the kept file, on rank 0

    def of(self, batch: DataProto, sequences: Sequence[PreferenceSequence]) -> torch.Tensor:
        """Log-probs [batch] of the `sequences`, the rows of `batch`. Raises DataError for a sequence that was not kept."""
        if self._kept is None:
            return completion_log_probs(self.model, batch, self.ld_alpha)
        try:
            return torch.tensor([self._kept[name] for name in self._names(batch, sequences)], dtype=torch.float64)
        except KeyError:
            raise DataError(
                f"The data has rows that it did not have when the run began, so that their reference log-probabilities are not "
                f"in {FILE}. Train on the data of before, set ref.precompute=False, or start a new run."
            ) from None

    def keep(self, parts: Iterable[tuple[DataProto, Sequence[PreferenceSequence]]]) -> None:
        """Compute and keep the log-probs of all batches."""
        log_probs: dict[bytes, float] = {}
        for batch, sequences in parts:
            values = completion_log_probs(self.model, batch, self.ld_alpha)
            log_probs.update(zip(self._names(batch, sequences), values.tolist(), strict=True))
        self._kept = log_probs

    def write(self, folder: Path) -> None:
        """Write the kept log-probs into `folder`."""
        assert self._kept is not None
        names = np.frombuffer(b"".join(self._kept), dtype=np.uint8).reshape(len(self._kept), -1)
        tensors = {
            "digests": torch.from_numpy(names.copy()),
            "log_probs": torch.tensor(list(self._kept.values()), dtype=torch.float64),
        }
        temporary = folder / f"{FILE}.new"
        remove_tree(temporary)  # of a start that was killed
        self.digest = write_tensors(temporary, tensors).blake2b
        put_in_place(temporary, folder / FILE)

    def read(self, folder: Path, expected_digest: str | None, is_rank_zero: bool, broadcast: Broadcast) -> None:
        """Read what `write` has written, with `expected_digest` (None: any); on rank 0, for all ranks. Raises DataError when
        it is not there or has changed."""
        arrays, file, state = None, folder / FILE, "gone"
        if is_rank_zero and file.is_file():
            self.digest, state = record_of(file).blake2b, "not the file that this run has written"
            if expected_digest in (None, self.digest):
                tensors = read_tensors(file)
                arrays = [tensors["digests"].numpy(), tensors["log_probs"].numpy()]
        arrays, state = broadcast((arrays, state))
        if arrays is None:
            raise DataError(
                f"{file} is {state}, and the policy has changed since then. Bring it back, set "
                "ref.precompute=False, or start a new run."
            )
        self._kept = {name.tobytes(): value for name, value in zip(arrays[0], arrays[1].tolist(), strict=True)}

    def _names(self, batch: DataProto, sequences: Sequence[PreferenceSequence]) -> list[bytes]:
        """A name for each sequence, a row of `batch`; with `ld_alpha` the value depends on the pair's other sequence too."""
        media = media_of(batch) or [None] * len(sequences)
        names = [sequence.digest(images) for sequence, images in zip(sequences, media, strict=True)]
        if self.ld_alpha is None:
            return names
        lengths = [int(sequence.completion.sum()) for sequence in sequences]
        shared = [min(lengths[i - i % 2 : i - i % 2 + 2]) for i in range(len(sequences))]
        return [name + length.to_bytes(4, "little") for name, length in zip(names, shared, strict=True)]


def completion_log_probs(model: ModelHandle, batch: DataProto, ld_alpha: float | None) -> torch.Tensor:
    """log pi(y) [batch] by `model` as it is now."""
    log_probs = model.forward(batch, {"log_probs": "log_probs"}).get().batch["log_probs"]
    return row_sums(log_probs, batch.batch, ld_alpha)


REFERENCE = "reference"


class PreferenceOptimization(GivenRowsProgram[PreferenceConfig]):
    """Metrics in addition to GivenRowsProgram's: train/* of PreferenceObjective, under TRL's names. A validation has val/loss
    and val/* of the objective, over all validation rows."""

    console_metrics = line_of_step({"rewards/accuracies": "accuracy", "rewards/margins": "margin"})
    labels = {
        "loss": "held-out loss",
        "rewards/accuracies": "held-out pairs ranked as labelled",
        "rewards/margins": "held-out reward margin",
    }
    curves = {
        "loss": with_held_out("loss"),
        "pairs ranked as labelled": with_held_out("rewards/accuracies"),
        "reward margin": with_held_out("rewards/margins"),
        "learning rate": {"train/lr": ""},
    }
    span_phases = {**GivenRowsProgram.span_phases, "reference": ("training", REFERENCE)}

    state_schema = {
        **GivenRowsProgram.state_schema, "num_rewards": is_count, "mean_reward": is_number, "reference": maybe(is_text),
    }  # fmt: skip

    @classmethod
    def load_rows(
        cls, config: PreferenceConfig, files: Files, tokenizer: Tokenizer, **selects: object
    ) -> PreferenceDataset:
        losses = config.preference.losses
        paired, trains_prompts = all(map(is_paired, losses)), "orpo" in losses
        return load_preferences(
            files, tokenizer, config.data, paired=paired, trains_prompts=trains_prompts,
            stop_token_ids=eos_token_ids_of(config.model, tokenizer), **selects,
        )  # fmt: skip

    @classmethod
    def objective(cls, config: PreferenceConfig) -> Callable[[StepGuard], Objective]:
        return partial(PreferenceObjective, config.preference)

    @classmethod
    def roles(cls, config: PreferenceConfig, *, train: bool = True) -> RoleSpecs:
        model = model_spec(config, cls.objective(config), train=train)
        return specs_of(config, (model, *([_reference(config, model)] if has_reference_role(config) else [])))

    def __init__(self, config: PreferenceConfig, data: GivenRows, roles: Roles, run: RunContext):
        super().__init__(config, data, roles, run)
        self.loss = PreferenceObjective(config.preference)
        model = roles.models.get(REFERENCE, self.model)
        self.reference = ReferenceLogProbs(model, config.preference.ld_alpha)
        self.keeps = self.loss.has_reference and config.ref.precompute and not config.ref.sync_steps
        self.num_rewards, self.mean_reward = 0, 0.0  # of all completions that have trained
        datasets = (data.train.dataset if data.train else None, data.validation)
        self.datasets = cast("list[PreferenceDataset]", [rows for rows in datasets if rows is not None])
        self.partners: dict[int, list[int]] = {}  # id of a data set -> the partner of each row, for KTO
        if "kto" in config.preference.losses:
            section = config.data
            for rows in self.datasets:
                self.partners[id(rows)] = partners_of(
                    rows.prompts(),
                    section.train_batch_size,
                    seed=config.trainer.seed if section.seed is None else section.seed,
                    shuffle=section.shuffle and rows is not data.validation,
                )

    def loss_name(self) -> str:
        loss = self.config.preference
        names = " + ".join(
            name if weight == 1 else f"{weight:g} {name}"
            for name, weight in zip(loss.losses, loss.weights, strict=True)
        )
        return f"{names}, mean over the {'pairs' if self.loss.paired else 'completions'} of a batch; beta {loss.beta:g}"

    # -- the columns of a batch --------------------------------------------------------------------------------------

    def batch(self, number: int) -> DataProto:
        assert self.data.train is not None
        (batch,) = self._batches(self.datasets[0], [self.data.train.rows(number)])
        return batch

    def _batches(self, dataset: PreferenceDataset, chunks: Sequence[Sequence[int]]) -> list[DataProto]:
        """The rows of each chunk with all columns of the objective; statistics are over all chunks."""
        batches = [dataset.batch(rows) for rows in chunks]
        if self.loss.has_reference:
            for batch, rows in zip(batches, chunks, strict=True):
                with self.run.spans("reference"):
                    batch.batch["ref_logp"] = self.reference.of(batch, dataset.sequences(rows))
        if "shift" in self.loss.wants:
            shift = self._kl(dataset, chunks) if self.partners else self.mean_reward
            for batch in batches:
                batch.batch["shift"] = torch.full((len(batch),), shift, dtype=torch.float64)
        if {"matched_margin", "matched_chosen"} & self.loss.wants:
            self._match(batches)
        return batches

    def _kl(self, dataset: PreferenceDataset, chunks: Sequence[Sequence[int]]) -> float:
        """The mean of log pi - log pi_ref over completions of other prompts, not below 0 (KTO's z)."""
        total = count = 0.0
        for batch, sequences in self._mismatched(dataset, chunks):
            ratios = self._policy_sums(batch) - self.reference.of(batch, sequences)
            total, count = total + float(ratios.double().sum()), count + len(ratios)
        return max(0.0, total / count)

    def _mismatched(
        self, dataset: PreferenceDataset, chunks: Sequence[Sequence[int]]
    ) -> Iterator[tuple[DataProto, list[PreferenceSequence]]]:
        for rows in chunks:
            sequences = dataset.mismatched(rows, self.partners[id(dataset)], self.config.data.max_length)
            yield sequence_batch(sequences), sequences

    def _policy_sums(self, batch: DataProto) -> torch.Tensor:
        """log pi(y) [batch] by the policy as it is now."""
        return completion_log_probs(self.model, batch, self.config.preference.ld_alpha)

    def _match(self, batches: Sequence[DataProto]) -> None:
        """Add what completions of the same rank have in other pairs (AOT)."""
        sums = torch.cat([self._policy_sums(batch) for batch in batches]).double()
        reference, chosen = (torch.cat([batch.batch[name] for batch in batches]) for name in ("ref_logp", "chosen"))
        ratios = sums - reference
        margins, matched = torch.zeros_like(sums), torch.zeros_like(sums)
        margins[chosen] = match_ranks(sums[chosen] - sums[~chosen], (reference[chosen] - reference[~chosen]).to(sums))
        matched[chosen] = match_ranks(ratios[chosen], ratios[~chosen])
        matched[~chosen] = match_ranks(ratios[~chosen], ratios[chosen])
        sizes = [len(batch) for batch in batches]
        for batch, *columns in zip(batches, margins.split(sizes), matched.split(sizes), strict=True):
            batch.batch["matched_margin"], batch.batch["matched_ratio"] = columns

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self, step: int) -> StepResult:
        result = super().step(step)
        if not result.skipped:
            self._note_rewards(result.metrics)
        ref = self.config.ref
        if self.loss.has_reference and ref.sync_steps and step % ref.sync_steps == 0:
            self.reference.model.follow(ref.mixup_alpha)
        return replace(result, metrics=with_margins(result.metrics, "train/"))

    def row_facts(self, batch: DataProto) -> list[dict[str, object]]:
        """The rows with their side, and as score the implicit reward beta (log pi - log pi_ref), or without a reference
        beta log pi."""
        columns, rows = batch.batch, super().row_facts(batch)
        sums = columns["train_log_probs"].nan_to_num(0.0).double().sum(dim=1)
        if "ref_logp" in columns.keys():
            sums = sums - columns["ref_logp"].double()
        scores = (self.config.preference.beta * sums).tolist()
        sides = columns["chosen"].tolist()
        return [{**row, "chosen": s, "score": v} for row, s, v in zip(rows, sides, scores, strict=True)]

    def _note_rewards(self, metrics: Mapping[str, float]) -> None:
        """Add the rewards of a step to BCO's running mean."""
        if "bco" not in self.config.preference.losses:
            return
        new = self.config.data.train_batch_size
        self.num_rewards += new
        self.mean_reward += (metrics["train/rewards/mean"] - self.mean_reward) * new / self.num_rewards

    def validate(self, step: int) -> dict[str, float]:
        batches = self._batches(self.datasets[-1], list(self.held_out()))
        totals = BatchTotals(
            *np.sum([sizes_of(batch, unit_ids(batch, self.loss.unit)) for batch in batches], axis=0).tolist()
        )
        batch_metrics = []
        for batch in batches:
            outputs = self.model.forward(batch, {name: name for name in self.loss.outputs}).get().batch
            loss, metrics = self.loss(dict(outputs.items()), batch, totals)
            batch_metrics.append({"loss": Metric.sum(loss), **metrics})
        values = metric_values(merge_metrics(batch_metrics))
        return with_margins({f"val/{name}": value for name, value in values.items()}, "val/")

    # -- state -------------------------------------------------------------------------------------------------------

    def load_state_dict(
        self, state: Mapping[str, Any] | None, checkpoint: Path | None, rolled_back: RollBack | None = None
    ) -> None:
        super().load_state_dict(state, checkpoint, rolled_back)
        self.num_rewards, self.mean_reward = (state["num_rewards"], state["mean_reward"]) if state else (0, 0.0)
        if not self.keeps or rolled_back is not None:
            return
        if state is not None:
            self.reference.read(self.run.folder, state.get("reference"), self.run.is_rank_zero, self.run.broadcast)
            return
        self.reference.keep(self._all_parts())
        if self.run.is_rank_zero:
            self.reference.write(self.run.folder)

    def _all_parts(self) -> Iterator[tuple[DataProto, list[PreferenceSequence]]]:
        """Every sequence that may need a reference log-probability; a span lasts while its batch is computed."""
        size = self.config.data.train_batch_size
        for rows in self.datasets:
            for start in range(0, len(rows), size):
                self.run.check_stop()
                with self.run.spans("reference"):
                    chunk = range(start, min(start + size, len(rows)))
                    yield rows.batch(chunk), rows.sequences(chunk)
                    if self.partners:
                        yield from self._mismatched(rows, [chunk])

    def state_dict(self) -> dict[str, object]:
        rewards = {"num_rewards": self.num_rewards, "mean_reward": self.mean_reward}
        return {**super().state_dict(), **rewards, "reference": self.reference.digest}

    def header(self) -> dict[str, object]:
        facts = super().header()
        if self.loss.has_reference:
            path = self.config.ref.model_path or "the model at the start of the run"
            computed = f"computed once, in {FILE}" if self.keeps else "computed in each step"
            facts["reference"] = f"{path}; log-probabilities {computed}"
        return facts


def with_margins(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The metrics, for labelled completions with the difference of the mean rewards."""
    chosen, rejected = (metrics.get(f"{prefix}rewards/{name}") for name in ("chosen", "rejected"))
    if chosen is None or rejected is None or f"{prefix}rewards/margins" in metrics:
        return dict(metrics)
    return {**metrics, f"{prefix}rewards/margins": chosen - rejected}


def _reference(config: PreferenceConfig, model: RoleSpec) -> RoleSpec:
    """A frozen role: the policy as training starts from it, or a separate model."""
    path, model_config = config.ref.model_path, config.model
    return replace(
        model,
        name=REFERENCE,
        model=model_config if path is None else replace(model_config, path=path, lora_rank=0, lora_adapter_path=None),
        optim=None,
        objective=None,
        shares=model.name if model_config.lends_its_base and path is None else None,
        follows=model.name if config.ref.sync_steps else None,
    )
