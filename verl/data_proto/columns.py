"""The column table: every column that a batch can carry, named once, with its shape, dtype, producer and meaning.

`batch` is rows, `prompt` the padded prompt length, `response` the padded response length, `k` listed tokens.
Prompts are padded on the left, responses on the right, so that column `prompt + t` of a row is response token `t`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """One row of the table. `dtype` is a torch dtype's name, or "object" for a non-tensor column."""

    axes: tuple[str, ...]
    dtype: str
    producer: str
    meaning: str


_B, _BP, _BR, _BRK = ("batch",), ("batch", "prompt"), ("batch", "response"), ("batch", "response", "k")

COLUMNS: dict[str, Column] = {
    # from the data loader
    "ordinal": Column(_B, "int64", "data", "number of the prompt within the run; rows of one group share it"),
    "row_index": Column(_B, "int64", "data", "row of the dataset that the prompt was read from"),
    "uid": Column(_B, "object", "data", "group id; the samples of one prompt share it"),
    "prompt_token_ids": Column(_B, "object", "data", "prompt tokens, unpadded, list[int]"),
    "media": Column(
        _B, "object", "image processor", "images of the prompt as Media, or None; its samples share the object"
    ),
    "episode_media": Column(
        _B, "object", "rollout", "images of an episode at places from its first response token, tuple of MediaSpan"
    ),
    "raw_prompt": Column(_B, "object", "data", "chat messages, list[{role, content}]"),
    "template_kwargs": Column(_B, "object", "data", "the row's arguments of the chat template, such as tools"),
    "data_source": Column(_B, "object", "data", "name of the task; selects the scorer"),
    "reward_model": Column(_B, "object", "data", "{style, ground_truth} of the row"),
    "extra_info": Column(_B, "object", "data", "free-form dict of the row"),
    # from the rollout
    "sample_split": Column(
        _B, "object", "rollout", "train, greedy, val, ...: names the sample, with ordinal and sample_index"
    ),
    "sample_index": Column(_B, "int64", "rollout", "number of the sample within its group"),
    "prompts": Column(_BP, "int64", "rollout", "prompt tokens, padded on the left"),
    "responses": Column(_BR, "int64", "rollout", "response tokens, padded on the right"),
    "prompt_mask": Column(_BP, "bool", "rollout", "true on prompt tokens"),
    "response_mask": Column(
        _BR, "bool", "rollout", "true on response tokens that train (false on padding and tool output)"
    ),
    "response_is_inside": Column(_B, "bool", "training service", "the response is the end of its prompt"),
    "attention_mask": Column(("batch", "prompt+response"), "bool", "rollout", "true on every token that exists"),
    "rollout_log_probs": Column(
        _BR,
        "float32",
        "rollout",
        "log-prob of each sampled token under the sampler, at its temperature (float64 of such a model)",
    ),
    "routed_experts": Column(
        _B,
        "object",
        "rollout or actor",
        "experts of each token but the last in each layer, [tokens, layers, k] of small integers, for routing replay",
    ),
    "weight_version": Column(_B, "int64", "rollout", "oldest version of the weights that made a token of the sample"),
    "rollout_rank": Column(_B, "int64", "rollout", "which of the ranks that generate made the sample"),
    "token_weight_version": Column(
        _BR, "int64", "rollout", "version of the weights that made each token, where samples are made ahead of training"
    ),
    "finish_reason": Column(_B, "object", "rollout", "stop, length or abort"),
    "begun_step": Column(_B, "int64", "rollout", "step in which an unfinished sample began; keys its random numbers"),
    "expected_tokens": Column(
        _B,
        "float32",
        "rollout",
        "tokens that a sample will likely get. New sample: mean of the newest ended samples of its prompt, for the order of "
        "prompts. Unfinished sample: in this part, for its division over ranks",
    ),
    "kv_rank": Column(
        _B, "int64", "rollout", "the rank that kept keys and values of an unfinished sample, -1 where none may be read"
    ),
    "__num_turns__": Column(_B, "object", "rollout", "turns of an episode, those of tools and users included"),
    "tool_call_counts": Column(_B, "object", "rollout", "tool calls of an episode"),
    "episode_times": Column(_B, "object", "rollout", "seconds of an episode by what it did, dict"),
    "episode_reward": Column(_B, "object", "rollout", "reward that an episode brings itself, or None"),
    "episode_error": Column(_B, "object", "rollout", "why an episode could not be made, or None"),
    "episode_extra": Column(_B, "object", "rollout", "what an episode adds to extra_info for the scorer, dict"),
    "episode_branches": Column(_B, "object", "rollout", "further conversations of an episode, list of Trajectory"),
    "branch_of": Column(
        _B, "int64", "rollout", "row of the episode that a further conversation belongs to; -1 for an episode"
    ),
    # from the reward
    "token_level_scores": Column(_BR, "float32", "reward", "the score on the last response token, 0 elsewhere"),
    "reward_parts": Column(_B, "object", "reward", "what the reward function returned beside the score, dict"),
    "reward_error": Column(_B, "object", "reward", "why there is no score of the reward function, or None"),
    "is_scored": Column(
        _B, "bool", "reward", "false on rows without a usable score, which do not train and count in no mean of scores"
    ),
    "reward_baselines": Column(_B, "float32", "reward", "score of the greedy sample of the same prompt (ReMax)"),
    "reward_model_score": Column(_B, "float32", "reward model", "score of a sequence classification model"),
    "reward_model_reply": Column(_B, "object", "reward model", "what a judge wrote about the sample"),
    # from the models
    "old_log_probs": Column(_BR, "float32", "actor", "log-probs under the policy at the start of the step"),
    "train_log_probs": Column(_BR, "float32", "actor", "log-probs in the first update; NaN where none was computed"),
    "entropys": Column(_BR, "float32", "actor", "entropy of the next-token distribution, nats"),
    "sum_pi_squared": Column(_BR, "float32", "actor", "sum over the vocabulary of p squared (optimal token baseline)"),
    "ref_log_prob": Column(_BR, "float32", "reference", "log-probs under the reference policy"),
    "values": Column(_BR, "float32", "critic", "value before each response token"),
    "teacher_log_prob": Column(_BR, "float32", "teacher", "log-probs under the row's teacher"),
    "candidate_ids": Column(_BRK, "int64", "teacher", "the teacher's most probable tokens at each response token"),
    "teacher_top_log_probs": Column(_BRK, "float32", "teacher", "their log-probs under the teacher"),
    # from the algorithms
    "token_level_rewards": Column(_BR, "float32", "algorithm", "scores less the KL penalty"),
    "turn_ids": Column(_BR, "int64", "algorithm", "number of the turn of each token that trains, -1 elsewhere"),
    "advantages": Column(_BR, "float32", "algorithm", "advantage of each response token"),
    "returns": Column(_BR, "float32", "algorithm", "target of the value function"),
    "rollout_is_weights": Column(_BR, "float32", "algorithm", "importance weight of trainer over sampler"),
}


def ends_with_rewards(name: str) -> bool:
    """Whether only the phases up to the rewards read this object column, from the data file."""
    return name not in COLUMNS or name in ("prompt_token_ids", "raw_prompt", "template_kwargs", "extra_info")
