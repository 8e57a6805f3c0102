"""verl.utils.{model, flops_counter, attention_utils, ulysses, torch_functional}: tensors and models."""

import logging
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, LlamaConfig, Qwen3MoeConfig

from tests.forked import fork
from verl.config import OptimConfig
from verl.models.optim import lr_at
from verl.utils import ulysses
from verl.utils.attention_utils import index_first_axis, pad_input, rearrange, unpad_input
from verl.utils.flops_counter import FlopsCounter, get_device_flops
from verl.utils.model import (
    compute_position_id_with_mask,
    convert_weight_keys,
    extract_multi_modal_inputs,
    get_generation_config,
    get_model_size,
    print_model_size,
    update_model_config,
)
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.utils.ulysses import gather_outputs_and_unpad, ulysses_pad, ulysses_pad_and_slice_inputs


def test_positions():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    assert compute_position_id_with_mask(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]


def test_sizes(caplog):
    model = nn.Linear(1000, 2, bias=False)
    assert get_model_size(model) == (2.0, "K")
    assert get_model_size(model, "M") == (0.002, "M")
    with pytest.raises(ValueError, match="scale"):
        get_model_size(model, "X")
    with caplog.at_level(logging.INFO):
        print_model_size(model, "critic")
    assert "critic has 2.00K parameters" in caplog.text


def test_configs(tiny_llama, tmp_path):
    assert get_generation_config(str(tiny_llama)).eos_token_id == 258
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    assert get_generation_config(str(tmp_path)).eos_token_id == 258  # from config.json
    config = LlamaConfig()
    config.inner = LlamaConfig()
    update_model_config(config, {"vocab_size": 7, "inner": {"hidden_size": 9}, "rope_scaling": {"factor": 2}})
    assert (config.vocab_size, config.inner.hidden_size) == (7, 9)
    assert config.rope_scaling == {"factor": 2}


def test_names_of_weights_as_files_have_them():
    class Model:
        _checkpoint_conversion_mapping = {
            "^visual": "model.visual",
            r"^model(?!\.(language_model|visual))": "model.language_model",
        }

    state = {"model.visual.a": 1, "model.language_model.b": 2, "lm_head.c": 3}
    assert convert_weight_keys(state, Model()) == {"visual.a": 1, "model.b": 2, "lm_head.c": 3}
    assert convert_weight_keys(state, object()) is state


def test_inputs_of_several_rows():
    rows = [{"pixel_values": torch.ones(2, 3), "extra": None}, {}, {"pixel_values": torch.zeros(1, 3)}]
    assert extract_multi_modal_inputs(rows)["pixel_values"].tolist() == [[1] * 3, [1] * 3, [0] * 3]
    assert extract_multi_modal_inputs(rows, indices=[2, 9])["pixel_values"].tolist() == [[0] * 3]
    bound = [{"image_bound": "x", "pixel_values": "p"}]
    assert extract_multi_modal_inputs(bound) == {"image_bound": ["x"], "pixel_values": ["p"]}


class TestFlops:
    def test_a_dense_decoder(self, tiny_llama):
        """Counted by hand: 2 layers of hidden size 64 with 4 heads and 2 KV heads of 16, 264 tokens."""
        config = AutoConfig.from_pretrained(tiny_llama)
        layer = 64 * 16 * (4 + 2 + 2 + 4) + 3 * 64 * config.intermediate_size
        weights = 2 * layer + 2 * 264 * 64
        total = 6 * weights * (3 + 5) + 6 * (3 * 3 + 5 * 5) * 16 * 4 * 2
        achieved, peak = FlopsCounter(config).estimate_flops([3, 5], 0.5)
        assert achieved == pytest.approx(total / 0.5 / 1e12, rel=1e-12)
        assert peak == get_device_flops("T")

    def test_experts_count_as_routed(self):
        shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1}
        config = Qwen3MoeConfig(
            hidden_size=64, vocab_size=10, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, **shape
        )
        weights = 64 * 16 * 12 + 3 * 64 * 32 * 2 + 64 * 8 + 2 * 10 * 64
        expected = (6 * weights * 10 + 6 * 100 * 16 * 4) / 1e12
        assert FlopsCounter(config).estimate_flops([10], 1.0)[0] == pytest.approx(expected, rel=1e-12)

    def test_peaks(self):
        assert get_device_flops("T", "NVIDIA H100 80GB HBM3") == 989
        assert get_device_flops("P", "NVIDIA A100-SXM4-80GB") == 0.312
        assert get_device_flops("T", "NVIDIA L40S") == 362.05
        assert get_device_flops("T", "something else") == math.inf


