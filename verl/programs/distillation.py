"""Teachers of a student: their outputs for a batch, and responses of the rows in place of samples (GKD, stored outputs)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from verl.config import PPOConfig
from verl.data.conversations.turn_ends import TurnEnds
from verl.data.prompts import encode_text
from verl.data.schema import at
from verl.data_proto.future import Finished, Future
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import SamplingParams
from verl.data_proto.token_ids import num_embeddings, token_ids
from verl.data_proto.tokenizer import Tokenizer
from verl.data_proto.trajectory import Segment, Trajectory, response_lengths, to_columns
from verl.errors import ConfigError, DataError
from verl.foreign_text import quoted
from verl.models.load import load_model_config, load_tokenizer
from verl.programs.ppo_roles import role_of
from verl.registry import match_all
from verl.roles.api import ModelHandle, RolloutHandle
from verl.roles.objectives.distillation import TEACHER_COLUMNS, lists_tokens, teacher_outputs
from verl.roles.rollout import sample_names

STORED = ("teacher_ids", "teacher_log_probs")  # fields of a row, [response][k]
_ROUNDING = 0.01  # of probabilities that add up to 1, in bfloat16


def check_teachers(config: PPOConfig, tokenizer: Tokenizer, rows: Any = None) -> None:
    """Raise ConfigError for a teacher that splits text into other tokens than the student, and DataError for a row without a
    teacher or without the response and outputs that it is to have."""
    distillation = config.distillation
    for name, teacher in distillation.teachers().items():
        path = f"distillation.teacher_models.{name}.model_path={teacher.model_path}"
        _check_vocabulary(path, tokenizer.get_vocab(), load_tokenizer(str(teacher.model_path)).get_vocab())
        if distillation.distillation_loss.topk == -1 and lists_tokens(distillation.distillation_loss):
            sizes = [
                _vocabulary_size(config, path) for path in (teacher.model_path, config.actor_rollout_ref.model.path)
            ]
            if sizes[0] != sizes[1]:
                raise ConfigError(
                    f"{path} has {sizes[0]} logits and the student {sizes[1]}: topk=-1 compares all of them. Set "
                    "distillation.distillation_loss.topk, for example to 64."
                )
    keys = {teacher.key for teacher in distillation.teachers().values()}
    off_policy = distillation.on_policy_share < 1
    vocabulary = _vocabulary_size(config, config.actor_rollout_ref.model.path) if off_policy else 0
    ends = TurnEnds(tokenizer)
    if rows is not None and (len(keys) > 1 or off_policy):
        for number in range(len(rows)):
            row, place = rows[number], rows.place(number)
            if len(keys) > 1 and row.get(distillation.teacher_key) not in keys:
                raise DataError(
                    f"{place}: {distillation.teacher_key}={quoted(row.get(distillation.teacher_key))} chooses no teacher; "
                    f"distillation.teacher_models has the keys {', '.join(map(str, sorted(keys, key=str)))}."
                )
            if off_policy:
                ids = _response_ids(row, distillation.response_key, ends, place)
                if distillation.stored_outputs:
                    _check_stored(row, len(ids), vocabulary, place)
    if rows is not None and len(keys) > 1:
        keys_of_rows = {str(rows[number].get(distillation.teacher_key)) for number in range(len(rows))}
        what = f"value of the field {distillation.teacher_key!r} in the rows"
        match_all("distillation.teacher_models.*.key", map(str, keys), sorted(keys_of_rows), what)


def _check_vocabulary(path: str, student: Mapping[str, int], teacher: Mapping[str, int]) -> None:
    differing = [token for token, number in student.items() if teacher.get(token) != number]
    if differing:
        token = min(differing, key=lambda t: student[t])
        difference = f"has it as {teacher[token]}" if token in teacher else "does not have it"
        raise ConfigError(
            f"{path} splits text into other tokens than the student: {len(differing)} of the student's {len(student)} differ. "
            f"Token {student[token]} is {token!r}; the teacher {difference}. Distillation compares token by token: choose a "
            "teacher with the student's tokenizer."
        )


def _vocabulary_size(config: PPOConfig, path: str | None) -> int:
    teacher_config = load_model_config(str(path), config.actor_rollout_ref.model.trust_remote_code, None)
    return int(teacher_config.get_text_config().vocab_size)


def _response_ids(row: Mapping[str, object], key: str, ends: TurnEnds, place: str) -> list[int]:
    """The response of a row: token ids unchanged, or the tokens of a text and the token that ends it."""
    response = row.get(key)
    if isinstance(response, str) and response:
        end = ends.token(place, after_chat=bool(ends.tokenizer.chat_template))
        return [*encode_text(ends.tokenizer, response, place, add_special_tokens=False), end]
    if isinstance(response, list | tuple | np.ndarray) and len(response):
        with at(place):
            ids: list[int] = token_ids(response, key, num_embeddings(ends.tokenizer)).tolist()
        return ids
    raise DataError(
        f"{place}: field {key!r} (distillation.response_key) must be a text or a list of token ids, but it is "
        f"{quoted(response, 60)}."
    )


def _check_stored(row: Mapping[str, Any], length: int, vocabulary: int, place: str) -> None:
    tables: list[np.ndarray] = []
    for name in STORED:
        try:
            table = np.asarray([list(tokens) for tokens in row.get(name)])  # type: ignore[union-attr]
        except (TypeError, ValueError):  # no lists, or of several lengths
            table = np.empty(0)
        if table.ndim != 2 or len(table) != length or table.size == 0 or table.shape != (tables or [table])[0].shape:
            raise DataError(
                f"{place}: field {name!r} must have a list of equally many tokens for each of the {length} tokens of the "
                "response; distillation.stored_outputs=True reads it."
            )
        tables.append(table)
    log_probs = tables[1]
    with at(place):
        for number, tokens in enumerate(row[STORED[0]]):
            token_ids(tokens, f"{STORED[0]}[{number}]", vocabulary)
    if log_probs.dtype.kind not in "if" or not np.exp(log_probs.astype(float)).sum(1).max() <= 1 + _ROUNDING:
        raise DataError(
            f"{place}: field {STORED[1]!r} must have log-probabilities: numbers of at most 0, whose probabilities at one token "
            "add up to at most 1."
        )


class Teachers:
    """Columns of the teachers' outputs for the objective, see verl/roles/objectives/distillation.py."""

    def __init__(self, config: PPOConfig, handles: Mapping[str, ModelHandle]):
        self.config, loss = config.distillation, config.distillation.distillation_loss
        self.by_key = {teacher.key: handles[role_of(name)] for name, teacher in self.config.teachers().items()}
        self.lists_tokens = lists_tokens(loss)
        self.vocabulary = _vocabulary_size(config, config.actor_rollout_ref.model.path) if self.lists_tokens else 0
        self.outputs = teacher_outputs(loss, self.vocabulary)

    def start(self, batch: DataProto) -> Callable[[], DataProto]:
        """Start all teachers on their rows of `batch`; the result waits for them."""
        if self.config.stored_outputs:
            return lambda: self._stored(batch)
        if len(self.by_key) == 1:
            pending = next(iter(self.by_key.values())).forward(batch, self.outputs)
            return lambda: self._checked(pending.get())
        keys = batch.non_tensor_batch[self.config.teacher_key]
        rows = {key: np.flatnonzero(keys == key) for key in self.by_key}
        parts = [
            (rows[key], handle.forward(batch.select_idxs(rows[key]), self.outputs))
            for key, handle in self.by_key.items()
            if len(rows[key])
        ]
        return lambda: self._checked(_in_row_order(parts))

    def _stored(self, batch: DataProto) -> DataProto:
        objects, lengths = batch.non_tensor_batch, response_lengths(batch.batch).tolist()
        count = len(objects[STORED[0]][0][0])
        columns = {}
        for field, column, dtype in zip(STORED, TEACHER_COLUMNS, (torch.int64, torch.float32), strict=True):
            values = torch.zeros(*batch.batch["responses"].shape, count, dtype=dtype)
            for row, (listed, length) in enumerate(zip(objects[field], lengths, strict=True)):
                row_values = np.stack([np.asarray(tokens) for tokens in listed[:length]])
                if row_values.shape[1] != count:
                    raise DataError(
                        f"Rows of one batch list {count} and {row_values.shape[1]} tokens in {field}; store equally many."
                    )
                values[row, :length] = torch.from_numpy(row_values)
            columns[column] = values
        return self._checked(DataProto.from_dict(columns))

    def _checked(self, outputs: DataProto) -> DataProto:
        """`outputs`, unless it names a token that the student does not have."""
        if self.lists_tokens and int(outputs.batch[TEACHER_COLUMNS[0]].max()) >= self.vocabulary:
            raise DataError(
                f"The teacher lists token {int(outputs.batch[TEACHER_COLUMNS[0]].max())}, and the student has "
                f"{self.vocabulary}: it puts probability on padding of its vocabulary. Lower distillation_loss.topk."
            )
        return outputs


