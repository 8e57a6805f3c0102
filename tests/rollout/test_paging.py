"""A paged KV cache: the samples of a whole one, in less memory, whatever its limit."""

import resource

import numpy as np
import psutil
import pytest
import torch

from tests.rollout.conftest import make_prompts
from verl.config import load_config
from verl.data_proto.samples import SamplingParams
from verl.errors import ConfigError
from verl.rollout.native.compiled.library import kernels
from verl.rollout.native.compiled.paged_store import PagedStore
from verl.rollout.native.compiled.store import BlockStore, Shape

pytestmark = [
    pytest.mark.seed("C9"),
    pytest.mark.skipif(kernels() is None, reason="the decoding kernels are not compiled for this processor"),
]
LENGTHS = [5, 40, 17, 33, 3, 29]


def config(**kv):
    from verl.config.sections.rollout import KVCacheConfig

    return KVCacheConfig(**kv)


def samples(engine, n, prompts=None, new=40):
    params = SamplingParams(n=n, max_new_tokens=new, temperature=1.0)
    done = engine.generate(prompts or make_prompts(LENGTHS), params, step=3)
    return {c.key: (c.token_ids, c.log_probs) for c in done}, engine.stats()


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("max_tokens", [None, 640, 200])
def test_samples_match_a_whole_cache(make_engine, n, max_tokens):
    unpaged, before = samples(make_engine("native", max_num_seqs=16), n)
    paged = config(enable_paged_attention=True, max_tokens=max_tokens)
    tokens, stats = samples(make_engine("native", max_num_seqs=16, kv_cache_config=paged), n)
    assert tokens == unpaged
    assert "kv_fragmentation" not in before
    assert 0 < stats["kv_fragmentation"] < 1
    assert stats["kv_cache_bytes"] < before["kv_cache_bytes"]
    assert (stats["num_preempted"] > 0) == (max_tokens == 200 or (max_tokens == 640 and n == 4))


def test_larger_blocks_hold_more_that_is_empty(make_engine):
    unused = [
        samples(make_engine("native", kv_cache_config=config(enable_paged_attention=True, block_size=size)), 2)[1]
        for size in (16, 128)
    ]
    assert unused[0]["kv_fragmentation"] < unused[1]["kv_fragmentation"]


def test_a_limit_below_one_sample_is_refused(make_engine):
    engine = make_engine("native", kv_cache_config=config(enable_paged_attention=True, max_tokens=64))
    with pytest.raises(
        ConfigError, match=r"max_tokens=64 cannot hold one sample of 40 prompt tokens and 40 .* at least 112"
    ):
        samples(engine, 2)


def test_without_the_compiled_decoder_it_is_refused(make_engine, torch_computes):
    engine = make_engine("native", kv_cache_config=config(enable_paged_attention=True))
    with pytest.raises(
        ConfigError, match=r"needs the compiled decoder for CPUs, or a GPU .* neither computes LlamaForCausalLM"
    ):
        samples(engine, 2)


def test_the_key_of_the_seed_documents():
    loaded = load_config(["kv_cache_config.enable_paged_attention=True", "kv_cache_config.block_size=32"], check=False)
    assert loaded.config.actor_rollout_ref.rollout.kv_cache_config == config(enable_paged_attention=True, block_size=32)


class TestPagedStore:
    SHAPE = Shape(2, 4, 64, torch.float32)
    BLOCK_BYTES = 2 * 16 * 64 * 4 * 4 * 2  # keys and values of 16 tokens, all heads and layers

    def filled(self, lengths, slots=64, capacity=4096):
        store = PagedStore(self.SHAPE)
        store.reserve(slots, capacity, capacity)
        store.keep(np.array(lengths))
        store.view()
        for layer in store._blocks:
            for slot, length in enumerate(lengths):
                layer[slot, :, : -(-length // 16)] = slot + 1
        return store

    def test_memory_comes_with_tokens_and_goes_with_them(self):
        process = psutil.Process()
        before = process.memory_info().rss
        store = self.filled([4096] * 4 + [16] * 60)
        held = process.memory_info().rss - before
        addresses = 64 * 4096 // 16 * self.BLOCK_BYTES
        assert store.num_bytes == (4 * 256 + 60) * self.BLOCK_BYTES
        assert 0.8 * store.num_bytes < held < 1.3 * store.num_bytes < 0.2 * addresses
        store.keep(np.array([4096, 16] + [0] * 62))
        assert process.memory_info().rss - before < 0.4 * held
        assert (store._blocks[0][0] == 1).all(), "what is kept stays"
        assert (store._blocks[0][1, :, :1] == 2).all()
        assert not store._blocks[0][1, :, 1:].any(), "memory that comes back is empty"
        assert not store._blocks[1][2:].any()

    def test_growing_keeps_what_is_there(self):
        store = self.filled([16, 48], slots=2, capacity=64)
        store.reserve(5, 640, 640)
        store.view()
        assert store._blocks[0].shape[:3] == (5, 4, 40)
        assert (store._blocks[1][1, :, :3] == 2).all()
        assert len(store._maps) == 2

    def test_contents_match_a_block_store(self):
        paged, unpaged = self.filled([16, 48], slots=3, capacity=64), BlockStore(self.SHAPE)
        unpaged.reserve(3, 64, 64)
        unpaged.view()
        taken = paged.take(1, 48, copy=True)
        unpaged.put(2, taken)
        paged.move([1], [2], 48)
        assert torch.equal(paged._blocks[1][2, :, :3], unpaged._blocks[1][2, :, :3])

    @pytest.mark.parametrize("kind", [BlockStore, PagedStore])
    def test_limited_addresses_are_taken_as_samples_grow(self, kind, monkeypatch):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 33, 1 << 33))
        store, sizes = kind(self.SHAPE), []
        for length in (16, 100, 4096):
            store.reserve(2, length, 8192)
            if kind is PagedStore:
                store.keep(np.array([length, 0]))
            store.view()
            store._blocks[1][0, :, sizes[-1] if sizes else 0] = length
            sizes.append(store._blocks[1].shape[2])
        assert sizes[0] * 16 < 64
        assert sizes[-1] * 16 < 8192
        assert [int(store._blocks[1][0, 0, at].max()) for at in (0, *sizes[:-1])] == [16, 100, 4096]

    def test_a_store_that_is_not_paged_copies_nothing_up_to_its_limit(self):
        process = psutil.Process()
        before, store = process.memory_info().rss, BlockStore(self.SHAPE)
        addresses = []
        for length in (16, 100, 4096):
            store.reserve(64, length, 4096)
            store.view()
            addresses.append([layer.data_ptr() for layer in store._blocks])
            assert store.num_bytes == 64 * -(-length // 16) * self.BLOCK_BYTES
        assert addresses[0] == addresses[1] == addresses[2]
        assert process.memory_info().rss - before < 0.1 * store.num_bytes, "memory comes with tokens"
        store.reserve(64, 4097, 8192)
        store._blocks[1][3, :, 5] = 1
        store.view()
        assert (store._blocks[1][3, :, 5] == 1).all()
