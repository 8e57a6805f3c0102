"""Samples are the same bits however many are generated at once, or the engine says that they need not be."""

import copy

import pytest
import torch

from tests.rollout.conftest import make_prompts
from tests.slow import each_value
from verl.data_proto.samples import SamplingParams
from verl.errors import ConfigError

LENGTHS = [3, 20, 7, 33, 12, 20, 28, 5] * 4
SLOTS = (32, 7, 1)
DTYPES = [torch.float32, torch.bfloat16]


def bits(engine, n, temperature=1.0):
    # few samples each of many prompts: 32 slots hold other neighbours than 7, and rows end at other times
    params = SamplingParams(n=n, max_new_tokens=12, temperature=temperature, seed=5)
    done = engine.generate(make_prompts(LENGTHS), params, step=3)
    return [(c.token_ids, c.log_probs) for c in done]


def engines(make_engine, load, family, dtype, **config):
    module = copy.deepcopy(load(family)).to(dtype)
    settings = {"max_num_batched_tokens": 48, **config}
    return [make_engine("native", module=module, max_num_seqs=slots, **settings) for slots in SLOTS]


@pytest.mark.usefixtures("bf16_path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("family", "n", "prepack"), each_value(["llama", "gemma"], [1, 2], [True, False]))
def test_bits_do_not_depend_on_the_slots_or_the_engine_says_so(family, n, prepack, dtype, load, make_engine):
    built = engines(make_engine, load, family, dtype, prepack_weights=prepack)
    holds = {engine.invariance().holds for engine in built}
    assert len(holds) == 1, "says one thing for all numbers of slots"
    if True in holds:
        first, *repeats = [bits(engine, n) for engine in built]
        assert all(other == first for other in repeats)
    else:
        assert built[0].invariance().why


@pytest.mark.parametrize(
    ("family", "isa", "why"),
    [
        ("gemma2", "", "torch computes it"),
        ("llama", "none", "torch computes it, whose order of adding depends on the number"),
    ],
)
def test_what_is_not_proven_is_said_and_refused_where_it_is_required(family, isa, why, load, make_engine, monkeypatch):
    if isa:
        monkeypatch.setenv("VERL_CPU_ISA", isa)
    examined = make_engine("native", family).invariance()
    assert not examined.holds
    assert why in str(examined)
    with pytest.raises(ConfigError, match=f"batch_invariant=require cannot be kept: .*{why}"):
        make_engine("native", family, batch_invariant="require")


def test_off_is_not_invariant(make_engine):
    assert not make_engine("native", batch_invariant="off").invariance().holds
