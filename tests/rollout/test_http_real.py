"""The service engine against vLLM's own server with our sampler and receiver of weights; slow, needs vLLM.

python -m pytest -m slow -p no:xdist tests/rollout/test_http_real.py
"""

import importlib.util
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.rollout.conftest import EOS, make_prompts
from tests.rollout.simulated import send, transfer_of_run
from tests.rollout.test_vllm_real import DRAWS, LENGTHS, changed, require_native
from verl.config import RolloutConfig
from verl.config.sections.rollout import ServiceConfig
from verl.data_proto.samples import SamplingParams
from verl.errors import ConfigError, ModelError, UnreachableError, VerlError
from verl.models.tiny import make_tiny_model
from verl.parallel.collectives import free_port
from verl.rollout.api import ENGINES
from verl.rollout.http.client import Client
from verl.runtime.weight_sync import skeleton

START_S = 240.0
TOKEN = "a token of this test"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("service") / "tiny"
    return make_tiny_model(place, "llama", hidden_size=128, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    with serving(folder, tmp_path_factory.mktemp("log")) as running:
        yield running


@contextmanager
def serving(folder, log_folder, *arguments, length=256):
    """(address, process) of a server of `folder` that asks for TOKEN, with further `arguments`."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    log = (log_folder / "server.log").open("w+")
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--host", "127.0.0.1",
        "--port", str(port), "--api-key", TOKEN, "--dtype", "float32", "--enforce-eager", "--max-model-len", str(length),
        "--enable-scale-out",
        "--logprobs-mode", "processed_logits", "--logits-processors", "verl.rollout.vllm.library:Sampler",
        "--worker-extension-cls", "verl.rollout.vllm.weights.WeightReceiver", *arguments,
    ]  # fmt: skip
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=log, stderr=log, start_new_session=True
    )
    try:
        os.environ["VERL_ROLLOUT_TOKEN"] = TOKEN
        client = Client(url, token_env="VERL_ROLLOUT_TOKEN", timeout_s=5.0, num_retries=0)
        deadline = time.monotonic() + START_S
        while True:
            try:
                client.get("/v1/models")
                break
            except (UnreachableError, ModelError):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    pytest.fail(log.read()[-4000:])
                time.sleep(1.0)
        yield url, process
    finally:
        os.environ.pop("VERL_ROLLOUT_TOKEN", None)
        os.killpg(process.pid, 9)
        process.wait()


def make(url, folder, tokenizer, reader=None, length=256, **service):
    keys = f"actor_rollout_ref.model.path={folder}", "actor_rollout_ref.actor.fsdp_config.dtype=float32"
    loaded, spec = transfer_of_run(*keys)
    spec = replace(spec, reader=reader or spec.reader)
    settings = ServiceConfig(url=url, timeout_s=60.0, num_retries=1, **service)
    config = RolloutConfig(name="http", max_num_seqs=8, max_model_len=length, service=settings)
    return ENGINES.get("http")(
        skeleton(loaded.actor_rollout_ref.model, spec.dtype), tokenizer, config, eos_token_ids=[EOS], transfer=spec
    )


@pytest.mark.parametrize("way", ["memory", "fetched"])
def test_samples_are_the_native_ones_before_and_after_updates(way, server, folder, tokenizer, tmp_path):
    """A service that reads no memory of the run, here by that reader, fetches buckets."""
    reader = "verl.reshard.device_memory:read_device_bucket" if way == "fetched" else None
    engine = make(server[0], folder, tokenizer, reader, api="vllm", weights_dir=str(tmp_path))
    assert engine.weights_way() == (f"TCP to {server[0]}" if way == "fetched" else None)
    for version in (1, 2):
        module = changed(folder, version)
        send(engine, module, version)
        for step, params in enumerate(DRAWS.values()):
            completions = require_native(engine, module, tokenizer, params, step)
            assert {c.weight_version for c in completions} == {version}
    engine.client.post("/update_weight_version", {"new_version": "77"})
    with pytest.raises(ModelError, match="version 77, but version 2-.* was published"):
        engine.generate(make_prompts(LENGTHS), DRAWS["plain"], step=0)


def test_refusals(server, folder, tokenizer, monkeypatch, tmp_path):
    with pytest.raises(ModelError, match="service.api to vllm"):
        make(server[0], folder, tokenizer, weights_dir=str(tmp_path)).load(changed(folder, 1).named_parameters())
    with pytest.raises(ConfigError, match="not another"):
        make(server[0], folder, tokenizer, served_model_name="another")
    monkeypatch.setenv("VERL_ROLLOUT_TOKEN", "wrong")
    with pytest.raises(ConfigError, match="VERL_ROLLOUT_TOKEN"):
        make(server[0], folder, tokenizer)


def test_a_service_that_dies_is_named(server, folder, tokenizer, tmp_path):
    """The last test: it ends the server while it generates."""
    engine, ended = make(server[0], folder, tokenizer, api="vllm", weights_dir=str(tmp_path)), []

    def die(done):
        ended.append(done)
        os.killpg(server[1].pid, 9)

    with pytest.raises(VerlError, match=r"cannot be reached|refused"):
        engine.generate(make_prompts([10] * 40), SamplingParams(n=4, max_new_tokens=64), step=0, on_finish=die)
    assert ended
