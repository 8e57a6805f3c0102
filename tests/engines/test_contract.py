"""Contract of every training engine. An engine joins by a row in ENGINE_ROWS."""

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from tests.models.reference import make_columns, random_rows, reference_outputs, row_logits, widen_norms
from tests.slow import slow
from verl.config import FSDPConfig, OptimConfig, SFTModelConfig
from verl.config.sections.deepspeed import DeepSpeedConfig
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.engines.api import ENGINES, BatchTotals, MicroBatching, TrainEngine, whole
from verl.engines.base import TrainedEngine
from verl.errors import CheckpointError, ConfigError, ModelError
from verl.models.classifier import sequence_scores
from verl.models.load import load_causal_lm, load_model
from verl.models.outputs import OUTPUTS, OutputKind
from verl.models.rounding import Rounding
from verl.models.tiny import make_tiny_model

# row -> engine, the library that it needs. DeepSpeed's ZeRO has no float64: stage 0 computes it
ROWS = {
    "local": ("local", None),
    "fsdp": ("fsdp", None),
    "megatron": ("megatron", "megatron.core"),
    "zero2": ("deepspeed", "deepspeed"),
    "zero3": ("deepspeed", "deepspeed"),
}
ENGINE_ROWS = [slow(name, when=bool(row[1])) for name, row in ROWS.items()]
ALL = MicroBatching(max_tokens=10**6)
CUTS = {
    "whole": ALL,
    "tokens": MicroBatching(max_tokens=24),
    "rows": MicroBatching(max_rows=2),
    "odd rows": MicroBatching(max_rows=3),
    "single": MicroBatching(max_tokens=1),
}


