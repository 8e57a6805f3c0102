"""Every conversation of an episode as a row that trains (`agent.branches=all`).

The row of an episode is the conversation with the most sampled tokens. Further conversations are rows behind the episodes of a
step, with the prompt index, sample and group of their episode. They have no score. Estimators see the episodes, and a further
row has the advantage of its episode on the tokens that it sampled.
"""

import numpy as np
import torch

from verl.config import full_key
from verl.data_proto.merge import object_array
from verl.data_proto.proto import DataProto
from verl.data_proto.trajectory import Trajectory, to_columns
from verl.errors import ConfigError
from verl.roles.updates import BRANCH_OF

_FURTHER = 1 << 19  # added to the number of a sample


def with_conversations(batch: DataProto, pad_token_id: int) -> DataProto:
    """The rows of `batch` and of their further conversations, with the column branch_of."""
    further: list[list[Trajectory]] = [list(one or ()) for one in batch.non_tensor_batch.get("episode_branches", ())]
    owners = np.array([row for row, branches in enumerate(further) for _ in branches], dtype=np.int64)
    rest = [name for name in batch.non_tensor_batch if name != "episode_branches"]
    batch = batch.select(non_tensor_batch_keys=rest)
    batch.batch[BRANCH_OF] = torch.full((len(batch),), -1)
    if not len(owners):
        return batch
    trajectories = [one for branches in further for one in branches]
    rows, shape = batch.select_idxs(owners), batch.batch["responses"].shape
    columns = to_columns(
        trajectories, pad_token_id=pad_token_id, prompt_width=batch.batch["prompts"].shape[1], response_width=shape[1],
        dtype=batch.batch["rollout_log_probs"].dtype,
    )  # fmt: skip
    for name, column in columns.items():
        rows.batch[name] = column
    rows.batch["response_mask"] = columns["response_mask"] & rows.batch["is_scored"][:, None]
    rows.batch["token_level_scores"] = torch.zeros_like(rows.batch["token_level_scores"])
    rows.batch[BRANCH_OF] = torch.from_numpy(owners)
    rows.batch["sample_index"] = rows.batch["sample_index"] + _FURTHER  # values of its tokens are not its episode's
    if "episode_media" in rows.non_tensor_batch:
        rows.non_tensor_batch["episode_media"] = object_array([one.media for one in trajectories])
    return DataProto.concat([batch, rows])


def episodes(batch: DataProto) -> DataProto:
    """The rows of episodes alone."""
    return batch.select_idxs(batch.batch[BRANCH_OF] < 0)


def spread_over_conversations(batch: DataProto, values: torch.Tensor) -> torch.Tensor:
    """`values` [episode, response] of episodes for all rows of `batch` [row, response]: a further row has its episode's value
    on its own tokens. Raises ConfigError for an episode whose tokens have different values."""
    owners, mask = batch.batch[BRANCH_OF], batch.batch["response_mask"].bool()
    trained = mask[: len(values)]
    first = values.gather(1, trained.int().argmax(dim=1, keepdim=True)) * trained.any(dim=1, keepdim=True)
    if (values != first)[trained].any():
        raise ConfigError(
            f"{full_key('rollout.agent.branches')}=all gives each conversation the advantage of its episode, and the advantage "
            "estimator gives the tokens of an episode different ones. Choose grpo or another estimator of groups."
        )
    further = owners >= 0
    return torch.cat([values, first[owners[further]] * mask[further]])
