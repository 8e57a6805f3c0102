"""The vLLM engine with vLLM; all slow.

    VERL_SMOLLM2=folder python -m pytest -m slow -p no:xdist tests/rollout/test_vllm_real.py

Samples are the native engine's, token by token, and log-probs agree within 1e-4 in float32.
"""

import importlib.util
import os
import signal
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tests import letters_task
from tests.agents.test_driver import PARAMS, agent, tasks
from tests.commands import ran
from tests.json_lines import read_lines, write_lines
from tests.rollout import second_runner
from tests.rollout.conftest import EOS, make_prompts
from tests.rollout.simulated import send, transfer_of_run
from tests.runtime.ranks import still_there
from verl.agents.driver import EpisodeDriver, EventLoop
from verl.config import RolloutConfig
from verl.data_proto.samples import PromptRequest, SamplingParams
from verl.errors import ModelError, WorkerLostError
from verl.models.load import load_causal_lm
from verl.models.tiny import make_tiny_model
from verl.rollout.api import ENGINES
from verl.runtime.weight_sync import skeleton

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-4
LENGTHS = [3, 20, 7, 140, 1, 20]
DRAWS = {
    "plain": SamplingParams(n=3, max_new_tokens=24),
    "filtered": SamplingParams(n=2, temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, max_new_tokens=24),
    "greedy": SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True),
    "stops": SamplingParams(n=4, max_new_tokens=64, stop=("e", "qu"), stop_token_ids=(65,)),
}

