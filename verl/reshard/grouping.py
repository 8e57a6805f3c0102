"""Groups of training ranks that generate together, chosen to minimise transfers. Pure, without torch.

Parallel grouping of the 3D-HybridEngine (HybridFlow, arXiv:2409.19256, section 5.3). With training p-t-d and generation
p_g-t_g-d_g-d there are d_g = p t / (p_g t_g) engines per training replica. With
consecutive ranks in a generation group, some training shards lie outside their rank's generation shard. Ranks at intervals of
t/t_g (tensor) and p/p_g (pipeline) put every training shard inside its generation shard:

    training 1-4-2 on 8 ranks      tensor groups (0 1 2 3) (4 5 6 7)
    generation 1-2-2-2             (0 2) (1 3) (4 6) (5 7): rank 1 keeps its second quarter and receives the first one

A rank then receives M/(t_g p_g) - M/(t p) = (d_g - 1)/(t p) M bytes, as in HybridFlow's column of Table 2.

Engines have no pipeline (p_g = 1): the stages of a training pipeline become separate engines.
"""

from collections.abc import Mapping, Sequence

from verl.errors import ConfigError
from verl.reshard.layout import TrainingLayout

Groups = tuple[tuple[int, ...], ...]  # [engine][index] -> world rank


def interval_engines(
    training: TrainingLayout, tensor_parallel: int, hosts: Mapping[int, int] | None = None, by_experts: bool = False
) -> Groups:
    """The engines of RolloutLayout over all training ranks.

    Ranks are ordered by the position of their training shard (tensor parallel rank, then FSDP rank), and engine e takes
    every n-th from the e-th on, with n the number of engines. Engines ascend by their first rank. `by_experts` orders
    ranks by the position of their experts, for engines that divide the experts. Engines stay on one of `hosts` (rank ->
    host) if its ranks divide: generation communicates for every token. Raises ConfigError when sizes do not divide.
    """

    def order(rank: int) -> tuple[int, ...]:
        at = training.coordinates(rank)
        if by_experts:
            return at.expert, at.expert_fsdp, at.tensor, at.stage, at.replicate
        return at.tensor, at.fsdp, at.stage, at.replicate

    _check_divides(len(training.ranks), tensor_parallel)
    by_host: dict[int, list[int]] = {}
    for rank in training.ranks:
        by_host.setdefault(hosts[rank] if hosts is not None else 0, []).append(rank)
    blocks = list(by_host.values())
    if any(len(block) % tensor_parallel for block in blocks):
        blocks = [list(training.ranks)]
    engines = []
    for block in blocks:
        ordered, count = sorted(block, key=order), len(block) // tensor_parallel
        engines += [tuple(ordered[first::count]) for first in range(count)]
    return tuple(sorted(engines, key=min))


def consecutive_engines(ranks: Sequence[int], tensor_parallel: int) -> Groups:
    """Engines of consecutive ranks: for ranks that do not train, and for engines that assign their ranks themselves. Raises
    ConfigError when sizes do not divide."""
    _check_divides(len(ranks), tensor_parallel)
    return tuple(tuple(ranks[start : start + tensor_parallel]) for start in range(0, len(ranks), tensor_parallel))


def _check_divides(num_ranks: int, size: int) -> None:
    if size < 1 or num_ranks % size:
        raise ConfigError(
            f"{num_ranks} ranks do not divide into groups of {size} (tensor or expert parallel ranks of the "
            "rollout); choose a divisor."
        )
