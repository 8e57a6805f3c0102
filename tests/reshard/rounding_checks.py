"""Checks that test_rounding_layouts.py runs on two and on four ranks: dithered weights of every layout against the
weights of one device."""

import torch
import torch.distributed as dist

from tests.engines.parallel_checks import make, model_folder, on, rows_of, step
from tests.engines.test_contract import make_batch, weights_of
from tests.reshard.update_checks import CPU, together
from verl.engines.api import MicroBatching
from verl.engines.fsdp import FSDPEngine
from verl.engines.fsdp_units import sharded_units
from verl.engines.local import LocalEngine
from verl.models.load import load_causal_lm
from verl.models.rounding import Rounding
from verl.parallel.mesh import Mesh
from verl.reshard import layout as layouts  # not its classes: what has `ranks` is taken for a check
from verl.reshard.delivery import Delivery
from verl.reshard.grouping import consecutive_engines
from verl.reshard.shared_memory import read_shared_bucket
from verl.reshard.update import plan_update
from verl.reshard.weight_files import read_folder, write_folder
from verl.rollout.rollout_model import Replica, copy_group
from verl.rollout.weight_version import checked, checked_buckets


def same(actual, expected, what):
    """Bit for bit, and not what rounding to nearest gives."""
    assert actual.keys() == expected.keys(), what
    for name, tensor in actual.items():
        assert tensor.dtype == torch.bfloat16, (what, name)
        assert torch.equal(tensor.contiguous().view(torch.int16), expected[name].contiguous().view(torch.int16)), (
            what,
            name,
        )


def replica_of(path, size):
    group = copy_group(Mesh.grid(range(dist.get_world_size()), replicate=dist.get_world_size() // size, tp=size), 60.0)
    return Replica(load_causal_lm(str(path), device=CPU, dtype=torch.bfloat16).requires_grad_(False), group)


def check_layout(folder, path, replica_size, **engine):
    """Two steps in bfloat16 on one device and on all ranks. Gradients are summed in another order there, so the masters
    differ in their last bits. First the ranks' weights are what their own masters say; then they get the masters of the one
    device, and have its weights."""
    one = make(LocalEngine, path, dtype="bfloat16")
    many = make(FSDPEngine, path, dtype="bfloat16", **engine)
    micro = MicroBatching(max_tokens=24)
    for seed in range(2):
        batch = make_batch(seed, (3, 1, 4, 2))
        step(one, batch, micro, "lm")
        step(many, batch.select_idxs(rows_of(many, len(batch))), micro, "lm")
    rank_masters = weights_of(many)
    same(
        dict(many.gather_weights()),
        {n: Rounding().rounded(n, m, torch.bfloat16) for n, m in rank_masters.items()},
        "own masters",
    )

    many.load_state(one.state())
    expected = {name: p.detach() for name, p in one.module.named_parameters()}
    masters = weights_of(one)
    assert any(not torch.equal(expected[n], m.to(torch.bfloat16)) for n, m in masters.items())
    sent = dict(many.gather_weights())
    same(sent, expected, "gathered whole")
    for unit in sharded_units(many.model):
        unit.unshard()
    gathered = {name: p.detach() for name, p in many.module.named_parameters()}
    same(gathered, {n: s.own_part(many.groups, expected[n]) for n, s in many.shards.items()}, "computes with")
    many._free_gathered()

    by_plan, loaded = replica_of(path, replica_size), replica_of(path, replica_size)
    copies = consecutive_engines(range(dist.get_world_size()), replica_size)
    both = (
        layouts.TrainingLayout(many.groups.mesh, many.config.expert_parallel_size),
        layouts.RolloutLayout(copies, expert_groups=copies),
    )
    update = plan_update(together(), *both, engine=many, replica=by_plan, device=CPU)
    assert update is not None
    update()
    loaded.load(expected.items())
    same(by_plan.parts(), loaded.parts(), "replica")

    if dist.get_rank() == 0:  # what vLLM is sent in shared memory, and an HTTP service in files
        skeleton = load_causal_lm(str(path), device=CPU, dtype=torch.bfloat16)
        in_memory = {}
        delivery = Delivery(None, CPU, (0,), ((0,),), torch.bfloat16, 1 << 14, keeps=True)
        for bucket in checked_buckets(delivery(sent.items()), skeleton):
            in_memory.update({name: tensor.clone() for name, tensor in read_shared_bucket(bucket)})
        same(in_memory, expected, "shared memory")
        place = folder / f"files-{replica_size}-{len(list(folder.glob('files-*')))}"
        place.mkdir()
        files = write_folder(place, 1, checked(sent.items(), skeleton, torch.bfloat16), 1 << 14)
        same(dict(read_folder(files)), expected, "files")
    dist.barrier()
    return {"visible": many.visible_update_ratio(), "of_one": one.visible_update_ratio()}


@on(2)
def check_fsdp(folder):
    return check_layout(folder, model_folder(folder, "qwen3"), 1)


@on(2)
def check_fsdp_of_odd_sizes(folder):
    """Vocabulary and hidden sizes that two ranks do not divide evenly."""
    path = model_folder(folder, "llama", tie_word_embeddings=False, vocab_size=265)
    return check_layout(folder, path, 2, reshard_after_forward=False)


@on(2)
def check_tensor(folder):
    return check_layout(folder, model_folder(folder, "qwen3"), 2, tensor_parallel_size=2)


@on(2)
def check_experts(folder):
    path = model_folder(folder, "qwen3_moe", moe_intermediate_size=16)
    return check_layout(folder, path, 1, expert_parallel_size=2)


@on(4)
def check_fsdp_and_tensor(folder):
    return check_layout(folder, model_folder(folder, "qwen3", tie_word_embeddings=False), 2, tensor_parallel_size=2)
