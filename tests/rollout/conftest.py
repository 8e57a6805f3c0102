"""Tiny models of every family, made and loaded once per process."""

import functools

import pytest
import torch

import verl.models.attention  # noqa: F401 - registers the attention
from verl.config import RolloutConfig
from verl.data_proto.samples import PromptRequest
from verl.models.tiny import make_tiny_model, make_tokenizer
from verl.rollout.api import ENGINES

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 16},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
}
EOS = 258


@pytest.fixture(scope="session")
def load(tmp_path_factory):
    """load(family, attention="verl") -> float32 module in train mode, the same object each time."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("families")

    @functools.cache
    def path(family):
        return make_tiny_model(folder / family, family, **FAMILIES[family])

    @functools.cache
    def get(family, attention="verl"):
        model = AutoModelForCausalLM.from_pretrained(path(family), attn_implementation=attention, dtype=torch.float32)
        return model.train()

    return get


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def make_engine(load, tokenizer):
    def make(name, family="llama", module=None, **config):
        module = module or load(family)
        return ENGINES.get(name)(module, tokenizer, RolloutConfig(**config), eos_token_ids=[EOS], pad_token_id=256)

    return make


def make_prompts(lengths, seed=0, first_ordinal=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        PromptRequest(first_ordinal + i, tuple(torch.randint(0, 250, (n,), generator=generator).tolist()))
        for i, n in enumerate(lengths)
    ]


@pytest.fixture
def torch_computes(monkeypatch):
    """Without the compiled kernels (tests/rollout/test_cpu_kernels.py)."""
    monkeypatch.setenv("VERL_CPU_ISA", "none")