pytestmark = [
    pytest.mark.seed("B5"),
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


if os.environ.get(second_runner.CHOSEN):
    second_runner.simulate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tied model (the harder case) with heads of a size that vLLM has kernels for."""
    place = tmp_path_factory.mktemp("vllm") / "tiny"
    return make_tiny_model(place, "llama", hidden_size=128, num_attention_heads=4, num_key_value_heads=2)


def make(folder, mode, tokenizer, **config):
    loaded, spec = transfer_of_run(
        f"actor_rollout_ref.model.path={folder}",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.rollout.prompt_length=160",
        "actor_rollout_ref.rollout.response_length=64",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1",
        f"actor_rollout_ref.rollout.mode={mode}",
        *(f"actor_rollout_ref.rollout.{key}={value}" for key, value in config.items()),
    )
    rollout = loaded.actor_rollout_ref.rollout
    return ENGINES.get("vllm")(
        skeleton(loaded.actor_rollout_ref.model, spec.dtype), tokenizer, rollout, eos_token_ids=[EOS], transfer=spec
    )


@pytest.fixture(scope="module")
def fault(tmp_path_factory):
    """The file that makes the receivers of `engine` faulty."""
    with pytest.MonkeyPatch.context() as patch:
        file = tmp_path_factory.mktemp("fault") / "fault"
        patch.setenv("VERL_TEST_FAULT", str(file))
        yield file


@pytest.fixture(scope="module", params=["sync", "async"])
def engine(request, folder, fault):
    from verl.models.tiny import make_tokenizer

    receiver = "{vllm: {worker_extension_cls: tests.rollout.faulty_receiver.FaultyReceiver}}"
    built = make(folder, request.param, make_tokenizer(), max_num_seqs=8, engine_kwargs=receiver)
    yield built
    built.close()


def changed(folder, seed):
    """The model with other weights, as after some training."""
    module = load_causal_lm(folder).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.add_(torch.randn(p.shape, generator=generator) * 0.05)
    return module


def native(module, tokenizer):
    return ENGINES.get("native")(module, tokenizer, RolloutConfig(max_num_seqs=8), eos_token_ids=[EOS])


def assert_equal(completions, expected):
    assert [(c.ordinal, c.sample, c.finish_reason) for c in completions] == [
        (c.ordinal, c.sample, c.finish_reason) for c in expected
    ]
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    gaps = [
        abs(a - b)
        for m, e in zip(completions, expected, strict=True)
        for a, b in zip(m.log_probs, e.log_probs, strict=True)
    ]
    assert max(gaps) < TOLERANCE


def require_native(engine, module, tokenizer, params, step=1, on_finish=None):
    """The samples of the engine, equal to the native engine's with `module`."""
    prompts = make_prompts(LENGTHS)
    completions = engine.generate(prompts, params, step=step, on_finish=on_finish)
    assert_equal(completions, native(module, tokenizer).generate(prompts, params, step=step))
    return completions


def test_samples_are_the_native_ones_before_and_after_updates(engine, folder, tokenizer):
    ended = []
    for version in range(3):
        module = changed(folder, version)
        send(engine, module, version)
        for step, params in enumerate(DRAWS.values()):
            completions = require_native(engine, module, tokenizer, params, step, on_finish=ended.append)
            assert {c.weight_version for c in completions} == {version}
            assert len(ended) == len(completions)
            ended.clear()
    stats = engine.stats()
    assert stats["num_prompt_tokens_computed"] < stats["num_prompt_tokens"] * 4  # computed once, but for the last block
    assert engine.generate([PromptRequest(3, (5, 6, 7), first_sample=2, num_drawn=1)], DRAWS["plain"], step=0)


def test_experts_of_an_update_are_computed(tmp_path, tokenizer):
    """The samples are the native ones: vLLM packs experts for a processor as it starts, verl in each update. A process with
    a dense model in vLLM takes no mixture."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    folder = make_tiny_model(tmp_path / "model", "qwen3_moe", hidden_size=128, **heads)
    module = changed(folder, 1)
    with closing(make(folder, "async", tokenizer, max_num_seqs=8)) as engine:
        send(engine, module, 0)
        require_native(engine, module, tokenizer, DRAWS["plain"], step=0)


@pytest.mark.skipif(second_runner.CHOSEN in os.environ, reason="runs these tests")
def test_the_second_runner_schedules_ahead_and_gives_the_same_samples():
    """The tests that have an engine in this process, with vLLM's second model runner; see second_runner."""
    chosen = "(sync and not async and not died) or the_chosen_runner"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-p", "no:xdist", "-p", "no:cacheprovider", __file__]
    ran(*command, "-k", chosen, cwd=ROOT, env={**os.environ, second_runner.CHOSEN: "1"}, timeout=900)


@pytest.mark.skipif(second_runner.CHOSEN not in os.environ, reason="of the second model runner")
@pytest.mark.parametrize("engine", ["sync"], indirect=True)
def test_the_chosen_runner_is_the_second_one(engine):
    core = engine.core._llm.llm_engine.engine_core.engine_core
    assert core.batch_queue is not None, "scheduling ahead"
    runner = core.model_executor.driver_worker.model_runner
    assert type(runner).__module__ == "vllm.v1.worker.cpu.model_runner"


def converse(engine):
    """Episodes of several turns, each after a tool's answer, over one generation."""
    events = EventLoop()
    try:
        driver = EpisodeDriver(engine, events, max_episodes=100, timeout_s=120.0, filler=EOS)
        return driver.run(tasks(), agent(), PARAMS, step=1)
    finally:
        events.close()


def test_conversations_are_the_native_ones(engine, folder, tokenizer):
    module = changed(folder, 4)
    send(engine, module, 20)
    episodes, expected = converse(engine), converse(native(module, tokenizer))
    assert [e.trajectory.response_ids for e in episodes] == [e.trajectory.response_ids for e in expected]
    for one, other in zip(episodes, expected, strict=True):
        assert one.error is None
        row, expected_row = one.trajectory.to_row(), other.trajectory.to_row()
        assert (row.response_mask == expected_row.response_mask).all()
        np.testing.assert_allclose(row.log_probs, expected_row.log_probs, atol=TOLERANCE)
    assert max(sum(s.source == "policy" for s in e.trajectory.segments) for e in episodes) > 2


def test_weights_that_do_not_fit_are_refused_and_the_next_update_succeeds(engine, folder, tokenizer):
    module = changed(folder, 7)
    weights = list(module.named_parameters())
    for wrong, words in (
        (weights[:-1], "is missing parameter"),
        ([(weights[0][0], weights[0][1][:5]), *weights[1:]], "which the rollout model lacks"),
        ([*weights, ("model.other", torch.zeros(3))], "model.other"),
    ):
        with pytest.raises(ModelError, match=words):
            engine.load(wrong)
        with pytest.raises(ModelError, match="did not end well"):
            engine.generate(make_prompts([4]), DRAWS["plain"], step=0)
    send(engine, module, 9)
    require_native(engine, module, tokenizer, DRAWS["plain"])


@pytest.mark.parametrize("kind", ["drop", "zero", "change", "swap", "norm"])
def test_an_engine_that_holds_other_weights_than_it_was_sent_is_an_error(kind, engine, fault, folder, tokenizer):
    """The weights arrive as they were sent; vLLM's model gets others, or one of three that are fused not at all."""
    module = changed(folder, 11)
    fault.write_text(kind)
    try:
        with pytest.raises(ModelError, match="The rollout engine holds other values in model"):
            engine.load(module.named_parameters())
    finally:
        fault.unlink()
    with pytest.raises(ModelError, match="did not end well"):
        engine.generate(make_prompts([4]), DRAWS["plain"], step=0)
    send(engine, module, 10)
    require_native(engine, module, tokenizer, DRAWS["plain"])


def test_two_workers_share_the_model(folder, tokenizer):
    """Tensor parallelism inside vLLM, in a separate process: each worker reads the buckets and verifies them."""
    module = changed(folder, 5)
    with closing(make(folder, "async", tokenizer, tensor_model_parallel_size=2)) as engine:
        send(engine, module, 1)
        require_native(engine, module, tokenizer, DRAWS["filtered"], step=2)


@pytest.mark.parametrize("ended", ["a worker", "the engine's process"])
def test_nothing_is_left_of_workers_that_share_a_model(ended, folder, tokenizer):
    """A killed worker takes its engine with it, and the engine comes back; so does the engine's process with its workers."""
    with closing(make(folder, "async", tokenizer, tensor_model_parallel_size=2)) as engine:
        family = own_family(engine.core.core.process.pid)
        module = changed(folder, 6)
        send(engine, module, 1)
        if ended == "a worker":
            max(family[1:], key=lambda process: process.memory_info().rss).kill()
        else:
            family[0].kill()  # as the kernel does, too, when this process ends
            assert not still_there(family, grace_s=30)
        require_native(engine, module, tokenizer, DRAWS["plain"], step=3)
        assert not still_there(family, grace_s=30)
        family = own_family(engine.core.core.process.pid)
    assert not still_there(family, grace_s=30)


def own_family(pid):
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def weights_with_a_kill(module, pid):
    """The parameters of `module`; the process `pid` is killed before the last two."""
    weights = list(module.named_parameters())
    yield from weights[:-2]
    os.kill(pid, signal.SIGKILL)
    yield from weights[-2:]


@pytest.mark.parametrize("moment", ["generating", "updating"])
def test_an_engine_that_dies_is_named_and_nothing_comes_of_it(moment, folder, tokenizer):
    engine, ended = make(folder, "async", tokenizer, response_length=800, max_engine_restarts=0), []
    process = engine.core.process

    def die(done):
        ended.append(done)
        os.kill(process.pid, signal.SIGKILL)

    lost = rf"vLLM process \(pid {process.pid}\) was ended by SIGKILL"
    if moment == "updating":
        with pytest.raises(WorkerLostError, match=lost):
            engine.load(weights_with_a_kill(changed(folder, 1), process.pid))
        with pytest.raises(ModelError, match="did not end well"):
            engine.generate(make_prompts([4]), DRAWS["plain"], step=0)
    else:
        long = SamplingParams(n=8, max_new_tokens=800)
        with pytest.raises(WorkerLostError, match=lost):
            engine.generate(make_prompts([10] * 8), long, step=0, on_finish=die)
        assert ended
    engine.close()


def test_an_engine_that_dies_comes_back_with_its_weights(folder, tokenizer):
    """In an update and in the generation after it; a new process is another start of vLLM."""
    module = changed(folder, 4)
    with closing(make(folder, "async", tokenizer)) as engine:
        first = engine.core.core.process.pid
        engine.load(weights_with_a_kill(module, first))
        engine.publish(1)
        second, ended = engine.core.core.process.pid, []

        def die(done):
            ended.append((done.ordinal, done.sample))
            if len(ended) == 2:
                os.kill(second, signal.SIGKILL)

        completions = require_native(engine, module, tokenizer, DRAWS["stops"], step=3, on_finish=die)
        assert sorted(ended) == [(c.ordinal, c.sample) for c in completions], "each was told of once"
        assert len({first, second, engine.core.core.process.pid}) == 3


@pytest.fixture(scope="module")
def smollm2():
    folder = os.environ.get("VERL_SMOLLM2", "")
    if not Path(folder, "config.json").is_file():
        pytest.skip("VERL_SMOLLM2 names no model folder")
    return folder


@pytest.fixture(scope="module")
def grpo(smollm2, tmp_path_factory):
    """grpo("key=value", ...) trains 3 steps of SmolLM2 in float32; rows of metrics, and samples of each step."""
    place = tmp_path_factory.mktemp("grpo")
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {i} + {i % 7}?"}], "data_source": "sums",
         "reward_model": {"style": "rule", "ground_truth": str(i + i % 7)}}
        for i in range(12)
    ]  # fmt: skip
    write_lines(place / "train.jsonl", rows)
    digits = "sum(c.isdigit() for c in solution_str) / (len(solution_str) + 1)"
    letters_task.write_reward(place, f"return (ground_truth in solution_str) + 0.1 * {digits}")

    def run(name, *changes):
        keys = letters_task.overrides(
            smollm2, place, f"data.val_files={place}/train.jsonl", "trainer.test_freq=-1", "data.max_response_length=12",
            "actor_rollout_ref.actor.optim.lr=1e-5", "trainer.total_training_steps=3", "trainer.save_freq=-1",
            f"trainer.default_local_dir={place}/{name}", *changes,
        )  # fmt: skip
        command = [sys.executable, "-m", "verl", "train", *keys]
        ran(*command, cwd=ROOT, timeout=600)
        metrics = read_lines(place / name / "metrics.jsonl")
        files = sorted((place / name / "samples" / "train").glob("*.jsonl"))
        samples = [read_lines(file) for file in files]
        return [row for row in metrics if row["step"] > 0], samples

    return run


def test_grpo_on_smollm2_matches_the_native_engine(grpo):
    """Three steps colocated and as a process: first-step samples are equal, log-probs within 1e-4, rewards step by step."""
    expected, expected_samples = grpo("native", "actor_rollout_ref.rollout.name=native")
    for mode in ("sync", "async"):
        metrics, samples = grpo(mode, "actor_rollout_ref.rollout.name=vllm", f"actor_rollout_ref.rollout.mode={mode}")
        gaps = []
        for row, other in zip(samples[0], expected_samples[0], strict=True):
            assert row["response_ids"] == other["response_ids"]
            gaps += [abs(a - b) for a, b in zip(row["log_probs"], other["log_probs"], strict=True)]
        assert max(gaps) < TOLERANCE
        versions = [{row["weight_version"] for row in rows} for rows in samples]
        assert versions == [{row["weight_version"] for row in rows} for rows in expected_samples]
        rewards = [[row["critic/rewards/mean"] for row in rows] for rows in (metrics, expected)]
        assert rewards[0] == pytest.approx(rewards[1], abs=0.02)
