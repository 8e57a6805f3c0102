"""Wrong numbers injected into a tiny run: every guard with every action, and the run's reaction."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from tests.json_lines import read_lines
from tests.run.conftest import Run, merge
from tests.run.test_resume import weights
from tests.runtime import ranks
from verl.config import load_config
from verl.config.sections.trainer import GuardConfig, GuardsConfig, NonfiniteGuardConfig
from verl.engines.api import whole
from verl.errors import ConfigError, NumericsError
from verl.programs import ppo_program as program_file
from verl.programs.api import ProgramSpecs, RunContext
from verl.programs.ppo import PPO
from verl.programs.ppo_data import load_data
from verl.roles.guards import Finding, Guards, RollBack, StepGuard, merge_findings
from verl.roles.model import ModelRole
from verl.roles.objectives.policy import PolicyObjective
from verl.roles.reward import RewardWorker
from verl.rollout.native.engine import NativeRollout
from verl.runtime.local import LocalRuntime
from verl.tracking.timeline import Spans

pytestmark = pytest.mark.seed("F7")

# Two optimizer steps a batch: old log-probs are then the sampler's. A reference policy, a schedule, and a controller that an
# abandoned step must not change.
SETTINGS = (
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=100",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "trainer.total_training_steps=1000",
)


class Bench:
    """One set of roles; each step may have separate guards."""

    def __init__(self, overrides, folder):
        self.config = load_config(overrides).config
        data = load_data(self.config)
        runtime = LocalRuntime(ProgramSpecs(PPO, self.config))
        self.roles = runtime.build_roles(total_steps=1000, data_sources=data.data_sources)
        self.actor, self.reference = runtime.workers.models["actor"], runtime.workers.models["reference"]
        context = RunContext(folder, False, lambda value: value, lambda: None, Spans(), lambda *_: None)
        self.program = PPO(self.config, data, self.roles, context)
        self.num_steps = 0
        self.roles.weights.sync(0)

    def step(self, guards):
        """The rows and metrics of a step."""
        self.program.guards = Guards(guards)
        guard = self.actor.guard = StepGuard(guards)
        self.actor.objective = self.actor.spec.objective(guard)
        self.num_steps += 1
        return self.program.step(self.num_steps)

    def holds(self):
        """All state that a skipped step must not change, as bytes and numbers."""
        state = self.actor.engine.state()
        tensors = {**state.model, **{f"optimizer/{k}": v for k, v in state.optimizer.items()}}
        return {
            **{name: whole(t).numpy().tobytes() for name, t in tensors.items()},
            "extra": dict(state.extra),
            "random": torch.get_rng_state().numpy().tobytes(),
            "controller": self.program.kl_controller.state_dict(),
        }


@pytest.fixture(scope="module")
def bench(tiny_llama, tiny_task, tmp_path_factory):
    group = "actor_rollout_ref"
    started = Bench(
        [
            *("algorithm.adv_estimator=grpo", f"{group}.model.path={tiny_llama}", f"{group}.rollout.n=4"),
            *(f"data.train_files={tiny_task}/train.jsonl", "data.val_files=[]", "data.train_batch_size=4"),
            *("data.max_prompt_length=64", "data.max_response_length=6", f"{group}.actor.optim.lr=0.002"),
            *(f"{group}.actor.fsdp_config.dtype=float32", "reward.debug=True"),
            f"reward.custom_reward_function.path={tiny_task}/reward.py",
            *SETTINGS,
        ],
        tmp_path_factory.mktemp("guards"),
    )
    yield started
    started.roles.close()


def after(around, owner, name, change):
    """Apply `change(result)` to the method's result."""

    def call(original, *args, **kwargs):
        result = original(*args, **kwargs)
        return change(result) or result

    around(owner, name, call)


def after_reference(around, change):
    """Apply `change(columns)` to the columns that the reference policy computes."""
    after(around, ModelRole, "forward", lambda batch: change(batch) if "ref_log_prob" in batch.batch.keys() else None)


def put(column, value, row=5):
    def change(batch):
        batch.batch[column][row, 0] = value

    return change


def shift_samplers(result):
    result[0].batch.batch["rollout_log_probs"][3] += 1.0


def move_reference(batch):
    batch.batch["ref_log_prob"][3] -= 19.0


def break_gradient(around):
    """The gradient of the samples' log-probs becomes NaN, the loss stays a number."""

    def call(original, self, outputs, batch, totals):
        outputs["log_probs"].register_hook(lambda gradient: gradient * math.nan)
        return original(self, outputs, batch, totals)

    around(PolicyObjective, "__call__", call)


def break_log_probs(around):
    def call(original, self, outputs, batch, totals):
        spoilt = outputs["log_probs"] * 1.0
        spoilt[1, 0] = math.inf
        return original(self, {**outputs, "log_probs": spoilt}, batch, totals)

    around(PolicyObjective, "__call__", call)


