"""Groups of training ranks that generate together, chosen to minimise transfers. Pure, without torch.

Parallel grouping of the 3D-HybridEngine (HybridFlow, arXiv:2409.19256, section 5.3). With training p-t-d and generation
p_g-t_g-d_g-d there are d_g = p t / (p_g t_g) engines per training replica. With
consecutive ranks in a generation group, some training shards lie outside their rank's generation shard. Ranks at intervals of
t/t_g (tensor) and p/p_g (pipeline) put every training shard inside its generation shard:

    training 1-4-2 on 8 ranks      tensor groups (0 1 2 3) (4 5 6 7)
    generation 1-2-2-2             (0 2) (1 3) (4 6) (5 7): rank 1 keeps its second quarter and receives the first one

A rank then receives M/(t_g p_g) - M/(t p) = (d_g - 1)/(t p) M bytes, which is HybridFlow's column of Table 2.

The stages of a training pipeline become separate engines (p_g = 1) by default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.errors import ConfigError
from verl.reshard.layout import TrainingLayout

Groups = tuple[tuple[int, ...], ...]


def interval_engines(
    training: TrainingLayout,
    tensor_parallel: int,
    pipeline_parallel: int = 1,
    hosts: Mapping[int, int] | None = None,
    by_experts: bool = False,
) -> tuple[Groups, ...]:
    """[engine][stage][index] -> world rank, for RolloutLayout, over all training ranks.

    Within a generation stage, ranks are ordered by the position of their training shard (tensor parallel rank, then FSDP
    rank), and engine e takes every n-th from the e-th on, where n is the number of engines. `by_experts` orders them by the
    position of their experts, for engines that divide the experts. Tensor parallel groups stay on one of `hosts` (rank ->
    host) where its ranks divide: generation communicates for every token. Raises ConfigError when sizes do not divide.
    """

    def order(rank: int) -> tuple[int, ...]:
        at = training.coordinates(rank)
        if by_experts:
            return at.expert, at.expert_fsdp, at.tensor, at.stage, at.replicate
        return at.tensor, at.fsdp, at.stage, at.replicate

    num_stages = training.num_stages
    if pipeline_parallel < 1 or num_stages % pipeline_parallel:
        raise ConfigError(
            f"A rollout of {pipeline_parallel} pipeline stages does not divide the {num_stages} stages of the training "
            "layout; choose a divisor (1: every engine has all layers)."
        )
    stages = [
        _interval_groups(members, tensor_parallel, order, hosts) for members in _by_stage(training, pipeline_parallel)
    ]
    return tuple(zip(*stages, strict=True))


def consecutive_engines(ranks: Sequence[int], tensor_parallel: int, pipeline_parallel: int = 1) -> tuple[Groups, ...]:
    """[engine][stage][index] -> world rank with consecutive ranks in a group: for ranks that do not train, and for engines
    that assign their ranks themselves. Raises ConfigError when sizes do not divide."""
    size = tensor_parallel * pipeline_parallel
    _check_divides(len(ranks), size)
    return tuple(
        tuple(
            tuple(ranks[start + stage * tensor_parallel + index] for index in range(tensor_parallel))
            for stage in range(pipeline_parallel)
        )
        for start in range(0, len(ranks), size)
    )


def _by_stage(training: TrainingLayout, pipeline_parallel: int) -> list[list[int]]:
    members: list[list[int]] = [[] for _ in range(pipeline_parallel)]
    for rank in training.ranks:
        members[training.coordinates(rank).stage * pipeline_parallel // training.num_stages].append(rank)
    return members


def _interval_groups(
    ranks: Sequence[int], size: int, order: Callable[[int], Any], hosts: Mapping[int, int] | None
) -> Groups:
    """Groups of `size` ranks, sorted by their first rank; a group has every n-th rank of the order, n = ranks / size."""
    _check_divides(len(ranks), size)
    by_host: dict[int, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank] if hosts is not None else 0, []).append(rank)
    blocks = list(by_host.values())
    if any(len(block) % size for block in blocks):
        blocks = [list(ranks)]
    groups = []
    for block in blocks:
        ordered, num_groups = sorted(block, key=order), len(block) // size
        groups += [tuple(ordered[first::num_groups]) for first in range(num_groups)]
    return tuple(sorted(groups, key=min))


def _check_divides(num_ranks: int, size: int) -> None:
    if size < 1 or num_ranks % size:
        raise ConfigError(
            f"{num_ranks} ranks do not divide into groups of {size} (tensor x pipeline or expert parallel ranks of the "
            "rollout); choose a divisor."
        )
