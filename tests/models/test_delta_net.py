"""Linear attention by layouts: against the rule token by token, and against transformers' own rows."""

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.models.reference import make_columns, random_rows, reference_outputs, relative, widen_norms
from verl.config import RolloutConfig
from verl.config.sections.rollout import AgentConfig
from verl.data_proto.samples import PromptRequest, SamplingParams, TurnRequest
from verl.errors import ConfigError
from verl.models.delta_net import DeltaPlan, delta_rule
from verl.models.forward import packed_outputs
from verl.models.load import load_causal_lm, load_model
from verl.models.ops.varlen import PackedSegment
from verl.models.packed import PackedLayout
from verl.models.packing import pack_rows
from verl.models.padded import forward_kind
from verl.models.parallel.sequence import check_heads
from verl.models.shapes import ModelShape
from verl.models.tiny import TINY_FAMILIES, make_tiny_model, make_tokenizer
from verl.rollout.native.engine import NativeRollout

HEADS, KEYS, VALUES = 3, 4, 5
LONG = {"longest_prompt": 90, "longest_response": 150}  # several chunks


def streams_of(tokens, seed):
    draws = torch.Generator().manual_seed(seed)

    def normal(*sizes):
        return torch.randn(tokens, HEADS, *sizes, dtype=torch.float64, generator=draws)

    q, k = (torch.nn.functional.normalize(normal(KEYS), dim=-1) for _ in range(2))
    return [x.requires_grad_() for x in (q, k, normal(VALUES), -normal().abs(), normal().sigmoid())]


def by_token(streams, state):
    """The rule for rows of tokens, [tokens, ..., heads, ...], and the matrices behind the last."""
    outs = []
    for q, k, v, decay, beta in zip(*streams, strict=True):
        state = state * decay.exp()[..., None, None]
        change = (v - torch.einsum("...hkv,...hk->...hv", state, k)) * beta[..., None]
        state = state + k[..., None] * change[..., None, :]
        outs.append(torch.einsum("...hkv,...hk->...hv", state, q))
    return torch.stack(outs), state


def segments_of(groups):
    """Segments of groups (tokens of a prompt, tokens of each response), and the tokens of each row."""
    segments, rows, start = [], [], 0
    for prompt, responses in groups:
        first, start = start, start + prompt
        segments.append(PackedSegment(first, prompt))
        for length in responses:
            segments.append(PackedSegment(start, length, first if prompt else 0, prompt))
            rows.append([*range(first, first + prompt), *range(start, start + length)])
            start += length
    return segments, rows


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 140), st.lists(st.integers(1, 140), min_size=1, max_size=3)), min_size=1, max_size=3
    ),
    st.integers(0, 99),
)
@example([(64, [64, 65, 1]), (0, [1]), (129, [63])], 0)
def test_chunks_of_packed_rows_equal_the_rule_token_by_token(groups, seed):
    segments, rows = segments_of(groups)
    streams = streams_of(sum(segment.length for segment in segments), seed)
    ours, _ = delta_rule(streams, DeltaPlan(segments, 3, torch.device("cpu")))
    zero, total, is_read = torch.zeros(HEADS, KEYS, VALUES, dtype=torch.float64), 0.0, torch.zeros(len(ours))
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows])
    for row, outs in zip(rows, by_token([x[padded] for x in streams], zero)[0].unbind(1), strict=True):
        expected = outs[: len(row)]
        assert torch.allclose(ours[row], expected, rtol=0, atol=1e-10)
        first = is_read[row] == 0  # a shared prompt is one row of the outputs
        total, is_read[row] = total + expected[first].square().sum(), 1.0
    pairs = zip(*(torch.autograd.grad(loss, streams) for loss in (ours.square().sum(), total)), strict=True)
    assert all(relative(a, b) < 1e-9 for a, b in pairs)


def test_a_state_continues_a_row():
    streams, zero = streams_of(150, 1), torch.zeros(HEADS, KEYS, VALUES, dtype=torch.float64)
    expected, last = by_token(streams, zero)
    state, outs = zero[None], []
    for start, end in itertools.pairwise((0, 70, 71, 150)):
        plan = DeltaPlan([PackedSegment(0, end - start)], 0, torch.device("cpu"))
        out, state = delta_rule([x[start:end] for x in streams], plan, state)
        outs.append(out)
    assert torch.allclose(torch.cat(outs), expected, rtol=0, atol=1e-12)
    assert torch.allclose(state[0], last, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "qwen3_5_text")