def _in_row_order(parts: Sequence[tuple[np.ndarray, Future[DataProto]]]) -> DataProto:
    joined = DataProto.concat([pending.get() for _, pending in parts])
    order = np.argsort(np.concatenate([rows for rows, _ in parts]))
    return joined.select_idxs(order)


@dataclass
class RowResponses:
    """A RolloutHandle that returns the responses of the rows in the off-policy training steps of GKD (2306.13649, algorithm 1).
    The choice of a step depends only on (seed, step). `version` returns the version of the current weights."""

    rollout: RolloutHandle
    config: PPOConfig
    tokenizer: Tokenizer
    version: Callable[[], int]

    @cached_property
    def ends(self) -> TurnEnds:
        """Ends of the responses of rows."""
        return TurnEnds(self.tokenizer)

    def is_on_policy(self, step: int) -> bool:
        """Whether the student samples in training step `step`."""
        random = np.random.Generator(np.random.Philox(key=[self.config.data.seed or 0, step]))
        return bool(random.random() < self.config.distillation.on_policy_share)

    def generate(
        self, prompts: DataProto, *, step: int, params: SamplingParams, split: str = "train", limit: int | None = None
    ) -> Future[DataProto]:
        """See RolloutHandle. Responses longer than rollout.response_length are cut, as samples are."""
        if split != "train" or self.is_on_policy(step):
            return self.rollout.generate(prompts, step=step, split=split, params=params, limit=limit)
        settings = self.config.actor_rollout_ref.rollout
        trajectories = [self._trajectory(prompts, row) for row in range(len(prompts))]
        columns = to_columns(
            trajectories,
            pad_token_id=self.tokenizer.pad_token_id or 0,
            prompt_width=settings.prompt_length,
            response_width=settings.response_length,
        )
        columns["rollout_rank"] = torch.zeros(len(trajectories), dtype=torch.int64)
        return Finished(DataProto.from_dict(columns, sample_names([(t, split) for t in trajectories])))

    def _trajectory(self, prompts: DataProto, row: int) -> Trajectory:
        ordinal, objects = int(prompts.batch["ordinal"][row]), prompts.non_tensor_batch
        key, limit = self.config.distillation.response_key, self.config.actor_rollout_ref.rollout.response_length
        fields = {key: objects[key][row]} if key in objects else {}
        ids = _response_ids(fields, key, self.ends, f"prompt {ordinal}")
        tokens = np.asarray(ids[:limit], dtype=np.int32)
        segment = Segment(tokens, np.zeros(len(tokens), dtype=np.float32), self.version())
        is_cut = len(ids) > limit
        return Trajectory(ordinal, 0, objects["prompt_token_ids"][row], [segment], "length" if is_cut else "stop")

    def advance(
        self, prompts: DataProto, rows: DataProto, step: int, params: SamplingParams, first: int, split: str, limit: int,
        due: int | None = None,
    ) -> Future[tuple[DataProto, DataProto]]:  # fmt: skip
        return self.rollout.advance(
            prompts, rows, step=step, params=params, first=first, split=split, limit=limit, due=due
        )

    def end_generation(self, *, syncs: bool = False) -> Future[dict[str, Metric]]:
        return self.rollout.end_generation(syncs=syncs)

    def exact_log_probs(self) -> bool:
        return self.rollout.exact_log_probs()
