"""Episodes over one generation: a sample depends on its tokens and its tools' answers, not on time, slots or memory."""

import asyncio
import random
import threading

import numpy as np
import pytest
import torch

from verl.agents.driver import EpisodeDriver, EventLoop
from verl.agents.episode import AgentKilled, EpisodeError, EpisodeResult, EpisodeTask
from verl.config import RolloutConfig
from verl.config.sections.rollout import AgentConfig
from verl.data_proto.samples import PromptRequest, SamplingParams
from verl.errors import DeadlineError
from verl.models.tiny import make_tokenizer
from verl.rollout.hf import HFRollout
from verl.rollout.native.compiled.library import kernels
from verl.rollout.native.engine import NativeRollout

STOPS = tuple(range(0, 80))  # a random model samples one every few tokens
PARAMS = SamplingParams(n=3, max_new_tokens=60, stop_token_ids=STOPS, seed=5)


@pytest.fixture(scope="module")
def module(tiny_llama):
    from transformers import AutoModelForCausalLM

    import verl.models.attention  # noqa: F401

    return AutoModelForCausalLM.from_pretrained(tiny_llama, attn_implementation="verl", dtype=torch.float32)


@pytest.fixture
def events():
    loop = EventLoop()
    yield loop
    loop.close()


def engine_of(module, cls=NativeRollout, *, slots=8, kv_cache_mb=100):
    config = RolloutConfig(max_num_seqs=slots, agent=AgentConfig(kv_cache_mb=kv_cache_mb), batch_invariant="auto")
    return cls(module, make_tokenizer(), config, eos_token_ids=[258])


def tasks(count=6, n=3):
    return [
        EpisodeTask(10 + i, s, 1, "train", (257, *range(97, 100 + i % 3)), {}, 60, 20)
        for i in range(count)
        for s in range(n)
    ]


def agent(delay=lambda: 0.0):
    async def run(episode):
        prompt = list(episode.task.prompt_ids)
        response, mask = [], []
        for turn in range(5):
            done = await episode.generate(prompt + response)
            if done is None:
                break
            response += done.token_ids
            mask += [1] * len(done.token_ids)
            await asyncio.sleep(delay())
            answer = [258, 257, 100 + (sum(response) + turn) % 50]  # the result of a tool
            if len(response) + len(answer) >= episode.task.limit:
                break
            response += answer
            mask += [0] * len(answer)
        while mask and not mask[-1]:
            mask.pop(), response.pop()
        return EpisodeResult(episode.task, episode.trajectory(prompt, response, mask, "stop"))

    return run


def run(module, events, *, delay=lambda: 0.0, max_episodes=100, count=6, **engine):
    driver = EpisodeDriver(engine_of(module, **engine), events, max_episodes=max_episodes, timeout_s=60.0, filler=258)
    episodes = driver.run(tasks(count), agent(delay), PARAMS, step=1)
    return [(r.trajectory.response_ids, r.trajectory.to_row()) for r in episodes], driver.stats


def same(a, b, exact=True):
    for (ids, row), (other_ids, other) in zip(a, b, strict=True):
        assert ids == other_ids
        assert (row.response_mask == other.response_mask).all()
        np.testing.assert_allclose(row.log_probs, other.log_probs, atol=0 if exact else 1e-5)


def test_time_slots_and_memory_change_no_sample(module, events):
    rng = random.Random(1)
    invariant = engine_of(module).invariance().holds
    reference, stats = run(module, events)
    assert any((~row.response_mask).sum() >= 6 for _, row in reference)  # several turns
    for changes in (
        {"delay": lambda: rng.random() * 0.01},
        {"slots": 2},
        {"max_episodes": 3},
        {"kv_cache_mb": 0},
        {"cls": HFRollout},
    ):
        episodes, its_stats = run(module, events, **changes)
        # PyTorch's attention rounds a turn that is computed again otherwise than its tokens one by one
        rounds = "cls" in changes or ("kv_cache_mb" in changes and kernels() is None)
        same(reference, episodes, exact=invariant and not rounds)
        if changes.get("kv_cache_mb") == 0:
            assert its_stats["num_evicted"] > 0
            assert its_stats["num_prompt_tokens_computed"] > stats["num_prompt_tokens_computed"]


