"""A run that trains on nothing says so once, with the likeliest cause."""

import pytest

from tests.letters_task import write_reward
from verl.run.loop import Loop
from verl.tracking.learning import CollapseWatch, SignalWatch, StillWatch, TrainedRole

SILENT = {"critic/advantages/max": 0.0, "critic/advantages/min": 0.0, "critic/score/mean": 0.0}
ACTOR = "actor_rollout_ref.actor"
LEARNS = {**SILENT, "critic/advantages/max": 0.5}


def all_score(reward):
    return {"critic/score/max": reward, "critic/score/min": reward}


def said(steps, samples_per_prompt=4):
    watch = SignalWatch(max_response_length=16, samples_per_prompt=samples_per_prompt)
    for step, metrics in enumerate(steps, 1):
        watch.record(step, metrics)


@pytest.mark.parametrize(
    ("metrics", "samples_per_prompt", "words"),
    [
        ({}, 4, "All samples of a prompt score the same"),
        ({"critic/score/max": 0.5}, 1, "set actor_rollout_ref.rollout.n to 4 or more"),
        ({}, 1, "All samples of a prompt score the same"),  # GRPO trains a single sample with its raw reward, here 0
        ({"response_length/clip_ratio": 0.95}, 4, "95% of the responses are cut at data.max_response_length=16"),
        (all_score(1.0), 4, "Every sample has the reward 1: the task is solved"),
        ({**all_score(1.0), "response_length/clip_ratio": 0.95}, 4, "the task is solved"),
        (all_score(0.2), 4, "Every sample has the reward 0.2: the task is solved"),
        ({**all_score(0.2), "response_length/clip_ratio": 0.95}, 4, "are cut at"),  # for its form, perhaps
        (all_score(-1.0), 4, "All samples of a prompt score the same"),
        ({"rollout/num_failed_episodes": 7}, 4, "7 episodes of the last step have failed"),
        ({"reward/num_defaulted": 12}, 4, "The reward function has failed for 12 samples"),
        (
            {**LEARNS, "rollout_corr/rollout_rs_masked_fraction": 1.0},
            4,
            "every token is rejected (mean reward 0). Sampler and",
        ),
    ],
)
def test_the_third_silent_step_warns(caplog, metrics, samples_per_prompt, words):
    said([{**SILENT, **metrics}] * 9, samples_per_prompt)
    assert [record.getMessage().count(words) for record in caplog.records] == [1]
    assert "Steps 1 to 3 learnt nothing" in caplog.text


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([SILENT], ["Step 1 learnt nothing"]),
        ([SILENT, SILENT], ["Steps 1 to 2 learnt nothing"]),
        ([LEARNS, SILENT], []),
        ([SILENT] * 3, ["Steps 1 to 3 learnt nothing"]),
        ([{}], []),  # a batch that was left out has another warning
    ],
)
def test_a_run_of_few_steps_warns_with_its_last(caplog, steps, words):
    watch = SignalWatch(max_response_length=16, samples_per_prompt=4)
    for step, metrics in enumerate(steps, 1):
        watch.record(step, metrics, is_last=step == len(steps))
    assert [record.getMessage().partition(" from ")[0] for record in caplog.records] == words


@pytest.mark.parametrize(
    ("mean", "distinct", "words"),
    [
        (
            0.0,
            0.3,
            "The mean reward was 0.45 in step 2, and responses have become alike since: the policy has collapsed",
        ),
        (0.0, 0.9, "are cut at"),  # different responses are no collapse
        (0.4, 0.3, "are cut at"),  # nor is a reward that has hardly fallen
    ],
)
def test_a_reward_that_was_there_names_a_collapse(caplog, mean, distinct, words):
    before = [{**LEARNS, "critic/score/mean": reward, "response/distinct_ratio": 0.95} for reward in (0.2, 0.45, 0.45)]
    after = {
        **SILENT,
        "critic/score/mean": mean,
        "response/distinct_ratio": distinct,
        "response_length/clip_ratio": 1.0,
    }
    said([*before, *[after] * 3])
    (record,) = caplog.records
    assert words in record.getMessage()


def test_a_signal_in_between_begins_the_count_anew(caplog):
    said([SILENT, SILENT, LEARNS, SILENT, SILENT, {"critic/score/mean": 1.0}])
    assert not caplog.records


def collapsed(*steps, rewards=(0.0, 1.0)):
    """A CollapseWatch after `steps`: (share of the most frequent response, mean reward)."""
    watch = CollapseWatch()
    for number, (share, mean) in enumerate(steps, 1):
        scores = dict(zip(("min", "max", "mean"), (*rewards, mean), strict=True))
        metrics = {f"critic/score/{name}": value for name, value in scores.items()}
        watch.record(number, metrics if share is None else {**metrics, "response/most_frequent_ratio": share})


def test_one_answer_to_nearly_all_prompts_while_the_reward_rises_is_warned_of_once(caplog):
    collapsed((0.05, 0.02), (0.6, 0.3), (0.8, 0.4), (0.84, 0.52), (0.5, 0.5), *[(0.9, 0.5)] * 4)
    (record,) = caplog.records
    assert "Step 4: 84% of the samples are one and the same response" in record.getMessage()
    assert "(0.02 in the first step, now 0.52): the policy collapses" in record.getMessage()
    assert "entropy_coeff" in record.getMessage()


