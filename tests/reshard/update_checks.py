"""Checks that test_update.py runs on two ranks: engines and copies of every family, updated by plan and by gathering."""

import torch
import torch.distributed as dist

from tests.engines.parallel_checks import make, model_folder, on
from verl.engines.fsdp import FSDPEngine
from verl.errors import ModelError
from verl.model_families import families_with
from verl.models.load import load_causal_lm
from verl.models.lora import is_adapter
from verl.parallel.collectives import Collectives, Peer
from verl.parallel.mesh import Mesh
from verl.reshard import layout as layouts  # not its classes: what has `ranks` is taken for a check
from verl.reshard.grouping import consecutive_engines
from verl.reshard.update import plan_update
from verl.rollout.rollout_model import Replica, copy_group

CPU = torch.device("cpu")
DENSE = sorted(set(families_with("tensor")) - set(families_with("experts")))
MIXTURES = sorted(families_with("experts"))


def together():
    peer = Peer(dist.get_rank(), dist.get_world_size(), "", 0)
    return Collectives(peer, dist.HashStore(), dist.new_group(), 60.0, 60.0)


def copy_of(path, size, dtype):
    group = copy_group(Mesh.grid(range(2), replicate=2 // size, tp=size), 60.0)
    return Replica(load_causal_lm(str(path), device=CPU, dtype=dtype).requires_grad_(False), group)


def planned(engine, replica, size, **training):
    copies = consecutive_engines(range(2), size)
    both = layouts.TrainingLayout(engine.groups.mesh, **training), layouts.RolloutLayout(copies, copies)
    return plan_update(together(), *both, engine=engine, replica=replica, device=CPU)


def check_both_ways(path, size, *, dtype="float32", **config):
    """Both leave the same in the copies; returns the bytes of the plan."""
    engine = make(FSDPEngine, path, dtype=dtype, **config)
    replica = copy_of(path, size, getattr(torch, dtype))
    update = planned(engine, replica, size, expert_parallel=config.get("expert_parallel_size", 1))
    assert update is not None, (path, config)
    with torch.no_grad():
        for shard in engine.shards.values():
            shard.parameter.mul_(1.1)
        engine.optimizer.round_masters()
        for part in replica.parts().values():
            part.fill_(torch.nan)
    update()
    by_plan = {name: part.clone() for name, part in replica.parts().items()}
    replica.load(engine.gather_weights())
    for name, part in replica.parts().items():
        assert torch.equal(by_plan[name], part), (path, config, name)
    return update.plan.total_bytes


@on(2)
def check_dense_families(folder):
    results = {}
    for family in DENSE:
        path = model_folder(folder, family, num_hidden_layers=1)  # all layers are alike
        results[family] = [
            check_both_ways(path, 1),
            check_both_ways(path, 2),
            check_both_ways(path, 2, tensor_parallel_size=2),
        ]
    return results


@on(2)
def check_mixtures(folder):
    results = {}
    for family in MIXTURES:
        path = model_folder(folder, family)
        results[family] = [check_both_ways(path, 1), check_both_ways(path, 1, expert_parallel_size=2)]
        if family in families_with("tensor"):
            results[family].append(check_both_ways(path, 2, expert_parallel_size=2))
    return results


@on(2)
def check_untied_bfloat16(folder):
    path = model_folder(folder, "llama", tie_word_embeddings=False, vocab_size=265)
    return {"sent": check_both_ways(path, 2, dtype="bfloat16")}


@on(2)
def check_what_no_plan_serves(folder):
    """Engines that lie otherwise than the layouts say."""
    path = model_folder(folder, "llama")
    engine, replica = make(FSDPEngine, path), copy_of(path, 1, torch.float64)
    assert planned(engine, replica, 2) is None
    return {}


def check_adapters_both_ways(path, size, **config):
    """Syncing only adapters gives the same weights as loading all; returns the bytes of the plan, and of all adapters."""
    engine = make(FSDPEngine, path, lora=4, **config)
    replica = copy_of(path, size, torch.float64)
    update = planned(engine, replica, size)
    trained = [shard for name, shard in engine.shards.items() if is_adapter(name)]
    for _ in range(2):  # the second time onto the result of the first
        with torch.no_grad():
            for shard in trained:
                shard.parameter.add_(0.1)
        update()
    by_plan = {name: part.clone() for name, part in replica.parts().items()}
    replica.load(engine.gather_weights())
    for name, part in replica.parts().items():
        assert torch.allclose(by_plan[name], part, rtol=1e-13, atol=1e-15), (path, config, name)
    return [update.plan.total_bytes, 8 * sum(shard.shape.numel() for shard in trained)]


@on(2)
def check_adapters(folder):
    path = model_folder(folder, "llama")
    return {
        "copies": check_adapters_both_ways(path, 1),
        "divided": check_adapters_both_ways(path, 2),
        "same": check_adapters_both_ways(path, 2, tensor_parallel_size=2),
    }


def messages_of(attempt):
    """The ModelError of `attempt` on both ranks."""
    message = ""
    try:
        attempt()
    except ModelError as error:
        message = str(error)
    messages = [None] * 2
    dist.all_gather_object(messages, message)
    return {"messages": messages}


def messages_after(change, folder, **settings):
    """Messages of an update to replicas of which `change` has changed the second rank's module."""
    path = model_folder(folder, "llama")
    replica = copy_of(path, 1, torch.float64)
    if dist.get_rank() == 1:
        change(replica.module)
    return messages_of(lambda: planned(make(FSDPEngine, path, **settings), replica, 1))


@on(2)
def check_parameter_that_nobody_trains(folder):
    return messages_after(lambda module: setattr(module, "extra", torch.nn.Parameter(torch.zeros(3))), folder)


@on(2)
def check_parameter_that_nobody_takes(folder):
    return messages_after(lambda module: delattr(module.model.norm, "weight"), folder)


@on(2)
def check_adapters_that_nobody_takes(folder):
    return messages_after(lambda m: setattr(m.model.layers[1].mlp, "down_proj", torch.nn.Identity()), folder, lora=4)
