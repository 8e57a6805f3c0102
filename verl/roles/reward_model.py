"""Reward models: a classifier that scores, or a judge that replies in text.

`score(batch)` adds one column, by rows, so that a group of ranks can share the work. The reward function
(verl/rewards/model_score.py) reads the column and computes the reward from it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from verl.config import RewardModelConfig
from verl.config.roots.reward_model import RMDataConfig
from verl.data.conversations.formats import Example
from verl.data.conversations.tokens import ConversationEncoder
from verl.data.prompts import answer_prefix
from verl.data_proto.extras import MEDIA_COLUMNS, row_media_of
from verl.data_proto.media import Spans
from verl.data_proto.merge import object_array
from verl.data_proto.proto import DataProto
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ConfigError, ModelError, NumericsError
from verl.families import engine_facts
from verl.models.classifier import load_reward_model, reward_model_config, scores_steps, sequence_scores
from verl.models.heads import ScalarHeadModel
from verl.models.load import load_external, load_model_config, load_tokenizer
from verl.models.packing import placed_in
from verl.models.tokenizer import eos_token_ids
from verl.models.vision import require_vision
from verl.parallel.device import compute_dtype
from verl.parallel.register import Dispatch, register
from verl.regular_files import read_user_text
from verl.roles.judges import Judge, build_judge
from verl.roles.verdicts import CachedReplies, ask_once, compare_pairs, fill, name_of_judge, read_rubric, rubric_scores

log = logging.getLogger(__name__)

Row = TypeVar("Row")

PLACE = "a conversation for the reward model"


def build_reward_model(
    config: RewardModelConfig,
    policy_tokenizer: Tokenizer,
    device: torch.device,
    *,
    start_timeout_s: float = 300.0,
    call_timeout_s: float = 600.0,
) -> RewardModelWorker | JudgeWorker:
    """The worker that `reward.reward_model` describes: a judge when it has a judge_template, else a classifier. The seconds
    are a judge's on vLLM, see build_judge.

    Raises ConfigError without a model_path or for a template that leaves the response out, ModelError for a model that
    cannot score, and what build_judge raises.
    """
    template = examine_reward_model(config)
    if template:
        judge = build_judge(config, device, start_timeout_s=start_timeout_s, call_timeout_s=call_timeout_s)
        return JudgeWorker(judge, policy_tokenizer, config, template=template)
    assert config.model_path is not None
    module = load_reward_model(
        config.model_path,
        device=device,
        dtype=compute_dtype(config.rollout.dtype, device),
        trust_remote_code=config.trust_remote_code,
    )
    return RewardModelWorker(
        module,
        load_tokenizer(config.model_path),
        policy_tokenizer,
        max_tokens=config.rollout.max_num_batched_tokens,
        batch_size=config.reward_batch_size,
        scores_steps=scores_steps(load_model_config(config.model_path, config.trust_remote_code, None)),
    )


def examine_reward_model(config: RewardModelConfig) -> str:
    """The template of a judge, "" of a classifier. Raises what `build_reward_model` raises before it reads weights."""
    at_service = bool(config.judge_template) and engine_facts(config.rollout.name).asks_service
    if not config.model_path and not at_service:
        raise ConfigError("reward.reward_model.enable=True needs reward.reward_model.model_path, a folder or hub name.")
    load_external(config.external_lib)
    if not config.judge_template:
        reward_model_config(config.model_path or "", config.trust_remote_code)
        return ""
    if config.rubric is not None:
        read_rubric(config.rubric)
    return read_template(config.judge_template, has_rubric=config.rubric is not None)


class RewardModelWorker:
    """Scores prompt and response with a sequence classification model.

    A reward model with the policy's tokenizer and chat template reads the policy's tokens; another one reads the
    conversation through its own template, in the tokens that `verl rm` trains on. The score is read at its place in training:
    at the token that ends the response, or for a process reward model at the token before.
    """

    def __init__(
        self,
        module: ScalarHeadModel,
        tokenizer: Tokenizer,
        policy_tokenizer: Tokenizer,
        *,
        max_tokens: int,
        batch_size: int | None = None,
        scores_steps: bool = False,
    ):
        self.module = module
        self.tokenizer = tokenizer
        self.policy_tokenizer = policy_tokenizer
        self.max_tokens, self.batch_size = max_tokens, batch_size
        has_same_tokens = tokenizer.get_vocab() == policy_tokenizer.get_vocab()
        self.reads_policy_tokens = has_same_tokens and tokenizer.chat_template == policy_tokenizer.chat_template
        if not self.reads_policy_tokens and not tokenizer.chat_template:
            raise ModelError(
                "The reward model's tokenizer differs from the policy's and has no chat template, so it is not known how "
                "a conversation is written for it. Add the template that it was trained with to its tokenizer files."
            )
        stops = frozenset(eos_token_ids(module, tokenizer))
        settings = RMDataConfig(max_length=None, ignore_input_ids_mismatch=True)
        self.encoder = ConversationEncoder(tokenizer, settings, stops, checks=False)
        self.left_out = stops if scores_steps else frozenset()
        self._has_warned = False

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, objects=("raw_prompt", "template_kwargs", "uid", *MEDIA_COLUMNS))
    def score(self, batch: DataProto) -> DataProto:
        """Column reward_model_score [batch]. Raises NumericsError for a score that is not finite, ConfigError for images that
        another template would leave out, ModelError for a model that reads none."""
        images = self._images(batch)
        if self.reads_policy_tokens:
            sequences = [prompt + response for prompt, response in zip(*_unpadded(batch), strict=True)]
        else:
            sequences = self._conversations(batch)
        sequences = [ids[:-1] if ids[-1:] and ids[-1] in self.left_out else ids for ids in sequences]
        scores = torch.cat(
            [
                sequence_scores(
                    self.module,
                    [ids for ids, _ in some],
                    max_tokens=self.max_tokens,
                    media=[image for _, image in some],
                )
                for some in batches([*zip(sequences, images, strict=True)], self.batch_size)
            ]
        )
        bad = ~torch.isfinite(scores)
        if bad.any():
            row = int(bad.nonzero()[0])
            uid = batch.non_tensor_batch["uid"][row] if "uid" in batch.non_tensor_batch else row
            raise NumericsError(
                f"The reward model gave {float(scores[row])} for a response to prompt {uid} (row {row} of "
                f"{len(scores)}); nothing was trained on this batch. Use reward.reward_model.rollout.dtype=float32, or "
                "another reward model."
            )
        return DataProto.from_dict({"reward_model_score": scores.to(torch.float32)})

    def _images(self, batch: DataProto) -> list[Spans]:
        """The images of each row, at places from its first token."""
        media = row_media_of(batch) or [None] * len(batch)
        if any(media):
            require_vision(self.module)
            if not self.reads_policy_tokens:
                raise ConfigError(
                    "Rows have images, and the reward model's tokenizer or chat template differs from the policy's. Train it "
                    "from the policy's model, or set reward.reward_model.enable=False."
                )
        lengths = [len(prompt) for prompt in _unpadded(batch)[0]]
        return [
            tuple(span.moved(length) for span in placed_in(images, length))
            for images, length in zip(media, lengths, strict=True)
        ]

    def close(self) -> None:
        """Nothing to end."""

    def _conversations(self, batch: DataProto) -> list[tuple[int, ...]]:
        sequences, mask = [], batch.batch["response_mask"].bool()
        answered = batch.batch["attention_mask"][:, -mask.shape[1] :].bool() & ~mask
        if (mask.any(dim=1) & answered.any(dim=1)).any() and not self._has_warned:
            self._has_warned = True
            log.warning(
                "The reward model reads an episode of several turns as one message of the assistant, since its tokenizer or "
                "chat template differs from the policy's. Train it from the policy's model."
            )
        objects = batch.non_tensor_batch
        row_kwargs = objects["template_kwargs"] if "template_kwargs" in objects else [None] * len(batch)
        for messages, kwargs, response in zip(
            objects["raw_prompt"], row_kwargs, responses(batch, self.policy_tokenizer), strict=True
        ):
            prefix = answer_prefix(messages, kwargs or {})
            turns = list(messages) if prefix is None else list(messages[:-1])
            answer = [{"role": "assistant", "content": (prefix or "") + response}]
            conversation = Example("prompt_completion", turns, answer, template_kwargs=kwargs or {})
            (sequence,) = self.encoder.encode(conversation, PLACE)
            sequences.append(tuple(sequence.input_ids.tolist()))
        return sequences


class JudgeWorker:
    """Asks a generative model. It replies greedily, so that equal responses get equal replies. A rubric is asked criterion by
    criterion, a template with {first} and {second} about the response and the ground truth, in both orders."""

    def __init__(self, judge: Judge, policy_tokenizer: Tokenizer, config: RewardModelConfig, *, template: str):
        self.judge, self.policy_tokenizer, self.template = judge, policy_tokenizer, template
        self.batch_size, self.max_reply_tokens = config.reward_batch_size, config.rollout.response_length
        self.rubric = None if config.rubric is None else read_rubric(config.rubric)
        self.ask = self._ask
        if config.reply_cache is not None:
            name = name_of_judge(config.model_path or config.rollout.service.served_model_name, self.max_reply_tokens)
            self.ask = CachedReplies(self._ask, Path(config.reply_cache).expanduser(), name)

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, objects=("raw_prompt", "reward_model", "uid"))
    def score(self, batch: DataProto) -> DataProto:
        """Column reward_model_reply [batch], text; equal questions are asked once. With a rubric or a comparison it ends with
        `judge/NAME: number` for each part, and `Score: number`. Raises what Judge.replies raises."""
        rows = self._rows(batch)
        if self.rubric:
            scored = rubric_scores(self.ask, self.template, self.rubric, rows)
            replies = [_reply("", grades.pop("score"), grades) for grades in scored]
        elif "{first}" in self.template:
            replies = self._compared(rows)
        else:
            replies = ask_once(self.ask, [self.prompt(*row) for row in rows])
        self.judge.release()
        return DataProto.from_dict({}, {"reward_model_reply": object_array(replies)})

    def close(self) -> None:
        """End the processes of the judge."""
        self.judge.close()

    def prompt(self, conversation: str, response: str, ground_truth: str) -> str:
        """The template with its places filled; braces that are no places stay."""
        return fill(self.template, prompt=conversation, response=response, ground_truth=ground_truth)

    def _ask(self, questions: Sequence[str]) -> list[str]:
        replies: list[str] = []
        for some in batches(questions, self.batch_size):
            try:
                replies += self.judge.replies(some)
            except ModelError as error:
                raise ModelError(
                    f"The judge did not reply (reward.reward_model.rollout.response_length={self.max_reply_tokens} tokens are "
                    f"kept for it): {error}"
                ) from error
        return replies

    def _compared(self, rows: Sequence[tuple[str, str, str]]) -> list[str]:
        replies = []
        for verdict in compare_pairs(self.ask, self.template, rows):
            preference, agrees = verdict.preference, verdict.agrees
            score = float("nan") if preference is None else (preference + 1) / 2
            parts = {} if agrees is None else {"order_agreement": float(agrees)}
            replies.append(_reply("\n\n".join(verdict.replies) + "\n", score, parts))
        return replies

    def _rows(self, batch: DataProto) -> list[tuple[str, str, str]]:
        objects = batch.non_tensor_batch
        rules = objects["reward_model"] if "reward_model" in objects else [None] * len(batch)
        return [
            (conversation_text(messages), response, str((rule or {}).get("ground_truth", "")))
            for messages, response, rule in zip(
                objects["raw_prompt"], responses(batch, self.policy_tokenizer), rules, strict=True
            )
        ]


def _reply(words: str, score: float, parts: dict[str, float]) -> str:
    """The judge's reply, then the values read from it, for the reward function."""
    return words + "".join(f"judge/{name}: {value:.4f}\n" for name, value in parts.items()) + f"Score: {score:.4f}"