@pytest.mark.parametrize(
    ("steps", "rewards"),
    [
        ([(0.05, 0.02), *[(0.95, 0.97)] * 4], (0.0, 1.0)),
        ([(0.05, -0.9), *[(0.95, -0.02)] * 4], (-1.0, 0.0)),
        ([(None, 0.02), *[(None, 0.5)] * 4], (0.0, 1.0)),
        ([(0.55, 0.5), *[(0.9, 0.6)] * 4], (0.0, 1.0)),
        ([(0.8, 0.1), *[(0.9, 0.5)] * 4], (0.0, 1.0)),
        ([(0.05, 0.5), *[(0.9, 0.5)] * 4], (0.0, 1.0)),
        ([(0.05, 0.1), (0.9, 0.5), (0.3, 0.5), (0.9, 0.5)], (0.0, 1.0)),
    ],
    ids=["solved", "solved, penalties", "few prompts", "yes or no", "from the start", "no rise", "a single step"],
)
def test_few_different_responses_with_another_cause_are_no_collapse(caplog, steps, rewards):
    collapsed(*steps, rewards=rewards)
    assert not caplog.records


@pytest.mark.parametrize(("else_", "is_said"), [(0, True), (1, False)])
def test_a_run_says_that_its_policy_collapses(tiny_run, tmp_path, caplog, else_, is_said):
    """Onto a response that is right for every second prompt, or for all of them."""
    letters = "sum(map(str.isalpha, solution_str)) / max(len(solution_str), 1)"
    reward = write_reward(tmp_path, f"return {letters} * (int(ground_truth) % 2 or {else_})")
    steps = ["trainer.total_training_steps=18", "data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8"]
    run = tiny_run(*steps, reward, f"{ACTOR}.optim.lr=0.02")
    first, last = run.rows[0], run.rows[-1]
    assert first["response/distinct_ratio"] > 0.5 > 0.4 > last["response/distinct_ratio"]
    assert last["critic/score/mean"] > first["critic/score/mean"]
    assert ("the policy collapses to one answer" in caplog.text) == is_said


def test_updates_that_rounding_hides_are_warned_of_once_for_each_role(tiny_run, around, caplog):
    """Not those of weight decay in a step without a gradient."""
    ratios = iter([(0.1, 0.0), (0.1, 1.0), (0.1, 1.0)])

    def hidden(metrics, self, result, seconds):
        named = zip(("actor/visible_update_ratio", "actor/grad_norm"), next(ratios), strict=True)
        return {**metrics(self, result, seconds), **dict(named)}

    around(Loop, "_metrics", hidden)
    tiny_run("trainer.total_training_steps=3")
    (said,) = [r.getMessage() for r in caplog.records if r.name == "verl.run.loop"]
    assert "Only 10% of the weight updates of the actor survive rounding" in said
    assert "Set actor_rollout_ref.actor.fsdp_config.master_rounding=dithered" in said


TAUGHT = {"actor/grad_norm": 1.0, "actor/lr": 1e-6, "critic/advantages/max": 0.5, "critic/advantages/min": -0.5}


def validated(*fingerprints, metrics=TAUGHT, lora_rank=0, lr=1e-6):
    """A StillWatch after a validation before training, and one after each two steps."""
    watch = StillWatch(TrainedRole("actor", f"{ACTOR}.optim", lr, lora_rank > 0))
    for number, fingerprint in enumerate(fingerprints):
        watch.validated(2 * number, fingerprint)
        for _ in range(2):
            watch.trained(metrics)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, f"Raise {ACTOR}.optim.lr (now 1e-06)."),
        ({"lora_rank": 16}, "Adapters (lora_rank) usually take 1e-5 to 1e-3."),
        ({"lr": 1e-3}, f"The schedule keeps it below {ACTOR}.optim.lr=0.001: shorten {ACTOR}.optim.lr_warmup_steps."),
    ],
)
def test_a_rate_that_moves_no_weight_is_warned_of_at_the_third_equal_validation(caplog, settings, words):
    validated(*"aaaaa", **settings)
    (record,) = caplog.records
    assert "The validations after steps 0, 2 and 4 are equal to the last digit" in record.getMessage()
    assert words in record.getMessage()


@pytest.mark.parametrize(
    ("fingerprints", "metrics"),
    [
        ("aabba", TAUGHT),
        ([None] * 4, TAUGHT),  # a solved task, or a program that cannot tell
        ("aaaa", {**TAUGHT, **SILENT}),  # no signal
        ("aaaa", {**TAUGHT, "actor/grad_norm": 0.0}),
        ("aaaa", {**TAUGHT, "actor/visible_update_ratio": 0.1}),  # rounding
        ("aaaa", {**TAUGHT, "response/most_frequent_ratio": 0.9}),  # a collapse
        ("aaaa", {}),  # skipped steps
    ],
    ids=["changing", "unknown", "no signal", "no gradient", "rounding", "collapse", "skipped"],
)
def test_equal_validations_with_another_cause_do_not_blame_the_rate(caplog, fingerprints, metrics):
    validated(*fingerprints, metrics=metrics)
    assert not caplog.records


@pytest.mark.parametrize(("lr", "is_said"), [(1e-9, True), (1e-2, False)])
def test_a_run_says_that_its_rate_is_too_small(tiny_run, caplog, lr, is_said):
    tiny_run("trainer.total_training_steps=3", "trainer.test_freq=1", f"{ACTOR}.optim.lr={lr}")
    assert ("validations after steps 1, 2 and 3 are equal" in caplog.text) == is_said
    assert (f"Raise {ACTOR}.optim.lr (now 1e-09)" in caplog.text) == is_said
