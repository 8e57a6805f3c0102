"""SGLang itself on a CPU, as a server that the engine starts; slow, needs SGLang (see docs/versions.md).

python -m pytest -m slow -p no:xdist tests/rollout/test_sglang_real.py
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.commands import ran
from tests.json_lines import read_lines
from tests.letters_task import overrides, write_task
from tests.rollout.conftest import make_prompts
from tests.rollout.simulated import send, transfer_of_run
from tests.rollout.test_quantized import gap as distances
from tests.rollout.test_quantized import rounding
from tests.rollout.test_vllm_real import changed
from verl.config import RolloutConfig
from verl.data_proto.samples import SamplingParams
from verl.errors import ConfigError
from verl.models.load import load_tokenizer
from verl.models.tiny import make_tiny_model
from verl.rollout.api import ENGINES
from verl.rollout.http.server import FP8_CHECKPOINT
from verl.runtime.weight_sync import skeleton

ON_CPU = {
    "attention_backend": "torch_native", "max_total_tokens": 8192, "disable_overlap_schedule": True,
    "skip_server_warmup": True,
}  # fmt: skip
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(Path(__file__).parent / "sglang_on_cpu"), os.environ.get("PYTHONPATH")])
    ),
}
GREEDY = SamplingParams(temperature=0, max_new_tokens=16)
LONGEST = 64  # tokens of a sequence

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed in this Python"),
]


# of a run: it starts a server with this environment
ENGINE_KEYS = [
    "actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.max_num_seqs=8",
    "trainer.ray_wait_register_center_timeout=900",
    *(f"+actor_rollout_ref.rollout.engine_kwargs.sglang.{name}={value}" for name, value in ON_CPU.items()),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("sglang") / "tiny", "llama", hidden_size=128, num_attention_heads=4)


def make(folder, *keys):
    rollout = "actor_rollout_ref.rollout"
    config, transfer = transfer_of_run(
        f"actor_rollout_ref.model.path={folder}", "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        f"{rollout}.service.timeout_s=300", f"{rollout}.gpu_memory_utilization=0.5", *ENGINE_KEYS, *keys,
    )  # fmt: skip
    ref = config.actor_rollout_ref
    tokenizer = load_tokenizer(ref.model)
    return ENGINES.get("sglang")(
        skeleton(ref.model, transfer.dtype), tokenizer, ref.rollout, eos_token_ids=[tokenizer.eos_token_id],
        transfer=transfer,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(folder):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        started = make(folder, f"actor_rollout_ref.rollout.max_model_len={LONGEST}")
    yield started
    started.close()


def native(module, engine):
    eos = engine.eos_token_ids
    return ENGINES.get("native")(module, engine.tokenizer, RolloutConfig(max_num_seqs=8), eos_token_ids=eos)


def gap(completions, expected):
    """The largest difference of log-probs; tokens and ends are equal."""
    assert [(c.token_ids, c.finish_reason) for c in completions] == [(c.token_ids, c.finish_reason) for c in expected]
    pairs = zip(completions, expected, strict=True)
    return max(abs(p - q) for a, b in pairs for p, q in zip(a.log_probs, b.log_probs, strict=True))


def test_greedy_samples_are_the_native_ones_before_and_after_updates(engine, folder):
    prompts = make_prompts([3, 9, 17])
    for version in (1, 2):
        module = changed(folder, version)
        send(engine, module, version)
        completions = engine.generate(prompts, GREEDY, step=0)
        assert gap(completions, native(module, engine).generate(prompts, GREEDY, step=0)) < 1e-5
        assert {c.weight_version for c in completions} == {version}


SAMPLED = (
    SamplingParams(n=4, temperature=1.0, max_new_tokens=16),
    SamplingParams(n=4, temperature=0.7, top_k=20, top_p=0.9, max_new_tokens=16, seed=3),
    SamplingParams(n=2, temperature=1.0, min_p=0.02, max_new_tokens=12),
)


@pytest.mark.parametrize("params", SAMPLED)
def test_samples_are_the_native_ones(engine, folder, params):
    """On logits that differ in their last bits, by the same uniforms."""
    prompts = make_prompts([3, 9, 17, 5])
    expected = native(changed(folder, 2), engine).generate(prompts, params, step=7)
    assert gap(engine.generate(prompts, params, step=7), expected) < 2e-5


def test_memory_is_freed_and_comes_back(engine, folder, monkeypatch):
    """The order of the calls, which SGLang checks; on a CPU it frees nothing."""
    module, prompts = changed(folder, 2), make_prompts([3, 9])
    expected = native(module, engine).generate(prompts, GREEDY, step=0)
    monkeypatch.setattr(engine.server, "frees_memory", True)
    for syncs in (False, True):
        engine.syncs = syncs
        engine.release()
        if syncs:
            send(engine, module, 2)
        assert gap(engine.generate(prompts, GREEDY, step=0), expected) < 1e-5


def test_weights_in_fp8_follow_each_update(tmp_path, monkeypatch):
    """With the arguments of a GPU, and products that sitecustomize.py emulates: loading and parameters are SGLang's."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4}
    folder = make_tiny_model(tmp_path / "even", "llama", **sizes)
    place = "+actor_rollout_ref.rollout.engine_kwargs.sglang"
    checkpoint = json.dumps({"quantization_config": FP8_CHECKPOINT}).replace('"', "")
    settings = {"quantization": "fp8", "load_format": "dummy", "json_model_override_args": checkpoint}
    engine = make(folder, *(f"{place}.{name}={value}" for name, value in settings.items()))
    try:
        for version in (1, 2):
            module, prompts = changed(folder, version), make_prompts([3, 9, 17, 5])
            send(engine, module, version)
            done = engine.generate(prompts, SAMPLED[0], step=1)
            alike, exact = distances(done, prompts, rounding(module, "fp8")), distances(done, prompts, module)
            # a value at the border of two levels may go either way
            assert np.quantile(alike, 0.2) < 1e-4
            assert alike.mean() < 0.1 * exact.mean()
    finally:
        engine.close()


