"""The run under a `fit` of a script: the host has folder, data, roles, ledger and checkpoints, the script has the phases."""

from __future__ import annotations

import itertools
import operator
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, SupportsIndex

import numpy as np
import torch

from verl.compat import tracking
from verl.compat.batches import CORRECTED, warn_uncorrected
from verl.compat.own_rows import MASKS, PromptIds, Row, columns_of, outward, require_rows, samples_of_rows, whole_rows
from verl.config import LoadedConfig
from verl.data.loader import ValidationLoader
from verl.data.order import prompts_per_generation
from verl.data_proto.metrics import Metric, metric_values
from verl.data_proto.proto import DataProto
from verl.data_proto.sample_rows import sample_rows
from verl.data_proto.samples import SamplingParams
from verl.data_proto.token_ids import num_embeddings, token_ids
from verl.errors import ConfigError, InterruptedRun, NumericsError
from verl.programs.collect import VALIDATION_STEP, generate_samples, rollout_metrics
from verl.programs.ppo import PPO
from verl.roles.guards import RollBack, StepBatch
from verl.roles.rollout import greedy, sampling_params
from verl.roles.updates import Updates
from verl.run.host import open_run
from verl.run.loop import StopRequested
from verl.tracking.ledger.records import keys_of


class FitRun:
    """A run that is open from its first call to `close`. `step` is the number of the last step with an ended update. Each
    sample is in the ledger, ends when the actor trains in its step, and is scored once. Weights are synced before the next
    generation."""

    def __init__(self, loaded: LoadedConfig[Any]):
        config = loaded.config
        if config.actor_rollout_ref.rollout.prefetch_num or config.algorithm.program != "ppo":
            raise ConfigError(
                "A fit of one's own has its samples made in its own order. Set actor_rollout_ref.rollout.prefetch_num=0, "
                "trainer.v1.trainer_mode=sync and algorithm.program=ppo."
            )
        self._stack = ExitStack()
        # metrics come from the script's Tracking: that opens the trackers of trainer.logger
        quiet = replace(config, trainer=replace(config.trainer, logger=[]))
        self.loop, self._finish = self._stack.enter_context(open_run(replace(loaded, config=quiet)))
        assert isinstance(self.loop.program, PPO)
        self.program = self.loop.program
        assert self.program.data.train is not None
        self.loader = self.program.data.train
        self.roles, self.config = self.program.roles_of_run, config
        self.step = self.loop.state.step
        self._is_synced, self._began = True, time.perf_counter()
        CORRECTED.clear()
        self._rollout_metrics: dict[str, float] = {}
        self.forward_s = 0.0  # of the last forward
        self._calls = threading.RLock()  # the endpoint samples on a thread
        self._open: tuple[StepBatch, int] | None = None  # batch and number of a step; its actor may be updated yet
        self._rows_of_step = 0, itertools.count()  # numbers of the script's rows that a step has sampled
        self._sampled_at = 0  # step of the newest samples
        self._sampled_by: dict[int, int] = {}  # its prompts -> version of the weights that sampled them
        self._stack.enter_context(tracking.followed_by(self._log))

    @contextmanager
    def within(self) -> Iterator[FitRun]:
        """Around a `fit`. A requested stop saves the last step and raises InterruptedRun."""
        try:
            yield self
            self._end_step()
            self.loop.store.finish()
            self._finish()
        except StopRequested:
            self._end_step()
            self.save(self.step)
            self.loop.store.finish()
            note = f"Stopped on request after step {self.step}, and saved. {InterruptedRun.hint}"
            raise InterruptedRun(note) from None
        finally:
            self.close()

    def close(self) -> None:
        self._stack.close()

    def prompts(self) -> PromptBatches:
        """The batches of an epoch, from the first prompt that has not trained."""
        return PromptBatches(self)

    def generate(self, batch: DataProto, step: int) -> DataProto:
        """One sample for each row of `batch`, in the order of its rows, with scores: columns prompts, responses, input_ids,
        attention_mask, response_mask, position_ids, rollout_log_probs, rm_scores and one for each value of the reward function.
        Rows of one prompt are its samples. With meta_info["do_sample"]=False: the greedy sample of each prompt. With
        meta_info["validate"] samples are as of validation, and in no ledger."""
        do_sample = batch.meta_info.get("do_sample", True) and not batch.meta_info.get("validate", False)
        step = _number(step) if do_sample else int(step)  # a fit may measure before its first step
        if self._open is not None and self._open[1] != step:
            self._end_step()
        self.loop.stop.check()
        self.sync()
        self.loop.spans.begin_step(step)
        require_rows(batch)
        if "ordinal" not in batch.batch.keys():
            if not isinstance(next(iter(batch.non_tensor_batch.get("raw_prompt_ids", ())), None), PromptIds):
                if self._rows_of_step[0] != step:
                    self._rows_of_step = step, itertools.count()
                return samples_of_rows(self, batch, step, self._rows_of_step[1])
            batch = whole_rows(batch)
        ordinals = batch.batch["ordinal"].tolist()
        if do_sample:
            self._require_new(ordinals, step)
        rows_of: dict[int, list[int]] = {}
        for row, ordinal in enumerate(ordinals):
            rows_of.setdefault(ordinal, []).append(row)
        parts, places, seconds = [], [], 0.0
        for count in sorted({len(rows) for rows in rows_of.values()}):  # several if the batch is padded to a divisor
            rows = [rows for rows in rows_of.values() if len(rows) == count]
            samples, took = self._sampled(batch.select_idxs([first for first, *_ in rows]), step, count)
            parts.append(samples)
            places += [row for group in rows for row in group]
            seconds += took
        samples = DataProto.concat(parts).select_idxs(np.argsort(places))
        return outward(samples, set(batch.non_tensor_batch) - {"media"}, seconds)

    def sample_until(self, stop: Sequence[str]) -> None:
        """End each turn behind one of these texts too, also in validation."""
        rollout = self.config.actor_rollout_ref.rollout
        actor = replace(self.config.actor_rollout_ref, rollout=replace(rollout, stop=[*rollout.stop, *stop]))
        self.config = replace(self.config, actor_rollout_ref=actor)
        if self.program.data.validation is not None:
            validator = self.program.validator
            texts = (*validator.params.stop, *stop)
            validator.params, validator.greedy = (replace(p, stop=texts) for p in (validator.params, validator.greedy))

    def _require_new(self, ordinals: Sequence[int], step: int) -> None:
        """Raises ConfigError for a prompt with samples of this step and these weights: new ones would have the same tokens."""
        if self._sampled_at != step:
            self._sampled_at, self._sampled_by = step, {}
        for ordinal in set(ordinals):
            if self._sampled_by.get(ordinal) == self.program.weight_version:
                raise ConfigError(
                    f"Prompt {ordinal} has samples of step {step} already, and a further call would make the same ones. Repeat "
                    "its row in one batch: that many samples are made."
                )
            self._sampled_by[ordinal] = self.program.weight_version

    def _sampled(self, prompts: DataProto, step: int, count: int) -> tuple[DataProto, float]:
        """`count` samples of each prompt, with scores, and the seconds of their generation."""
        validates, do_sample = (prompts.meta_info.get(*flag) for flag in (("validate", False), ("do_sample", True)))
        params = replace(sampling_params(self.config.actor_rollout_ref.rollout, validation=validates), n=count)
        began, collector = time.perf_counter(), self.program.collector
        collector.reads_data = True
        with self.loop.spans("gen"):
            if do_sample and not validates:
                samples = collector.samples_of(prompts, step, params)
            else:
                params = params if do_sample else greedy(params, count)
                at = (VALIDATION_STEP, "val") if validates else (step, "greedy")
                samples = generate_samples(self.roles.rollout, prompts, params, step=at[0], split=at[1])
        seconds = time.perf_counter() - began
        if do_sample and not validates:
            return collector.scored(samples, step), seconds
        return samples.union(self.roles.reward.collect(samples)), seconds

    def outside_samples(self, prompts: DataProto, step: int, params: SamplingParams, split: str) -> DataProto:
        """Rollout columns of one sample for each of `prompts` (ordinal, prompt_token_ids), which no ledger has and nothing
        scores."""
        with self._calls:
            self.sync()
            return self.roles.rollout.generate(prompts, step=step, split=split, params=params).get()

    def end_generation(self) -> None:
        """Free the KV cache until the next generation."""
        metrics = self.roles.rollout.end_generation().get()
        self._rollout_metrics = metric_values(rollout_metrics(metrics))

    def rewards(self, batch: DataProto) -> DataProto:
        """The scores of samples of this step, as `generate` has given them: rm_scores, and reward_extra_keys in meta_info."""
        names = batch.meta_info.get("reward_extra_keys", [])
        objects = {name: batch.non_tensor_batch[name] for name in names}
        return DataProto.from_dict(
            {"rm_scores": batch.batch["rm_scores"]}, objects, meta_info={"reward_extra_keys": names}
        )

    def forward(self, role: str, batch: DataProto, outputs: dict[str, str], span: str) -> DataProto:
        """Model outputs of a role, by column. Raises ConfigError for a role that the run does not have."""
        handle = getattr(self.roles, role)
        if handle is None:
            raise ConfigError(f"The run has no {role}: its config asks for none.")
        began = time.perf_counter()
        with self._calls, self.loop.spans(span):
            values: DataProto = handle.forward(self._inward(batch), outputs).get()
        self.forward_s = time.perf_counter() - began
        return values

    def update(self, role: str, batch: DataProto, step: int, **schedule: int) -> dict[str, float]:
        """All optimizer steps of a role on `batch`, with another `size` or `epochs` of its `schedule`; returns its metrics.
        Guards check the batch and the steps; a batch that they leave out has training/skipped_batches. Raises NumericsError if
        a guard stops the run or would go back."""
        require_rows(batch)
        step, is_own = _number(step), "ordinal" not in batch.batch.keys()  # rows that agents outside have made
        if not is_own and (
            self._sampled_at != step or not self._sampled_by.keys() >= set(batch.batch["ordinal"].tolist())
        ):
            raise ConfigError(
                f"The batch of step {step} has samples of an earlier step, which are dropped when that ends. Train in a step "
                "on what it has generated."
            )
        if role == "actor":
            warn_uncorrected(self.config.algorithm.rollout_correction, batch)
        handle = getattr(self.roles, role)
        result, guards = StepBatch(self._inward(batch)), self.program.guards
        usual = handle.schedule
        try:
            handle.schedule = replace(usual, **schedule)
            with self._calls, guards.step(step, result, self.program.samples.cursor):
                guards.check_samples(result, needs_scores=False)
                guards.check_credit(result)
                with self.loop.spans(f"update_{role}"):
                    updates: Updates = handle.update(result.batch, step).get()
                result.metrics.update(guards.record(updates).metrics())
                guards.check_updates(result)
        except RollBack as back:
            raise NumericsError(
                f"{back}. A fit of one's own cannot go back to a checkpoint: set trainer.guards.*.action to skip or stop, or "
                "run the same command again to resume from the newest checkpoint."
            ) from back
        finally:
            handle.schedule = usual
        self.loop.saved_step = -1  # a checkpoint of this step lacks the update
        self._open = result, step
        if role == "actor":
            self._trained_policy(result)
            self._end_step()
        return metric_values(result.metrics)

    def sync(self) -> None:
        """Let the rollout engine sample with the trained weights."""
        if not self._is_synced:
            with self.loop.spans("update_weights"):
                self.roles.weights.sync(self.program.weight_version)
            self._is_synced = True

    def validate(self) -> dict[str, float]:
        """Metrics of the held-out prompts, {} without any; the samples are in the run folder."""
        self.sync()
        return dict(self.loop.validate()) if self.loop.data.has_validation else {}

    def save(self, step: int) -> None:
        """A checkpoint of `step` for the same command to resume from; nothing before the first step."""
        self._end_step()
        if step and self.loop.saved_step != step:
            self.loop.state.step = _number(step)
            self.loop.save()

    def write_rows(self, batch: DataProto, step: int) -> None:
        """The samples of a step, to the run folder and trainer.rollout_data_dir."""
        if self.loop.is_rank_zero:
            self.loop.tracker.samples("train", step, sample_rows(_inward(batch), self.loop.data.tokenizer))

    def _inward(self, batch: DataProto) -> DataProto:
        """As `_inward`. Raises ConfigError for rows of agents outside that no model can read."""
        if "ordinal" not in batch.batch.keys():
            missing = [name for name in ("input_ids", "attention_mask", "responses") if name not in batch.batch.keys()]
            if missing:
                raise ConfigError(
                    f"The rows have no column {missing[0]}. Rows of agents have input_ids, attention_mask "
                    "[batch, prompt + response], prompts and responses."
                )
            token_ids(batch.batch["input_ids"].flatten(), "input_ids", num_embeddings(self.loop.data.tokenizer))
        return _inward(batch)

    def _trained_policy(self, result: StepBatch) -> None:
        if not result.skipped:
            self.program.weight_version += 1
            self._is_synced = False

    def _end_step(self) -> None:
        """The step of the last update is taken. Without an update of the actor (trainer.critic_warmup) this is known when the
        next one begins, or is saved."""
        if self._open is None:
            return
        (result, step), self._open = self._open, None
        if step == self.step:  # the script trains several times on its batch
            return
        is_own = "ordinal" not in result.batch.batch.keys()
        self.program.samples.train(step, [] if result.skipped or is_own else keys_of(result.batch), leaves_out=True)
        self.step = self.loop.state.step = step
        now = time.perf_counter()
        self.loop.state.seconds += now - self._began
        self.loop.state.num_tokens += int(result.batch.batch["attention_mask"].sum())
        self._began = now
        self.write_rows(result.batch, step)
        self._note_end()

    def _log(self, metrics: dict[str, object], step: int) -> None:
        """Metrics of the script, to metrics.jsonl of the run folder."""
        numbers = {
            n: v for n, v in metrics.items() if isinstance(v, int | float | Metric) or getattr(v, "size", 0) == 1
        }
        self.loop.tracker.log({**self._rollout_metrics, **numbers}, step)
        self.loop.spans.write(step)
        self._note_end()

    def _note_end(self) -> None:
        """Write the summary once the last step is taken: the process may then end without closing the run."""
        if self.step >= self.loop.data.num_steps:
            self._finish(ends=False)