def break_loss(around):
    after(around, PolicyObjective, "__call__", lambda pair: (pair[0] * math.nan, pair[1]))


# injected fault -> (guard, its limit, how, words of the sentence)
CASES = {
    "reward": ("nonfinite", None, lambda b, a: after(a, RewardWorker, "collect", put("token_level_scores", math.nan)),
               r"token_level_scores is not finite \(nan\) in the batch, 1 sample \(prompt \d+ sample 1: nan\)"),
    "sampled log-prob": ("nonfinite", None,
                         lambda b, a: after(a, b.program, "collect", lambda r: put("rollout_log_probs", -math.inf)(r[0].batch)),
                         r"rollout_log_probs is not finite \(-inf\) .*sample 1: -inf"),
    "reference": ("nonfinite", None, lambda b, a: after_reference(a, put("ref_log_prob", math.nan)),
                  "ref_log_prob is not finite"),
    "advantage": ("nonfinite", None,
                  lambda b, a: after(a, program_file, "compute_advantage", lambda f: (f[0] / 0.0, f[1])),
                  "advantages is not finite"),
    "loss": ("nonfinite", None, lambda b, a: break_loss(a), r"loss is not finite \(nan\) in mini-batch 1 of the actor"),
    "log-prob": ("nonfinite", None, lambda b, a: break_log_probs(a), r"not finite .*sample \d+: inf"),
    "gradient": ("nonfinite", None, lambda b, a: break_gradient(a), r"grad_norm is not finite \(nan\)"),
    "grad_norm": ("grad_norm", 1e-9, None, "gradient norm is .* beyond trainer.guards.grad_norm.limit=1e-09"),
    "policy_kl": ("policy_kl", 0.005, lambda b, a: after(a, b.program, "collect", shift_samplers),
                  r"KL to the old policy .*mini-batch 1 .*sample 3: "),
    "ratio": ("ratio", 2.0, lambda b, a: after(a, b.program, "collect", shift_samplers), "ratio .* is 2.7"),
    "sampler_kl": ("sampler_kl", 0.005, lambda b, a: after(a, b.program, "collect", shift_samplers),
                   "KL of the sampler to the policy is .*beyond trainer.guards.sampler_kl.limit=0.005"),
    "mismatch": ("mismatch", 0.001, lambda b, a: after(a, b.program, "collect", shift_samplers), "sampler's probability"),
    "reference_kl": ("reference_kl", 0.4, lambda b, a: after_reference(a, move_reference),
                     r"KL to the reference policy .*in the batch, 1 sample \(prompt \d+ sample 3: "),
    "entropy": ("entropy", 100.0, None, "entropy is .*beyond trainer.guards.entropy.limit=100"),
}  # fmt: skip
ALL_MINI_BATCHES = {
    "policy_kl",
    "ratio",
    "sampler_kl",
    "mismatch",
    "log-prob",
}  # only the mini-batch with the sample shows these


def guards_with(guard, limit, action):
    section = NonfiniteGuardConfig(action) if limit is None else GuardConfig(limit, action)
    return replace(GuardsConfig(), **{guard: section})


@pytest.fixture(params=list(CASES))
def case(request, bench, monkeypatch, around):
    guard, limit, inject, words = CASES[request.param]
    if request.param in ALL_MINI_BATCHES:  # then the one mini-batch is the whole batch
        group = bench.roles.models["actor"]
        monkeypatch.setattr(group, "schedule", replace(group.schedule, size=16))
    if inject is not None:
        inject(bench, around)
    return guard, limit, words


def test_skip_leaves_everything_as_it_was(bench, case, caplog):
    guard, limit, words = case
    before, ordinal = bench.holds(), bench.program.samples.cursor
    result = bench.step(guards_with(guard, limit, "skip"))
    assert bench.holds() == before
    assert bench.program.samples.cursor == ordinal + 4  # the prompts are not asked again
    assert "The batch is left out" in caplog.text
    assert re.search(words, result.skipped), result.skipped
    assert result.metrics["training/skipped_batches"] == 1


def test_roll_back_says_where_to_go_on(bench, case):
    guard, limit, words = case
    before, ordinal = bench.holds(), bench.program.samples.cursor
    with pytest.raises(RollBack, match=words) as caught:
        bench.step(guards_with(guard, limit, "rollback"))
    assert caught.value.next_ordinal == ordinal + 4
    assert bench.holds() | {"controller": None} == before | {"controller": None}