def test_a_model_divided_over_two_processes(folder, monkeypatch):
    for name, value in {**ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}.items():
        monkeypatch.setenv(name, value)
    rollout = "actor_rollout_ref.rollout"
    divided = make(folder, f"{rollout}.tensor_model_parallel_size=2", f"{rollout}.max_model_len={LONGEST}")
    try:
        module, prompts = changed(folder, 1), make_prompts([3, 9, 17, 5])
        send(divided, module, 1)
        for params in (GREEDY, *SAMPLED):
            expected = native(module, divided).generate(prompts, params, step=1)
            assert gap(divided.generate(prompts, params, step=1), expected) < 2e-5
    finally:
        divided.close()


def test_samples_end_at_stop_tokens(engine, folder):
    """At the stop tokens of a request too, with ignore_eos and without, if the end-of-sequence token is sampled too."""
    module, prompts = changed(folder, 2), make_prompts([3, 9, 17])
    expected = native(module, engine)
    text = expected.generate(prompts, GREEDY, step=0)[0].token_ids
    for stops, strings in (((text[3],), ()), ((), ()), ((), (engine.tokenizer.decode(text[2:4]),))):
        for ignore_eos in (False, True):
            params = SamplingParams(
                temperature=0, max_new_tokens=16, stop_token_ids=stops, stop=strings, ignore_eos=ignore_eos
            )
            completions = engine.generate(prompts, params, step=0)
            assert gap(completions, expected.generate(prompts, params, step=0)) < 1e-5
            if stops:
                assert len(completions[0].token_ids) == text.index(stops[0]) + 1
                assert completions[0].finish_reason == "stop"