class PromptBatches:
    """`for columns in batches`: the epoch from here on, up to the last step, in batches of data.gen_batch_size prompts with a
    group filter, else of data.train_batch_size. `columns` has ordinal, row_index, prompt_token_ids, the fields of the rows, and
    input_ids, attention_mask, position_ids [batch, data.max_prompt_length] and raw_prompt_ids, as fits of earlier releases
    read."""

    sampler = None  # the run has the order of its rows

    def __init__(self, run: FitRun):
        self._run, self._next = run, 0
        self.batch_size = prompts_per_generation(run.config)

    def __len__(self) -> int:
        return -(-self._run.loader.order.rows_per_epoch // self.batch_size)

    def __iter__(self) -> Iterator[Row]:
        loader = self._run.loader
        per_epoch = loader.order.rows_per_epoch
        self._next = max(self._next, self._run.program.samples.cursor)
        end = (self._next // per_epoch + 1) * per_epoch
        while self._next < end and self._run.step < self._run.loop.data.num_steps:
            batch = loader.take(self._next, self.batch_size)
            self._next += self.batch_size
            yield columns_of(batch, self._run.config.data.max_prompt_length)


class HeldOutBatches:
    """All held-out prompts of a run in batches of data.val_batch_size, with the columns of PromptBatches; see `generate`."""

    def __init__(self, run: FitRun, loader: ValidationLoader):
        self._loader, self._width = loader, run.config.data.max_prompt_length

    def __len__(self) -> int:
        return -(-self._loader.num_rows // self._loader.batch_size)

    def __iter__(self) -> Iterator[Row]:
        return (columns_of(batch, self._width) for batch in self._loader)


def _inward(batch: DataProto) -> DataProto:
    """The batch with the masks that roles read. Raises ConfigError if a script has changed only some of its tokens."""
    columns = dict(batch.batch.items())
    is_whole = {"input_ids", "prompts", "responses"} <= columns.keys()
    if is_whole and not torch.cat([columns["prompts"], columns["responses"]], 1).equal(columns["input_ids"]):
        raise ConfigError("The columns input_ids, prompts and responses have different tokens. Change them together.")
    if {"responses", "attention_mask"} <= columns.keys():  # rows of agents outside may lack parts of it
        width = columns["responses"].shape[1]
        columns.setdefault("response_mask", columns["attention_mask"][:, -width:])
        columns.setdefault("prompt_mask", columns["attention_mask"][:, :-width])
        columns |= {} if is_whole or "input_ids" not in columns else {"prompts": columns["input_ids"][:, :-width]}
    columns |= {name: columns[name].bool() for name in MASKS if name in columns}
    for name in [n for n, values in columns.items() if values.is_floating_point() and values.dtype.itemsize < 4]:
        columns[name] = columns[name].float()  # scores of a project may be in bfloat16
    return DataProto.from_dict(columns, dict(batch.non_tensor_batch))


def _number(step: SupportsIndex) -> int:
    """The number of a step, as an int. Raises ConfigError for a number that the existing trainer would not count."""
    number = operator.index(step) if hasattr(step, "__index__") else 0
    if number < 1:
        raise ConfigError(f"global_steps is {step}: a fit counts its steps from 1, and increments it before the first.")
    return number