def cuts(*names):
    """Every cut of a batch; the default run takes `names`, and over all tests of an engine each cut several times."""
    return pytest.mark.parametrize("micro", [slow(cut, id=name, when=name not in names) for name, cut in CUTS.items()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", hidden_size=32, intermediate_size=48, head_dim=8)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A process group of only this process, for engines that need one."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=ENGINE_ROWS)
def make(request, folder):
    """Builds an engine of the row under test; float64 ones have norms that keep float64."""
    engine_name, library = ROWS[request.param]
    if library:
        pytest.importorskip(library, reason=f"needs the extra {engine_name}")
    if engine_name != "local":
        request.getfixturevalue("one_rank")

    def build(
        *, head="lm", dtype="float64", trainable=True, checkpointing=False, share_prompts=True, noise=None, **optim
    ):
        if noise and engine_name == "megatron":
            pytest.skip("strategy=megatron refuses model.neftune_alpha")
        if dtype == "float16" and library:
            pytest.skip("engines of other libraries refuse float16")
        settings = {}
        if engine_name == "deepspeed":
            stage = 0 if dtype == "float64" else int(request.param[-1])
            settings["section"] = DeepSpeedConfig(zero_stage=stage)
        engine = ENGINES.get(engine_name)(
            model=SFTModelConfig(path=str(folder), enable_gradient_checkpointing=checkpointing, neftune_alpha=noise),
            engine=FSDPConfig(dtype=dtype),
            optim=OptimConfig(**{"lr": 1e-2, **optim}) if trainable else None,
            head=head,
            device=torch.device("cpu"),
            total_steps=10,
            share_prompts=share_prompts,
            **settings,
        )
        if dtype == "float64":
            widen_norms(engine.module)
        return engine

    return build


def make_batch(seed=0, sizes=(3, 1, 2), **padding):
    prompts, responses = random_rows(seed, list(sizes))
    columns = make_columns(prompts, responses, **padding)
    generator = torch.Generator().manual_seed(seed + 1)
    width = columns["responses"].shape[1] - padding.get("pad_response", 0)
    weights = torch.randn(len(prompts), width, generator=generator, dtype=torch.float64)
    columns["advantages"] = torch.nn.functional.pad(weights, (0, padding.get("pad_response", 0)))
    return DataProto.from_dict(columns)


def policy_loss(outputs, batch, totals):
    """Linear in the log-probs with a bit of entropy: as sensitive to a wrong token as a loss can be."""
    mask, weight = batch.batch["response_mask"], batch.batch["advantages"].to(outputs["log_probs"])
    assert not outputs["log_probs"][~mask].any()
    loss = -(weight * outputs["log_probs"]).sum() / totals.num_tokens
    loss = loss - 0.1 * outputs["entropy"].sum() / totals.num_sequences
    return loss, {"pg_loss": Metric.sum(loss), "rows": Metric.sum(len(batch))}


def value_loss(outputs, batch, totals):
    mask = batch.batch["response_mask"]
    target = batch.batch["advantages"].to(outputs["values"])
    return (mask * (outputs["values"] - target).square()).sum() / totals.num_tokens, {}


def pair_loss(outputs, batch, totals):
    """Bradley-Terry over rows of equal `pair`: the first row of a pair is preferred. Fails for a pair that is cut."""
    scores, pairs = outputs["sequence_scores"], batch.batch["pair"].tolist()
    loss = scores.sum() * 0
    for pair in set(pairs):
        better, worse = (row for row in range(len(pairs)) if pairs[row] == pair)
        if batch.batch["rank"][better] > batch.batch["rank"][worse]:
            better, worse = worse, better
        loss = loss - torch.nn.functional.logsigmoid(scores[better] - scores[worse])
    return loss / totals.num_units, {"pairs": Metric.sum(len(set(pairs)))}


def make_pairs(seed=0, num_pairs=4, **padding):
    """Pairs of samples, of two each that share a prompt, in no order."""
    prompts, responses = random_rows(seed, [4] * (num_pairs // 2))
    columns = make_columns(prompts, responses, **padding)
    columns["pair"], columns["rank"] = torch.arange(2 * num_pairs) // 2, torch.arange(2 * num_pairs) % 2
    return DataProto.from_dict(columns).select_idxs(
        torch.randperm(2 * num_pairs, generator=torch.Generator().manual_seed(seed))
    )


def make_conversations(seed=0, num_rows=5, **padding):
    """Rows of several trained segments, every second one without a prompt."""
    prompts, responses = random_rows(seed, [1] * num_rows, longest_response=12)
    columns = make_columns([[] if i % 2 else p for i, p in enumerate(prompts)], responses, **padding)
    generator = torch.Generator().manual_seed(seed)
    columns["response_mask"] &= torch.rand(columns["response_mask"].shape, generator=generator) < 0.6
    columns["response_mask"][1::2, 0] = False
    columns["advantages"] = torch.randn(columns["responses"].shape, generator=generator, dtype=torch.float64)
    return DataProto.from_dict(columns)


def train(engine, batch, micro=ALL):
    return engine.train_batch(batch, policy_loss, ("log_probs", "entropy"), micro, 1.2)


def weights_of(engine):
    return {name: whole(tensor).clone() for name, tensor in engine.state().model.items()}


def largest_gap(a, b):
    assert a.keys() == b.keys()
    return max(((a[n] - b[n]).norm() / b[n].norm().clamp_min(1e-3)).item() for n in a)


def test_is_a_train_engine(make):
    assert isinstance(make(), TrainEngine)


def test_an_engine_that_lacks_a_method_cannot_be_built():
    class Half(TrainedEngine):
        def _ready(self, *, trains=False):
            return contextlib.nullcontext()

    with pytest.raises(TypeError, match="_outputs"):
        Half()


@pytest.mark.parametrize("head", ["lm", "token_value", "sequence_score"])
def test_weights_are_declared_for_weight_sync(make, head):
    engine = make(head=head, dtype="float32")
    layout, held = engine.weight_layout(), engine.local_weights()
    assert (layout.dtype, layout.rounding, layout.adapter_scales) == (torch.float32, "dithered", {})
    assert (layout.num_layers, layout.num_heads, layout.num_kv_heads) == (2, 4, 2)
    assert layout.shapes == {name: tuple(tensor.shape) for name, tensor in engine.gather_weights()}
    assert held.keys() == layout.shapes.keys() == engine.trained_weights().keys()
    for name, tensor in engine.gather_weights():
        assert torch.equal(held[name].view(tensor.shape), tensor)  # one rank holds all of it
        held[name].add_(1.0)  # and not a copy
    assert all(torch.equal(engine.local_weights()[name], held[name]) for name in held)
    assert engine.compute_dtype == torch.float32


def test_a_frozen_engine_declares_its_weights_too(make):
    engine = make(trainable=False, dtype="bfloat16")
    assert engine.weight_layout().shapes.keys() == engine.local_weights().keys()
    assert {tensor.dtype for tensor in engine.local_weights().values()} == {torch.bfloat16}
    assert (engine.trained_weights(), engine.num_steps) == ({}, 0)


@pytest.mark.usefixtures("bf16_path")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_snapshot_brings_weights_back_bit_for_bit(make, dtype):
    ours, untouched, batch = make(dtype=dtype), make(dtype=dtype), make_batch()
    for engine in (ours, untouched):
        train(engine, batch)
    saved = ours.snapshot()
    with torch.no_grad():
        for tensor in (*ours.local_weights().values(), *ours.trained_weights().values()):
            tensor.mul_(1.5)
    assert largest_gap(dict(ours.gather_weights()), dict(untouched.gather_weights())) > 0
    ours.restore(saved)
    assert ours.num_steps == untouched.num_steps == 1
    for engine in (ours, untouched):
        engine.free_cached_memory()
        train(engine, batch)
    assert largest_gap(weights_of(ours), weights_of(untouched)) == 0
    assert largest_gap(dict(ours.gather_weights()), dict(untouched.gather_weights())) == 0


def test_forward_equals_hugging_face(make, folder):
    batch = make_batch()
    outputs = make(dtype="float32").forward(batch, ("log_probs", "entropy", "sum_pi_squared", "mean_logit"), ALL, 1.3)
    expected = reference_outputs(load_causal_lm(folder), dict(batch.batch.items()), 1.3, "eager")
    for name, values in expected.items():
        assert outputs[name].dtype == torch.float32
        assert not outputs[name].requires_grad
        assert torch.allclose(outputs[name], values, atol=1e-5)
        assert not outputs[name][~batch.batch["response_mask"]].any()


def test_only_what_is_asked_for_is_returned(make):
    engine = make(trainable=False)
    assert set(engine.forward(make_batch(), ("entropy",), ALL)) == {"entropy"}
    with pytest.raises(ModelError, match="no output 'values'"):
        engine.forward(make_batch(), ("values",), ALL)
    with pytest.raises(ModelError, match="no output 'log_probs'"):
        make(head="token_value").forward(make_batch(), ("log_probs",), ALL)


def test_outputs_of_a_head_are_rows_of_the_registry(make):
    OUTPUTS.register("twice")(OutputKind("token", ("lm",), lambda inputs: 2 * inputs.statistics.log_probs))
    try:
        outputs = make(trainable=False).forward(make_batch(), ("log_probs", "twice"), ALL)
    finally:
        OUTPUTS.remove("twice")
    assert torch.equal(outputs["twice"], 2 * outputs["log_probs"])


def test_correct_tokens_have_the_largest_logit(make, folder):
    batch, engine = make_batch(), make(trainable=False)
    module = widen_norms(load_causal_lm(folder, dtype=torch.float64))
    prompt, mask = batch.batch["prompts"][0][batch.batch["prompt_mask"][0]], batch.batch["response_mask"]
    logits = row_logits(module, torch.cat([prompt, batch.batch["responses"][0]]))[len(prompt) - 1 : -1]
    batch.batch["responses"][0, 0] = logits[0].argmax()
    correct = engine.forward(batch, ("correct",), ALL)["correct"]
    assert correct[0, 0] == 1
    assert set(correct.unique().tolist()) <= {0.0, 1.0}
    assert not correct[~mask].any()
    for cut in (MicroBatching(max_tokens=24), MicroBatching(max_rows=1)):
        assert torch.equal(engine.forward(batch, ("correct",), cut)["correct"], correct)


@cuts("whole", "single")
def test_rows_of_several_segments_and_without_prompts_equal_hugging_face(make, folder, micro):
    batch = make_conversations()
    outputs = make(trainable=False).forward(batch, ("log_probs", "entropy"), micro, 1.3)
    module = widen_norms(load_causal_lm(folder, dtype=torch.float64))
    for row in range(len(batch)):
        prompt = batch.batch["prompts"][row][batch.batch["prompt_mask"][row]]
        logits = row_logits(module, torch.cat([prompt, batch.batch["responses"][row]]))
        log_p = (logits / 1.3).log_softmax(-1)
        for column in batch.batch["response_mask"][row].nonzero().flatten().tolist():
            expected = log_p[len(prompt) + column - 1]
            assert outputs["log_probs"][row, column] == pytest.approx(
                expected[batch.batch["responses"][row, column]].item(), abs=1e-10
            )
            assert outputs["entropy"][row, column] == pytest.approx(
                -(expected.exp() * expected).sum().item(), abs=1e-10
            )


@cuts("tokens")
def test_an_update_on_conversations_does_not_depend_on_the_cut(make, micro):
    one, two = make(), make()
    train(one, make_conversations())
    order = torch.tensor([3, 1, 4, 0, 2])
    train(two, make_conversations(pad_prompt=2).select_idxs(order), micro)
    assert largest_gap(weights_of(two), weights_of(one)) < 1e-9


def test_sequences_are_scored_at_their_last_token(make, folder):
    engine, batch = make(head="sequence_score", trainable=False), make_pairs()
    scores = engine.forward(batch, ("sequence_scores",), ALL)["sequence_scores"]
    assert scores.shape == (len(batch),)
    ids = [
        (*batch.batch["prompts"][i][batch.batch["prompt_mask"][i]], *row[batch.batch["response_mask"][i]])
        for i, row in enumerate(batch.batch["responses"])
    ]
    module = widen_norms(load_model(folder, "sequence_score", dtype=torch.float64))
    expected = sequence_scores(module, [tuple(map(int, row)) for row in ids], max_tokens=1000)
    assert torch.allclose(scores, expected, atol=1e-12)
    assert scores.unique().numel() == len(batch)  # a new head tells rows apart


@cuts("tokens", "odd rows")
def test_pairs_stay_together_whatever_the_cut_the_order_and_the_padding(make, micro):
    one, two = make(head="sequence_score"), make(head="sequence_score")
    for seed in range(2):
        a = one.train_batch(make_pairs(seed), pair_loss, ("sequence_scores",), ALL, unit="pair")
        batch = make_pairs(seed, pad_prompt=1, pad_response=2)
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(9))
        b = two.train_batch(batch.select_idxs(order), pair_loss, ("sequence_scores",), micro, unit="pair")
    assert a["pairs"].value == b["pairs"].value == 4
    assert a["loss"].value == pytest.approx(b["loss"].value, rel=1e-10)
    assert a["grad_norm"].value == pytest.approx(b["grad_norm"].value, rel=1e-10)
    assert largest_gap(weights_of(one), weights_of(two)) < 1e-9


def test_a_reward_model_learns_its_pairs(make):
    engine, batch = make(head="sequence_score", dtype="float32"), make_pairs()
    losses = [
        engine.train_batch(batch, pair_loss, ("sequence_scores",), MicroBatching(max_tokens=24), unit="pair")["loss"]
        for _ in range(15)
    ]
    assert losses[-1].value < 0.3 * losses[0].value


@cuts("rows")
def test_forward_does_not_depend_on_the_cut(make, micro):
    engine, batch = make(trainable=False), make_batch()
    uncut, cut = (engine.forward(batch, ("log_probs", "entropy", "mean_logit"), m) for m in (ALL, micro))
    assert all(torch.allclose(uncut[k], cut[k], atol=1e-12) for k in uncut)


@cuts("tokens", "single")
def test_update_does_not_depend_on_the_cut(make, micro):
    one, two = make(), make(checkpointing=micro.max_rows is None)
    batch = make_batch()
    for _ in range(2):
        a, b = train(one, batch), train(two, batch, micro)
    assert a["loss"].value == pytest.approx(b["loss"].value, rel=1e-10)
    assert a["grad_norm"].value == pytest.approx(b["grad_norm"].value, rel=1e-10)
    assert a["rows"].value == b["rows"].value == len(batch)
    assert largest_gap(weights_of(one), weights_of(two)) < 1e-9


def test_gradients_of_several_calls_add_up_to_one_step(make):
    """`sum_loss` divides by a number of the whole batch, since the totals are of a call."""
    one, two, batch = make(), make(), make_batch()
    tokens, outputs = int(batch.batch["response_mask"].sum()), ("log_probs",)

    def sum_loss(outputs, rows, totals):
        return (rows.batch["advantages"].to(outputs["log_probs"]) * outputs["log_probs"]).sum() / tokens, {}

    for _ in range(2):
        a = one.train_batch(batch, sum_loss, outputs, ALL)
        parts = [batch] if not two.accumulates_calls else [batch.slice(0, 2), batch.slice(2, len(batch))]
        losses = [two.forward_backward(part, sum_loss, outputs, ALL)["loss"].value for part in parts]
        if not two.accumulates_calls:
            with pytest.raises(ConfigError, match="takes one forward_backward a step"):
                two.forward_backward(batch, sum_loss, outputs, ALL)
        b = two.optim_step()
        assert sum(losses) == pytest.approx(a["loss"].value, rel=1e-10)
        assert b["grad_norm"].value == pytest.approx(a["grad_norm"].value, rel=1e-10)
    assert two.num_steps == 2
    assert largest_gap(weights_of(one), weights_of(two)) < 1e-9
    with pytest.raises(ConfigError, match="Call forward_backward"):
        two.optim_step()


def test_a_step_takes_the_rate_of_its_call(make):
    engine, batch = make(clip_grad=0.0), make_batch()
    before = weights_of(engine)
    engine.forward_backward(batch, policy_loss, ("log_probs", "entropy"), ALL)
    engine.optim_step(learning_rate=0.0)
    assert largest_gap(weights_of(engine), before) == 0


def test_update_does_not_depend_on_row_order_or_padding(make):
    one, two, three = make(), make(), make()
    batch = make_batch()
    train(one, batch)
    order = torch.tensor([4, 0, 3, 5, 2, 1])
    train(two, batch.select_idxs(order), MicroBatching(max_tokens=24))
    train(three, make_batch(pad_prompt=3, pad_response=5))
    assert largest_gap(weights_of(two), weights_of(one)) < 1e-9
    assert largest_gap(weights_of(three), weights_of(one)) < 1e-9


def test_update_does_not_depend_on_prompt_sharing(make):
    one, two = make(), make(share_prompts=False)
    batch = make_batch(sizes=(4, 2))
    for _ in range(2):
        train(one, batch)
        train(two, batch)
    assert largest_gap(weights_of(two), weights_of(one)) < 1e-9


def test_rows_that_do_not_train_only_count_in_the_totals(make):
    one, two = make(), make()
    batch = make_batch()
    masked = batch.select_idxs(torch.arange(6))
    masked.batch["response_mask"] = masked.batch["response_mask"].clone()
    masked.batch["response_mask"][1:4] = False

    def fixed_totals(outputs, part, totals):
        return (part.batch["advantages"].to(outputs["log_probs"]) * outputs["log_probs"]).sum() / 7, {}

    one.train_batch(masked, fixed_totals, ("log_probs",), MicroBatching(max_rows=2))
    two.train_batch(batch.select_idxs(torch.tensor([0, 4, 5])), fixed_totals, ("log_probs",), ALL)
    assert largest_gap(weights_of(one), weights_of(two)) < 1e-9


@cuts("rows")
def test_rows_that_are_left_out_only_count_in_the_totals(make, micro):
    one, two = make(), make()
    batch, calls = make_batch(), []
    batch.batch["advantages"][[1, 2, 3]] = 0.0

    def linear(outputs, part, totals):
        calls.append((len(part), totals))
        weight = part.batch["advantages"].to(outputs["log_probs"])
        return -(weight * outputs["log_probs"]).sum() / totals.num_tokens, {}

    for _ in range(2):
        a = one.train_batch(batch, linear, ("log_probs",), ALL)
        b = two.train_batch(batch, linear, ("log_probs",), micro, rows=[0, 4, 5])
    assert a["loss"].value == pytest.approx(b["loss"].value, rel=1e-10)
    assert largest_gap(weights_of(two), weights_of(one)) < 1e-9
    tokens = batch.batch["response_mask"].sum(dim=1)
    assert {totals for _, totals in calls} == {BatchTotals(int(tokens.sum()), 6, 6)}
    assert sum(size for size, _ in calls) == 2 * (6 + 3)


def imitation_losses(engine, batch, steps=2, micro=ALL):
    """Losses of steps that imitate the rows of `batch`."""

    def imitate(outputs, part, totals):
        return -outputs["log_probs"].sum() / totals.num_tokens, {}

    return [engine.train_batch(batch, imitate, ("log_probs",), micro)["loss"].value for _ in range(steps)]


def test_noise_on_embeddings_depends_only_on_step_and_row(make):
    batch, order = make_batch(), torch.tensor([4, 0, 3, 5, 2, 1])
    first = imitation_losses(make(noise=5.0), batch)
    cut = imitation_losses(make(noise=5.0), batch.select_idxs(order), micro=CUTS["rows"])
    padded = imitation_losses(make(noise=5.0), make_batch(pad_prompt=3, pad_response=5), micro=CUTS["single"])
    assert cut == pytest.approx(first, rel=1e-9)
    assert padded == pytest.approx(first, rel=1e-9)
    silent = make(lr=1e-30, weight_decay=0.0, noise=5.0)  # the same weights in both steps, other noise
    one, two = imitation_losses(silent, batch)
    assert abs(one - two) > 1e-6


def test_noise_is_part_of_training_only_and_survives_a_resume(make):
    batch, noisy, plain = make_batch(), make(noise=5.0), make()
    same = (engine.forward(batch, ("log_probs",), ALL)["log_probs"] for engine in (noisy, plain))
    assert torch.allclose(*same, atol=1e-12)
    imitation_losses(noisy, batch)
    resumed = make(noise=5.0)
    saved = noisy.state()
    saved.model, saved.optimizer = (
        {k: whole(v).clone() for k, v in part.items()} for part in (saved.model, saved.optimizer)
    )
    resumed.load_state(saved)
    assert imitation_losses(resumed, batch) == imitation_losses(noisy, batch)


def test_a_batch_without_a_trained_token_changes_nothing(make):
    engine, batch = make(), make_batch()
    batch.batch["response_mask"] = torch.zeros_like(batch.batch["response_mask"])
    before = weights_of(engine)
    metrics = engine.train_batch(
        batch, lambda o, b, t: (o["log_probs"].sum(), {}), ("log_probs",), MicroBatching(max_tokens=24)
    )
    assert metrics["loss"].value == 0
    assert largest_gap(weights_of(engine), before) == 0


@pytest.mark.usefixtures("bf16_path")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_same_input_gives_the_same_bits(make, dtype):
    one, two, batch = make(dtype=dtype), make(dtype=dtype), make_batch()
    for _ in range(2):
        train(one, batch, MicroBatching(max_tokens=24))
        train(two, batch, MicroBatching(max_tokens=24))
    assert largest_gap(weights_of(one), weights_of(two)) == 0


@pytest.mark.usefixtures("bf16_path")
@pytest.mark.parametrize(
    ("dtype", "head"),
    [
        ("float32", "token_value"),
        ("bfloat16", "lm"),
        ("float16", "lm"),
        slow("float32", "lm"),
        slow("bfloat16", "token_value"),
    ],
)
def test_state_round_trip_continues_bit_for_bit(make, dtype, head):
    settings = {"lr_scheduler_type": "cosine", "lr_warmup_steps": 2}
    unbroken, resumed = (make(dtype=dtype, head=head, **settings) for _ in range(2))

    def step(engine, seed):
        if head == "lm":
            metrics = train(engine, make_batch(seed))
        else:
            metrics = engine.train_batch(make_batch(seed), value_loss, ("values",), ALL)
        return metrics["loss"].value, metrics["grad_norm"].value, engine.end_step()

    for seed in range(3):
        step(unbroken, seed)
    saved = unbroken.state()
    assert all(t.dtype == torch.float32 for t in saved.model.values())
    saved.model, saved.optimizer = (
        {k: whole(v).clone() for k, v in part.items()} for part in (saved.model, saved.optimizer)
    )
    later = [step(unbroken, seed) for seed in (3, 4)]
    resumed.load_state(saved)
    assert [step(resumed, seed) for seed in (3, 4)] == later
    assert largest_gap(weights_of(resumed), weights_of(unbroken)) == 0
    one, two = dict(resumed.gather_weights()), dict(unbroken.gather_weights())
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_going_back_to_before_the_first_step_leaves_nothing_of_later_ones(make):
    """The optimizer had no state then, and has none afterwards."""
    ours, fresh = make(dtype="float32"), make(dtype="float32")
    saved = ours.state()
    saved.model = {name: whole(value).clone() for name, value in saved.model.items()}
    assert not saved.optimizer
    for seed in range(2):
        train(ours, make_batch(seed))
    ours.load_state(saved)
    for engine in (ours, fresh):
        train(engine, make_batch(3))
    assert largest_gap(weights_of(ours), weights_of(fresh)) == 0


@pytest.mark.usefixtures("bf16_path")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_for_rollout_are_whole_and_in_the_compute_dtype(make, folder, dtype):
    engine = make(dtype=dtype)
    train(engine, make_batch())
    names = dict(load_causal_lm(folder).named_parameters())
    weights = dict(engine.gather_weights())
    masters = engine.state().model
    assert weights.keys() == names.keys() == masters.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert tensor.shape == names[name].shape
        assert torch.equal(tensor, Rounding().rounded(name, whole(masters[name]), tensor.dtype))


def test_state_of_another_model_is_refused(make):
    engine = make(dtype="float32")
    state = engine.state()
    state.model.pop("model.norm.weight")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        engine.load_state(state)


@pytest.mark.usefixtures("bf16_path")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_skips_the_step_and_says_so(make, dtype):
    engine, batch = make(dtype=dtype), make_batch()
    train(engine, batch)
    before = weights_of(engine)

    def broken(outputs, part, totals):
        return outputs["log_probs"].sum() * float("nan"), {}

    metrics = engine.train_batch(batch, broken, ("log_probs",), ALL)
    assert not math.isfinite(metrics["grad_norm"].value)
    assert metrics["num_skipped_updates"].value == 1
    assert largest_gap(weights_of(engine), before) == 0
    assert "num_skipped_updates" not in train(engine, batch)  # and nothing of it lingers
    assert largest_gap(weights_of(engine), before) > 0


class Refusal:
    """A StepCheck that refuses every step, and remembers the metrics it was given."""

    names = {"loss": "sum", "part": "mean", "peak": "max", "absent": "mean", "never": "max"}

    def __call__(self, figures):
        self.figures = figures
        return False


@pytest.mark.usefixtures("bf16_path")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_step_that_is_refused_leaves_everything_as_it_was(make, dtype):
    engine, batch, check = make(dtype=dtype), make_batch(), Refusal()
    train(engine, batch)
    engine.end_step()

    def held():
        state = engine.state()
        tensors = {**state.model, **{f"optimizer/{k}": v for k, v in state.optimizer.items()}}
        return {**{k: whole(v).clone() for k, v in tensors.items()}, "random": torch.get_rng_state()}, state.extra

    def drawing(outputs, part, totals):
        noise = torch.rand(())  # as dropout would
        metrics = {"part": Metric.mean(2.0, len(part)), "peak": Metric.max(float(part.batch["ordinal"].max()))}
        return outputs["log_probs"].sum() / totals.num_tokens + 0 * noise, metrics

    batch.batch["ordinal"] = torch.arange(len(batch))
    (tensors, extra), cut = held(), MicroBatching(max_rows=2)
    metrics = engine.train_batch(batch, drawing, ("log_probs",), cut, check=check)
    assert engine.end_step(advance=False) == engine.optim.lr
    after, extra_after = held()
    assert extra_after == extra
    assert all(torch.equal(after[name], tensors[name]) for name in tensors)
    assert metrics["num_skipped_updates"].value == 1
    assert set(check.figures) == {"loss", "part", "peak", "grad_norm"}
    assert check.figures["part"] == 2.0
    assert check.figures["peak"] == len(batch) - 1
    assert check.figures["loss"] == pytest.approx(metrics["loss"].value)
    assert check.figures["grad_norm"] == metrics["grad_norm"].value > 0


def test_the_gradient_is_clipped_and_its_norm_reported_as_it_was(make):
    one, two = make(clip_grad=1e-3, optimizer="SGD", weight_decay=0.0, lr=1.0), make(clip_grad=1e9)
    before = weights_of(one)
    norms = [train(engine, make_batch())["grad_norm"].value for engine in (one, two)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)
    after = weights_of(one)
    moved = torch.stack([(after[n] - before[n]).norm() for n in before]).norm().item()
    assert moved == pytest.approx(1e-3, rel=1e-3)


def test_the_schedule_moves_with_trainer_steps_only(make):
    engine = make(lr_warmup_steps=4, lr=1.0)
    assert engine.end_step() == 0.0
    train(engine, make_batch())
    train(engine, make_batch())
    assert [engine.end_step() for _ in range(4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.usefixtures("bf16_path")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_learning_happens(make, dtype):
    engine, batch = make(dtype=dtype), make_batch()

    losses = imitation_losses(engine, batch, 15, MicroBatching(max_tokens=24))
    assert losses[-1] < 0.3 * losses[0]
    mean = engine.forward(batch, ("log_probs",), ALL)["log_probs"].sum() / batch.batch["response_mask"].sum()
    assert -mean < losses[-1]


def test_a_critic_learns_its_targets(make):
    engine, batch = make(head="token_value", dtype="float32"), make_batch()
    assert not engine.forward(batch, ("values",), ALL)["values"].any()
    losses = [engine.train_batch(batch, value_loss, ("values",), ALL)["loss"].value for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_frozen_model_keeps_one_copy_in_the_compute_dtype(make):
    engine = make(trainable=False, dtype="bfloat16")
    assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in engine.module.parameters())
    assert engine.state().optimizer == {}


@pytest.mark.usefixtures("bf16_path")
def test_parameters_that_a_family_makes_in_float32_train_in_float64(make, around):
    """The routers of DeepSeek V3 in new releases of transformers; FSDP refuses two dtypes in one layer."""

    def with_float32_norm(build, self, *args, **settings):
        build(self, *args, **settings)
        self.q_norm.weight = torch.nn.Parameter(self.q_norm.weight.float())

    around(Qwen3Attention, "__init__", with_float32_norm)
    engine = make()
    assert {weight.dtype for weight in engine.local_weights().values()} == {torch.float64}
    assert train(engine, make_batch())["grad_norm"].value > 0


@pytest.mark.parametrize(("dtype", "largest"), [("bfloat16", 0.05), ("float16", 0.005)])
def test_a_narrow_dtype_computes_near_float32(make, dtype, largest):
    batch = make_batch()
    a, b = (make(dtype=d, trainable=False).forward(batch, ("log_probs",), ALL)["log_probs"] for d in ("float32", dtype))
    assert (a - b).abs().mean() < largest


def scale_of(metrics):
    return metrics["loss_scale"].value, metrics["overflow_ratio"].value


@pytest.mark.parametrize("num_doublings", [0, 4])
def test_a_step_of_float16_does_not_depend_on_the_loss_scale(make, num_doublings):
    """A power of two rounds nothing; without a loss scale, gradients of a loss of 1e-6 would be zero."""
    engine, wide, batch = make(dtype="float16"), make(dtype="float32"), make_batch()
    engine.optimizer.loss_scale.value *= 2**num_doublings

    def small_loss(outputs, part, totals):
        value, metrics = policy_loss(outputs, part, totals)
        return value * 1e-6, metrics

    metrics, expected = (e.train_batch(batch, small_loss, ("log_probs", "entropy"), ALL) for e in (engine, wide))
    assert metrics["grad_norm"].value == pytest.approx(expected["grad_norm"].value, rel=0.01)
    assert metrics["loss"].value == pytest.approx(expected["loss"].value, rel=0.01)
    assert scale_of(metrics) == (2.0 ** (16 + num_doublings), 0)


def test_an_overflow_of_float16_skips_the_step_halves_the_scale_and_is_no_alarm(make):
    engine, batch, alarm = make(dtype="float16"), make_batch(), Refusal()
    engine.optimizer.loss_scale.value = 2.0**40
    before, values = weights_of(engine), []
    while engine.num_steps == 0:
        metrics = engine.train_batch(batch, policy_loss, ("log_probs", "entropy"), ALL, check=AcceptFinite())
        values.append(scale_of(metrics))
    assert len(values) > 10
    assert values[:2] == [(2.0**39, 1), (2.0**38, 1)]
    assert values[-1] == (2.0 ** (41 - len(values)), 0)
    assert "num_skipped_updates" not in metrics
    assert largest_gap(weights_of(engine), before) > 0
    saved = engine.state()
    resumed = make(dtype="float16")
    resumed.load_state(saved)
    assert scale_of(train(resumed, batch)) == values[-1]
    engine.optimizer.loss_scale.value = 1.0  # another cause is reported

    def broken(outputs, part, totals):
        return outputs["log_probs"].sum() * float("inf"), {}

    engine.train_batch(batch, broken, ("log_probs",), ALL, check=alarm)
    assert not math.isfinite(alarm.figures["grad_norm"])


class AcceptFinite:
    """A StepCheck that raises an error for a number that is not finite."""

    names = {"loss": "sum"}

    def __call__(self, figures):
        assert all(map(math.isfinite, figures.values()))
        return True


def test_steps_without_an_overflow_double_the_scale(make):
    engine, batch = make(dtype="float16"), make_batch()
    engine.optimizer.loss_scale.num_steps = 398
    assert [scale_of(train(engine, batch))[0] for _ in range(3)] == [2.0**16, 2.0**17, 2.0**17]


def test_only_float16_has_a_loss_scale(make):
    assert "loss_scale" not in train(make(dtype="float32"), make_batch())