def batches(rows: Sequence[Row], size: int | None) -> Iterator[Sequence[Row]]:
    """`rows` in chunks of at most `size`; None: in one."""
    size = size or max(1, len(rows))
    return (rows[at : at + size] for at in range(0, max(1, len(rows)), size))


def read_template(source: str, *, has_rubric: bool = False) -> str:
    """The text of a judge's template, given as text or as the name of a file. Raises ConfigError when it does not show
    the response, or the criterion of a rubric."""
    is_text = "{" in source or "\n" in source
    fix = "Name a file, or give a text with {response}."
    template = source if is_text else read_user_text(source, "The file reward.reward_model.judge_template", fix=fix)
    needed = ["{response}", "{criterion}"] if has_rubric else ["{first}", "{second}"]
    if not has_rubric and not any(place in template for place in needed):
        needed = ["{response}"]
    if lacking := [place for place in needed if place not in template]:
        raise ConfigError(
            f"reward.reward_model.judge_template has no place {lacking[0]}, so every response would be judged alike. Add it; "
            "{prompt} and {ground_truth} may be used too."
        )
    return template


def conversation_text(messages: Sequence[dict[str, object]]) -> str:
    """A lone message's text, or one paragraph per message with its role before it."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def responses(batch: DataProto, tokenizer: Tokenizer) -> list[str]:
    """The text of each response."""
    return [tokenizer.decode(list(ids), skip_special_tokens=True) for ids in _unpadded(batch)[1]]


def _unpadded(batch: DataProto) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    columns = batch.batch
    width = columns["responses"].shape[1]
    present = columns["attention_mask"].bool()
    return _present(columns["prompts"], present[:, :-width]), _present(columns["responses"], present[:, -width:])


def _present(tokens: torch.Tensor, present: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(row[mask].tolist()) for row, mask in zip(tokens.cpu(), present.cpu(), strict=True)]
