"""Checks that test_fsdp.py runs on several ranks at once: two steps of an engine of several ranks, against the steps of one
device with all the rows. The second step has the weights and the optimizer's state of the first."""

import functools
import glob
import math
import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from tests.engines.memory import peak_bytes
from tests.engines.test_contract import largest_gap, make_batch, make_pairs, pair_loss, policy_loss, value_loss
from tests.engines.tiny import make_engine
from tests.models.reference import make_columns, random_rows, rounded_by_rows, widen_norms
from verl.checkpoint.role import ALL_CONTENTS, read_role
from verl.checkpoint.store import CheckpointStore, RoleCheckpoint
from verl.config import ActorConfig, RolloutCorrectionConfig
from verl.config.sections.distillation import DistillationLossConfig
from verl.config.sections.fsdp import WrapPolicyConfig
from verl.data_proto.merge import object_array
from verl.data_proto.proto import DataProto
from verl.engines import fsdp, host_units
from verl.engines.api import MicroBatching, whole
from verl.engines.fsdp import FSDPEngine
from verl.engines.local import LocalEngine
from verl.errors import ConfigError, ModelError
from verl.model_families import FAMILIES
from verl.models import forward, optimizers
from verl.models.load import load_causal_lm
from verl.models.tiny import make_tiny_model
from verl.parallel.device import CPU_BF16
from verl.parallel.traffic import TRAFFIC
from verl.roles.objectives.distillation import DistillationObjective, teacher_outputs
from verl.roles.objectives.policy import PolicyObjective

OUTPUTS = {"lm": ("log_probs", "entropy"), "token_value": ("values",)}


def on(*ranks):
    """Declares a check and the numbers of ranks that run it."""

    def mark(function):
        function.ranks = ranks
        return function

    return mark


@functools.cache
def model_folder(folder: Path, family: str, **sizes) -> Path:
    path = folder / "-".join([family, *(f"{k}{v}" for k, v in sizes.items())])
    if dist.get_rank() == 0:
        shape = {"hidden_size": 32, "intermediate_size": 48, **sizes}
        if family != "deepseek_v3":  # which has several
            shape["head_dim"] = 8
        make_tiny_model(path, family, **shape)
    dist.barrier()
    return path


def one_layer(folder, family="qwen3"):
    """For checks of rows, losses and heads. The layer has experts if one of the family's does."""
    dense_first = {"first_k_dense_replace": 0} if "first_k_dense_replace" in FAMILIES[family].tiny else {}
    return model_folder(folder, family, num_hidden_layers=1, **dense_first)


def make(
    cls, path, *, head="lm", dtype="float64", checkpointing=False, lora=0, dora=False, optimizer="AdamW", **engine
):
    """The FSDPEngine computes with verl's layers in float64 too; its reference, the LocalEngine, with widened modules."""
    forward._FUSED_DTYPES.add(torch.float64)  # in a process of these checks only
    model = {"enable_gradient_checkpointing": checkpointing, "lora_rank": lora, "use_dora": dora}
    engine = engine if cls is FSDPEngine else {}
    built = make_engine(path, cls, head=head, dtype=dtype, model=model, engine=engine, optim={"optimizer": optimizer})
    if dtype == "float64":
        widen_norms(built.module)
    return built


def with_autograd(function):
    """`function()`, with the layers that train on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "_FUSED_DEVICES", ())
        patch.setattr(forward, "_STRAIGHT_DEVICES", ("cpu",))
        return function()


def in_messages(function):
    """`function()`, with ranks that gather weights and add up gradients as those of several hosts do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "share_units", lambda units: [])
        return function()


@on(1, 4)
def check_calls_of_modules(folder):
    """Calls of modules of transformers and torch in a forward and a step, by family: of all within the decoder but its layers,
    which FSDP surrounds with hooks, and the rotary embedding. With the layers of a CPU, and of a GPU."""
    counts, batch = {}, make_batch(0, (3, 1, 4, 2))
    for family, row in [(name, row) for name, row in FAMILIES.items() if row.decoder and row.tiny is not None]:
        divisions = {"none": True, "ulysses_sequence": True, "tensor": row.tensor, "expert": row.experts}
        for division in [name for name, computes in divisions.items() if computes]:
            sizes = {} if division == "none" else {f"{division}_parallel_size": 2}
            adapters = (0, 4) if division == "none" else (4,)
            for lora in adapters if division == "none" or dist.get_world_size() > 1 else ():
                num_calls = _num_calls(folder, family, batch, lora, **sizes)
                counts |= {f"{family} {division} {lora} {layers}": number for layers, number in num_calls.items()}
    return counts


def _num_calls(folder, family, batch, lora=0, **division):
    model = {"lora_rank": lora}
    engine, calls = make_engine(one_layer(folder, family), FSDPEngine, model=model, engine=division), Counter()
    for name, part in engine.module.get_decoder().named_modules():
        if name != "rotary_emb" and not isinstance(part, FSDPModule):
            part.register_forward_pre_hook(lambda *_: calls.update([forward._FUSED_DEVICES]))
    share, micro = batch.select_idxs(rows_of(engine, len(batch))), MicroBatching(max_tokens=128)  # one
    for run in (with_autograd, lambda function: function()):
        run(lambda: (engine.forward(share, OUTPUTS["lm"], micro), step(engine, share, micro, "lm")))
    return {"gpu": calls[()], "cpu": calls[forward._FUSED_DEVICES]}


def imitation_loss(outputs, batch, totals):
    return -outputs["log_probs"].sum() / totals.num_tokens, {}


