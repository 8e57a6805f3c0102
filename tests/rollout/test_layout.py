"""Attention of the native engine against a dense float64 reference; the bookkeeping of slots."""

import math
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.conftest import make_prompts
from verl.models.attention import Scoring
from verl.rollout.layout import Chunk, StepLayout
from verl.rollout.native.batch import BatchRows, Group, Prompts
from verl.rollout.native.torch.decode_attention import DecodeRows, Members, length_blocks
from verl.rollout.native.torch.kv_cache import SlotStore

HEADS, KV_HEADS, WIDTH = 6, 2, 8


def dense(q, keys, values, position, scale, window, softcap):
    """One token's attention to `keys` [tokens, kv_heads, width] (its own last), float64, head by head."""
    out = torch.empty(HEADS, WIDTH, dtype=torch.float64)
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        scores = keys[:, kv].double() @ q[head].double() * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if window:
            scores[: max(position - window + 1, 0)] = -math.inf
        out[head] = scores.softmax(0) @ values[:, kv].double()
    return out


def qkv(num_tokens, generator):
    shapes = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(1, heads, num_tokens, WIDTH, generator=generator) for heads in shapes]


def by_token(num_tokens, generator):
    return [x[0].transpose(0, 1) for x in qkv(num_tokens, generator)]


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("shared", [True, False])
def test_attention_over_prefix_and_own_part(window, softcap, shared):
    """Three prompts in chunks, then decode steps of rows in mixed order together with a prompt chunk."""
    generator = torch.Generator().manual_seed(0)
    row_store, prefix = SlotStore(keys_as_columns=True), SlotStore()
    lengths, row_slot = [4, 9, 1], [1, 0, 1, 1, 2] if shared else [0, 1, 2]
    history = [([], []) for _ in lengths]  # keys and values of each prompt
    scoring = Scoring(0.3, window, softcap)

    def check(out, q, at, keys, values, position):
        expected = dense(q[0, :, at], torch.stack(keys), torch.stack(values), position, 0.3, window, softcap)
        assert torch.allclose(out[0, at].double(), expected, atol=1e-5)

    def remember(store, k, v, at):
        store[0].append(k[0, :, at])
        store[1].append(v[0, :, at])

    for chunks in ([Chunk(0, 0, 3), Chunk(1, 0, 9)], [Chunk(0, 3, 4), Chunk(2, 0, 1)]):
        prefix.reserve(3, 9, 9)
        q, k, v = qkv(sum(p.end - p.start for p in chunks), generator)
        layout = StepLayout(None, prefix, chunks)
        out, at = layout.attend(0, q, k, v, scoring), 0
        for chunk in chunks:
            for position in range(chunk.start, chunk.end):
                remember(history[chunk.slot], k, v, at)
                check(out, q, at, *history[chunk.slot], position)
                at += 1

    rows = [([*history[s][0]], [*history[s][1]]) for s in row_slot]
    prompt = np.array([lengths[s] for s in row_slot])
    drawn = np.array([0, 3, 1, 0, 2] if shared else [0, 0, 0])  # rows that began earlier than others
    row_store.reserve(len(row_slot), 16, 16)
    members = Members(np.array(row_slot), np.array(lengths), torch.device("cpu")) if shared else None
    stored = row_store.tensors(0, *by_token(1, generator)[1:])
    for row, count in enumerate(drawn):
        for _ in range(count):
            _, k, v = qkv(1, generator)
            stored[0][row, :, :, len(rows[row][0]) - prompt[row]] = k[0, :, 0]
            stored[1][row, :, len(rows[row][0]) - prompt[row]] = v[0, :, 0]
            remember(rows[row], k, v, 0)
    if not shared:
        for row, slot in enumerate(row_slot):
            row_store.put(row, prefix.take(slot, lengths[slot]))
    decoding = DecodeRows(row_store, prefix, len(row_slot), members, torch.device("cpu"))
    for step in range(3):
        own_lengths = drawn + step + (0 if shared else prompt)
        positions = prompt + drawn + step
        chunk = Chunk(3, 0, 2)
        prefix.reserve(4, 9, 9)
        q, k, v = qkv(len(row_slot) + 2, generator)
        decoding.advance(own_lengths, positions)
        layout = StepLayout(decoding, prefix, [chunk])
        out = layout.attend(0, q, k, v, scoring)
        assert out.shape == (1, len(row_slot) + 2, HEADS, WIDTH)
        for row in range(len(row_slot)):
            remember(rows[row], k, v, row)
            check(out, q, row, *rows[row], int(positions[row]))


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_very_different_lengths(seed):
    """Blocks cut by length give what one padded batch gives."""
    generator = torch.Generator().manual_seed(seed)
    lengths = np.sort(np.random.default_rng(seed).integers(1, 200, 40))[::-1].copy()
    assert len(length_blocks(lengths)) > 1
    row_store = SlotStore(keys_as_columns=True)
    row_store.reserve(40, 201, 201)
    keys, values = row_store.tensors(0, *by_token(1, generator)[1:])
    keys.normal_(generator=generator)
    values.normal_(generator=generator)
    q, k, v = qkv(40, generator)
    decoding = DecodeRows(row_store, SlotStore(), 40, None, torch.device("cpu"))
    decoding.advance(lengths, lengths)
    layout = StepLayout(decoding, SlotStore(), [])
    out = layout.attend(0, q, k, v, Scoring(WIDTH**-0.5))
    for row, length in enumerate(lengths):
        past = [t[row, :, : length + 1].transpose(0, 1) for t in (keys.transpose(2, 3), values)]
        expected = dense(q[0, :, row], *past, int(length), WIDTH**-0.5, None, None)
        assert torch.allclose(out[0, row].double(), expected, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=60))
