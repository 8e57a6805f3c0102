"""Checks that test_transport.py runs on four ranks at once."""

import torch
import torch.distributed as dist

from tests.engines.parallel_checks import make, model_folder, on
from tests.reshard.reference import interval_experts, llama, mixture
from tests.reshard.update_checks import together
from verl.engines.fsdp import FSDPEngine
from verl.errors import ModelError
from verl.models.parallel.collectives import local
from verl.parallel.mesh import Mesh
from verl.parallel.traffic import TRAFFIC
from verl.reshard import layout as layouts  # not its classes: what has `ranks` is taken for a check
from verl.reshard.grouping import consecutive_engines, interval_engines
from verl.reshard.hf_sharding import decoder_tensors
from verl.reshard.host_memory import HostMemory
from verl.reshard.plan import make_plan
from verl.reshard.transport import PeerToPeer

STAGING_BYTES = 2000


def part_of(full, part):
    """The local tensor of a Part."""
    for dim, spans in enumerate(part.spans):
        full = full.index_select(dim, torch.cat([torch.arange(*s) for s in spans]))
    return full


def numbers(tensors, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {t.name: torch.randn(t.shape, generator=generator) for t in tensors}


def parts(full, layout):
    """This rank's local tensors."""
    tensors, values = full
    owned = {t.name: layout.part(t, dist.get_rank()) for t in tensors}
    return {name: part_of(values[name], part).contiguous() for name, part in owned.items() if part is not None}


class Wire:
    """Counts the bytes sent, without digests."""

    def __init__(self, monitored=dist.batch_isend_irecv):
        self.num_bytes, self.send = 0, monitored

    def __call__(self, ops):
        self.num_bytes += sum(op.tensor.nbytes for op in ops if op.op is dist.isend and op.tensor.dtype != torch.uint8)
        return self.send(ops)


def carry(tensors, training, rollout, *, faulty=PeerToPeer, dtype=torch.bfloat16, in_memory=False):
    """One update; returns the transport, the plan, what arrived, what should have arrived, and the bytes in messages."""
    values = numbers(tensors)
    plan = make_plan(tensors, training, rollout, {rank: rank // 2 for rank in range(4)})
    expected = {name: value.to(dtype) for name, value in parts((tensors, values), rollout).items()}
    arrived = {name: torch.full_like(value, torch.nan) for name, value in expected.items()}
    transport = faulty(
        tensors,
        training,
        rollout,
        plan,
        dtype=dtype,
        device=torch.device("cpu"),
        staging_bytes=STAGING_BYTES,
        memory=HostMemory(together(), arrived) if in_memory else None,
    )
    TRAFFIC.take()
    wire = dist.batch_isend_irecv = Wire()
    try:
        transport(parts((tensors, values), training), arrived)
    finally:
        dist.batch_isend_irecv = wire.send
    return transport, plan, arrived, expected, wire.num_bytes


def layout_pairs():
    dense, experts = llama(32, 48, 2, 4, 2, vocabulary=66), mixture(16, 8, 2, 4, 4)
    tensor, mixed, data = (Mesh.of(4, tensor_parallel=4), Mesh.of(4, tensor_parallel=2), Mesh.of(4))
    pipeline = Mesh.grid(range(4), pp=2, tp=2)
    heads = llama(32, 48, 2, 4, 4, vocabulary=66)
    yield "tp4-tp2", heads, layouts.TrainingLayout(tensor), 2, {}
    yield "tp2fsdp2-tp2", dense, layouts.TrainingLayout(mixed), 2, {}
    yield "fsdp4-tp1", dense, layouts.TrainingLayout(data), 1, {}
    yield "fsdp4-tp4", heads, layouts.TrainingLayout(data), 4, {}
    yield "pp2tp2-tp2", dense, layouts.TrainingLayout(pipeline, layers_per_stage=(1, 1)), 2, {}
    expert = layouts.TrainingLayout(data, expert_parallel=2)
    yield "ep2-ep2", experts, expert, 1, {"expert_groups": interval_experts(expert, 2)}
    two = layouts.TrainingLayout(Mesh.of(2, tensor_parallel=2))  # the other ranks have no part in it
    yield "tp2-tp1 on two ranks", dense, two, 1, {}
    yield "same", heads, layouts.TrainingLayout(tensor), 4, {}


@on(4)
def check_layout_pairs(folder):
    results = {}
    for name, tensors, training, t_g, more in layout_pairs():
        rollout = layouts.RolloutLayout(interval_engines(training, t_g), **more)
        for in_memory in (False, True):
            transport, plan, arrived, expected, sent = carry(tensors, training, rollout, in_memory=in_memory)
            for tensor, value in expected.items():
                assert torch.equal(arrived[tensor], value), (name, tensor)
            planned = plan.sent_bytes.get(dist.get_rank(), 0)
            assert transport.num_sent_bytes == planned == TRAFFIC.take().num_bytes
            assert sent == (0 if in_memory else planned)
            assert transport.peak_staging_bytes <= STAGING_BYTES
        results[name] = {"sent": plan.total_bytes, "peak": transport.peak_staging_bytes}
    return results


@on(4)
def check_many_updates_through_memory(folder):
    """Each update brings its own numbers."""
    tensors = llama(32, 48, 2, 4, 2, vocabulary=66)
    training, rollout = layouts.TrainingLayout(Mesh.of(4)), layouts.RolloutLayout(consecutive_engines(range(4), 1))
    transport, *_, arrived, _, _ = carry(tensors, training, rollout, in_memory=True)
    sent = transport.num_sent_bytes
    for seed in range(1, 6):
        values = numbers(tensors, seed)
        dist.barrier()  # a rank may write into another when that has looked at what came before
        transport(parts((tensors, values), training), arrived)
        for name, value in parts((tensors, values), rollout).items():
            assert torch.equal(arrived[name], value.to(torch.bfloat16)), (seed, name)
    return {"updates": transport.num_sent_bytes // sent}


@on(4)
def check_other_ranks(folder):
    """Ranks 0 and 1 train, 2 and 3 generate."""
    tensors, training = llama(32, 48, 2, 4, 2, vocabulary=66), layouts.TrainingLayout(Mesh.of(2))
    rollout = layouts.RolloutLayout(consecutive_engines((2, 3), 2))
    _, plan, arrived, expected, sent = carry(tensors, training, rollout)
    assert len(arrived) == (len(tensors) if dist.get_rank() >= 2 else 0)
    assert all(torch.equal(arrived[name], expected[name]) for name in expected)
    return {"sent": list(plan.sent_bytes.values())}


class LosesABucket(PeerToPeer):
    """Rank 2 does not unpack the second message it receives; the second of its moves in memory is written elsewhere."""

    count = 0

    def _is_lost(self, rank):
        self.count += rank == 2
        return rank == 2 and self.count == 2

    def _unpack(self, moves, message, target):
        if not self._is_lost(self.rank):
            super()._unpack(moves, message, target)

    def _place(self, move):
        place = super()._place(move)
        return torch.empty_like(place) if self._is_lost(move.destination) else place


class SwapsTwo(PeerToPeer):
    """The engine of rank 2 takes k_proj for v_proj of a layer."""

    def check_held(self, target):
        if self.rank == 2:
            k, v = (target[f"model.layers.1.self_attn.{which}_proj.weight"] for which in "kv")
            was = k.clone()
            k.copy_(v)
            v.copy_(was)
        super().check_held(target)


class ForgetsWhatItKeeps(PeerToPeer):
    def _put(self, moves, held, target):
        moves = [move for move in moves if self.rank != 2 or not move.is_kept]
        if moves:
            super()._put(moves, held, target)


class FlipsABit(PeerToPeer):
    """One bit of one element that came to rank 2 is another."""

    def check_held(self, target):
        if self.rank == 2:
            came = next(move for move in reversed(self._verified) if not move.is_kept)
            place = self._at(target, came, is_source=False)
            place.view(torch.int16)[(0,) * place.dim()] ^= 1
        super().check_held(target)


class WritesInTheWrongPlace(PeerToPeer):
    """Rank 3 writes something into the memory of rank 2 without an announcement."""

    def __init__(self, *args, memory, **options):
        super().__init__(*args, memory=memory, **options)
        self.memory = memory

    def _exchange(self):
        dist.barrier()  # when rank 2 has written the tensors that it keeps
        if self.rank == 3:
            self.memory.places[2]["model.norm.weight"].view(torch.int16)[3] += 1
        return super()._exchange()


@on(4)
def check_faults(folder):
    tensors, training = llama(32, 48, 2, 4, 4, vocabulary=66), layouts.TrainingLayout(Mesh.of(4, tensor_parallel=4))
    rollout = layouts.RolloutLayout(interval_engines(training, 2))
    results = {}
    faults = [
        (fault, way) for fault in (LosesABucket, SwapsTwo, ForgetsWhatItKeeps, FlipsABit) for way in (False, True)
    ]
    for fault, in_memory in (*faults, (WritesInTheWrongPlace, True)):
        message = ""
        try:
            carry(tensors, training, rollout, faulty=fault, in_memory=in_memory)
        except ModelError as error:
            message = str(error)
        dist.barrier()
        assert bool(message) == (dist.get_rank() == 2), (fault, in_memory, message)
        messages = [None] * 4
        dist.all_gather_object(messages, message)
        results[f"{fault.__name__}, {'memory' if in_memory else 'messages'}"] = messages[2]
    return results


def weights_that_share(dtype):
    """Two weights that lie back to back, one in a storage with other columns, and one with two names."""
    joined = torch.randn(5, 4, dtype=dtype)
    beside, tied = torch.randn(3, 8, dtype=dtype), torch.randn(7, dtype=dtype)
    return {"q": joined[:2], "k": joined[2:], "columns": beside[:, :5], "embed": tied, "head": tied}


@on(4)
def check_weights_move_together(folder):
    """Numbers, shapes and neighbours stay; others write where they lie now, and again when they were moved away."""
    mine, writer, reader = dist.get_rank(), (dist.get_rank() - 1) % 4, (dist.get_rank() + 1) % 4
    weights = weights_that_share(torch.bfloat16)
    for _ in range(2):
        before = {name: weight.clone() for name, weight in weights.items()}
        memory = HostMemory(together(), weights)
        assert memory.pairs == {(a, b) for a in range(4) for b in range(4) if a != b}
        assert not memory.has_moved(weights)
        assert all(torch.equal(weights[name], before[name]) for name in weights)
        assert weights["k"].data_ptr() == weights["q"].data_ptr() + weights["q"].nbytes
        assert weights["head"] is weights["embed"]
        assert weights["columns"].stride() == (8, 1)
        dist.barrier()
        for place in memory.places[reader].values():
            place.fill_(mine)
        dist.barrier()
        assert all((weight == writer).all() for weight in weights.values())
        weights["head"].data = weights["head"].clone()
        assert memory.has_moved(weights)
    memory = HostMemory(together(), weights if mine == 0 else {})
    assert memory.pairs == {(1, 0), (2, 0), (3, 0)}
    assert list(memory.places) == ([] if mine == 0 else [0])
    return {}


@on(4)
def check_ranks_that_are_alike(folder):
    """Ranks 0 and 2, and 1 and 3, have their weights in one memory each; what one changes the other sees."""
    mine = dist.get_rank()
    weights = {name: weight.fill_(mine) for name, weight in weights_that_share(torch.bfloat16).items()}
    memory = HostMemory(together(), weights, f"fingerprint {mine % 2}")
    assert memory.owners == {0: 0, 1: 1, 2: 0, 3: 1}
    assert memory.pairs == {(1, 0), (2, 0), (3, 0), (0, 1), (2, 1), (3, 1)}
    assert all((weight == mine % 2).all() for weight in weights.values())
    dist.barrier()
    if mine == 3:
        weights["k"][1, 2] = 7
    dist.barrier()
    assert weights["k"][1, 2] == (7 if mine % 2 else 0)
    assert not memory.has_moved(weights)
    if mine != 1:
        weights["k"].data = weights["k"].clone()
        assert memory.has_moved(weights)
        assert memory.differing(weights) == ""
        weights["k"][0, 0] += 1
        assert memory.differing(weights) == "k"
    return {}


@on(4)
def check_who_looks_at_what_ranks_share(folder):
    """Four whole copies in one memory: each rank looks at what another has written, all of it is looked at once, and a bit
    that is another is found by one of them."""
    tensors, training = llama(32, 48, 2, 4, 2, vocabulary=66), layouts.TrainingLayout(Mesh.of(4))
    rollout = layouts.RolloutLayout(consecutive_engines(range(4), 1))
    values, mine = numbers(tensors), dist.get_rank()
    arrived = {t.name: torch.full(t.shape, torch.nan, dtype=torch.bfloat16) for t in tensors}
    memory = HostMemory(together(), arrived, "same")
    target = layouts.OnRanks(rollout, tuple(set(memory.owners.values())))
    plan = make_plan(tensors, training, target)
    transport = PeerToPeer(
        tensors,
        training,
        target,
        plan,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        staging_bytes=STAGING_BYTES,
        memory=memory,
    )
    transport(parts((tensors, values), training), arrived)
    assert all(torch.equal(arrived[name], value.to(torch.bfloat16)) for name, value in values.items())
    assert {move.source for move in transport._verified} == {(mine - 1) % 4}
    looked = [None] * 4
    dist.all_gather_object(looked, [(move.tensor, move.slice) for move in transport._verified])
    assert sorted(sum(looked, [])) == sorted((move.tensor, move.slice) for move in plan.moves)
    results = {}
    for name in arrived:
        bits = arrived[name].view(torch.int16)
        dist.barrier()
        if mine == 0:
            bits[(-1,) * bits.dim()] ^= 1
        dist.barrier()
        message = ""
        try:
            transport.check_held(arrived)
        except ModelError as error:
            message = str(error)
        messages = [None] * 4
        dist.all_gather_object(messages, message)
        results[name] = list(filter(None, messages))
        if mine == 0:
            bits[(-1,) * bits.dim()] ^= 1
    return results


@on(4)
def check_missing_and_misshapen(folder):
    tensors, training = llama(32, 48, 1, 4, 4), layouts.TrainingLayout(Mesh.of(4, tensor_parallel=4))
    rollout = layouts.RolloutLayout(interval_engines(training, 4))
    plan = make_plan(tensors, training, rollout)
    transport = PeerToPeer(
        tensors, training, rollout, plan, dtype=torch.bfloat16, device=torch.device("cpu"), staging_bytes=64
    )
    held = parts((tensors, numbers(tensors)), training)
    errors = []
    for wrong in ({**held, "model.norm.weight": torch.zeros(31)}, {k: v for k, v in held.items() if "k_proj" not in k}):
        try:
            transport(held, wrong)
        except ModelError as error:
            errors.append(str(error))
    return errors


def engine_layout(engine, **experts):
    return layouts.TrainingLayout(engine.groups.mesh, **experts)


def check_engine(folder, family, t_g, **config):
    """A real engine's shards match the layout, and its weights reach the ranks that generate."""
    engine = make(FSDPEngine, model_folder(folder, family), **config)
    experts = config.get("expert_parallel_size", 1)
    training = engine_layout(engine, expert_parallel=experts)
    tensors = decoder_tensors(
        {name: tuple(s.shape) for name, s in engine.shards.items()},
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        is_tied=True,
        itemsize=8,
    )
    held = {name: local(s.parameter.detach()) for name, s in engine.shards.items()}
    full = {name: value.clone() for name, value in engine.gather_weights()}
    rank = dist.get_rank()
    for tensor in tensors:
        part = training.part(tensor, rank)
        if part is None:
            assert held[tensor.name].numel() == 0, tensor.name
        else:
            assert torch.equal(held[tensor.name], part_of(full[tensor.name], part)), tensor.name
    groups = interval_experts(training, experts) if experts > 1 else ()
    rollout = layouts.RolloutLayout(interval_engines(training, t_g), groups)
    plan = make_plan(tensors, training, rollout)
    transport = PeerToPeer(
        tensors, training, rollout, plan, dtype=torch.float64, device=torch.device("cpu"), staging_bytes=10_000
    )
    expected = {t.name: part_of(full[t.name], rollout.part(t, rank)) for t in tensors}
    generating = {name: torch.full_like(value, torch.nan) for name, value in expected.items()}
    transport(held, generating)
    for name, value in expected.items():
        assert torch.equal(generating[name], value), name
    return {"sent": plan.total_bytes}


@on(4)
def check_dense_engine(folder):
    return check_engine(folder, "qwen3", 2, tensor_parallel_size=2)


@on(4)
def check_replicated_engine(folder):
    return check_engine(folder, "llama", 1, fsdp_size=2)


@on(4)
def check_expert_engine(folder):
    return check_engine(folder, "qwen3_moe", 1, expert_parallel_size=2)
