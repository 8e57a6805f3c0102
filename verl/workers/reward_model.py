"""The reward model as a role: a classifier that scores, or a judge that writes its opinion.

`score(batch)` adds one column, by rows, so that a group of ranks can share the work. What it says goes to the reward
function (verl/rewards/model_score.py), which makes the reward of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from verl.config import RewardModelConfig, RolloutConfig
from verl.data_proto.merge import object_array
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import PromptRequest, SamplingParams
from verl.errors import ConfigError, ModelError, NumericsError
from verl.models.classifier import load_reward_model, sequence_scores
from verl.models.load import eos_token_ids, load_causal_lm, load_external, load_tokenizer
from verl.models.value import ValueModel
from verl.parallel.device import compute_dtype
from verl.parallel.register import Dispatch, register
from verl.rollout.api import ENGINES, RolloutEngine

_PLACES = re.compile(r"\{(prompt|response|ground_truth)\}")


def build_reward_model(
    config: RewardModelConfig, policy_tokenizer: Any, device: torch.device
) -> RewardModelWorker | JudgeWorker:
    """The worker that `reward.reward_model` describes: a judge when it has a judge_template, else a classifier.

    Raises ConfigError without a model_path or for a template that leaves the response out, ModelError for a model that
    cannot score.
    """
    if not config.model_path:
        raise ConfigError("reward.reward_model.enable=True needs reward.reward_model.model_path, a folder or hub name.")
    load_external(config.external_lib)
    dtype = compute_dtype(config.rollout.dtype, device)
    tokenizer = load_tokenizer(config.model_path)
    if not config.judge_template:
        module = load_reward_model(
            config.model_path, device=device, dtype=dtype, trust_remote_code=config.trust_remote_code
        )
        return RewardModelWorker(module, tokenizer, policy_tokenizer, max_tokens=config.rollout.max_num_batched_tokens)
    judge = load_causal_lm(
        config.model_path, device=device, dtype=dtype, trust_remote_code=config.trust_remote_code
    ).requires_grad_(False)
    settings = RolloutConfig(
        max_num_seqs=config.rollout.max_num_seqs,
        max_num_batched_tokens=config.rollout.max_num_batched_tokens,
        max_model_len=config.rollout.max_model_len,
        free_cache_engine=config.rollout.free_cache_engine,
    )
    engine = ENGINES.get("native")(
        judge, tokenizer, settings, eos_token_ids=eos_token_ids(judge, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return JudgeWorker(
        engine,
        tokenizer,
        policy_tokenizer,
        template=read_template(config.judge_template),
        max_reply_tokens=config.rollout.response_length,
        free_cache=config.rollout.free_cache_engine,
    )


class RewardModelWorker:
    """Scores prompt and response with a sequence classification model.

    A reward model with the policy's tokenizer and chat template reads the policy's tokens; another one reads the
    conversation, the response being the assistant's turn, through its own template.
    """

    def __init__(self, module: ValueModel, tokenizer: Any, policy_tokenizer: Any, *, max_tokens: int):
        self.module = module
        self.tokenizer = tokenizer
        self.policy_tokenizer = policy_tokenizer
        self.max_tokens = max_tokens
        self.reads_policy_tokens = same_tokenizer(tokenizer, policy_tokenizer)
        if not self.reads_policy_tokens and not tokenizer.chat_template:
            raise ModelError(
                "The reward model's tokenizer differs from the policy's and has no chat template, so it is not known how "
                "a conversation is written for it. Add the template that it was trained with to its tokenizer files."
            )

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, objects=("raw_prompt", "uid"))
    def score(self, batch: DataProto) -> DataProto:
        """Column reward_model_score [batch]. Raises NumericsError for a score that is not finite."""
        sequences = policy_tokens(batch) if self.reads_policy_tokens else self._conversations(batch)
        scores = sequence_scores(self.module, sequences, max_tokens=self.max_tokens)
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

    def _conversations(self, batch: DataProto) -> list[tuple[int, ...]]:
        texts = [
            self.tokenizer.apply_chat_template(
                [*messages, {"role": "assistant", "content": response}], tokenize=False, add_generation_prompt=False
            )
            for messages, response in zip(
                batch.non_tensor_batch["raw_prompt"], responses(batch, self.policy_tokenizer), strict=True
            )
        ]
        return [tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


class JudgeWorker:
    """Asks a causal language model, which replies greedily, so that equal responses get equal replies."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: Any,
        policy_tokenizer: Any,
        *,
        template: str,
        max_reply_tokens: int,
        free_cache: bool,
    ):
        self.engine = engine
        self.tokenizer = tokenizer
        self.policy_tokenizer = policy_tokenizer
        self.template = template
        self.params = SamplingParams(temperature=0.0, max_new_tokens=max_reply_tokens)
        self.free_cache = free_cache

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, objects=("raw_prompt", "reward_model", "uid"))
    def score(self, batch: DataProto) -> DataProto:
        """Column reward_model_reply [batch], text. Raises ModelError when a response does not fit into the judge."""
        prompts = [self.prompt(*row) for row in self._rows(batch)]
        distinct = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        requests = [PromptRequest(number, ids) for number, ids in enumerate(self._tokens(list(distinct)))]
        try:
            completions = self.engine.generate(requests, self.params, step=0)
        except ModelError as error:
            raise ModelError(
                f"The judge could not read its prompt and reply in {self.params.max_new_tokens} tokens "
                f"(reward.reward_model.rollout.response_length): {error}"
            ) from error
        if self.free_cache:
            self.engine.release()
        replies = [self.tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]
        return DataProto.from_dict({}, {"reward_model_reply": object_array([replies[distinct[p]] for p in prompts])})

    def prompt(self, conversation: str, response: str, ground_truth: str) -> str:
        """The template with its places filled; braces that are no places stay."""
        parts = {"prompt": conversation, "response": response, "ground_truth": ground_truth}
        return _PLACES.sub(lambda found: parts[found.group(1)], self.template)

    def _rows(self, batch: DataProto) -> list[tuple[str, str, str]]:
        objects = batch.non_tensor_batch
        rules = objects["reward_model"] if "reward_model" in objects else [None] * len(batch)
        return [
            (conversation_text(messages), response, str((rule or {}).get("ground_truth", "")))
            for messages, response, rule in zip(
                objects["raw_prompt"], responses(batch, self.policy_tokenizer), rules, strict=True
            )
        ]

    def _tokens(self, prompts: Sequence[str]) -> list[tuple[int, ...]]:
        if not self.tokenizer.chat_template:
            return [tuple(self.tokenizer(prompt)["input_ids"]) for prompt in prompts]
        texts = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in prompts
        ]
        return [tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


def read_template(given: str) -> str:
    """The text of a judge's template, given as text or as the name of a file. Raises ConfigError when it does not show
    the response."""
    is_text = "{" in given or "\n" in given
    file = Path(given).expanduser()
    if not is_text and not file.is_file():
        raise ConfigError(
            f"reward.reward_model.judge_template={given} is neither an existing file nor text with {{response}}."
        )
    template = given if is_text else file.read_text(encoding="utf-8")
    if "{response}" not in template:
        raise ConfigError(
            "reward.reward_model.judge_template has no place {response}, so every response would be judged alike. Add it; "
            "{prompt} and {ground_truth} may be used too."
        )
    return template


def same_tokenizer(one: Any, other: Any) -> bool:
    """Whether the tokens and conversations of one mean the same to the other."""
    return one.chat_template == other.chat_template and one.get_vocab() == other.get_vocab()


def conversation_text(messages: Sequence[dict[str, Any]]) -> str:
    """A lone message's text, or one paragraph per message with its role before it."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def policy_tokens(batch: DataProto) -> list[tuple[int, ...]]:
    """Prompt and response of each row without padding."""
    return [prompt + response for prompt, response in zip(*_unpadded(batch), strict=True)]


def responses(batch: DataProto, tokenizer: Any) -> list[str]:
    """The text of each response."""
    return [tokenizer.decode(list(ids), skip_special_tokens=True) for ids in _unpadded(batch)[1]]


def _unpadded(batch: DataProto) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    columns = batch.batch
    width = columns["responses"].shape[1]
    present = columns["attention_mask"].bool()
    return _present(columns["prompts"], present[:, :-width]), _present(columns["responses"], present[:, -width:])


def _present(tokens: torch.Tensor, present: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(row[here].tolist()) for row, here in zip(tokens.cpu(), present.cpu(), strict=True)]
