"""A head that predicts the token after the next trains by its own loss, and the policy trains to the same bits without it."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.engines.test_contract import make_batch, policy_loss
from tests.engines.tiny import HEADS, make_engine, make_model_with_head
from verl.checkpoint.export import export
from verl.checkpoint.role import ALL_CONTENTS, read_role
from verl.checkpoint.store import CheckpointStore, RoleCheckpoint
from verl.config import SCHEMAS, load_config
from verl.config.sections.model import MTPConfig
from verl.engines.api import MicroBatching, whole
from verl.errors import ConfigError, ModelError
from verl.models.further_heads import FurtherHead
from verl.models.load import load_causal_lm

FILE = "model.safetensors"
OUTPUTS, MICRO = ("log_probs", "entropy"), MicroBatching(max_tokens=24)


@pytest.fixture(params=list(HEADS))
def folder(request, tmp_path):
    """A model of two layers with a head as its family's checkpoints have it."""
    return make_model_with_head(tmp_path / "model", request.param)


def engine_of(folder, trains=True, **settings):
    return make_engine(folder, model={"mtp": MTPConfig(enable=True, enable_train=trains)}, **settings)


def step(engine, seed):
    return engine.train_batch(make_batch(seed, (3, 1, 4, 2)), policy_loss, OUTPUTS, MICRO, 1.2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_policy_trains_to_the_same_bits(dtype, folder):
    plain, with_head = (engine_of(folder, trains, dtype=dtype) for trains in (False, True))
    before = {name: p.detach().clone() for name, p in with_head._further.named_parameters()}
    for seed in range(3):
        expected, metrics = step(plain, seed), step(with_head, seed)
        further = {name: metrics.pop(name) for name in ("mtp_loss", "mtp_grad_norm")}
        assert {n: m.value for n, m in metrics.items()} == {n: m.value for n, m in expected.items()}
        assert min(m.value for m in further.values()) > 0
    assert [n for n, p in plain.gather_weights() if not torch.equal(p, dict(with_head.gather_weights())[n])] == []
    unmoved = [n for n, p in with_head._further.named_parameters() if torch.equal(p, before[n])]
    # an expert that no token chose has no gradient
    assert [name for name in unmoved if "experts" not in name] == []


def reference_loss(model, head, batch, count):
    """The loss of `head`, row by row, with transformers' own attention, in float64."""
    columns, names, losses = batch.batch, head.names, []
    decoder = model.model
    for prompt, prompt_mask, response, mask in zip(
        columns["prompts"],
        columns["prompt_mask"].bool(),
        columns["responses"],
        columns["response_mask"].bool(),
        strict=True,
    ):
        length = int(mask.nonzero().max()) + 1
        ids = torch.cat([prompt[prompt_mask], response[:length]])
        captured = []
        hook = decoder.layers[-1].register_forward_hook(lambda _, __, out: captured.append(out))  # noqa: B023
        states = decoder(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        hook.remove()
        if not names.reads_normed:
            states = (captured[0][0] if isinstance(captured[0], tuple) else captured[0])[0]
        halves = [head.token_norm(decoder.embed_tokens(ids[1:])), head.hidden_norm(states[:-1])]
        x = torch.cat(halves[::-1] if names.hidden_first else halves, -1) @ head.join.weight.T
        positions = torch.arange(len(x))[None]
        causal = torch.full((len(x), len(x)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        turns = decoder.rotary_emb(x[None], positions)
        out = head.layer(x[None], attention_mask=causal, position_ids=positions, position_embeddings=turns)
        out = head.norm(out[0] if isinstance(out, tuple) else out)[0]
        log_probs = (out @ model.lm_head.weight.T).log_softmax(-1)
        first = int(prompt_mask.sum())
        for column in mask.nonzero()[:, 0].tolist():
            if first + column > 1:
                losses.append(-log_probs[first + column - 2, response[column]])
    return torch.stack(losses).sum() / count


def test_the_loss_equals_a_loop_in_float64(folder):
    batch = make_batch(0, (3, 1, 4, 2))
    packed = load_causal_lm(folder, dtype=torch.float64)
    head = FurtherHead(packed, str(folder))
    loss, _ = head.loss(packed, batch, 10)
    loss.backward()
    assert all(p.grad is None for p in packed.parameters())
    eager = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    other = FurtherHead(eager, str(folder))
    expected = reference_loss(eager.requires_grad_(False), other, batch, 10)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-8)
    for (name, p), q in zip(head.named_parameters(), other.parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7, msg=name)


def test_a_resumed_run_has_the_bits_of_the_unbroken_one_and_exports_the_head(folder, tmp_path):
    unbroken = engine_of(folder)
    for seed in range(3):
        step(unbroken, seed)
    begun = engine_of(folder)
    for seed in range(2):
        step(begun, seed)
    role = RoleCheckpoint(begun.state(), begun.module.config.save_pretrained)
    store = CheckpointStore(tmp_path / "run")
    store.save(2, {"actor": role}, {})
    resumed = engine_of(folder)
    resumed.load_state(read_role(store.path(2) / "actor", ALL_CONTENTS))
    step(resumed, 2)
    state, again = unbroken.state(), resumed.state()
    for kind in ("model", "optimizer"):
        expected, ours = getattr(state, kind), getattr(again, kind)
        assert expected.keys() == ours.keys()
        assert [n for n in expected if not torch.equal(whole(expected[n]), whole(ours[n]))] == []
    (tmp_path / "run/config.yaml").write_text("actor_rollout_ref: {actor: {fsdp_config: {master_rounding: nearest}}}\n")
    out = load_file(export(store.root, tmp_path / "out") / FILE)
    trained = begun.state().model
    assert out.keys() == trained.keys()
    assert {n for n in load_file(folder / FILE) if "layers.0" not in n and "layers.1" not in n} <= out.keys()
    assert [n for n in out if not torch.equal(out[n], whole(trained[n]).to(out[n].dtype))] == []
    if "model.layers.2.shared_head.head.weight" in out:
        assert torch.equal(out["model.layers.2.shared_head.head.weight"], out["lm_head.weight"])
    reopened = FurtherHead(load_causal_lm(tmp_path / "out", dtype=torch.float32), str(tmp_path / "out"))
    assert torch.equal(reopened.join.weight, begun._further_optimizer.masters["join.weight"].bfloat16().float())


def test_a_skipped_update_leaves_the_head_as_it_is(folder):
    engine = engine_of(folder)
    before = {name: p.detach().clone() for name, p in engine._further.named_parameters()}
    refuse = type("Refuse", (), {"names": {}, "__call__": lambda self, metrics: False})()
    metrics = engine.train_batch(make_batch(), policy_loss, OUTPUTS, MICRO, 1.2, check=refuse)
    assert "num_skipped_updates" in metrics
    assert all(torch.equal(p, before[n]) for n, p in engine._further.named_parameters())
    assert all(p.grad is None for p in engine._further_optimizer.masters.values())


def test_what_is_refused(tiny_llama, folder):
    with pytest.raises(ModelError, match="has no heads that predict further tokens.*enable_train=False"):
        engine_of(tiny_llama)
    tensors = load_file(folder / FILE)
    name = next(n for n in tensors if n.endswith("input_layernorm.weight") and ("layers.2." in n or "mtp" in n))
    save_file({n: t for n, t in tensors.items() if n != name}, folder / FILE, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"has other tensors than a layer of its model: 1 differ, such as {name}"):
        engine_of(folder)
    keys = ["model.mtp.enable=True", "model.mtp.enable_train=True", "trainer.n_gpus_per_node=2"]
    with pytest.raises(ConfigError, match="only a policy on one device does"):
        load_config(keys, schema=SCHEMAS["sft"])
    with pytest.raises(ConfigError, match="a run with adapters does not"):
        load_config([f"actor_rollout_ref.{key}" for key in (*keys[:2], "model.lora_rank=4")])


def test_the_keys_of_drafts_follow_the_keys_of_the_model():
    keys = (
        "model.mtp.enable=True",
        "model.mtp.enable_rollout=True",
        "model.mtp.num_speculative_tokens=3",
        "rollout.name=vllm",
    )
    config = load_config([f"actor_rollout_ref.{key}" for key in keys], check=False).config
    drafts = config.actor_rollout_ref.rollout.speculative
    assert (drafts.methods, drafts.num_speculative_tokens) == (["mtp"], 3)