def test_blocks_cover_every_row_once(lengths):
    blocks = length_blocks(np.array(lengths))
    assert [r for a, b, _ in blocks for r in range(a, b)] == list(range(len(lengths)))
    assert all(longest == max(lengths[a:b]) for a, b, longest in blocks)


@settings(max_examples=60, deadline=None)
@given(slots=st.lists(st.integers(0, 7), min_size=1, max_size=30))
def test_members_place_every_row(slots):
    members = Members(np.array(slots), np.arange(8) + 1, torch.device("cpu"))
    flat = members.rows.reshape(-1)
    place = members.place_index.numpy()
    assert (flat[place] == np.arange(len(slots))).all()
    assert (place // members.rows.shape[1] == np.array(slots)).all()
    assert members.identity == (list(flat) == list(range(len(slots))))


def test_store_grows_keeps_and_frees():
    store, like = SlotStore(), torch.ones(1, 2, 4)
    store.reserve(2, 5, 100)
    keys, values = store.tensors(3, like, like * 2)
    assert keys.shape == (2, 2, 16, 4)
    keys[1, :, 4] = 7
    store.reserve(5, 17, 100)
    grown, _ = store.tensors(3, like, like)
    assert grown.shape == (5, 2, 32, 4)
    assert (grown[1, :, 4] == 7).all()
    assert (grown[2:] == 0).all()
    assert store.tensors(3, like, like)[0] is grown
    store.move([1], [4], 5)
    assert (grown[4, :, 4] == 7).all()
    store.reserve(5, 33, 40)
    assert store.capacity == 48  # the limit, rounded to a cache line
    assert store.tensors(3, like.bfloat16(), like.bfloat16())[0].dtype == torch.bfloat16
    assert store.num_bytes == 2 * 5 * 2 * 48 * 4 * 2
    store.clear()
    assert store.num_bytes == 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_schedule_starts_every_sample_once(data):
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    n, num_rows, budget = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9)), data.draw(st.integers(1, 50))
    ahead = data.draw(st.sampled_from([0, 0, 1, 3, 8]))
    schedule, rows = Prompts(), BatchRows(4)
    rows.grow(num_rows)
    schedule.waiting.extend(Group(prompt, deque(range(n)), n) for prompt in make_prompts(lengths))
    schedule.sort()
    computed, started = dict.fromkeys(range(len(lengths)), 0), []
    while not schedule.is_empty or rows.num_running:
        for group, sample in schedule.start(rows.num_free):
            assert computed[group.request.ordinal] == group.num_tokens
            rows.place(group, sample, 0, 0)
            started.append((group.request.ordinal, sample))
        rows.close_holes()
        assert rows.end == rows.num_running <= num_rows
        assert all(g is not None for g in rows.groups[: rows.end])
        chunks = schedule.take_chunks(rows.num_free, budget, ahead=ahead)
        assert sum(p.end - p.start for _, p in chunks) <= budget
        for group, chunk in chunks:
            assert chunk.start == computed[group.request.ordinal]
            computed[group.request.ordinal] = chunk.end
        assert [g.slot for g in schedule.by_slot] == list(range(len(schedule.by_slot)))
        assert len(schedule.by_slot) <= num_rows + 1 + ahead
        if rows.end and (not chunks or data.draw(st.booleans())):
            ended = data.draw(st.sets(st.integers(0, rows.end - 1), min_size=1))
            for row in ended:
                group = rows.groups[row]
                rows.remove(row)
                group.num_live -= 1
                if group.num_live == 0:
                    schedule.leave_slot(group)
    assert sorted(started) == [(i, s) for i in range(len(lengths)) for s in range(n)]
    assert not schedule.by_slot


def test_samples_that_continue_begin_first_then_known_long_ones():
    schedule, facts = Prompts(), [(9, 0, 0), (3, 0, 2), (5, 0, 8), (7, 4, 0), (11, 0, 0)]
    for prompt, (_, drawn, tokens) in zip(make_prompts([n for n, _, _ in facts]), facts, strict=True):
        schedule.waiting.append(Group(replace(prompt, num_drawn=drawn, expected_tokens=tokens), deque([0]), 1))
    schedule.sort()
    assert [group.request.ordinal for group in schedule.waiting] == [3, 2, 1, 4, 0]


def test_close_holes_moves_rows_whole():
    rows = BatchRows(3)
    rows.grow(6)
    group = Group(make_prompts([4])[0], deque(), 6)
    for sample in range(6):
        rows.place(group, sample, 100 + sample, 0)
    rows.record(np.arange(6), np.arange(6) + 10, np.zeros(6, dtype=np.float32))
    for row in (1, 5, 2):
        rows.remove(row)
    assert rows.num_free == 3
    assert rows.close_holes() == [(4, 1), (3, 2)]
    assert rows.sample[:3].tolist() == [0, 4, 3]
    assert rows.inputs().ids.tolist() == [10, 14, 13]
    assert rows.key[:3].tolist() == [100, 104, 103]
    assert rows.positions().tolist() == [4, 4, 4]
    assert rows.num_running == rows.end == 3