def test_stop_is_an_error_that_names_the_guard(bench, case):
    guard, limit, words = case
    before = bench.holds()
    with pytest.raises(NumericsError, match=words) as caught:
        bench.step(guards_with(guard, limit, "stop"))
    assert f"trainer.guards.{guard}.action is stop" in str(caught.value)
    held = bench.holds()
    assert held["extra"] == before["extra"]
    assert held["model.norm.weight"] == before["model.norm.weight"]


def test_warnings_change_nothing_about_training(bench, case, caplog):
    guard, limit, words = case
    if guard == "nonfinite":
        pytest.skip("what is not finite never trains")
    before = bench.holds()
    result = bench.step(guards_with(guard, limit, "warn"))
    assert bench.holds()["model.norm.weight"] != before["model.norm.weight"]
    assert "beyond trainer.guards" in caplog.text
    assert "left out" not in caplog.text
    assert not result.skipped


def test_guards_without_limits_are_silent(bench, caplog):
    result = bench.step(GuardsConfig())
    assert not [r for r in caplog.records if r.name.startswith("verl.roles.guards")]
    assert not [name for name in result.metrics if "guard" in name or "skipped_updates" in name]


def test_one_bad_mini_batch_of_two_costs_only_itself(bench, around):
    def call(original, self, outputs, batch, totals):
        loss, metrics = original(self, outputs, batch, totals)
        return (loss * math.nan if bench.actor.guard._mini_batch == 1 else loss), metrics

    around(PolicyObjective, "__call__", call)
    before = bench.holds()
    result = bench.step(GuardsConfig())
    held = bench.holds()
    assert held["extra"]["num_optimizer_steps"] == before["extra"]["num_optimizer_steps"] + 1
    assert held["extra"]["num_lr_steps"] == before["extra"]["num_lr_steps"] + 1
    assert not result.skipped
    assert result.metrics["actor/num_skipped_updates"] == 1


def test_findings_of_ranks_become_one():
    one = Finding("ratio", "ratio", 9.0, 2.0, 0, 8, True, [(3, 1, 9.0)], 1)
    two = Finding("ratio", "ratio", 9.0, 2.0, 0, 6, True, [(5, 0, 4.0), (6, 0, 12.0)], 2)
    other = Finding("entropy", "entropy", 0.1, 0.2, 1, 8, False, [(3, 1, 0.1)], 1)
    merged = merge_findings([[one, other], [two]])
    assert [(f.num_rows, f.num_samples) for f in merged] == [(14, 3), (8, 1)]
    assert merged[0].samples == [(6, 0, 12.0), (3, 1, 9.0), (5, 0, 4.0)]
    elsewhere = Finding("nonfinite", "loss", math.nan, None, 0, 6, True, [(7, 0, math.nan)], 1, located=False)
    bad = Finding("nonfinite", "loss", math.nan, None, 0, 6, True, [(8, 0, math.inf)], 1)
    (merged,) = merge_findings([[elsewhere], [bad]])
    assert (merged.samples, merged.num_samples, merged.num_rows) == ([(8, 0, math.inf)], 1, 12)


AHEAD_OF_A_ROLLBACK = (
    "trainer.save_freq=1", "actor_rollout_ref.rollout.prefetch_num=1", "trainer.guards.nonfinite.action=rollback",
)  # fmt: skip

# -- whole runs


def bad_from(around, first, last=math.inf):
    """The score of one sample is NaN in the calls of the reward with these numbers, counted from 1."""
    calls = iter(range(1, 1000))
    change = put("token_level_scores", math.nan)
    after(around, RewardWorker, "collect", lambda batch: change(batch) if first <= next(calls) <= last else None)


def alarms(folder):
    return read_lines(folder / "guards.jsonl")


def test_a_run_leaves_a_bad_batch_out_and_goes_on(tiny_run, around):
    """An engine that has let go of its weights gets them again before it generates, after the step that was left out, too."""
    events = []
    around(NativeRollout, "release", lambda release, engine: events.append(f"syncs {engine.syncs}") or release(engine))
    around(NativeRollout, "publish", lambda publish, *args: events.append("weights") or publish(*args))
    around(NativeRollout, "open", lambda open, *args, **more: events.append("generation") or open(*args, **more))
    bad_from(around, 2, 2)
    run = tiny_run("trainer.total_training_steps=3", "trainer.save_freq=1")
    training = ["generation", "syncs True", "weights"]
    assert [
        events[i : i + 3] for i, event in enumerate(events) if event == "generation" and "True" in events[i + 1]
    ] == [training] * 3
    rows = run.training_rows()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row.get("training/skipped_batches") for row in rows] == [None, 1.0, None]
    assert [row["training/next_ordinal"] for row in rows] == [4, 8, 12]
    one, two, three = (weights(run, step) for step in (1, 2, 3))
    assert one == two != three
    (alarm,) = alarms(run.folder)
    assert (alarm["step"], alarm["guard"], alarm["what"]) == (2, "nonfinite", "token_level_scores")
    assert (alarm["action"], alarm["done"], alarm["num_samples"]) == ("skip", "skip", 1)
    assert alarm["samples"] == [{"uid": "5", "ordinal": 5, "sample": 1, "score": "nan", "value": "nan"}]


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_loss_that_is_not_finite_names_the_samples_of_its_mini_batch(tiny_run, around, tmp_path, broken):
    {"loss": break_loss, "gradient": break_gradient}[broken](around)
    with pytest.raises(NumericsError, match="Nothing has trained: .* is not finite"):
        tiny_run("trainer.total_training_steps=1")
    run = Run(tmp_path / "run")
    (alarm,) = alarms(run.folder)
    trained = {(row["ordinal"], row["sample_index"]) for row in run.samples_of() if any(row["advantages"])}
    assert {(sample["ordinal"], sample["sample"]) for sample in alarm["samples"]} == trained
    assert alarm["num_samples"] == len(trained) > 0
    assert {sample["value"] for sample in alarm["samples"]} == {"nan"}


