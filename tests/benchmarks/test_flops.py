"""Operation counts against torch's own counter on real modules, and against numbers worked by hand."""

import json

import pytest
import torch
from flops import (
    Decoder,
    causal_pairs,
    decode_bytes,
    decode_flops,
    generate_flops,
    prefill_flops,
    training_flops,
    training_tokens,
)
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from workload import Workload

TINY = Decoder(
    num_layers=2, hidden=64, intermediate=128, num_heads=4, num_kv_heads=2, head_dim=16, vocabulary=264, tied=True
)


def work(**changes):
    sizes = {"num_prompts": 2, "num_samples": 3, "prompt_tokens": 5, "response_tokens": 4}
    return Workload(model="", dtype="float32", **{**sizes, **changes})


@pytest.fixture(scope="module")
def eager(tiny_llama):
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32, attn_implementation="eager")


def test_sizes_come_from_the_config(tiny_llama):
    assert Decoder.of_folder(tiny_llama) == TINY
    config = json.loads((tiny_llama / "config.json").read_text())
    del config["num_key_value_heads"]
    assert Decoder.of_config({**config, "head_dim": 24}).num_kv_heads == 4
    assert Decoder.of_config({**config, "head_dim": 24}).head_dim == 24


def test_parameters_are_the_model_s_but_for_the_norms(eager):
    counted = sum(p.numel() for n, p in eager.named_parameters() if "norm" not in n)
    assert TINY.num_parameters == counted


@pytest.mark.parametrize(("batch", "length"), [(1, 7), (3, 10)])
def test_forward_equals_what_torch_counts(eager, batch, length):
    """Eager attention computes the whole square of pairs, so it is compared with the square."""
    ids = torch.zeros(batch, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        eager(input_ids=ids, use_cache=False)
    tokens, pairs = batch * length, batch * length * length
    assert TINY.layers(tokens) + TINY.head(tokens) + TINY.attention(pairs) == counter.get_total_flops()


def test_backward_is_twice_the_forward(eager):
    """All but the first projections' and the embedding's input gradients, which autograd needs too: nothing is skipped."""
    ids = torch.zeros(1, 6, dtype=torch.int64)
    with FlopCounterMode(display=False) as forward:
        loss = eager(input_ids=ids, use_cache=False).logits.sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert backward.get_total_flops() == 2 * forward.get_total_flops()


def test_prefill_counts_pairs_that_are_seen_and_one_row_of_logits():
    flops = prefill_flops(TINY, 2, 5)
    assert flops == TINY.layers(10) + 2 * 2 * 64 * 264 + 4 * (2 * 15) * 2 * 4 * 16


def test_causal_pairs():
    assert causal_pairs(4) == 1 + 2 + 3 + 4
    assert causal_pairs(3, before=5) == 6 + 7 + 8


def test_generation_is_the_sum_of_its_steps():
    """4 tokens: the first from the prompt, then 3 steps whose token sees 6, 7 and 8 tokens, itself included."""
    steps = sum(decode_flops(TINY, 6, context) for context in (6, 7, 8))
    assert generate_flops(TINY, work()) == pytest.approx(prefill_flops(TINY, 2, 5) + steps)


def test_training_shares_prompts_and_drops_last_tokens():
    assert training_tokens(work()) == 2 * (5 + 3 * 3)
    pairs = 2 * (15 + 3 * (6 + 7 + 8))
    expected = TINY.layers(28) + TINY.head(24) + TINY.attention(pairs)
    assert training_flops(TINY, work()) == pytest.approx(3 * expected)


def test_training_equals_what_the_engine_computes(tiny_llama):
    """The token counts of the packed forward equal the counts of needed tokens."""
    from verl.models.packing import pack_rows

    size = work()
    rows = size.num_sequences
    prompts = torch.arange(size.num_prompts).repeat_interleave(size.num_samples)[:, None].expand(rows, 5)
    columns = {
        "prompts": prompts,
        "prompt_mask": torch.ones(rows, 5, dtype=torch.bool),
        "responses": torch.ones(rows, 4, dtype=torch.int64),
        "response_mask": torch.ones(rows, 4, dtype=torch.bool),
    }
    packed = pack_rows(columns)
    assert packed.num_tokens == training_tokens(size)
    assert len(packed.targets) == size.num_new_tokens


def test_decode_bytes_count_weights_once_and_a_shared_prompt_once():
    weights = 2 * sum(i * o for i, o in TINY.layer_matrices()) + 64 * 264
    per_token = 2 * 2 * 2 * 16  # keys and values, layers, heads, size
    assert decode_bytes(TINY, 2, 3, 10, 4.0, 4) == 4 * (weights + per_token * (2 * 10 + 6 * 4))


def test_joined_projections_are_the_same_work():
    assert sum(i * o for i, o in TINY.joined_matrices()) == sum(i * o for i, o in TINY.layer_matrices())
