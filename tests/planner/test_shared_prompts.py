"""Prompts that samples share: the planner's count of tokens against the tokens of the engines' micro-batches."""

import pytest
import torch

from verl.config import load_config
from verl.data_proto.proto import DataProto
from verl.engines.api import MicroBatching
from verl.engines.micro_batches import plan_micro_batches
from verl.models.packing import pack_rows, unpadded_rows
from verl.parallel.balance import TokenCost, balanced_shares
from verl.planner import Lengths, Workload
from verl.planner.request import WorkloadRequest, workload_of
from verl.roles.updates import MiniBatchSchedule

PROMPT, RESPONSE = 30, 21  # of a response the last token is not computed


def batch_of(prompts, samples):
    rows = prompts * samples
    first = torch.arange(prompts).repeat_interleave(samples)[:, None]
    columns = {
        "ordinal": first[:, 0],
        "prompts": first + torch.arange(PROMPT)[None],
        "prompt_mask": torch.ones(rows, PROMPT, dtype=torch.bool),
        "responses": torch.ones(rows, RESPONSE, dtype=torch.int64),
        "response_mask": torch.ones(rows, RESPONSE, dtype=torch.bool),
        "attention_mask": torch.ones(rows, PROMPT + RESPONSE, dtype=torch.bool),
    }
    return DataProto.from_dict(columns)


def tokens_computed(batch, ranks, micro_batch, updates):
    """Tokens of every packed micro-batch on every rank, by the functions that a run calls."""
    total, size = 0, len(batch) // updates
    for rows in MiniBatchSchedule(size=size).rows(batch, 1):
        for share in balanced_shares(batch, ranks, TokenCost(384), rows.tolist()):
            rank_batch = batch.select_idxs(share)
            packed = unpadded_rows(rank_batch.batch)
            for part in plan_micro_batches(packed, MicroBatching(max_tokens=micro_batch), share_prompts=True):
                total += pack_rows(rank_batch.select_idxs(part).batch).num_tokens if part else 0
    return total


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("micro_batch", [50, 75, 110, 190, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_tokens_of_a_step_are_those_that_ranks_compute(ranks, micro_batch, updates):
    prompts, samples = 8, 8
    work = Workload(prompts, samples, PROMPT, Lengths.constant(RESPONSE - 1), shares_prompts=True)
    tokens = work.computed(ranks, micro_batch, updates).tokens
    assert tokens == pytest.approx(tokens_computed(batch_of(prompts, samples), ranks, micro_batch, updates))


@pytest.mark.parametrize(
    ("settings", "shares"), [((), True), (("data.train_batch_size=512", "actor_rollout_ref.actor.shuffle=True"), False)]
)
def test_a_config_shares_prompts(settings, shares):
    """A run does, unless it shuffles rows into several optimizer steps."""
    keys = ["actor_rollout_ref.model.path=x", "data.train_files=x.parquet", *settings]
    assert workload_of(load_config(keys, check=False).config, WorkloadRequest()).shares_prompts is shares