def test_a_token_that_only_the_server_takes_for_an_end_is_none(engine, folder):
    """Its end-of-sequence token, if the run ignores it and has a stop token, so that SGLang's rule is on."""
    (prompt,) = make_prompts([5])
    eos = engine.tokenizer.eos_token_id
    params = SamplingParams(temperature=1e4, max_new_tokens=32, stop_token_ids=(7,), ignore_eos=True, n=64)
    completions = engine.generate([prompt], params, step=0)
    assert any(eos in c.token_ids[:-1] for c in completions), "64 x 32 tokens of nearly uniform draws have it"
    assert all(len(c.token_ids) == 32 or c.token_ids[-1] == 7 for c in completions)
    assert not any(7 in c.token_ids[:-1] for c in completions)


def test_log_probs_are_at_the_sampling_temperature(engine, folder):
    module, prompts = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), make_prompts([3, 9, 17])
    module.load_state_dict(changed(folder, 2).state_dict())
    for completion in engine.generate(prompts, SamplingParams(n=2, temperature=0.7, max_new_tokens=12), step=0):
        ids = [*prompts[completion.ordinal].token_ids, *completion.token_ids]
        with torch.no_grad():
            logits = module(torch.tensor([ids])).logits[0].float() / 0.7
        rows = torch.log_softmax(logits, -1)[-len(completion.token_ids) - 1 : -1]
        log_probs = rows.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert (log_probs - torch.tensor(completion.log_probs)).abs().max() < 1e-5


def test_the_end_of_the_context_is_reached(engine):
    for length in (57, 58, 60, 63):
        params = SamplingParams(temperature=0, max_new_tokens=LONGEST - length, ignore_eos=True)
        (sample,) = engine.generate(make_prompts([length]), params, step=0)
        assert (len(sample.token_ids), sample.finish_reason) == (LONGEST - length, "length")


def test_another_run_on_the_same_server(engine, folder, tmp_path):
    """After updates: SGLang names their folder as its model."""
    keys = f"actor_rollout_ref.rollout.service.url={engine.server.url}"
    folder_key = f"actor_rollout_ref.rollout.service.weights_dir={tmp_path}"
    with pytest.raises(ConfigError, match="takes up to 66 tokens in a sequence, and this run has up to 67"):
        make(folder, keys, "actor_rollout_ref.rollout.max_model_len=67")
    other = make(folder, keys, folder_key, f"actor_rollout_ref.rollout.max_model_len={LONGEST}")
    module, prompts = changed(folder, 3), make_prompts([3, 9])
    send(other, module, 3)
    assert gap(other.generate(prompts, GREEDY, step=0), native(module, other).generate(prompts, GREEDY, step=0)) < 1e-5


LORA = (
    "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.rollout.adapters_by_name=True",
)  # fmt: skip


@pytest.mark.parametrize(("more", "way"), [((), "shared memory"), (LORA, "shared memory, adapters as files")])
def test_a_run_with_a_server_of_its_own(folder, tmp_path, more, way):
    """Two steps of GRPO. A third of the vocabulary ends a sample, so that few have all 24 tokens."""
    stops = f"actor_rollout_ref.rollout.stop_token_ids={list(range(81))}"
    keys = overrides(
        folder, write_task(tmp_path), *ENGINE_KEYS, *more, stops, "data.max_response_length=24",
        "trainer.total_training_steps=2", "trainer.save_freq=-1", "trainer.test_freq=-1",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    )  # fmt: skip
    command = [sys.executable, "-m", "verl", "train", *keys]
    done = ran(*command, env={**os.environ, **ENVIRONMENT}, timeout=900)
    assert f"weights: {way}\n" in done.stdout + done.stderr
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")
    trained = [row for row in rows if row["step"] > 0]
    assert len(trained) == 2
    for row in trained:
        assert row["training/rollout_probs_diff_max"] < 1e-5
        assert row["response_length/mean"] < 12
        assert row["response_length/clip_ratio"] < 0.2