def test_kept_turns_compute_each_token_once(module, events):
    episodes, stats = run(module, events)
    # the last token of a turn is computed with the tokens that follow it
    new = sum(int((~row.response_mask).sum()) + 5 for _, row in episodes)
    prompts = sum(len(task.prompt_ids) for task in tasks()[::3])
    assert stats["num_prompt_tokens_computed"] <= prompts + new
    assert stats["num_evicted"] == 0


def test_a_turn_continues_the_response_it_belongs_to(module, events):
    """Log-probs of sampled tokens equal the log-probs of one forward over the whole episode."""
    episodes, _ = run(module, events, count=2)
    for ids, row in episodes:
        tokens = torch.tensor([[*row.prompt_ids.tolist(), *ids]])
        with torch.no_grad():
            log_probs = engine_of(module, HFRollout).view(tokens).logits.log_softmax(-1)[0]
        start = len(row.prompt_ids)
        for i, sampled in enumerate(row.response_mask):
            if sampled:
                assert abs(float(log_probs[start + i - 1, ids[i]]) - row.log_probs[i]) < 1e-4


def test_the_first_turn_is_the_sample_without_agents(module, events):
    episodes, _ = run(module, events, count=2)
    plain = engine_of(module).generate([PromptRequest(10, tasks()[0].prompt_ids)], PARAMS, step=1)
    assert [ids[: len(p.token_ids)] for (ids, _), p in zip(episodes, plain, strict=False)] == [
        p.token_ids for p in plain
    ]


def test_branches_have_tokens_of_their_own(module, events):
    """Calls that do not continue the conversation begin a branch. Its tokens do not depend on the order of the calls."""

    def branching(order):
        async def run_one(episode):
            prompt = list(episode.task.prompt_ids)
            first = await episode.generate(prompt)
            requests = [prompt + [105], prompt + [106]]
            answers = await asyncio.gather(*(episode.generate(requests[i]) for i in order))
            again = await episode.generate(prompt)  # the same prompt a second time is another sample
            by_prompt = dict(zip(order, [a.token_ids for a in answers], strict=True))
            result = EpisodeResult(
                episode.task, episode.trajectory(prompt, first.token_ids, [1] * len(first.token_ids), "stop")
            )
            result.extra = {"by_prompt": sorted(by_prompt.items()), "again": again.token_ids, "first": first.token_ids}
            return result

        driver = EpisodeDriver(engine_of(module), events, max_episodes=9, timeout_s=60.0, filler=258)
        return [r.extra for r in driver.run(tasks(2), run_one, PARAMS, step=1)]

    one, other = branching((0, 1)), branching((1, 0))
    assert one == other
    assert any(extra["again"] != extra["first"] for extra in one)


def test_an_episode_whose_agent_is_killed_is_made_again(module, events, caplog):
    """With the same tokens; an agent that is killed again and again is left out."""
    run_agent, takes = agent(), []

    async def dies(episode):
        takes.append(episode.task.name)
        times = {"train/10/1": 1, "train/11/0": 99}.get(episode.task.name, 0)
        if takes.count(episode.task.name) <= times:
            await episode.generate(list(episode.task.prompt_ids))
            raise AgentKilled("its command ended its process by SIGKILL")
        return await run_agent(episode)

    driver = EpisodeDriver(engine_of(module), events, max_episodes=100, timeout_s=60.0, filler=258)
    expected = driver.run(tasks(2), run_agent, PARAMS, step=1)
    results = driver.run(tasks(2), dies, PARAMS, step=1)
    assert [r.task.name for r in results if r.error] == ["train/11/0"]
    assert takes.count("train/11/0") == 3
    for a, b in zip(expected, results, strict=True):
        assert b.error or a.trajectory.response_ids == b.trajectory.response_ids
    assert "train/10/1 is made again: its command ended its process by SIGKILL" in caplog.text


