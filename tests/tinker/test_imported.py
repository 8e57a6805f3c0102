"""Adapters that peft saved, as checkpoints of the service."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

tinker = pytest.importorskip("tinker", reason="the extra tinker is not installed")
peft = pytest.importorskip("peft", reason="the oracle is not installed")

from tinker import types  # noqa: E402

from tests.tinker.data import datum  # noqa: E402
from tests.tinker.served import base_of, running  # noqa: E402
from verl.errors import ConfigError  # noqa: E402
from verl.tinker.checkpoints import Checkpoints  # noqa: E402
from verl.tinker.imported import import_adapters  # noqa: E402


def saved(model, folder, **settings):
    """An adapter with random values, and the log-probs of tokens under it."""
    module = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float32)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **settings)
    adapted = peft.get_peft_model(module, config).eval()
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(folder)
    ids = torch.tensor([[3, 4, 5, 6]])
    log_probs = torch.log_softmax(adapted(input_ids=ids).logits[0, :-1].float(), -1)
    return log_probs.gather(1, ids[0, 1:, None])[:, 0].tolist()


@pytest.mark.parametrize("settings", [{"lora_alpha": 8}, {"lora_alpha": 12, "use_rslora": True}])
def test_an_adapter_of_peft_samples_and_trains(bench, tiny_llama, tmp_path, monkeypatch, settings):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    expected = saved(tiny_llama, tmp_path / "adapters/mine", **settings)
    base = base_of(bench, [str(tiny_llama), "base"])
    for _ in range(2):  # a second start writes it again
        (uri,) = import_adapters(tmp_path / "adapters", Checkpoints(tmp_path / "service", str(tiny_llama)), [base])
    assert uri == "tinker://imported-mine/sampler_weights/peft"
    with running(bench, tmp_path / "service") as served:
        sampler = served.client().create_sampling_client(model_path=uri)
        scores = sampler.compute_logprobs(types.ModelInput.from_ints([3, 4, 5, 6])).result()
        assert scores[1:] == pytest.approx(expected, abs=1e-4)
        trainer = served.client().create_training_client_from_state(uri)
        trainer.forward_backward([datum(0)], "cross_entropy").result()
        assert trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics["grad_norm"] > 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"base_model_name_or_path": "other"}, "was trained on other, and this server has"),
        ({"base_model_name_or_path": None}, "adapter_config.json names no base model. Set"),
        ({"r": 1000}, "has rank 1000, and the largest one"),
    ],
)
def test_another_adapter_is_a_sentence(bench, tiny_llama, tmp_path, changes, sentence):
    saved(tiny_llama, tmp_path / "adapters/mine", lora_alpha=8)
    file = tmp_path / "adapters/mine/adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    base = base_of(bench, [str(tiny_llama)])
    with pytest.raises(ConfigError, match=sentence):
        import_adapters(tmp_path / "adapters", Checkpoints(tmp_path / "service", str(tiny_llama)), [base])
    with pytest.raises(ConfigError, match=r"has no folder with adapter_config.json"):
        import_adapters(tmp_path / "empty", Checkpoints(tmp_path / "service", str(tiny_llama)), [base])