def rows_of(engine, num_rows):
    """Uneven shares: each data-parallel rank one row more than the next, the first ones short."""
    mesh = engine.groups.mesh
    size, rank = mesh.dp_size, mesh.dp_rank(dist.get_rank())
    cuts = [num_rows * i * (i + 1) // (size * (size + 1)) for i in range(size + 1)]
    return list(range(cuts[rank], cuts[rank + 1]))


def step(engine, batch, micro, head):
    loss = policy_loss if head == "lm" else value_loss
    return {k: m.value for k, m in engine.train_batch(batch, loss, OUTPUTS[head], micro, 1.2).items()}


@functools.cache
def steps_of_one_device(path, head, dtype, micro, sizes, lora, dora, optimizer, bf16_path):
    """(outputs of the first, metrics) of two steps, and the state after them. `bf16_path`: its value in the environment."""
    one, steps = make(LocalEngine, path, head=head, dtype=dtype, lora=lora, dora=dora, optimizer=optimizer), []
    for seed in range(2):
        batch = make_batch(seed, sizes)
        outputs = {} if seed else one.forward(batch, OUTPUTS[head], micro, 1.2)
        steps.append((outputs, step(one, batch, micro, head)))
    return steps, dict(one.gather_weights()), whole_state(one)


def compare(
    path, *, head="lm", dtype="float64", micro=None, sizes=(3, 1, 4, 2), lora=0, dora=False, optimizer="AdamW", **engine
):
    """Largest relative differences of loss, norm and weights over two steps, and of the outputs before, on the first rank."""
    micro, is_first = micro or MicroBatching(max_tokens=24), dist.get_rank() == 0
    if is_first:
        settings = (head, dtype, micro, sizes, lora, dora, optimizer, os.environ.get(CPU_BF16))
        steps, weights, state = steps_of_one_device(path, *settings)
    many = make(FSDPEngine, path, head=head, dtype=dtype, lora=lora, dora=dora, optimizer=optimizer, **engine)
    gaps = {"loss": 0.0, "grad_norm": 0.0, "outputs": 0.0}
    for seed in range(2):
        batch = make_batch(seed, sizes)
        mine = rows_of(many, len(batch))
        share = batch.select_idxs(mine)
        b = {} if seed else many.forward(share, OUTPUTS[head], micro, 1.2)  # the second loss shows its own
        actual = step(many, share, micro, head)
        loss = many.groups.over_data_(torch.tensor(actual["loss"], dtype=torch.float64)).item()
        if is_first:
            a, expected = steps[seed]
            for name in b:
                gaps["outputs"] = max(gaps["outputs"], *(a[name][mine] - b[name]).abs().flatten().tolist(), 0.0)
            gaps["loss"] = max(gaps["loss"], abs(loss / expected["loss"] - 1))
            gaps["grad_norm"] = max(gaps["grad_norm"], abs(actual["grad_norm"] / expected["grad_norm"] - 1))
    gathered = dict(many.gather_weights())
    gaps["weights"] = largest_gap(gathered, weights) if is_first else 0.0
    if optimizer == "Muon":  # with moments of Adam that are noise, states differ
        held = whole_state(many)
        gaps["weights"] = max(gaps["weights"], largest_gap(held, state) if is_first else 0.0)
    return gaps


def with_rounds_of_a_gpu(path):
    """Tensor parallel ranks that send matrices in bfloat16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizers, "_computes_in", lambda *_: torch.bfloat16)
        return compare(path, dtype="float32", optimizer="Muon", tensor_parallel_size=2)


def comparison(ranks, family, model=None, **settings):
    """A check on that many ranks: `compare` for a model of `family` of these sizes."""
    return on(*ranks)(lambda folder: compare(model_folder(folder, family, **(model or {})), **settings))


check_fsdp = comparison((2, 4), "qwen3")
check_fsdp_in_messages = on(2, 4)(lambda folder: in_messages(lambda: compare(model_folder(folder, "qwen3"))))
check_fsdp_float32 = comparison((2,), "llama", dtype="float32", forward_prefetch=True)
check_fsdp_no_sync_checkpointing = comparison(
    (4,), "qwen3", use_no_sync_for_gradient_accumulation=True, checkpointing=True, reshard_after_forward=False
)
check_layers_of_a_gpu = on(2)(
    lambda folder: with_autograd(lambda: compare(model_folder(folder, "qwen3"), checkpointing=True))
)
check_selective = comparison((2,), "qwen3", checkpointing="selective")
check_selective_of_a_gpu = on(2)(
    lambda folder: with_autograd(lambda: compare(model_folder(folder, "qwen3"), checkpointing="selective", lora=4))
)


@on(2)
def check_dora(folder):
    path = model_folder(folder, "qwen3")
    for settings in ({"dtype": "bfloat16"}, {"tensor_parallel_size": 2}):
        with pytest.raises(
            ConfigError, match="use_dora trains with FSDP2 in float32 only, and without tensor_parallel"
        ):
            make(FSDPEngine, path, lora=4, dora=True, **settings)
    return compare(path, lora=4, dora=True)


check_dora_checkpointing = comparison((2,), "qwen2", lora=4, dora=True, checkpointing=True)
check_dora_sequence = comparison((2,), "llama", lora=4, dora=True, ulysses_sequence_parallel_size=2)
check_kept_weights = comparison(
    (2,), "llama", model={"attention_bias": True, "mlp_bias": True}, reshard_after_forward=False
)
check_muon = comparison((2,), "qwen3", optimizer="Muon")
check_muon_tensor = comparison((2, 4), "qwen3", optimizer="Muon", tensor_parallel_size=2)
check_muon_experts = comparison((2, 4), "qwen3_moe", optimizer="Muon", expert_parallel_size=2)
check_muon_adapters = comparison((2,), "qwen3", lora=4, optimizer="Muon", tensor_parallel_size=2)
check_muon_float32 = on(2)(lambda folder: with_rounds_of_a_gpu(model_folder(folder, "qwen3")))
check_muon_replicas = comparison((4,), "qwen3", optimizer="Muon", fsdp_size=2)
check_value = comparison((4,), "qwen3", model={"num_hidden_layers": 1}, head="token_value")


@on(2)
def check_calls_that_add_up(folder):
    """Gradients of two calls, with a tensor parallel model, against one step of one device."""
    path, batch, micro = one_layer(folder), make_batch(0, (3, 2, 4)), MicroBatching(max_tokens=24)
    one, many = make(LocalEngine, path), make(FSDPEngine, path, tensor_parallel_size=2)
    tokens = int(batch.batch["response_mask"].sum())

    def sum_loss(outputs, rows, totals):
        return (rows.batch["advantages"].to(outputs["log_probs"]) * outputs["log_probs"]).sum() / tokens, {}

    expected = one.train_batch(batch, sum_loss, OUTPUTS["lm"], micro)
    parts = [batch.slice(0, 4), batch.slice(4, len(batch))]
    loss = sum(many.forward_backward(part, sum_loss, OUTPUTS["lm"], micro)["loss"].value for part in parts)
    gaps = {"outputs": 0.0, "loss": abs(loss - expected["loss"].value)}
    gaps["grad_norm"] = abs(many.optim_step()["grad_norm"].value - expected["grad_norm"].value)
    gaps["weights"] = largest_gap(dict(many.gather_weights()), dict(one.gather_weights()))
    return gaps


@on(2)
def check_pairs(folder):
    """Three of four pairs on one rank."""
    path = one_layer(folder)
    one, many = (make(cls, path, head="sequence_score") for cls in (LocalEngine, FSDPEngine))
    gaps = {"loss": 0.0, "grad_norm": 0.0, "outputs": 0.0}
    for seed in range(2):
        batch = make_pairs(seed)
        share = batch.select_idxs((batch.batch["pair"] == 3) == bool(dist.get_rank()))
        arguments = (pair_loss, ("sequence_scores",), MicroBatching(max_tokens=24))
        expected = one.train_batch(batch, *arguments, unit="pair")
        actual = many.train_batch(share, *arguments, unit="pair")
        loss = many.groups.over_data_(torch.tensor(actual["loss"].value, dtype=torch.float64)).item()
        gaps["loss"] = max(gaps["loss"], abs(loss - expected["loss"].value))
        gaps["grad_norm"] = max(gaps["grad_norm"], abs(actual["grad_norm"].value - expected["grad_norm"].value))
    gaps["weights"] = largest_gap(dict(many.gather_weights()), dict(one.gather_weights()))
    return gaps


@on(2)
def check_sequence_scores(folder):
    """With the tokens of a row divided over ranks."""
    path, batch = one_layer(folder), make_pairs()
    one = make(LocalEngine, path, head="sequence_score")
    many = make(FSDPEngine, path, head="sequence_score", ulysses_sequence_parallel_size=2)
    arguments = (pair_loss, ("sequence_scores",), MicroBatching(max_tokens=24))
    expected, actual = (engine.train_batch(batch, *arguments, unit="pair") for engine in (one, many))
    gaps = {name: abs(actual[name].value - expected[name].value) for name in ("loss", "grad_norm")}
    a, b = (engine.forward(batch, *arguments[1:])["sequence_scores"] for engine in (one, many))
    gaps["outputs"] = (a - b).abs().max().item()
    gaps["weights"] = largest_gap(dict(many.gather_weights()), dict(one.gather_weights()))
    return gaps


@on(2)
def check_declared_weights(folder):
    """Each rank's part is where the layout of a weight sync says, and a snapshot brings it back."""
    many = make(FSDPEngine, model_folder(folder, "qwen3"), dtype="bfloat16")
    step(many, make_batch(0, (3, 2)).select_idxs(rows_of(many, 5)), MicroBatching(max_tokens=24), "lm")
    layout, held = many.weight_layout(), many.local_weights()
    assert held.keys() == layout.shapes.keys()
    assert {tensor.dtype for tensor in held.values()} == {layout.dtype} == {torch.bfloat16}
    counts = torch.tensor([[tensor.numel() for tensor in held.values()]])
    many.groups.over_data_(counts)
    assert counts.flatten().tolist() == [math.prod(shape) for shape in layout.shapes.values()]
    before, saved = {name: t.clone() for name, t in many.gather_weights()}, many.snapshot()
    with torch.no_grad():
        for tensor in (*held.values(), *many.trained_weights().values()):
            tensor.add_(1.0)
    changed = largest_gap(dict(many.gather_weights()), before)
    assert changed > 0
    many.restore(saved)
    return {"loss": 0.0, "grad_norm": 0.0, "outputs": 0.0, "weights": largest_gap(dict(many.gather_weights()), before)}


@on(2)
def check_correct_tensor(folder):
    """Correct tokens and mean logits where each rank has a part of the vocabulary."""
    path = one_layer(folder)
    one, many = make(LocalEngine, path), make(FSDPEngine, path, tensor_parallel_size=2)
    batch, micro = make_batch(0, (3, 2)), MicroBatching(max_tokens=24)
    outputs = ("log_probs", "correct", "mean_logit")
    for _ in range(8):  # until some tokens are learned
        for engine in (one, many):
            engine.train_batch(batch, imitation_loss, outputs, micro)
    a, b = (engine.forward(batch, outputs, micro, 1.3) for engine in (one, many))
    assert 0 < a["correct"].sum() < batch.batch["response_mask"].sum()
    gap = max((a[name] - b[name]).abs().max().item() for name in outputs)
    return {"loss": 0.0, "grad_norm": 0.0, "outputs": gap, "weights": 0.0}


def compare_distillation(folder, mode="jsd", **engine):
    """A student against the tokens that a teacher of the same kind lists, on uneven shares of rows."""
    path = one_layer(folder)
    one, many = make(LocalEngine, path), make(FSDPEngine, path, **engine)
    loss = DistillationLossConfig(loss_mode=mode, topk=5, use_task_rewards=False)
    objective = DistillationObjective(loss, ActorConfig(), RolloutCorrectionConfig(), max_response_length=8)
    columns, micro = teacher_outputs(loss, 264), MicroBatching(max_tokens=24)
    gaps = {"loss": 0.0, "grad_norm": 0.0, "outputs": 0.0}
    for seed in range(2):
        batch = make_batch(seed, (3, 1, 4, 2))
        mine = rows_of(many, len(batch))
        share = batch.select_idxs(mine)
        for engine_, rows in ((one, batch), (many, share)):
            actual = engine_.forward(rows, tuple(columns), micro, 0.7)  # the distributions of another temperature
            rows.batch.update({columns[name]: values for name, values in actual.items()})
        for column in columns.values():
            gap = (batch.batch[column][mine] - share.batch[column]).abs().max().item()
            gaps["outputs"] = max(gaps["outputs"], gap)
        arguments = (objective, objective.outputs, micro, 1.2)
        expected, actual = one.train_batch(batch, *arguments), many.train_batch(share, *arguments)
        value = many.groups.over_data_(torch.tensor(actual["loss"].value, dtype=torch.float64)).item()
        gaps["loss"] = max(gaps["loss"], abs(value / expected["loss"].value - 1))
        gaps["grad_norm"] = max(gaps["grad_norm"], abs(actual["grad_norm"].value / expected["grad_norm"].value - 1))
    gaps["weights"] = largest_gap(dict(many.gather_weights()), dict(one.gather_weights()))
    return gaps


@on(4)
def check_distillation(folder):
    return compare_distillation(folder, "forward_kl_topk")


@on(2)
def check_distillation_tensor(folder):
    return compare_distillation(folder, tensor_parallel_size=2)


@on(4)
def check_distillation_sequence(folder):
    return compare_distillation(folder, ulysses_sequence_parallel_size=2)


@on(2)
def check_left_out_rows(folder):
    """Two steps without a row for rank 0 and a step with only one row, against one device that computes all rows."""
    path = one_layer(folder)
    one, many = make(LocalEngine, path), make(FSDPEngine, path)
    config = ActorConfig(calculate_entropy=True)
    objective = PolicyObjective(config, RolloutCorrectionConfig(), max_response_length=8)
    gaps = {"loss": 0.0, "grad_norm": 0.0, "outputs": 0.0}
    first, last = range(3), range(9, 10)  # rank 0's rows, and one row of rank 1
    steps = [(MicroBatching(max_tokens=24), first, ()), (MicroBatching(max_rows=2), first, ()), (None, range(10), last)]
    for seed, (micro, silent, computed_all_the_same) in enumerate(steps):
        batch = make_batch(seed, (3, 1, 4, 2))
        batch.batch["advantages"][list(silent)] = 0.0
        computed = set(range(10)) - set(silent) | set(computed_all_the_same)
        mine = rows_of(many, len(batch))
        rows = [i for i, row in enumerate(mine) if row in computed]
        assert bool(rows) == (dist.get_rank() == 1)
        micro = micro or MicroBatching(max_rows=2)
        expected = one.train_batch(batch, objective, objective.outputs, micro, 1.2)
        actual = many.train_batch(batch.select_idxs(mine), objective, objective.outputs, micro, 1.2, rows=rows)
        loss = many.groups.over_data_(torch.tensor(actual["loss"].value, dtype=torch.float64)).item()
        gaps["loss"] = max(gaps["loss"], abs(loss - expected["loss"].value))
        gaps["grad_norm"] = max(gaps["grad_norm"], abs(actual["grad_norm"].value - expected["grad_norm"].value))
    gaps["num_steps"] = one.optimizer.num_steps - many.optimizer.num_steps
    gaps["weights"] = largest_gap(dict(many.gather_weights()), dict(one.gather_weights()))
    return gaps


check_hsdp = comparison((4,), "qwen3", model={"tie_word_embeddings": False}, fsdp_size=2)
check_tensor = comparison((2,), "qwen3", tensor_parallel_size=2)
check_sequence = comparison((2,), "qwen3", ulysses_sequence_parallel_size=2)
check_sequence_layers_of_a_gpu = on(2)(
    lambda folder: with_autograd(
        lambda: compare(model_folder(folder, "qwen3"), checkpointing=True, ulysses_sequence_parallel_size=2)
    )
)
check_sequence_window = comparison(
    (2,), "mistral", model={"sliding_window": 5, "num_key_value_heads": 1}, lora=4, ulysses_sequence_parallel_size=2
)
check_lora = comparison((2,), "qwen3", lora=4)
check_lora_tensor = comparison((4,), "qwen3", lora=4, tensor_parallel_size=2)
RING = {"num_attention_heads": 3, "num_key_value_heads": 1}
check_ring = comparison((2,), "qwen3", model=RING, ulysses_sequence_parallel_size=2)
check_ring_of_a_gpu = on(2)(
    lambda folder: with_autograd(
        lambda: compare(model_folder(folder, "qwen3", **RING), checkpointing=True, ulysses_sequence_parallel_size=2)
    )
)
check_ring_four = comparison(
    (4,), "qwen3", model={"num_attention_heads": 6, "num_key_value_heads": 2}, ulysses_sequence_parallel_size=4
)
check_value_sequence = comparison((4,), "qwen3", head="token_value", ulysses_sequence_parallel_size=2)
check_tensor_gemma = comparison((4,), "gemma2", model={"vocab_size": 265}, tensor_parallel_size=2, checkpointing=True)
check_moe_fsdp = comparison((2, 4), "qwen3_moe", model={"moe_intermediate_size": 16}, checkpointing=True)
check_moe_sequence = comparison((2,), "mixtral", ulysses_sequence_parallel_size=2)
check_shared_experts = comparison((2,), "qwen2_moe", lora=4)
check_experts_of_a_gpu = on(2)(
    lambda folder: with_autograd(lambda: compare(model_folder(folder, "qwen2_moe"), ulysses_sequence_parallel_size=2))
)
check_experts = comparison((2,), "qwen3_moe", model={"moe_intermediate_size": 16}, expert_parallel_size=2)
check_gemma = comparison((2,), "gemma", lora=4, tensor_parallel_size=2)
check_gemma2 = comparison((2,), "gemma2", model={"sliding_window": 5}, checkpointing="selective")
GEMMA3 = {"sliding_window": 5, "sliding_window_pattern": 2}
check_gemma3_tensor = comparison((2,), "gemma3_text", model=GEMMA3, tensor_parallel_size=2)
check_gemma3_of_a_gpu = on(2)(
    lambda folder: with_autograd(
        lambda: compare(model_folder(folder, "gemma3_text", **GEMMA3), lora=4, ulysses_sequence_parallel_size=2)
    )
)
check_glm4 = comparison((2,), "glm4", model={"attention_bias": True}, ulysses_sequence_parallel_size=2, lora=4)
check_glm4_of_a_gpu = on(2)(
    lambda folder: with_autograd(
        lambda: compare(model_folder(folder, "glm4", attention_bias=False), checkpointing="selective")
    )
)
check_glm4_moe = comparison((2,), "glm4_moe", model={"moe_intermediate_size": 16}, checkpointing=True)
check_latent_sequence = comparison((2,), "deepseek_v3", lora=4, ulysses_sequence_parallel_size=2)
check_latent_of_a_gpu = on(2)(
    lambda folder: with_autograd(
        lambda: compare(model_folder(folder, "deepseek_v3"), checkpointing=True, expert_parallel_size=2)
    )
)


@on(2)
def check_routing(folder):
    """Ranks that have parts of the tokens and of the experts record what one device does, and replay choices of others."""
    path = model_folder(folder, "qwen3_moe", moe_intermediate_size=16)
    batch = make_batch(0, (3, 2))
    micro = MicroBatching()
    layout = {"expert_parallel_size": 2, "ulysses_sequence_parallel_size": 2}
    records, steps, engines = [], [], [make(LocalEngine, path), make(FSDPEngine, path, **layout)]
    for engine in engines:
        engine.routing.follow(engine.module)
        with engine.routing.recording() as record:
            engine.forward(batch, ("log_probs",), MicroBatching(max_rows=3), 1.2)
        records.append(record)
        wrong = object_array([(record[row] + 1) % 4 for row in range(len(batch))])
        replay = DataProto(batch.batch, {**batch.non_tensor_batch, "routed_experts": wrong})
        outputs = engine.forward(replay, ("log_probs",), micro, 1.2)["log_probs"]
        steps.append((outputs, step(engine, replay, MicroBatching(max_rows=2), "lm")))
    (one, expected), (many, actual) = steps
    assert all((records[0][row] == records[1][row]).all() for row in range(len(batch)))
    assert (one - engines[0].forward(batch, ("log_probs",), micro, 1.2)["log_probs"]).abs().max() > 0.01
    gaps = {name: abs(actual[name] / expected[name] - 1) for name in ("loss", "grad_norm")}
    weights = largest_gap(dict(engines[1].gather_weights()), dict(engines[0].gather_weights()))
    return {**gaps, "outputs": float((one - many).abs().max()), "weights": weights}


@on(2)
def check_experts_deepseek(folder):
    """Latent attention, a dense layer before the layers with experts, and a shared expert. Two ranks have fewer rows than
    one, and the processor rounds products of few rows differently from products of many."""
    path = model_folder(folder, "deepseek_v3", moe_intermediate_size=16)
    with rounded_by_rows():
        return compare(path, expert_parallel_size=2)


# a sliding window and soft caps inside the divided attention
check_sequence_gemma = comparison((4,), "gemma2", model={"vocab_size": 265}, ulysses_sequence_parallel_size=2)
check_tensor_layers_of_a_gpu = on(2)(
    lambda folder: with_autograd(
        lambda: compare(
            model_folder(folder, "llama", attention_bias=True, mlp_bias=True), lora=4, tensor_parallel_size=2
        )
    )
)
check_tensor_biases = comparison(
    (2,), "llama", model={"attention_bias": True, "mlp_bias": True}, tensor_parallel_size=2, checkpointing=True
)
check_divided_experts_of_a_gpu = on(2)(
    lambda folder: with_autograd(
        lambda: compare(model_folder(folder, "qwen3_moe"), checkpointing=True, expert_parallel_size=2)
    )
)
check_experts_mixtral = comparison((2,), "mixtral", expert_parallel_size=2, checkpointing=True)
check_tensor_fsdp = comparison((4,), "qwen3", model={"tie_word_embeddings": False}, tensor_parallel_size=2)
# four ranks and two key-value heads
check_sequence_four = comparison((4,), "llama", ulysses_sequence_parallel_size=4)
check_sequence_tensor = comparison((4,), "qwen3", ulysses_sequence_parallel_size=2, tensor_parallel_size=2)
check_experts_fsdp_sequence = comparison(
    (4,), "qwen3_moe", model={"moe_intermediate_size": 16}, expert_parallel_size=2, ulysses_sequence_parallel_size=2
)
check_experts_tensor = comparison(
    (4,), "qwen3_moe", model={"moe_intermediate_size": 16}, expert_parallel_size=2, tensor_parallel_size=2
)
check_ranks_without_rows = comparison((4,), "qwen3", sizes=(2,), fsdp_size=2)
# one row, of which one rank has no predicting token
check_sequence_without_predictions = comparison(
    (2,), "qwen3", model={"num_hidden_layers": 1}, sizes=(1,), ulysses_sequence_parallel_size=2
)

check_linear_attention = comparison((2,), "qwen3_5_moe_text", checkpointing=True, expert_parallel_size=2)
check_linear_attention_sequence = comparison((2,), "qwen3_5_text", lora=4, ulysses_sequence_parallel_size=2)


@on(2)
def check_offload_and_wrapping(folder):
    wrap = WrapPolicyConfig(transformer_layer_cls_to_wrap=["Qwen3MLP", "Qwen3DecoderLayer"])
    return compare(model_folder(folder, "qwen3"), offload_policy=True, wrap_policy=wrap)


check_wrapping_by_size = comparison((4,), "qwen3", wrap_policy=WrapPolicyConfig(min_num_params=2000))


def custom_wrap_policy():
    """A policy as a user's file makes it for FSDP."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer

    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Qwen3Attention, Qwen3DecoderLayer})


check_wrapping_by_a_function = comparison((4,), "qwen3", wrap_policy_fn=f"{__name__}:custom_wrap_policy")


@on(2)
def check_padded_family(folder):
    """A family whose own forward computes padded rows; its softmax is in float32."""
    gaps = compare(model_folder(folder, "bloom"), dtype="float32")
    path = model_folder(folder, "bloom")
    with pytest.raises(ConfigError, match=r"BloomForCausalLM runs by its own padded forward, which cannot be divided"):
        make(FSDPEngine, path, ulysses_sequence_parallel_size=2)
    return gaps


# two of three layers in one unit; with checkpointing the backward runs their forward again
check_groups_of_layers = comparison(
    (2,),
    "qwen3",
    model={"num_hidden_layers": 3},
    checkpointing=True,
    use_3d_hybrid=True,
    layer_per_group=2,
    forward_prefetch=True,
)


@on(4)
def check_groups_of_micro_batches(folder):
    three = {"use_3d_hybrid": True, "batch_group_size": 2, "enable_chunked_attention": True, "chunk_size": 3}
    return compare(model_folder(folder, "qwen3"), micro=MicroBatching(max_rows=1), **three)


@on(4)
def check_groups_with_tensor_parallel(folder):
    three = {"use_3d_hybrid": True, "batch_group_size": 3, "enable_chunked_attention": True, "chunk_size": 3}
    path = model_folder(folder, "gemma2", vocab_size=265)
    return compare(path, micro=MicroBatching(max_rows=2), tensor_parallel_size=2, checkpointing=True, **three)


@on(2)
def check_change_while_training(folder):
    """[loss, gradient norm, bytes sent by FSDP, peak memory in bytes] of three steps, for an unchanged engine and for an
    engine that is changed before each step."""
    path = model_folder(folder, "qwen3", num_hidden_layers=3, intermediate_size=256)
    phases = [{}, {"batch_group_size": 5}, {"batch_group_size": 1, "enable_chunked_attention": True, "chunk_size": 32}]
    engines = in_messages(lambda: [make(FSDPEngine, path, use_3d_hybrid=True) for _ in range(2)])
    steps = []
    for seed, changes in enumerate(phases):
        longest = (9, 8) if seed == 1 else (200, 100)  # weights or tokens weigh more
        columns = make_columns(*random_rows(seed, [1] * 6, longest_prompt=longest[0], longest_response=longest[1]))
        columns["advantages"] = columns["responses"].double().sin()
        batch = DataProto.from_dict(columns)
        engines[1].reconfigure(changes)
        for engine in engines:
            share = batch.select_idxs(rows_of(engine, len(batch)))
            TRAFFIC.take()
            metrics, peak = peak_bytes(lambda: step(engine, share, MicroBatching(max_rows=1), "lm"))  # noqa: B023
            steps.append([metrics["loss"], metrics["grad_norm"], TRAFFIC.take().num_bytes, peak])
    num_parameters = sum(s.shape.numel() for s in engines[0].shards.values())
    return {"steps": steps, "num_parameters": num_parameters}


@on(2)
def check_memory_of_the_host(folder):
    """In memory of the host and in messages: bytes that the first of two steps exchanges, and weights after the second."""
    path, micro, num_bytes, trained = model_folder(folder, "llama"), MicroBatching(max_tokens=256), [], []
    for build in (lambda function: function(), in_messages):
        engine = build(lambda: make(FSDPEngine, path, dtype="float32"))
        for seed in range(2):
            TRAFFIC.take()
            batch = make_batch(seed, (3, 1, 4, 2))
            step(engine, batch.select_idxs(rows_of(engine, len(batch))), micro, "lm")
            num_bytes += [] if seed else [TRAFFIC.take().num_bytes]
        trained.append(dict(engine.gather_weights()))
    differ = [name for name, weight in trained[0].items() if not torch.equal(weight, trained[1][name])]
    return {"bytes": num_bytes, "differ": differ, "num_parameters": sum(w.numel() for w in trained[0].values())}


@on(2)
def check_weights_are_one_copy(folder):
    """An embedding's last row as the first rank reads it, in both dtypes, if the second rank writes it late before a call of
    the engine and early after it; and the number of groups that share weights if the second rank has no memory to share."""
    path, values = one_layer(folder, "llama"), []
    for dtype in ("float32", "bfloat16"):
        engine, writes = make(FSDPEngine, path, dtype=dtype), dist.get_rank() == 1
        row = engine.shards["model.embed_tokens.weight"].computing[-1:] if writes else torch.zeros(1)
        time.sleep(0.4 * writes)
        row.fill_(0.5)
        with engine._ready():
            engine.model.unshard()
            time.sleep(0.2 * (not writes))
            values.append(engine.module.get_input_embeddings().weight[-1].float().mean().item())
        row.fill_(0.25)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(host_units, "try_segment", lambda num_bytes: None)
        return {"values": values, "groups": len(make(FSDPEngine, path)._hosts)}


@on(2)
def check_bfloat16(folder):
    """Storage stays float32 and sums are made in it; products are rounded as on one device, with instructions for bfloat16
    and without."""
    gaps = []
    for path in ("native", "widened"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(CPU_BF16, path)
            gaps.append(compare(one_layer(folder, "llama"), dtype="bfloat16"))
    return {name: max(row[name] for row in gaps) for name in gaps[0]}


@on(2)
def check_float16(folder):
    """Gradients overflow on the last rank only, until the loss scale is small enough there."""
    path, micro = one_layer(folder), MicroBatching(max_tokens=24)
    gaps, many = compare(path, dtype="float16"), make(FSDPEngine, path, dtype="float16")
    batch = make_batch(0, (3, 2)).select_idxs(rows_of(many, 5))

    def loss(outputs, rows, totals):
        value, metrics = policy_loss(outputs, rows, totals)
        return value * (1e3 if dist.get_rank() else 1e-6), metrics

    scales = []
    while many.num_steps == 0 and len(scales) < 40:
        metrics = many.train_batch(batch, loss, OUTPUTS["lm"], micro)
        scales.append([metrics["loss_scale"].value, metrics["overflow_ratio"].value])
    scales_of_ranks: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(scales_of_ranks, scales)
    return {"gaps": gaps, "scales": scales_of_ranks}


def whole_state(engine):
    """Model and optimizer, gathered."""
    state = engine.state()
    parts = {f"{n}": whole(t) for n, t in state.model.items()}
    return parts | {f"optimizer/{n}": whole(t) for n, t in state.optimizer.items()}


def refused_steps(ours, plain, step, *losses):
    """Differences between the states of two engines after two steps, where `ours` is asked for more between them: a step that a
    check refuses, one with each of `losses`, whose gradient is not finite, and one without a token."""
    checked, batch, micro = {}, make_batch(5, (2, 2)), MicroBatching(max_tokens=24)

    class Refuse:
        names = {"loss": "sum"}

        def __call__(self, metrics):
            checked.update(metrics)
            return False

    for engine in (ours, plain):
        step(engine, 0)
    refused = ours.train_batch(batch, imitation_loss, ("log_probs",), micro, check=Refuse())
    assert refused["num_skipped_updates"].value == 1
    assert checked["grad_norm"] == refused["grad_norm"].value > 0
    for loss in losses:
        assert ours.train_batch(batch, loss, ("log_probs",), micro)["num_skipped_updates"].value == 1
    nothing = batch.select_idxs(torch.arange(len(batch)))
    nothing.batch["response_mask"] = torch.zeros_like(nothing.batch["response_mask"])
    ours.train_batch(nothing, lambda o, b, t: (o["log_probs"].sum(), {}), ("log_probs",), micro)
    assert ours.num_steps == plain.num_steps == 1
    for engine in (ours, plain):
        step(engine, 1)
    return num_different(whole_state(ours), whole_state(plain))


def num_different(a, b):
    assert a.keys() == b.keys()
    return sum(not torch.equal(a[n].cpu(), b[n].cpu()) for n in a)


def save(engine, folder, number):
    """Save as a runtime does: the first rank writes, the others take part."""
    config = engine.module.config
    role = RoleCheckpoint(engine.state(), lambda path: config.save_pretrained(path))
    if dist.get_rank() == 0:
        CheckpointStore(folder).save(number, {"actor": role}, {"step": number})
    else:
        role.take_part()
    dist.barrier()


def load(engine, folder, number):
    store = CheckpointStore(folder)
    engine.load_state(read_role(store.path(number) / "actor", ALL_CONTENTS))
    return engine


def trained(path, micro, **engine):
    built = make(FSDPEngine, path, dtype="float32", **engine)
    for seed in range(2):
        batch = make_batch(seed)
        step(built, batch.select_idxs(rows_of(built, len(batch))), micro, "lm")
        built.end_step()
    return built


def next_steps(engines):
    """Grad norms of one more step each, and the spread of the weights after it, relative to the first."""
    micro, batch, norms, weights = MicroBatching(max_tokens=24), make_batch(7), [], []
    for engine in engines:
        rows = rows_of(engine, len(batch)) if isinstance(engine, FSDPEngine) else list(range(len(batch)))
        norms.append(step(engine, batch.select_idxs(rows), micro, "lm")["grad_norm"])
        weights.append(dict(engine.gather_weights()))
    return {
        "grad_norm": max(abs(n / norms[0] - 1) for n in norms),
        "weights": max(largest_gap(w, weights[0]) for w in weights),
    }


@on(2)
def check_checkpoint(folder):
    """Saved by two ranks; loaded by one, and by two that divide every tensor."""
    path = model_folder(folder, "qwen3", tie_word_embeddings=False)
    first = trained(path, MicroBatching(max_tokens=24))
    save(first, folder / "saved", 2)
    one = load(make(LocalEngine, path, dtype="float32"), folder / "saved", 2)
    divided = load(make(FSDPEngine, path, dtype="float32", tensor_parallel_size=2), folder / "saved", 2)
    expected = whole_state(first)
    different = [num_different(whole_state(e), expected) for e in (one, divided)]
    assert one.num_lr_steps == divided.num_lr_steps == 2
    return {
        "different": different,
        "stale": _gap_after_going_back(path, folder, one),
        **next_steps([first, one, divided]),
    }


def _gap_after_going_back(path, folder, one):
    """Largest gap of log-probs between `one`, which holds the checkpoint, and an engine that has computed with other weights
    before and keeps its gathered weights."""
    engine, batch, micro = make(FSDPEngine, path, dtype="float32", reshard_after_forward=False), make_batch(3), 24
    log_probs = []
    for _ in range(2):
        share = batch.select_idxs(rows_of(engine, len(batch)))
        log_probs.append(engine.forward(share, ("log_probs",), MicroBatching(max_tokens=micro))["log_probs"])
        load(engine, folder / "saved", 2)
    expected = one.forward(share, ("log_probs",), MicroBatching(max_tokens=micro))["log_probs"]
    assert (log_probs[0] - expected).abs().max() > 1e-3
    return (log_probs[1] - expected).abs().max().item()


@on(4)
def check_checkpoint_of_two_ranks(folder):
    """The checkpoint of check_checkpoint, by four ranks in three arrangements; saved again from each."""
    path = model_folder(folder, "qwen3", tie_word_embeddings=False)
    one = load(make(LocalEngine, path, dtype="float32"), folder / "saved", 2)
    shapes = [{}, {"fsdp_size": 2}, {"tensor_parallel_size": 2}]
    engines = [load(make(FSDPEngine, path, dtype="float32", **shape), folder / "saved", 2) for shape in shapes]
    expected, different = whole_state(one), []
    for number, engine in enumerate(engines):
        different.append(num_different(whole_state(engine), expected))
        save(engine, folder / f"again-{number}", 2)
        again = load(make(LocalEngine, path, dtype="float32"), folder / f"again-{number}", 2)
        different.append(num_different(whole_state(again), expected))
    return {"different": different, **next_steps([one, *engines])}


@on(2)
def check_checkpoint_of_experts(folder):
    path = model_folder(folder, "qwen3_moe", moe_intermediate_size=16)
    first = trained(path, MicroBatching(max_tokens=24), expert_parallel_size=2)
    save(first, folder / "experts", 2)
    one = load(make(LocalEngine, path, dtype="float32"), folder / "experts", 2)
    opened = load_causal_lm(folder / "experts" / "global_step_2" / "actor" / "huggingface")
    different = [
        num_different(whole_state(first), whole_state(one)),
        num_different(dict(opened.named_parameters()), dict(one.gather_weights())),
    ]
    return {"different": different, **next_steps([first, one])}


@on(2)
def check_checkpoint_of_adapters(folder):
    path = one_layer(folder)
    first = trained(path, MicroBatching(max_tokens=24), lora=4)
    save(first, folder / "adapters", 2)
    one = load(make(LocalEngine, path, dtype="float32", lora=4), folder / "adapters", 2)
    divided = make(FSDPEngine, path, dtype="float32", lora=4, tensor_parallel_size=2)
    load(divided, folder / "adapters", 2)
    expected = whole_state(one)
    different = [num_different(whole_state(e), expected) for e in (first, divided)]
    batch = make_batch(3)
    with first.reference():
        base = first.forward(batch, ("log_probs",), MicroBatching(max_rows=3))["log_probs"]
    frozen = make(LocalEngine, path, dtype="float32").forward(batch, ("log_probs",), MicroBatching(max_rows=3))
    gap = (base - frozen["log_probs"]).abs().max().item()
    return {"different": different, "reference": gap, **next_steps([one, first, divided])}


def held_groups():
    """Ranks of the process groups of this process, and its threads that wait for messages of gloo."""
    tasks = [Path(task, "comm").read_text().strip() for task in glob.glob("/proc/self/task/*")]
    world = dist.distributed_c10d._world
    groups = [sorted(world.pg_group_ranks[group]) for group in world.pg_map]
    return {"groups": sorted(groups), "threads": tasks.count("gloo_tcp_loop")}


@on(2)
def check_groups(folder):
    """Of several engines, after all further ones."""
    engines = [make(FSDPEngine, one_layer(folder), tensor_parallel_size=size) for size in (1, 2, 1)]
    return {**held_groups(), "num_engines": len(engines)}


@on(2)
def check_failure_on_the_first_rank(folder):
    """Weights that only the first rank reads are damaged: all ranks say so."""
    path = model_folder(folder, "qwen3", vocab_size=300)
    if dist.get_rank() == 0:
        (path / "model.safetensors").write_bytes(b"nonsense")
    dist.barrier()
    try:
        make(FSDPEngine, path)
    except ModelError as error:
        return {"error": str(error)}
    raise AssertionError("nothing was noticed")
