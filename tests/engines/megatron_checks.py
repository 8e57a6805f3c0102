"""Checks that test_megatron.py runs on two and four ranks at once: steps of the Megatron engine against steps of one device."""

import numpy as np
import torch
import torch.distributed as dist

from tests.engines.parallel_checks import (
    OUTPUTS,
    held_groups,
    load,
    model_folder,
    num_different,
    on,
    refused_steps,
    save,
    whole_state,
)
from tests.engines.test_contract import largest_gap, make_batch, make_pairs, pair_loss, policy_loss, value_loss
from tests.engines.tiny import make_engine
from verl.config.sections.megatron import MegatronConfig
from verl.data_proto.extras import EXPERTS
from verl.data_proto.merge import object_array
from verl.engines.api import MicroBatching, TrainEngine, gather_adapters, whole
from verl.engines.fsdp import FSDPEngine
from verl.engines.local import LocalEngine
from verl.engines.megatron.engine import MegatronEngine
from verl.models.lora import own_names
from verl.models.routing import expert_counts
from verl.parallel.mesh import Mesh
from verl.reshard.hf_sharding import decoder_tensors
from verl.reshard.layout import MegatronLayout, replicas

MICRO = MicroBatching(max_tokens=24)
LOSSES = {"lm": policy_loss, "token_value": value_loss}
CONTEXT = "context_parallel_size"
LATENT = {"n_shared_experts": 1, "routed_scaling_factor": 1.5}
GROUPS = {**LATENT, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
TENSOR, PIPELINE, EXPERT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


def make(cls, path, *, head="lm", dtype="float32", trainable=True, checkpointing=False, lora=0, dora=False, **more):
    """`more`: the optimizer, and sizes of a section `megatron`."""
    optimizer = more.pop("optimizer", "AdamW")
    settings = {"section": MegatronConfig(**more)} if cls is MegatronEngine else {}
    return make_engine(
        path, cls, head=head, dtype=dtype, trainable=trainable,
        model={"enable_gradient_checkpointing": checkpointing, "lora_rank": lora, "use_dora": dora},
        optim={"lr": 5e-4, "optimizer": optimizer},  # Adam scales first gradients near zero, noise, up to lr
        **settings,
    )  # fmt: skip


def rows_of(engine, num_rows):
    """Uneven shares of data-parallel ranks: the first has an empty micro-batch."""
    if isinstance(engine, LocalEngine):
        return list(range(num_rows))
    size, rank = engine.data.size(), engine.data.rank()
    cuts = [num_rows * i * (i + 1) // (size * (size + 1)) for i in range(size + 1)]
    return list(range(cuts[rank], cuts[rank + 1]))


def summed(engine, metric):
    total = torch.tensor(metric.value, dtype=torch.float64)
    if not isinstance(engine, LocalEngine):
        dist.all_reduce(total, group=engine.data)
    return total.item()


def batch_of(seed):
    """A batch with the padding token among the sampled ones."""
    batch = make_batch(seed, (3, 1, 4, 2))
    batch.batch["responses"][seed::4, 0] = 256
    return batch


def step(engine, seed, head="lm"):
    batch = batch_of(seed)
    share = batch.select_idxs(rows_of(engine, len(batch)))
    return engine.train_batch(share, LOSSES[head], OUTPUTS[head], MICRO, 1.2)


def compare(folder, family="llama", head="lm", model=None, checkpointing=False, lora=0, dora=False, **more):
    """Largest relative differences of losses, norms and outputs over three steps, and of the states after them."""
    path = model_folder(folder, family, **{"num_hidden_layers": 4, **(model or {})})
    settings = {"head": head, "lora": lora, "dora": dora, "optimizer": more.pop("optimizer", "AdamW")}
    one = make(LocalEngine, path, **settings)
    many = make(MegatronEngine, path, checkpointing=checkpointing, **settings, **more)
    assert isinstance(many, TrainEngine)
    gaps = {"start": largest_gap(dict(many.gather_weights()), dict(one.gather_weights()))}
    gaps |= {"loss": 0.0, "grad_norm": 0.0, "outputs": 0.0}
    noise: dict[str, torch.Tensor] = {}
    for seed in range(3):
        batch = batch_of(seed)
        rows = rows_of(many, len(batch))
        a = one.forward(batch, OUTPUTS[head], MICRO, 1.2)
        b = many.forward(batch.select_idxs(rows), OUTPUTS[head], MICRO, 1.2)
        gaps["outputs"] = max(gaps["outputs"], *((a[n][rows] - b[n]).abs().max().item() for n in b))
        expected, actual = step(one, seed, head), step(many, seed, head)
        gaps["loss"] = max(gaps["loss"], abs(summed(many, actual["loss"]) / expected["loss"].value - 1))
        gaps["grad_norm"] = max(gaps["grad_norm"], abs(actual["grad_norm"].value / expected["grad_norm"].value - 1))
        noise = noise or _noise(whole_state(one))
    # softmax does not change when all keys are moved: the gradient of their bias is rounding noise, and Adam scales it up
    no = torch.tensor(False)
    weights, states = (
        [{n: t.masked_fill(noise.get(n, no), 0.0) for n, t in held.items() if "k_proj.bias" not in n} for held in pair]
        for pair in ((dict(many.gather_weights()), dict(one.gather_weights())), (whole_state(many), whole_state(one)))
    )
    return {**gaps, "weights": largest_gap(*weights), "state": largest_gap(*states)}


def _noise(state):
    """Elements with a first gradient of rounding noise, by parameter: Adam's first step is lr g / (|g| + 1e-8)."""
    moments = {n.split("/")[1]: t for n, t in state.items() if n.startswith("optimizer/") and n.endswith("/exp_avg")}
    return {n: t.abs() < 1e-8 for n, t in moments.items()}  # a tenth of the gradient


def comparison(ranks, *family, **settings):
    """A check on that many ranks: `compare` under `settings`."""
    return on(*ranks)(lambda folder: compare(folder, *family, **settings))


check_data = comparison((2,))
check_data_without_distributed_optimizer = comparison((2,), "qwen3", use_distributed_optimizer=False)
check_tensor = comparison((2,), **{TENSOR: 2})
check_muon_data = comparison((2,), "qwen3", optimizer="Muon")
check_muon_tensor = comparison((2,), "qwen3", optimizer="Muon", **{TENSOR: 2})
check_muon_pipeline = comparison((2,), optimizer="Muon", **{PIPELINE: 2})
check_muon_experts = comparison((2,), "qwen3_moe", optimizer="Muon", **{EXPERT: 2})
check_muon_tensor_pipeline = comparison((4,), optimizer="Muon", **{TENSOR: 2, PIPELINE: 2})
check_tensor_without_sequence = comparison((2,), "qwen3", sequence_parallel=False, **{TENSOR: 2})
check_tensor_qwen3 = comparison((2,), "qwen3", **{TENSOR: 2})
check_tensor_qwen2_untied_recomputed = comparison(
    (2,), "qwen2", model={"tie_word_embeddings": False}, checkpointing=True, **{TENSOR: 2}
)
check_odd_vocabulary = comparison(
    (2,), "mistral", model={"vocab_size": 265, "tie_word_embeddings": False}, **{TENSOR: 2}
)
check_pipeline = comparison((2,), **{PIPELINE: 2})
check_pipeline_untied = comparison((2,), model={"tie_word_embeddings": False}, **{PIPELINE: 2})
check_value = comparison((2,), head="token_value", **{PIPELINE: 2})
check_value_tensor = comparison((2,), head="token_value", **{TENSOR: 2})
check_context = comparison((2,), "qwen3", **{CONTEXT: 2})
check_context_ring = comparison(
    (2,), "qwen3", model={"num_attention_heads": 3, "num_key_value_heads": 1}, **{CONTEXT: 2}
)
check_context_experts = comparison((2,), "qwen3_moe", **{CONTEXT: 2, EXPERT: 2})
check_experts = comparison((2,), "qwen3_moe", **{EXPERT: 2})
check_experts_glm = comparison((2,), "glm4_moe", **{EXPERT: 2})
check_experts_glm_pipeline = comparison((2,), "glm4_moe", **{PIPELINE: 2})
check_experts_glm_tensor = comparison((2,), "glm4_moe", **{TENSOR: 2})
check_latent = comparison((2,), "deepseek_v3", model=LATENT, **{EXPERT: 2})
SELECTIVE = {
    "override_transformer_config": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe_act"]}
}
check_latent_tensor = comparison((2,), "deepseek_v3", checkpointing=True, model=LATENT, **{TENSOR: 2}, **SELECTIVE)
check_latent_whole_queries = comparison((2,), "deepseek_v3", model={**LATENT, "q_lora_rank": None}, **{TENSOR: 2})
check_latent_pipeline = comparison((2,), "deepseek_v3", model=GROUPS, **{PIPELINE: 2})
check_latent_context = comparison((2,), "deepseek_v3", model=LATENT, **{CONTEXT: 2})
check_latent_lora_tensor = comparison((2,), "deepseek_v3", lora=4, model=LATENT, **{TENSOR: 2})
check_latent_expert_tensor = comparison((4,), "deepseek_v3", model=GROUPS, **{EXPERT: 2, TENSOR: 2})
check_experts_tensor = comparison((2,), "mixtral", **{TENSOR: 2})
check_experts_apart = comparison((2,), "qwen3_moe", expert_tensor_parallel_size=1, **{TENSOR: 2, EXPERT: 2})
check_tensor_pipeline = comparison((4,), **{TENSOR: 2, PIPELINE: 2})
check_pipeline_data = comparison((4,), **{PIPELINE: 2})
check_interleaved = comparison(
    (4,), model={"num_hidden_layers": 8}, virtual_pipeline_model_parallel_size=2, **{PIPELINE: 4}
)
check_context_tensor = comparison((4,), "qwen2", **{CONTEXT: 2, TENSOR: 2})
check_context_pipeline = comparison((4,), checkpointing=True, **{CONTEXT: 2, PIPELINE: 2})
check_context_data = comparison((4,), "qwen3_moe", use_distributed_optimizer=False, **{CONTEXT: 2, EXPERT: 2})
check_expert_tensor = comparison((4,), "qwen3_moe", **{EXPERT: 2, TENSOR: 2})
check_expert_pipeline = comparison((4,), "mixtral", **{EXPERT: 2, PIPELINE: 2})
check_lora_tensor = comparison((2,), "qwen2", lora=4, checkpointing=True, **{TENSOR: 2})
check_lora_tensor_without_sequence = comparison((2,), lora=4, sequence_parallel=False, **{TENSOR: 2})
check_lora_pipeline = comparison((2,), lora=4, checkpointing=True, **{PIPELINE: 2})
check_lora_value = comparison((2,), head="token_value", lora=4, **{PIPELINE: 2})
check_lora_experts = comparison((2,), "glm4_moe", lora=4, **{EXPERT: 2})
check_lora_context = comparison((2,), "qwen3", lora=4, **{CONTEXT: 2})
check_lora_tensor_pipeline = comparison((4,), "qwen3", lora=4, **{TENSOR: 2, PIPELINE: 2})
check_lora_expert_tensor = comparison((4,), "glm4_moe", lora=4, **{EXPERT: 2, TENSOR: 2})

check_dora_tensor = comparison((2,), "qwen2", lora=4, dora=True, checkpointing=True, **{TENSOR: 2})
check_dora_tensor_without_sequence = comparison((2,), lora=4, dora=True, sequence_parallel=False, **{TENSOR: 2})
check_dora_pipeline = comparison((2,), "glm4_moe", lora=4, dora=True, **{PIPELINE: 2})
check_dora_latent_tensor_pipeline = comparison(
    (4,), "deepseek_v3", lora=4, dora=True, model=LATENT, **{TENSOR: 2, PIPELINE: 2}
)


@on(2)
def check_pairs(folder):
    path = model_folder(folder, "llama", num_hidden_layers=4)
    one = make(LocalEngine, path, head="sequence_score")
    many = make(MegatronEngine, path, head="sequence_score", **{PIPELINE: 2})
    gaps = {"loss": 0.0, "grad_norm": 0.0}
    for seed in range(2):
        arguments = (make_pairs(seed), pair_loss, ("sequence_scores",), MICRO)
        expected, actual = (engine.train_batch(*arguments, unit="pair") for engine in (one, many))
        for name in gaps:
            gaps[name] = max(gaps[name], abs(actual[name].value / expected[name].value - 1))
    return gaps


def replay(folder, family, model, checkpointing=False, **section):
    """Experts are recorded as on one device, and with other experts than their own both compute the same."""
    path, batch = model_folder(folder, family, num_hidden_layers=4, **model), batch_of(1)
    one, many = make(LocalEngine, path), make(MegatronEngine, path, checkpointing=checkpointing, **section)
    rows, free_runs = rows_of(many, len(batch)), []
    for engine, part in ((one, batch), (many, batch.select_idxs(rows))):
        engine.routing.follow(engine.module)
        with engine.routing.recording() as record:
            outputs = engine.forward(part, OUTPUTS["lm"], MICRO)
        # the experts of a token are in no order
        free_runs.append((outputs["log_probs"], [np.sort(record[row]) for row in sorted(record)]))
    (_, expected), (free, recorded) = free_runs
    draws, (num_experts, k) = np.random.default_rng(0), expert_counts(one.module.config)
    wrong = [draws.random((*r.shape[:2], num_experts)).argsort(-1)[..., :k].astype(np.uint8) for r in expected]
    batch.non_tensor_batch[EXPERTS] = object_array(wrong)
    part = batch.select_idxs(rows)
    a, b = (e.forward(x, OUTPUTS["lm"], MICRO)["log_probs"] for e, x in ((one, batch), (many, part)))
    assert (b - free).abs().max() > 1e-3
    x, y = (e.train_batch(x, policy_loss, OUTPUTS["lm"], MICRO) for e, x in ((one, batch), (many, part)))
    return {
        "recorded": sum(not np.array_equal(recorded[n], expected[row]) for n, row in enumerate(rows)),
        "outputs": (a[rows] - b).abs().max().item(),
        "loss": abs(summed(many, y["loss"]) / x["loss"].value - 1),
        "grad_norm": abs(y["grad_norm"].value / x["grad_norm"].value - 1),
    }


check_replay_tensor = on(2)(lambda folder: replay(folder, "qwen3_moe", {}, checkpointing=True, **{TENSOR: 2}))
check_replay_pipeline = on(2)(lambda folder: replay(folder, "qwen3_moe", {}, **{PIPELINE: 2}))
check_replay_context = on(2)(lambda folder: replay(folder, "qwen3_moe", {}, **{CONTEXT: 2, EXPERT: 2}))
check_replay_latent = on(4)(lambda folder: replay(folder, "deepseek_v3", GROUPS, **{TENSOR: 2, PIPELINE: 2}))


@on(2, 4)
def check_rounding(folder):
    """In bfloat16 the weights that compute are the masters as every engine rounds them."""
    shapes = [{}, {TENSOR: 2}, {PIPELINE: 2}, {"use_distributed_optimizer": False}]
    path, different = model_folder(folder, "qwen3_moe", num_hidden_layers=4), {}
    for number, section in enumerate(shapes):
        many = make(MegatronEngine, path, dtype="bfloat16", **section)
        for seed in range(2):
            step(many, seed)
        masters = {name: whole(tensor) for name, tensor in many.state().model.items()}
        assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
        rounded = {n: many.rounding.rounded(n, masters[n], torch.bfloat16) for n in masters}
        different[number] = num_different(dict(many.gather_weights()), rounded)
        different[f"{number} exact"] = int(all(torch.equal(masters[n], rounded[n].float()) for n in masters))
        assert many.visible_update_ratio() > 0.9
        frozen = make(MegatronEngine, path, dtype="bfloat16", trainable=False, **section)
        expected = make(LocalEngine, path, dtype="bfloat16", trainable=False)
        different[f"{number} frozen"] = num_different(dict(frozen.gather_weights()), dict(expected.gather_weights()))
        del many, frozen
    return different


@on(2, 4)
def check_declared_weights(folder):
    """Each rank's part is at its place in the layout of a weight sync, is no copy, and a snapshot brings it back."""
    different = {}
    sections = [{TENSOR: 2}, {PIPELINE: 2}, {CONTEXT: 2, EXPERT: 2}, {EXPERT: 2, "expert_tensor_parallel_size": 1}]
    for number, section in enumerate([*sections, {TENSOR: 2, "lora": 4}, {"lora": 4}, {TENSOR: 2}]):
        path = model_folder(folder, "deepseek_v3" if number == 6 else "qwen3_moe", num_hidden_layers=4)
        many = make(MegatronEngine, path, dtype="bfloat16", **section)
        step(many, 0)
        declared, held = many.weight_layout(), many.local_weights()
        counts = {"num_layers": declared.num_layers, "num_heads": declared.num_heads}
        size = dist.get_world_size()
        layout = MegatronLayout(
            replicas(Mesh.grid(range(size), **many.section.sizes(size))),
            many.section.expert_model_parallel_size,
            many.section.layers_per_stage(4),
            expert_tensor_parallel=many.section.expert_tensor_size(),
        )
        before, wrong = {name: t.clone() for name, t in many.gather_weights()}, 0
        sent = own_names(dict(gather_adapters(many))) if many.spec else before
        for tensor in decoder_tensors(declared.shapes, num_kv_heads=declared.num_kv_heads, **counts):
            part = layout.part(tensor, dist.get_rank())
            assert (part is None) == (tensor.name not in held), tensor.name
            expected = sent[tensor.name]
            for dim, spans in enumerate(part.spans if part is not None else ()):
                expected = torch.cat([expected.narrow(dim, a, b - a) for a, b in spans], dim)
            wrong += int(part is not None and not torch.equal(held[tensor.name], expected))
        saved = many.snapshot()
        step(many, 1)
        moved = largest_gap(dict(many.gather_weights()), before)
        many.restore(saved)
        wrong += num_different(dict(many.gather_weights()), before)
        different[number] = wrong if moved > 0 else -1
        del many
    return different


@on(2)
def check_refused_steps(folder):
    path = model_folder(folder, "llama", num_hidden_layers=4)

    def different(**section):
        return refused_steps(*(make(MegatronEngine, path, **section) for _ in range(2)), step)

    return {"data": different(), "pipeline": different(**{PIPELINE: 2})}


def continue_adapters(folder, **adapters):
    """Adapters that were trained with one layout continue bit for bit with it, and with other layouts and engines; without them
    the model is the frozen one."""
    path, batch = model_folder(folder, "qwen2", num_hidden_layers=4), make_batch(3)
    first = make(MegatronEngine, path, **adapters, **{TENSOR: 2})
    for seed in range(2):
        step(first, seed)
    saved = folder / "-".join(adapters)
    save(first, saved, 2)
    engines = (make(MegatronEngine, path, **adapters, **{TENSOR: 2}), make(LocalEngine, path, **adapters))
    resumed, one = (load(engine, saved, 2) for engine in engines)
    differences = {"loaded": num_different(whole_state(resumed), whole_state(first))}
    differences["local"] = num_different(whole_state(one), whole_state(first))
    with first.reference():
        base = first.forward(batch, ("log_probs",), MICRO)["log_probs"]
    frozen = make(LocalEngine, path, trainable=False).forward(batch, ("log_probs",), MICRO)["log_probs"]
    differences["reference gap"] = (base - frozen).abs().max().item()
    losses = [step(engine, 2)["loss"].value for engine in (first, resumed, one)]
    differences["continued"] = num_different(whole_state(resumed), whole_state(first))
    differences["gap"] = max(abs(loss / losses[-1] - 1) for loss in losses)
    return differences


check_checkpoint_of_adapters = on(2)(lambda folder: continue_adapters(folder, lora=4))
check_checkpoint_of_dora = on(2)(lambda folder: continue_adapters(folder, lora=4, dora=True))


@on(2)
def check_checkpoint_of_muon(folder):
    path, differences = model_folder(folder, "llama", num_hidden_layers=4), {}
    first = make(MegatronEngine, path, optimizer="Muon", **{PIPELINE: 2})
    step(first, 0)
    first.end_step()
    save(first, folder / "muon", 1)
    expected = whole_state(first)
    del first
    for cls, section in ((LocalEngine, {}), (MegatronEngine, {TENSOR: 2})):
        engine = load(make(cls, path, optimizer="Muon", **section), folder / "muon", 1)
        differences[cls.__name__] = num_different(whole_state(engine), expected)
    return differences


@on(2)
def check_checkpoint(folder):
    """A resumed run is the unbroken one bit for bit; with another layout or engine its losses are equal, and back again."""
    path, differences = model_folder(folder, "llama", num_hidden_layers=4), {}
    shapes = [{}, {TENSOR: 2}, {PIPELINE: 2}]
    for number, section in enumerate(shapes):
        unbroken = make(MegatronEngine, path, **section)
        for seed in range(2):
            step(unbroken, seed)
            unbroken.end_step()
        save(unbroken, folder / f"megatron-{number}", 2)
        resumed = load(make(MegatronEngine, path, **section), folder / f"megatron-{number}", 2)
        one = load(make(LocalEngine, path), folder / f"megatron-{number}", 2)
        fsdp = load(make(FSDPEngine, path), folder / f"megatron-{number}", 2)
        differences[f"{number} loaded"] = num_different(whole_state(resumed), whole_state(unbroken))
        differences[f"{number} fsdp"] = num_different(whole_state(fsdp), whole_state(unbroken))
        save(fsdp, folder / f"fsdp-{number}", 2)
        losses = [[summed(e, step(e, s)["loss"]) for s in (2, 3)] for e in (unbroken, resumed)]
        differences[f"{number} continued"] = num_different(whole_state(resumed), whole_state(unbroken))
        del unbroken, resumed
        back = load(make(MegatronEngine, path, **shapes[number - 1]), folder / f"fsdp-{number}", 2)
        losses += [[summed(back, step(back, s)["loss"]) for s in (2, 3)]]
        expected = [step(one, s)["loss"].value for s in (2, 3)]
        differences[f"{number} gap"] = max(abs(a / b - 1) for row in losses for a, b in zip(row, expected, strict=True))
        del back
    return differences


@on(2, 4)
def check_groups(folder):
    """Of engines of all further checks, and of one on the first two ranks; they make its groups."""
    path, mesh = model_folder(folder, "llama", num_hidden_layers=4), Mesh.flat(range(2))
    if dist.get_rank() in mesh.ranks:
        engine = make_engine(path, MegatronEngine, section=MegatronConfig(), mesh=mesh)
        step(engine, 0)
        del engine
    dist.barrier()
    return {**held_groups(), "norm": step(make(MegatronEngine, path, **{TENSOR: 2}), 0)["grad_norm"].value}
