"""Checks that test_deepspeed.py runs on two ranks at once: steps of the DeepSpeed engine against steps of one device."""

import json

import torch
import torch.distributed as dist

from tests.engines.parallel_checks import (
    OUTPUTS,
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
from verl.config.sections.deepspeed import DeepSpeedConfig
from verl.engines.api import MicroBatching, TrainEngine, whole
from verl.engines.deepspeed.engine import DeepSpeedEngine
from verl.engines.local import LocalEngine
from verl.parallel.mesh import Mesh
from verl.reshard.hf_sharding import decoder_tensors
from verl.reshard.layout import TrainingLayout

MICRO = MicroBatching(max_tokens=24)
LOSSES = {"lm": policy_loss, "token_value": value_loss}


def make(cls, path, *, head="lm", dtype="float32", trainable=True, **section):
    settings = {"section": DeepSpeedConfig(**section)} if cls is DeepSpeedEngine else {}
    model = {"enable_gradient_checkpointing": False}
    return make_engine(path, cls, head=head, dtype=dtype, trainable=trainable, model=model, **settings)


def own_rows(batch):
    """A third of the rows for the first rank, so it has an empty micro-batch."""
    cut = len(batch) // 3
    return list(range(cut)) if dist.get_rank() == 0 else list(range(cut, len(batch)))


def summed(metric):
    total = torch.tensor(metric.value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def step(engine, seed, head="lm"):
    """Metrics of one optimizer step on this rank's rows of a batch."""
    batch = make_batch(seed, (3, 1, 4, 2))
    share = batch.select_idxs(own_rows(batch)) if isinstance(engine, DeepSpeedEngine) else batch
    return engine.train_batch(share, LOSSES[head], OUTPUTS[head], MICRO, 1.2)


def compare(folder, family="llama", head="lm", **section):
    """Largest relative differences of losses, norms, outputs and states over three steps."""
    path = model_folder(folder, family)
    one, many = make(LocalEngine, path, head=head), make(DeepSpeedEngine, path, head=head, **section)
    assert isinstance(many, TrainEngine)
    gaps = {"loss": 0.0, "grad_norm": 0.0, "outputs": 0.0}
    for seed in range(3):
        batch = make_batch(seed, (3, 1, 4, 2))
        rows = own_rows(batch)
        a = one.forward(batch, OUTPUTS[head], MICRO, 1.2)
        b = many.forward(batch.select_idxs(rows), OUTPUTS[head], MICRO, 1.2)
        gaps["outputs"] = max(gaps["outputs"], *((a[n][rows] - b[n]).abs().max().item() for n in b))
        expected, actual = step(one, seed, head), step(many, seed, head)
        gaps["loss"] = max(gaps["loss"], abs(summed(actual["loss"]) / expected["loss"].value - 1))
        gaps["grad_norm"] = max(gaps["grad_norm"], abs(actual["grad_norm"].value / expected["grad_norm"].value - 1))
    gaps["state"] = largest_gap(whole_state(many), whole_state(one))
    gaps["weights"] = largest_gap(dict(many.gather_weights()), dict(one.gather_weights()))
    return gaps


def comparison(ranks, *family, **settings):
    """A check on that many ranks: `compare` under `settings`."""
    return on(*ranks)(lambda folder: compare(folder, *family, **settings))


check_stage_0 = comparison((2,), zero_stage=0)
check_stage_1 = comparison((2,), zero_stage=1)
check_stage_2 = comparison((2,), zero_stage=2)
check_stage_2_offload = comparison((2,), zero_stage=2, offload_optimizer=True)
check_stage_2_value = comparison((2,), head="token_value", zero_stage=2)
check_stage_3 = comparison((2,), zero_stage=3)
check_stage_3_experts = comparison((2,), "qwen3_moe", zero_stage=3)
check_stage_3_offload = comparison((2,), zero_stage=3, offload_optimizer=True, offload_param=True)


@on(2)
def check_pairs(folder):
    """Both compute by modules, since the fused decoder rounds otherwise. One weight here has a gradient of 3e-8, which Adam
    divides by itself plus 1e-8: rounding of 5e-9 moves it by 0.03 learning rates, and the next loss by 1.1e-5 (relative to
    float64). The fused decoder moves the same weight by 0.008 the other way."""
    path, gaps = model_folder(folder, "llama"), {}
    for stage in (1, 2, 3):
        one = make(LocalEngine, path, head="sequence_score")
        one.module.get_decoder().register_forward_hook(lambda *_: None)  # no module with a hook is fused
        many = make(DeepSpeedEngine, path, head="sequence_score", zero_stage=stage)
        for seed in range(2):
            batch = make_pairs(seed)
            share = batch.select_idxs((batch.batch["pair"] == 3) == bool(dist.get_rank()))
            arguments = (pair_loss, ("sequence_scores",), MICRO)
            expected = one.train_batch(batch, *arguments, unit="pair")
            actual = many.train_batch(share, *arguments, unit="pair")
            norm, loss = actual["grad_norm"].value / expected["grad_norm"].value, summed(actual["loss"])
            gaps[f"{stage} {seed} grad_norm"] = abs(norm - 1)
            gaps[f"{stage} {seed} loss"] = abs(loss / expected["loss"].value - 1)
            if seed == 0:  # from the same weights
                gaps[f"{stage} gradients"] = gradient_gap(whole_state(many), whole_state(one))
    return gaps


def gradient_gap(actual, expected):
    """The largest relative difference of a parameter's mean gradient."""
    names = [name for name in expected if name.endswith("/exp_avg")]
    return max(((actual[n] - expected[n]).norm() / expected[n].norm()).item() for n in names)


@on(2)
def check_bfloat16_rounding(folder):
    """The weights that compute are the masters as every engine rounds them, on all ranks, with each stage."""
    path, different = model_folder(folder, "llama"), {}
    for stage in (1, 2, 3):
        many = make(DeepSpeedEngine, path, dtype="bfloat16", zero_stage=stage)
        for seed in range(2):
            step(many, seed)
        masters = {name: whole(tensor) for name, tensor in many.state().model.items()}
        assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
        weights = dict(many.gather_weights())
        rounded = {n: many.rounding.rounded(n, masters[n], torch.bfloat16) for n in masters}
        different[stage] = num_different(weights, rounded)
        different[f"{stage} exact"] = int(all(torch.equal(masters[n], rounded[n].float()) for n in masters))
        assert many.visible_update_ratio() > 0.9
    return different


@on(2)
def check_declared_weights(folder):
    """Each rank's part is at its place in the layout of a weight sync, and a snapshot brings it back."""
    path, gaps = model_folder(folder, "llama"), {}
    for stage in (2, 3):
        many = make(DeepSpeedEngine, path, dtype="bfloat16", zero_stage=stage)
        step(many, 0)
        declared, held = many.weight_layout(), many.local_weights()
        shape = {"num_layers": declared.num_layers, "num_heads": declared.num_heads}
        tensors = decoder_tensors(declared.shapes, num_kv_heads=declared.num_kv_heads, **shape)
        layout = TrainingLayout(Mesh.grid((0, 1), **many.section.sizes(2)))
        whole_weights = {name: t.clone() for name, t in many.gather_weights()}
        for tensor in tensors:
            part = layout.part(tensor, dist.get_rank())
            expected = whole_weights[tensor.name][tuple(slice(*span) for (span,) in part.spans)]
            assert torch.equal(held[tensor.name], expected), tensor.name
        saved = many.snapshot()
        step(many, 1)
        gaps[f"{stage} moved"] = largest_gap(dict(many.gather_weights()), whole_weights)
        many.restore(saved)
        gaps[f"{stage} back"] = largest_gap(dict(many.gather_weights()), whole_weights)
    return gaps


@on(2)
def check_refused_steps(folder):
    path = model_folder(folder, "llama")

    def broken(outputs, part, totals):
        return outputs["log_probs"].sum() * float("nan"), {}

    def different(stage):
        return refused_steps(*(make(DeepSpeedEngine, path, zero_stage=stage) for _ in range(2)), step, broken)

    return {stage: different(stage) for stage in (1, 2, 3)}


@on(2)
def check_checkpoint(folder):
    """A resumed run is the unbroken one bit for bit, with each stage; with another stage or engine its losses are equal."""
    path, differences = model_folder(folder, "llama"), {}
    for stage in (1, 2, 3):
        unbroken = make(DeepSpeedEngine, path, zero_stage=stage)
        for seed in range(2):
            step(unbroken, seed)
            unbroken.end_step()
        save(unbroken, folder / f"zero-{stage}", 2)
        resumed = load(make(DeepSpeedEngine, path, zero_stage=stage), folder / f"zero-{stage}", 2)
        other = load(make(DeepSpeedEngine, path, zero_stage=stage % 3 + 1), folder / f"zero-{stage}", 2)
        one = load(make(LocalEngine, path), folder / f"zero-{stage}", 2)
        differences[f"{stage} loaded"] = num_different(whole_state(resumed), whole_state(unbroken))
        losses = [[summed(step(e, s)["loss"]) for s in (2, 3)] for e in (unbroken, resumed, other)]
        expected = [step(one, s)["loss"].value for s in (2, 3)]
        differences[f"{stage} continued"] = num_different(whole_state(resumed), whole_state(unbroken))
        differences[f"{stage} gap"] = max(abs(a / b - 1) for row in losses for a, b in zip(row, expected, strict=True))
    return differences


@on(2)
def check_user_config(folder):
    """A file of a user's with "auto" and settings of his own."""
    file = folder / "ds_config.json"
    if dist.get_rank() == 0:
        content = {
            "train_batch_size": "auto",
            "zero_optimization": {"stage": 3, "sub_group_size": 1000, "stage3_param_persistence_threshold": 100},
            "bf16": {"enabled": "auto"},
            "gradient_clipping": "auto",
            "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        }
        file.write_text(json.dumps(content))
    dist.barrier()
    return compare(folder, config=str(file))
