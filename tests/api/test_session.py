"""`verl.Session`: loops that users write themselves, in one process, under torchrun and on Ray."""

import errno
import json
import math
import sys

import pytest
import torch

import verl
from tests.api import session_loop
from tests.api.session_loop import KEYS, PROMPTS, main, reinforce, take_step
from tests.commands import python
from tests.runtime.ranks import ROOT, environment, run
from verl.errors import CheckpointError, ConfigError, DataError
from verl.registry import reference_to

ROWS = [{"prompt_ids": [5, 6], "response_ids": [7, 8, 9], "advantage": 1.0}]


@pytest.fixture
def session(tiny_llama):
    with verl.Session(tiny_llama, config=[*KEYS, "actor_rollout_ref.rollout.n=2"]) as opened:
        yield opened


def summed(outputs, rows, totals):
    return outputs["log_probs"].sum()


def test_a_sample_has_the_log_probs_of_its_training_forward(session):
    samples = session.sample([*PROMPTS, [5, 6, 7], [{"role": "user", "content": "Hi"}]], n=2)
    assert [sample["prompt"] for sample in samples] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert samples[6]["prompt_ids"] == [5, 6, 7]
    for sample, log_probs in zip(samples, session.log_probs(samples), strict=True):
        assert len(sample["response_ids"]) == len(log_probs) == len(sample["log_probs"])
        assert sample["log_probs"] == pytest.approx(log_probs, abs=1e-4)
    greedy = [session.sample(iter(PROMPTS), greedy_decoding=True, max_tokens=3) for _ in range(2)]
    assert [[s["response_ids"] for s in call] for call in greedy][0] == [s["response_ids"] for s in greedy[1]]
    assert all(len(sample["response_ids"]) <= 3 for sample in greedy[0])
    assert len(greedy[0]) == 2 * len(PROMPTS)  # rollout.n, as `n` is not given


def test_the_value_of_a_loss_is_the_sum_over_the_rows_that_train(session):
    rows = [*ROWS, {"prompt_ids": [5], "response_ids": [6, 7], "response_mask": [1, 0], "advantage": 2.0}]
    first, second = session.log_probs(rows)
    expected = -(sum(first) + 2.0 * second[0]) / 4
    assert session.log_probs(iter(rows)) == [first, second]
    metrics = session.forward_backward(iter(rows), reinforce)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["num_rows"] == 2


def test_a_step_raises_the_log_probs_that_the_loss_asks_for(session):
    before = session.log_probs(ROWS)
    for _ in range(3):
        session.forward_backward(ROWS, reinforce)
        assert session.optim_step(learning_rate=1e-3)["lr"] == 1e-3
    assert sum(session.log_probs(ROWS)[0]) > sum(before[0])


