"""Routing replay: training computes with the experts that rollout, or the pass for old log-probs, chose."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from verl.config import RolloutConfig
from verl.data_proto.extras import BatchExtras
from verl.data_proto.samples import Completion, PromptRequest, SamplingParams
from verl.data_proto.trajectory import Trajectory, to_columns
from verl.errors import ConfigError
from verl.models.forward import packed_outputs
from verl.models.load import load_causal_lm
from verl.models.packing import by_row, pack_rows, unpadded_rows
from verl.models.routing import Routing, expert_counts, follow_routing
from verl.models.tiny import make_tiny_model
from verl.rollout.native.engine import NativeRollout

FAMILIES = ("qwen3_moe", "mixtral", "qwen2_moe", "deepseek_v3", "glm4_moe", "qwen3_5_moe_text")
COMPLETION = Completion(0, 0, [1, 2, 3], [-1.0] * 3, "stop", 0)
PROMPTS = [list(range(3, 14)), list(range(40, 47)), [9] * 5]


def near_ties(module, scale=3e-8):
    """Routers that rounding decides: all experts have one score, but for `scale`."""
    generator = torch.Generator().manual_seed(1)
    num_routers = 0
    for name, parameter in module.named_parameters():
        if name.endswith(("mlp.gate.weight", "mlp.router.weight")):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = (parameter.data[:1].double() * (1 + scale * noise)).to(parameter)
            num_routers += 1
    assert num_routers
    return module


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    path = make_tiny_model(
        tmp_path_factory.mktemp("routing") / "model", "qwen3_moe", num_experts=8, num_hidden_layers=3
    )
    return near_ties(load_causal_lm(path, dtype=torch.float32))


@pytest.fixture(scope="module")
def sampled(mixture):
    """Trajectories that rollout recorded."""
    engine = NativeRollout(
        mixture,
        None,
        RolloutConfig(name="native", enable_rollout_routing_replay=True, max_num_seqs=4),
        eos_token_ids=(),
    )
    params = SamplingParams(n=3, max_new_tokens=24, ignore_eos=True)
    prompts = [PromptRequest(i, tuple(ids)) for i, ids in enumerate(PROMPTS)]
    done = engine.generate(prompts, params, step=0)
    return [Trajectory(*d.key, PROMPTS[d.ordinal]).extended(d) for d in done]


def columns_of(trajectories):
    return to_columns(trajectories, pad_token_id=0, prompt_width=12, response_width=24)


def log_probs(module, columns, rows=None, **packing):
    rows = range(len(columns["prompts"])) if rows is None else rows
    packing["extras"] = BatchExtras(experts=packing.pop("experts", None)).select(rows)
    packed = pack_rows({name: values[list(rows)] for name, values in columns.items()}, **packing)
    return packed_outputs(module, packed, ["log_probs"])["log_probs"]


def test_the_record_has_every_token_but_the_last(sampled, mixture):
    num_layers, (num_experts, k) = mixture.config.num_hidden_layers, expert_counts(mixture.config)
    for trajectory in sampled:
        num_tokens = len(trajectory.prompt_ids) + trajectory.num_response_tokens
        assert trajectory.experts.shape == (num_tokens - 1, num_layers, k)
        assert trajectory.experts.dtype == np.uint8
        assert trajectory.experts.max() < num_experts
    assert len(np.unique(np.concatenate([t.experts for t in sampled]))) == num_experts


def test_with_replay_rollout_and_trainer_agree_to_rounding(sampled, mixture):
    columns = columns_of(sampled)
    mask, theirs = columns["response_mask"], columns["rollout_log_probs"]
    with torch.no_grad():
        free = log_probs(mixture, columns)
        replayed = log_probs(mixture, columns, experts=[t.experts for t in sampled])
    gaps = {name: float((ours - theirs)[mask].abs().max()) for name, ours in (("own", free), ("replayed", replayed))}
    assert gaps["replayed"] < 1e-5
    assert gaps["own"] > 0.1


def test_the_split_into_micro_batches_changes_nothing(sampled, mixture):
    columns, experts = columns_of(sampled), [t.experts for t in sampled]
    with torch.no_grad():
        undivided = log_probs(mixture, columns, experts=experts)
        apart = log_probs(mixture, columns, experts=experts, share_prompts=False)
        parts = [log_probs(mixture, columns, rows, experts=experts) for rows in ([0, 4, 8], [1, 2, 3], [5, 6, 7])]
    order = torch.tensor([0, 4, 8, 1, 2, 3, 5, 6, 7])
    assert torch.allclose(torch.cat(parts), undivided[order], atol=1e-5)
    assert torch.allclose(apart, undivided, atol=1e-5)


def test_prompts_of_other_experts_are_computed_apart(sampled, mixture):
    columns, experts = columns_of(sampled[:2]), [t.experts.copy() for t in sampled[:2]]
    together = pack_rows(columns, extras=BatchExtras(experts=experts))
    experts[1][0] = (experts[1][0] + 1) % 8
    apart = pack_rows(columns, extras=BatchExtras(experts=experts))
    assert apart.num_tokens == together.num_tokens + len(PROMPTS[0])
    assert together.layout.routing.replayed.shape[0] == together.num_tokens


def test_tokens_without_a_record_are_routed_anew(sampled, mixture):
    columns = columns_of(sampled[:1])
    with torch.no_grad():
        free = log_probs(mixture, columns)
        assert torch.equal(log_probs(mixture, columns, experts=[None]), free)
        assert torch.equal(log_probs(mixture, columns, experts=[sampled[0].experts[:0]]), free)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_replays_its_own_choices(family, tmp_path):
    """Its own choices give its own log-probs and gradients; other choices give others, also if layers are computed again."""
    path = make_tiny_model(tmp_path / "model", family)
    module = load_causal_lm(path, dtype=torch.float32, gradient_checkpointing=True).train()
    follow_routing(module)
    generator = torch.Generator().manual_seed(0)
    rows = [Trajectory(0, i, PROMPTS[0]).extended(COMPLETION) for i in range(2)]
    columns = columns_of(rows) | {
        "responses": torch.randint(0, 250, (2, 24), generator=generator),
        "response_mask": torch.ones(2, 24, dtype=torch.bool),
        "attention_mask": torch.ones(2, 36, dtype=torch.bool),
    }
    packed = pack_rows(columns)
    packed.layout.routing = Routing()
    with torch.no_grad():
        recorded = packed_outputs(module, packed, ["log_probs"])["log_probs"]
    record = packed.layout.routing.recorded(module.config).numpy()
    groups = [unpadded_rows(columns)]
    experts = [by_row(groups, record)[row] for row in range(2)]
    assert experts[0].shape[0] == len(PROMPTS[0]) + 23

    def gradient(experts):
        module.zero_grad()
        values = log_probs(module, columns, experts=experts)
        values.sum().backward()
        return values.detach(), [p.grad.clone() for p in module.parameters() if p.grad is not None]

    (free, own_grads), (again, grads) = gradient(None), gradient(experts)
    assert torch.allclose(again, recorded, atol=1e-6)
    assert torch.allclose(free, again, atol=1e-6)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(own_grads, grads, strict=True))
    wrong = [(e + 1) % 4 for e in experts]
    other, other_grads = gradient(wrong)
    assert (other - free).abs().max() > 1e-3
    assert all(g.isfinite().all() for g in other_grads)


def test_models_without_experts_are_refused(tmp_path):
    module = load_causal_lm(make_tiny_model(tmp_path / "model"), dtype=torch.float32)
    with pytest.raises(ConfigError, match="mixtures of experts, and llama has none"):
        follow_routing(module)


def test_a_resumed_sample_keeps_its_earlier_choices(sampled):
    first = sampled[0]
    longer = np.concatenate([first.experts + 1, first.experts[:3]])
    resumed = first.extended(replace(COMPLETION, experts=longer))
    assert np.array_equal(resumed.experts[: len(first.experts)], first.experts)
    assert len(resumed.experts) == len(longer)