@pytest.mark.parametrize(
    ("settings", "sentence", "done"),
    [
        (["max_skips_in_row=1"], r"is used up; .*guards.jsonl names the samples", [(2, "skip"), (3, "stop")]),
        (["max_rollbacks=2", "nonfinite.action=rollback"], "is used up", [(2, "rollback")] * 2 + [(2, "stop")]),
    ],
)
def test_a_run_stops_when_too_many_batches_are_bad(settings, sentence, done, tiny_run, around, tmp_path):
    bad_from(around, 2)
    with pytest.raises(NumericsError, match=f"{settings[0]} {sentence}"):
        tiny_run("trainer.total_training_steps=9", "trainer.save_freq=1", *(f"trainer.guards.{s}" for s in settings))
    assert [(a["step"], a["done"]) for a in alarms(tmp_path / "run")] == done


def test_a_run_goes_back_and_on_with_other_prompts(tiny_run, around):
    bad_from(around, 4, 4)
    settings = ("trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.guards.nonfinite.action=rollback")
    run = tiny_run(*settings)
    rows = run.training_rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    # step 4 failed on prompts 12 to 15; steps 3 and 4 were taken again, on the prompts that follow
    assert [row["training/next_ordinal"] for row in rows] == [4, 8, 20, 24]
    assert [row["training/weight_version"] for row in rows] == [1, 2, 3, 4]
    (alarm,) = alarms(run.folder)
    assert (alarm["step"], alarm["done"]) == (4, "rollback")


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(tiny_run, around):
    bad_from(around, 1)
    with pytest.raises(NumericsError, match="no checkpoint yet"):
        tiny_run("trainer.save_freq=2", "trainer.guards.nonfinite.action=rollback")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["trainer.guards.nonfinite.action=rollback"], "trainer.save_freq=-1 saves none"),
        (["trainer.guards.ratio.limit=0.5"], "choose one above 1"),
        (["trainer.guards.policy_kl.limit=-1"], "must be above 0"),
        (["trainer.guards.max_rollbacks=-1"], "at least 0"),
        (["trainer.guards.entropy.action=stop"], "no limit is set with it"),
        (["trainer.guards.nonfinite.action=warn"], "nonfinite.action"),
        (AHEAD_OF_A_ROLLBACK, "made ahead of training"),
    ],
)
def test_guards_that_cannot_be(tiny_overrides, changes, words):
    with pytest.raises(ConfigError, match=words):
        load_config([*tiny_overrides, *changes])


@pytest.mark.slow
def test_two_ranks_refuse_the_same_steps(tiny_overrides, tiny_llama, tmp_path):
    """`python -m pytest tests/run/test_guards.py -m slow`: a limit that no step can keep refuses every step. The weights
    of two ranks, which hold half of them each, stay as at the beginning."""
    changes = (
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "trainer.n_gpus_per_node=2",
        "reward.debug=False",
        "trainer.save_freq=2",
        "trainer.guards.entropy.limit=100",
        "trainer.guards.entropy.action=skip",
    )
    jobs = tmp_path / "jobs.json"
    jobs.write_text(json.dumps([{"overrides": merge(tiny_overrides, changes)}]))
    ranks.run(2, "tests.runtime.several_runs", jobs, timeout_s=120)
    run = Run(tmp_path / "run")
    with safe_open(f"{tiny_llama}/model.safetensors", "pt") as file:
        initial = {name: file.get_tensor(name).float().numpy().tobytes() for name in file.keys()}
    assert weights(run, 2) == initial
    assert [(a["step"], a["done"], a["num_samples"]) for a in alarms(run.folder)] == [(1, "skip", 16), (2, "skip", 16)]