def test_a_saved_session_continues_bit_for_bit(session, tiny_llama, tmp_path):
    take_step(session)
    folder = session.save(tmp_path / "checkpoint")
    expected = [take_step(session) for _ in range(2)]
    with verl.Session(tiny_llama, config=KEYS) as other:
        other.forward_backward(ROWS, reinforce)
        with pytest.raises(ConfigError, match="Call optim_step before save"):
            other.save(tmp_path / "other")
        other.load(folder)  # it drops the gradients
        with pytest.raises(ConfigError, match="There are no gradients"):
            other.optim_step()
        assert [take_step(other) for _ in range(2)] == expected
    assert (folder / "actor" / "huggingface" / "config.json").is_file()
    with pytest.raises(CheckpointError, match="exists already"):
        session.save(folder)
    with pytest.raises(CheckpointError, match=r"no checkpoint of a session: it has no session\.json"):
        session.load(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint of a session: the folder does not exist"):
        session.load(tmp_path / "none")
    (folder / "session.json").write_text('{"num_prompts": 2')
    with pytest.raises(CheckpointError, match="no checkpoint of a session"):
        session.load(folder)
    (folder / "session.json").unlink()  # what is left is what a step of a run has
    with pytest.raises(
        CheckpointError, match=r"but has a model\. Begin from it with verl\.Session\('.*actor/huggingface'"
    ):
        session.load(folder)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left"), "failed: No space left. Free some space"),
        (OSError("odd"), "odd. Check"),
    ],
)
def test_a_save_that_the_disk_refuses_leaves_nothing(session, tmp_path, monkeypatch, error, words):
    def refuse(path):
        raise error

    monkeypatch.setattr(session._policy, "save", refuse)
    with pytest.raises(CheckpointError, match=words):
        session.save(tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda s: s.optim_step(), ConfigError, "Call forward_backward before"),
        (lambda s: s.optim_step(learning_rate=math.nan), ConfigError, "must be a finite number"),
        (lambda s: s.optim_step(learning_rate=-1.0), ConfigError, "must be a finite number"),
        (lambda s: s.forward_backward(ROWS, lambda o, r, t: o["log_probs"].detach().sum()), ConfigError, "no gradient"),
        (lambda s: s.forward_backward([{**ROWS[0], "advantage": None}, *ROWS], summed), DataError, "row 0 .* a number"),
        (lambda s: s.sample([{"role": "user", "content": "q"}]), DataError, "prompt 0 is a single message"),
        (lambda s: s.forward_backward([], summed), DataError, "at least one with prompt_ids"),
        (lambda s: s.forward_backward([{"prompt_ids": [1]}], summed), DataError, "response_ids of row 0"),
        (lambda s: s.forward_backward([{**ROWS[0], "advantage": [1.0]}], summed), DataError, "3 numbers"),
        (lambda s: s.forward_backward([*ROWS, {**ROWS[0], "advantage": [1]}], summed), DataError, "row 1 .* a number"),
        (lambda s: s.forward_backward([*ROWS, {**ROWS[0], "advantage": None}], summed), DataError, "row 1 .* a number"),
        (lambda s: s.forward_backward([*ROWS, {**ROWS[0], "advantage": "x"}], summed), DataError, "row 1 .* a number"),
        (lambda s: s.forward_backward([{**ROWS[0], "prompts": 1}], summed), DataError, "another name"),
        (lambda s: s.forward_backward(ROWS, lambda o, r, t: o["log_probs"]), ConfigError, "scalar tensor"),
        (lambda s: s.forward_backward([{**ROWS[0], "response_ids": [10**6]}], summed), DataError, "token id"),
        (lambda s: s.sample([]), DataError, "at least one entry"),
        (lambda s: s.sample(PROMPTS, max_tokens=7), DataError, "data.max_response_length=6"),
        (lambda s: s.sample([[5] * 500]), DataError, "max_prompt_length"),
        (lambda s: s.sample(PROMPTS, n=1.5), DataError, "must be a whole number"),
        (lambda s: s.sample(PROMPTS, max_tokens=True), DataError, "max_tokens"),
        (
            lambda s: s.forward_backward([{**ROWS[0], "response_ids": [5] * 900}], summed),
            DataError,
            "max_response_length",
        ),
        (lambda s: s.log_probs(ROWS, reference=True), ConfigError, "use_kl_loss"),
    ],
)
def test_a_wrong_call_is_refused_and_leaves_the_session_usable(session, call, error, words):
    with pytest.raises(error, match=words):
        call(session)


def test_a_call_that_fails_drops_the_gradients(session):
    session.forward_backward(ROWS, reinforce)
    with pytest.raises(ConfigError, match="no gradient"):
        session.forward_backward(ROWS, lambda outputs, rows, totals: outputs["log_probs"].detach().sum())
    with pytest.raises(ConfigError, match="There are no gradients"):
        session.optim_step()


def test_a_reference_policy_keeps_the_initial_weights(tiny_llama):
    with verl.Session(tiny_llama, config=[*KEYS, "actor_rollout_ref.actor.use_kl_loss=True"]) as session:
        before = session.log_probs(ROWS)
        session.forward_backward(ROWS, reinforce)
        session.optim_step()
        assert session.log_probs(ROWS, reference=True) == before != session.log_probs(ROWS)


def test_a_function_of_a_script_that_runs_as_a_module_is_imported_from_the_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", session_loop)
    monkeypatch.setattr(reinforce, "__module__", "__main__")
    monkeypatch.setattr(session_loop, "__name__", "__main__")
    assert reference_to(reinforce) == "tests.api.session_loop:reinforce"


def assert_same(results, expected):
    for step, reference in zip(results["steps"], expected["steps"], strict=True):
        assert step.pop("responses") == reference.pop("responses")
        assert step == pytest.approx(reference, rel=1e-3)
    assert torch.tensor(results["log_probs"]).allclose(torch.tensor(expected["log_probs"]), atol=1e-3)


@pytest.fixture(scope="module")
def one_process(tiny_llama, tmp_path_factory):
    out = tmp_path_factory.mktemp("session") / "one.json"
    main(str(tiny_llama), out)
    return out


def test_two_ranks_take_the_steps_of_one_process(one_process, tiny_llama, tmp_path):
    run(2, "tests.api.session_loop", tiny_llama, tmp_path / "two.json", timeout_s=180)
    assert_same(*(json.loads(file.read_text()) for file in (tmp_path / "two.json", one_process)))


@pytest.mark.slow
def test_two_actors_of_ray_take_the_steps_of_one_process(one_process, tiny_llama, tmp_path):
    pytest.importorskip("ray")
    keys = ("trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=4")
    command = ("-m", "tests.api.session_loop", tiny_llama, tmp_path / "ray.json", *keys)
    python(*command, cwd=ROOT, env=environment(RAY_AUTH_MODE="disabled"), timeout=280)
    assert_same(*(json.loads(file.read_text()) for file in (tmp_path / "ray.json", one_process)))
