"""Models that take no packed batches, and randomness in a forward."""

import json
import logging
import textwrap
from pathlib import Path

import pytest
import torch
import transformers

from tests.engines.tiny import make_engine
from tests.models.reference import make_columns
from verl.config import RolloutConfig
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import PromptRequest, SamplingParams
from verl.engines.api import MicroBatching
from verl.engines.micro_batches import plan_micro_batches
from verl.errors import ConfigError, ModelError
from verl.models.forward import packed_outputs
from verl.models.load import load_causal_lm, load_model
from verl.models.log_probs import OPTIONAL, logit_statistics, token_log_probs
from verl.models.packing import PackedRow, pack_rows
from verl.models.padded import forward_kind, require_packed
from verl.rollout.hf import HFRollout
from verl.rollout.requests import vocab_size

pytestmark = pytest.mark.seed("B1")
SETTINGS = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "initializer_range": 0.1,
    "max_position_embeddings": 64,
}  # fmt: skip
PROMPT, RESPONSES = [3, 4, 5], [[6, 7, 8, 9, 10], [11], [12, 13, 2]]
OUTPUTS = ("log_probs", "entropy", "sum_pi_squared", "correct", "mean_logit")


def make(folder, family, **settings):
    config = transformers.AutoConfig.for_model(family, **{**SETTINGS, **settings})
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def user_model(folder, body, **settings):
    """A model with code in its folder, and a forward of token ids and nothing else."""
    folder.mkdir(exist_ok=True)
    code = """
        import torch
        from torch import nn
        from transformers import PretrainedConfig, PreTrainedModel

        class MyConfig(PretrainedConfig):
            model_type = "my_model"
            vocab_size: int = 64

        class MyModel(PreTrainedModel):
            config_class = MyConfig

            def __init__(self, config):
                super().__init__(config)
                self.table = nn.Embedding(64, 16)
                self.mix = nn.GRU(16, 16, batch_first=True)
                self.out = nn.Linear(16, 64)
                self.post_init()

            def forward(self, input_ids):
                x = self.mix(self.table(input_ids))[0]
    """
    (folder / "my_model.py").write_text(textwrap.dedent(code) + textwrap.indent(textwrap.dedent(body), " " * 8))
    config = {
        "model_type": "my_model", "architectures": ["MyModel"], "vocab_size": 64, "eos_token_id": 1,
        "auto_map": {"AutoConfig": "my_model.MyConfig", "AutoModelForCausalLM": "my_model.MyModel"}, **settings,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    parts = {"table": torch.nn.Embedding(64, 16), "mix": torch.nn.GRU(16, 16), "out": torch.nn.Linear(16, 64)}
    from safetensors.torch import save_file

    tensors = {f"{name}.{key}": value for name, part in parts.items() for key, value in part.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def expected(module, temperature=1.0):
    """[rows, 5] log-probs row by row from the model's own logits of unpadded rows."""
    rows = torch.zeros(len(RESPONSES), 5)
    for row, response in enumerate(RESPONSES):
        output = module(input_ids=torch.tensor([PROMPT + response]))
        logits = getattr(output, "logits", output)[0, len(PROMPT) - 1 : -1] / temperature
        rows[row, : len(response)] = logits.log_softmax(-1).gather(1, torch.tensor(response).unsqueeze(1)).squeeze(1)
    return rows


def columns():
    return make_columns([PROMPT] * 3, RESPONSES)


@pytest.mark.parametrize(
    ("family", "kind"), [("bloom", "padded"), ("mamba", "padded"), ("gpt_neox", "packed"), ("gpt_oss", "padded")]
)
def test_log_probs_and_gradients_of_families(tmp_path, family, kind):
    extra = {"gpt_oss": {"head_dim": 8, "num_local_experts": 4, "sliding_window": 4}}.get(family, {})
    module = load_causal_lm(make(tmp_path, family, **extra))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert forward_kind(module) == kind
    outputs = packed_outputs(module, pack_rows(columns()), OUTPUTS, temperature=0.7)
    torch.testing.assert_close(outputs["log_probs"], reference := expected(theirs, 0.7), rtol=0, atol=2e-5)
    ours = torch.autograd.grad(outputs["log_probs"].sum(), next(module.parameters()))[0]
    gradient = torch.autograd.grad(reference.sum(), next(theirs.parameters()))[0]
    torch.testing.assert_close(ours, gradient, rtol=1e-3, atol=1e-4)


def test_a_user_module_with_only_a_forward(tmp_path, caplog):
    folder = user_model(tmp_path / "m", "return self.out(x)\n")
    with caplog.at_level(logging.WARNING, logger="verl"):
        module = load_causal_lm(folder, trust_remote_code=True, gradient_checkpointing=True)
        load_causal_lm(folder, trust_remote_code=True)
    assert caplog.text.count("MyModel runs by its own padded forward") == 1
    assert forward_kind(module) == "logits"
    outputs = packed_outputs(module, pack_rows(columns()), OUTPUTS)
    torch.testing.assert_close(outputs["log_probs"], expected(module), rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match="MyModel runs by its own padded forward, which cannot be divided as tp asks"):
        require_packed(module, "tp")
    samples = generated(module)
    assert [len(s.token_ids) for s in samples] == [6, 6, 6, 6]
    assert_sampled_by(module, samples)


def generated(module):
    """Two samples of two prompts of unequal length."""
    config = RolloutConfig(max_num_seqs=3)
    engine = HFRollout(module, None, config, eos_token_ids=())
    params = SamplingParams(n=2, max_new_tokens=6, temperature=1.0, seed=5)
    generation = engine.open(params, step=0)
    for ordinal, prompt in enumerate(([3, 4], [5, 6, 7, 8])):
        generation.add(PromptRequest(ordinal, prompt))
    completions = []
    while done := generation.poll():
        completions += done
    return sorted(completions, key=lambda s: (s.ordinal, s.sample))


def assert_sampled_by(module, samples):
    """The log-probs of samples equal the log-probs of the forward that trains."""
    prompts = [[[3, 4], [5, 6, 7, 8]][s.ordinal] for s in samples]
    batch = make_columns(prompts, [list(s.token_ids) for s in samples])
    with torch.no_grad():
        log_probs = packed_outputs(module, pack_rows(batch), ("log_probs",))["log_probs"]
    torch.testing.assert_close(
        log_probs.double(), torch.tensor([s.log_probs for s in samples]).double(), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("family", ["bloom", "mamba"])
def test_samples_match_the_forward_that_trains(tmp_path, family):
    module = load_causal_lm(make(tmp_path, family))
    assert_sampled_by(module, generated(module))


def test_a_value_model_of_such_a_family(tmp_path):
    module = load_model(make(tmp_path, "bloom"), "token_value")
    with torch.no_grad():
        module.score.weight.normal_()
    values = packed_outputs(module, pack_rows(columns()), ("values",))["values"]
    for row, response in enumerate(RESPONSES):
        hidden = module.get_decoder()(input_ids=torch.tensor([PROMPT + response])).last_hidden_state[0]
        reference = module.value(hidden)[len(PROMPT) - 1 : -1]
        torch.testing.assert_close(values[row, : len(response)], reference, rtol=0, atol=1e-5)


def test_an_engine_trains_one(tmp_path):
    make(tmp_path, "bloom")
    engine = make_engine(tmp_path)
    assert not engine.share_prompts
    batch = DataProto.from_dict(columns())
    micro = MicroBatching(max_tokens=12)

    def loss(outputs, part, totals):
        return -(outputs["log_probs"] * part.batch["response_mask"]).sum() / totals.num_tokens, {}

    losses = []
    for _ in range(3):
        losses.append(engine.train_batch(batch, loss, ["log_probs"], micro)["loss"].value)
        engine.end_step()
    assert losses[2] < losses[1] < losses[0]


def test_micro_batches_count_padding():
    rows = [PackedRow(i, (1,) * p, n, True) for i, (p, n) in enumerate([(2, 2), (2, 30), (2, 2), (3, 2)])]
    planned = plan_micro_batches(rows, MicroBatching(max_tokens=16), share_prompts=False, pads=True)
    assert planned == [[0, 2, 3], [1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_statistics_of_logits_match_the_head(dtype):
    hidden, weight = torch.randn(5, 8, dtype=dtype), torch.randn(11, 8, dtype=dtype)
    targets = torch.tensor([0, 3, 10, 4, 4])
    candidates = torch.tensor([[1, 2], [3, 0], [10, 9], [4, 4], [5, 6]])
    wants = {"optional": OPTIONAL, "top": 3, "candidates": candidates}
    ours = logit_statistics(hidden @ weight.t(), targets, 0.7, **wants)
    theirs = token_log_probs(hidden, weight, targets, 0.7, **wants)
    for name, value in vars(ours).items():
        torch.testing.assert_close(value, getattr(theirs, name), rtol=1e-5, atol=1e-6)


def test_a_token_that_the_model_rules_out():
    logits = torch.tensor([[0.0, float("-inf"), 1.0]], requires_grad=True)
    statistics = logit_statistics(logits, torch.tensor([2]), optional=["entropy"])
    p = torch.tensor([0.0, 1.0]).softmax(0)
    torch.testing.assert_close(statistics.entropy, -(p * p.log()).sum().unsqueeze(0))
    statistics.entropy.sum().backward()
    assert logits.grad.isfinite().all()


def test_a_model_that_is_not_causal_is_refused(tmp_path):
    config = transformers.BertConfig(**SETTINGS, is_decoder=False)
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"BertLMHeadModel is not supported: .* not causal"):
        load_causal_lm(tmp_path)


def test_a_module_of_a_user_that_fails(tmp_path):
    folder = user_model(tmp_path / "m", "return self.no_such_layer(x)\n")
    with pytest.raises(
        ModelError, match=r"MyModel is not supported: its forward fails \(AttributeError: .*no_such_layer"
    ):
        load_causal_lm(folder, trust_remote_code=True)


@pytest.mark.parametrize(
    ("family", "rates"),
    [
        ("opt", {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5, "ffn_dim": 48, "word_embed_proj_dim": 32}),
        ("seed_oss", {"attention_dropout": 0.5, "residual_dropout": 0.5, "head_dim": 8}),
        (
            "phimoe",
            {"router_jitter_noise": 0.1, "input_jitter_noise": 0.1, "num_local_experts": 4, "attention_dropout": 0.5},
        ),
        ("mixtral", {"router_jitter_noise": 0.5, "num_local_experts": 4}),
        ("gpt2", {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}),
    ],
)
def test_two_forwards_of_a_training_engine_are_equal(tmp_path, family, rates):
    make(tmp_path, family, **rates)
    engine = make_engine(tmp_path, model={"enable_gradient_checkpointing": True})
    assert engine.module.is_gradient_checkpointing
    batch = pack_rows(columns())
    first, second = (packed_outputs(engine.module, batch, ("log_probs",))["log_probs"] for _ in range(2))
    assert torch.equal(first, second)
    assert first.requires_grad
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(first, expected(theirs), rtol=0, atol=2e-5)


@pytest.mark.parametrize("noise", ["torch.randn_like(x)", "torch.nn.functional.dropout(x, 0.5)"])
def test_noise_of_a_user_module_is_caught(tmp_path, noise):
    folder = user_model(tmp_path / "m", f"return self.out(x + {noise})\n")
    with pytest.raises(
        ModelError, match=r"two forwards over the same tokens differ by up to .* so its forward is random"
    ):
        load_causal_lm(folder, trust_remote_code=True)


def test_a_forward_that_writes_to_its_weights_is_caught(tmp_path):
    body = "with torch.no_grad():\n    self.out.weight.mul_(1.0)\nreturn self.out(x)\n"
    with pytest.raises(ModelError, match="its forward changes its own parameters"):
        load_causal_lm(user_model(tmp_path / "m", body), trust_remote_code=True)


def test_the_generator_of_torch_is_unchanged(tmp_path):
    folder = make(Path(tmp_path), "gpt2")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    load_causal_lm(folder)
    assert torch.equal(torch.get_rng_state(), before)


def test_vocabulary_of_a_module_without_embeddings(tmp_path):
    assert vocab_size(load_causal_lm(user_model(tmp_path / "m", "return self.out(x)\n"), trust_remote_code=True)) == 64