class TestUnpadding:
    def test_there_and_back(self):
        mask = torch.tensor([[0, 1, 1], [1, 0, 0], [1, 1, 1]])
        rows = torch.arange(18.0).view(3, 3, 2).requires_grad_()
        tokens, indices, ends, longest, lengths = unpad_input(rows, mask)
        assert indices.tolist() == [1, 2, 3, 6, 7, 8]
        assert (ends.tolist(), ends.dtype, longest, lengths.tolist()) == ([0, 2, 3, 6], torch.int32, 3, [2, 1, 3])
        assert torch.equal(tokens, rows.view(9, 2)[indices])
        padded = pad_input(tokens, indices, 3, 3)
        assert torch.equal(padded, rows * mask[..., None])
        padded.sum().backward()
        assert torch.equal(rows.grad, mask[..., None].expand(3, 3, 2).float())
        flat = rearrange(rows, "b s ... -> (b s) ...")
        assert torch.equal(index_first_axis(flat, indices), tokens)


class TestUlysses:
    def test_padding(self):
        ids, positions = torch.tensor([[5, 6, 7]]), torch.tensor([[0, 1, 2]])
        padded = ulysses_pad(ids, positions, sp_size=4, pad_value=9)
        assert (padded[0].tolist(), padded[1].tolist(), padded[2]) == ([[5, 6, 7, 9]], [[0, 1, 2, 0]], 1)
        ids, positions, missing = ulysses_pad(torch.ones(1, 3), torch.ones(3, 1, 3), sp_size=2)
        assert (ids.shape, positions.shape, missing) == ((1, 4), (3, 1, 4), 1)
        assert ulysses_pad(ids, None, sp_size=2) == (ids, None, 0)

    def test_without_a_group(self):
        x = torch.ones(3)
        assert gather_outputs_and_unpad(x, gather_dim=0, unpad_dim=0, padding_size=1) is x
        ids, positions, missing = ulysses_pad_and_slice_inputs(torch.tensor([[1, 2]]), None, sp_size=1)
        assert (ids.tolist(), positions, missing) == ([[1, 2]], None, 0)

    def test_cut_and_gathered_over_two_ranks(self, tmp_path):
        """f(x) = sum(w * x) over tokens: each rank computes its share, and the mean over ranks of the gradients of w is that
        of one process."""
        ranks = [fork(_gather_on_a_rank, rank, str(tmp_path)) for rank in range(2)]
        for rank in ranks:
            rank.join(120)
        assert [rank.exitcode for rank in ranks] == [0, 0]
        results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
        for result in results:
            assert result["ids"].tolist() == [[1, 2, 3]]
            assert result["missing"] == 1
        assert results[0]["share"].tolist() == [[1, 2]]
        assert results[1]["share"].tolist() == [[3, 0]]
        assert results[1]["positions"].tolist() == [[2, 0]]
        weights = torch.tensor([1.0, 10.0, 100.0])
        mean = (results[0]["grad"] + results[1]["grad"]) / 2
        assert mean.item() == pytest.approx((weights * torch.tensor([1.0, 2.0, 3.0])).sum().item())


def _gather_on_a_rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD)
    ids, positions = torch.tensor([[1, 2, 3]]), torch.tensor([[0, 1, 2]])
    share, positions, missing = ulysses.ulysses_pad_and_slice_inputs(ids, positions, sp_size=2)
    weight = torch.ones((), requires_grad=True)
    full = ulysses.gather_outputs_and_unpad(weight * share.float(), gather_dim=1, unpad_dim=1, padding_size=missing)
    (full * torch.tensor([[1.0, 10.0, 100.0]])).sum().backward()
    results = {"share": share, "positions": positions, "missing": missing, "ids": full.detach(), "grad": weight.grad}
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


class TestSchedules:
    def rates(self, schedule, steps):
        rates = []
        for _ in range(steps):
            rates.append(schedule.get_last_lr()[0])
            schedule.optimizer.step()
            schedule.step()
        return rates

    def optimizer(self):
        return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)

    @pytest.mark.parametrize(("least", "cycles"), [(0.0, 0.5), (0.1, 0.5), (0.0, 1.0)])
    def test_cosine_matches_a_run(self, least, cycles):
        schedule = get_cosine_schedule_with_warmup(self.optimizer(), 3, 10, min_lr_ratio=least, num_cycles=cycles)
        settings = {"lr_scheduler_type": "cosine", "lr_warmup_steps": 3, "min_lr_ratio": least, "num_cycles": cycles}
        config = OptimConfig(lr=2.0, zero_indexed_step=True, **settings)
        assert self.rates(schedule, 12)[:10] == pytest.approx([lr_at(step, config, 10) for step in range(10)])

    def test_constant(self):
        assert self.rates(get_constant_schedule_with_warmup(self.optimizer(), 4), 6) == [0, 0.5, 1, 1.5, 2, 2]

    def test_cosine_from_its_own_first_rate(self):
        schedule = get_cosine_schedule_with_warmup(self.optimizer(), 2, 4, min_lr_ratio=0.0, init_lr_ratio=0.5)
        assert self.rates(schedule, 5) == pytest.approx([1.0, 1.5, 2.0, 1.0, 0.0])