@pytest.fixture(scope="module")
def wide(folder):
    return widen_norms(load_causal_lm(folder, dtype=torch.float64))


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 10**6))
def test_any_lengths_equal_transformers_rows(wide, sizes, seed):
    columns = make_columns(*random_rows(seed, sizes, **LONG))
    ours = packed_outputs(wide, pack_rows(columns), ("log_probs",))["log_probs"]
    assert relative(ours, reference_outputs(wide, columns)["log_probs"]) < 1e-10


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(5)), st.integers(1, 4), st.integers(0, 9), st.booleans(), st.integers(0, 10**6))
def test_padding_packing_order_and_micro_batches_change_no_loss(wide, order, split, padding, share, seed):
    prompts, responses = random_rows(seed, [3, 2], **LONG)
    weights = torch.randn(5, 150, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def losses(rows, **settings):
        columns = make_columns([prompts[i] for i in rows], [responses[i] for i in rows], pad_prompt=padding)
        log_probs = packed_outputs(wide, pack_rows(columns, **settings), ("log_probs",))["log_probs"]
        return sum((line[:150] * weights[i, : len(line)]).sum() for i, line in zip(rows, log_probs, strict=True))

    joined = losses(range(5))
    parts = losses(order[:split], share_prompts=share) + losses(order[split:], share_prompts=share)
    assert torch.allclose(joined, parts, rtol=1e-10)
    names = dict(wide.named_parameters())
    both = (torch.autograd.grad(loss, names.values()) for loss in (joined, parts))
    for name, a, b in zip(names, *both, strict=True):
        assert relative(a, b) < 1e-8, name


def test_qwen3_next_is_packed_too(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 264,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = AutoConfig.for_model("qwen3_next", **sizes, **TINY_FAMILIES["qwen3_5_moe_text"])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    module = load_causal_lm(tmp_path)
    assert forward_kind(module) == "packed"
    columns = make_columns(*random_rows(2, [2, 1], **LONG))
    ours = packed_outputs(module, pack_rows(columns), ("log_probs",))["log_probs"]
    assert relative(ours, reference_outputs(module, columns, attention="eager")["log_probs"]) < 1e-5


def test_layers_that_are_computed_again_give_the_same_gradients(folder):
    packed, runs = pack_rows(make_columns(*random_rows(7, [3, 1]))), []
    for checkpointing in (False, True):
        module = load_causal_lm(folder, gradient_checkpointing=checkpointing).train()
        packed_outputs(module, packed, ("log_probs",))["log_probs"].sum().backward()
        runs.append({name: p.grad for name, p in module.named_parameters()})
    assert all(torch.equal(runs[0][name], gradient) for name, gradient in runs[1].items())


def test_devices_divide_a_sequence_by_key_heads(folder):
    config = load_model(folder).config
    check_heads(config, 2)
    with pytest.raises(ConfigError, match="ulysses_sequence_parallel_size=4 does not divide the 2 key heads"):
        check_heads(config, 4)


def test_memory_of_a_layer_is_the_planners(tmp_path):
    sizes = {
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    }
    module = load_causal_lm(make_tiny_model(tmp_path, "qwen3_5_text", **sizes))
    linear, net, storages = ModelShape.from_config(module.config).linear, module.model.layers[0].linear_attn, {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    x, layout = torch.randn(1, 512, 64, requires_grad=True), PackedLayout([PackedSegment(0, 512)])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = net(x, layout=layout)
    owned = {t.untyped_storage().data_ptr() for t in (x, *module.parameters())}
    num_bytes = sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in owned)
    narrow = 2 * (2 * (2 * linear.keys + linear.values) + 4 * linear.values)  # which are as wide as the rest in float32
    assert num_bytes / out.shape[1] == pytest.approx(linear.kept_bytes + narrow, rel=0.1)


PARAMS = SamplingParams(n=3, temperature=0.8, max_new_tokens=70)


@pytest.fixture(scope="module")
def engine_of(folder):
    module = load_causal_lm(folder)
    return lambda **config: NativeRollout(module, None, RolloutConfig(**config), eos_token_ids=[258])


def prompts_of(*lengths):
    draws = torch.Generator().manual_seed(0)
    return [
        PromptRequest(i, tuple(torch.randint(0, 250, (n,), generator=draws).tolist())) for i, n in enumerate(lengths)
    ]


def samples_of(completions):
    return {c.key: (c.token_ids, c.log_probs) for c in completions}


def require_alike(ours, expected):
    """The same tokens; log-probs but for rounding."""
    assert {key: tokens for key, (tokens, _) in ours.items()} == {key: tokens for key, (tokens, _) in expected.items()}
    for key, (_, log_probs) in ours.items():
        assert torch.allclose(torch.tensor(log_probs), torch.tensor(expected[key][1]), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("rows", "budget"), [(2, 5), (5, 1), (64, 40)])
def test_states_follow_samples_that_wait_refill_and_share_prompts(engine_of, rows, budget):
    """Prompts in parts of `budget` tokens, samples that take the rows of samples that have ended, rows that move."""
    requests = prompts_of(1, 2, 33, 70, 5)
    together = samples_of(engine_of().generate(requests, PARAMS, step=1))
    assert len({len(tokens) for tokens, _ in together.values()}) > 3, "samples end at different steps"
    engine = engine_of(max_num_seqs=rows, max_num_batched_tokens=budget)
    require_alike(samples_of(engine.generate(requests, PARAMS, step=1)), together)


def test_log_probs_of_the_sampler_are_the_trainers(engine_of):
    engine, requests = engine_of(), prompts_of(3, 40)
    done = engine.generate(requests, SamplingParams(n=2, max_new_tokens=90), step=1)
    columns = make_columns([list(requests[c.ordinal].token_ids) for c in done], [list(c.token_ids) for c in done])
    ours = packed_outputs(engine.module, pack_rows(columns), ("log_probs",))["log_probs"]
    for row, completion in zip(ours, done, strict=True):
        expected = torch.tensor(completion.log_probs)
        assert torch.allclose(row[: len(expected)], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_turn_continues_the_states_of_its_sample(engine_of, keeps):
    """With room for them, and computed again."""
    engine = engine_of(agent=AgentConfig(kv_cache_mb=None if keeps else 0))
    generation = engine.open(SamplingParams(n=1, max_new_tokens=6, ignore_eos=True), step=1, keep=True)
    (request,) = prompts_of(12)
    generation.add(request)
    (first,) = generation.poll()
    generation.add(TurnRequest(*first.key, (7, 8, 9), 6))
    (second,) = generation.poll()
    stats = generation.close()
    assert (stats["num_evicted"] == 0) == keeps
    history = (*request.token_ids, *first.token_ids, 7, 8, 9)
    columns = make_columns([list(history)], [list(second.token_ids)])
    ours = packed_outputs(engine.module, pack_rows(columns), ("log_probs",))["log_probs"][0]
    assert torch.allclose(ours, torch.tensor(second.log_probs, dtype=ours.dtype), rtol=0, atol=1e-4)