@pytest.mark.parametrize(("effects", "num_takes"), [(False, 3), (True, 1)])
def test_an_episode_that_fails_is_made_again_unless_a_tool_would_act_twice(module, events, caplog, effects, num_takes):
    run_agent, takes = agent(), []

    async def flaky(episode):
        takes.append(episode.task.name)
        if episode.task.name == "train/10/1" and takes.count("train/10/1") <= 2:
            await episode.generate(list(episode.task.prompt_ids))
            episode.num_unrecorded += effects  # as a call that the journal does not have
            raise ConnectionError("the backend is away.")
        return await run_agent(episode)

    driver = EpisodeDriver(engine_of(module), events, max_episodes=100, timeout_s=60.0, filler=258, num_retries=2)
    expected = driver.run(tasks(2), run_agent, PARAMS, step=1)
    results = driver.run(tasks(2), flaky, PARAMS, step=1)
    assert takes.count("train/10/1") == num_takes
    assert driver.stats["num_retried_episodes"] == num_takes - 1
    assert [r.task.name for r in results if r.error] == ["train/10/1"] * effects
    for a, b in zip(expected, results, strict=True):
        assert b.error or a.trajectory.response_ids == b.trajectory.response_ids
    assert ("is made again: raised ConnectionError: the backend is away." in caplog.text) != effects


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("raises", "raised ValueError: no"),
        ("exits", "raised SystemExit"),
        ("hangs", "took longer than"),
        ("invents", "would train but was not sampled there"),
        ("unknown token", "knows 264 tokens"),
        ("long prompt", "more than data.max_prompt_length=20"),
    ],
)
def test_an_episode_that_fails_costs_no_other(module, events, caplog, what, sentence):
    good = agent()

    async def run_one(episode):
        if (episode.task.ordinal, episode.task.sample) != (11, 1):
            return await good(episode)
        if what == "raises":
            raise ValueError("no")
        if what == "exits":
            raise SystemExit(3)
        if what == "hangs":
            await asyncio.sleep(100)
        prompt = list(episode.task.prompt_ids) * (20 if what == "long prompt" else 1)
        done = await episode.generate([*prompt, 9999] if what == "unknown token" else prompt)
        return EpisodeResult(
            episode.task, episode.trajectory(prompt, [*done.token_ids, 5], [1] * (len(done.token_ids) + 1), "stop")
        )

    timeout = 2.0 if what == "hangs" else 60.0
    driver = EpisodeDriver(engine_of(module), events, max_episodes=100, timeout_s=timeout, filler=258)
    results = driver.run(tasks(3), run_one, PARAMS, step=1)
    (failed,) = [r for r in results if r.error]
    assert (failed.task.ordinal, failed.task.sample) == (11, 1)
    assert sentence in failed.error
    assert "train/11/1 is left out" in caplog.text
    assert not failed.trajectory.to_row().response_mask.any()


def test_a_log_names_some_of_many_failures(module, events, caplog):
    async def raises(episode):
        raise ValueError("no.")

    driver = EpisodeDriver(engine_of(module), events, max_episodes=100, timeout_s=60.0, filler=258)
    results = driver.run(tasks(3), raises, PARAMS, step=1)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("is left out: raised ValueError: no." in line for line in lines) == 5
    assert f"So are {len(results) - 5} more episodes" in lines[-1]
    assert ".." not in "".join(lines)


def test_an_agent_that_blocks_the_event_loop_is_named(module, events, monkeypatch):
    monkeypatch.setattr("verl.agents.driver.GRACE_S", 0.2)

    blocked = threading.Event()

    async def blocks(episode):
        blocked.wait(120)
        raise EpisodeError("late")

    driver = EpisodeDriver(engine_of(module), events, max_episodes=100, timeout_s=0.2, filler=258)
    try:
        with pytest.raises(DeadlineError, match="blocks the event loop"):
            driver.run(tasks(1, n=1), blocks, PARAMS, step=1)
    finally:
        blocked.set()
