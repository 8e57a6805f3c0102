"""Tiny models of every family, made and loaded once per process."""

import contextlib
import dataclasses
import functools
import tempfile

import pytest
import torch

import verl.models.attention  # noqa: F401 - registers the attention
from tests.models.plain_attention import PLAIN
from tests.rollout.service import running
from tests.rollout.simulated import SimulatedVLLM, vllm_server, weight_transfer
from verl.config import RolloutConfig
from verl.config.sections.rollout import ServiceConfig
from verl.data_proto.samples import PromptRequest
from verl.models.delta_net import lay_out_delta_nets
from verl.models.tiny import make_tiny_model, make_tokenizer
from verl.rollout.api import ENGINES
from verl.rollout.native.cuda.forward import StraightForward

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 16},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "qwen3_5_text": {},
}
EOS = 258


@pytest.fixture(scope="session")
def load(tmp_path_factory):
    """load(family, attention="verl") -> float32 module in train mode, the same object each time."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("families")

    @functools.cache
    def path(family):
        return make_tiny_model(folder / family, family, **FAMILIES.get(family, {}))

    @functools.cache
    def get(family, attention="verl"):
        model = AutoModelForCausalLM.from_pretrained(path(family), attn_implementation=attention, dtype=torch.float32)
        lay_out_delta_nets(model)
        return model.train()

    return get


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def make_engine(load, tokenizer):
    """make_engine(name, family, module=, **config) -> an engine; its services and processes end with the session.

    "device" is the native engine with its GPU backend, computed on the CPU by the plain kernel; "vllm" and "http" are the
    engines of these names in front of a simulated vLLM and of a simulated service (simulated.py).
    """
    with contextlib.ExitStack() as stack:

        def make(name, family="llama", module=None, **config):
            module = module or load(family)
            settings = {"eos_token_ids": [EOS]}
            if name == "vllm":
                return SimulatedVLLM(module, tokenizer, RolloutConfig(**config), transfer=weight_transfer(), **settings)
            if name == "http":
                url = stack.enter_context(running(vllm_server(module))).url
                service = ServiceConfig(
                    url=url, api="vllm", timeout_s=30.0, num_retries=0, weights_dir=str(weights_dir())
                )
                config = RolloutConfig(service=service, **{"max_num_seqs": 8, **config})
                return ENGINES.get(name)(module, tokenizer, config, transfer=weight_transfer(), **settings)
            if name == "device":
                settings["device_kernel"], config = PLAIN, {"enforce_eager": True, **config}
            engine = ENGINES.get("native" if name == "device" else name)(
                module, tokenizer, RolloutConfig(**config), **settings
            )
            if name == "device":
                engine.device.fits = StraightForward.reads
            return engine

        def weights_dir():
            return stack.enter_context(tempfile.TemporaryDirectory())

        yield make


def make_prompts(lengths, seed=0, first_ordinal=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        PromptRequest(first_ordinal + i, tuple(torch.randint(0, 250, (n,), generator=generator).tolist()))
        for i, n in enumerate(lengths)
    ]


@pytest.fixture
def connect(load, tokenizer):
    """connect(url, name="http", module=, **config) -> an engine of a service with `config` of both."""

    def build(url, name="http", module=None, **config):
        fields = {field.name for field in dataclasses.fields(ServiceConfig)} & config.keys()
        service = ServiceConfig(
            **{"timeout_s": 5.0, "num_retries": 2} | {key: config.pop(key) for key in fields}, url=url
        )
        rollout = RolloutConfig(**{"max_num_seqs": 4, **config}, name=name, service=service)
        settings = {"eos_token_ids": [EOS], "transfer": weight_transfer("a/model")}
        return ENGINES.get(name)(module or load("llama"), tokenizer, rollout, **settings)

    return build


@pytest.fixture
def torch_computes(monkeypatch):
    """Without the compiled kernels (tests/rollout/test_cpu_kernels.py)."""
    monkeypatch.setenv("VERL_CPU_ISA", "none")
