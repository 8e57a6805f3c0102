"""The PPO program end to end on a tiny model: estimators and losses of each way, critic, KL, filters, validation."""

import inspect
import math

import pytest
import torch

from tests.algorithms import advantage_references, loss_references
from tests.letters_task import write_reward
from tests.run.conftest import Run
from verl.algorithms.advantages import ADVANTAGES, requires
from verl.algorithms.policy_losses import POLICY_LOSSES
from verl.algorithms.policy_losses.terms import is_zero_without_advantage
from verl.roles.objectives.policy import PolicyObjective

pytestmark = pytest.mark.seed("A1")


def first_of_each(names, kind):
    """The first name of each kind: rows of a registry whose function reads the same go the same way through a program."""
    return list({kind(name): name for name in reversed(names)}.values())


def way_of_a_loss(name):
    loss = POLICY_LOSSES.get(name)
    extra = {"generator", "rollout_is_weights"}.intersection(inspect.signature(loss).parameters)
    return frozenset(extra), is_zero_without_advantage(loss)


ESTIMATORS = first_of_each(
    [name for name in ADVANTAGES if "turn_ids" not in requires(name)], lambda name: frozenset(requires(name))
)
LOSSES = first_of_each([name for name in POLICY_LOSSES if name != "bypass_mode"], way_of_a_loss)
EXTRA = {
    "gdpo": ["algorithm.gdpo_reward_keys=[letters,short]", "algorithm.gdpo_reward_weights=[1.0,0.5]"],
    "gae": [],
    # every token within the bounds is left out, so that the choice is not random
    "clip_cov": [
        "actor_rollout_ref.actor.policy_loss.clip_cov_ratio=1.0",
        "actor_rollout_ref.actor.policy_loss.clip_cov_lb=0.05",
        "actor_rollout_ref.actor.policy_loss.clip_cov_ub=1.0",
    ],
    "dro": ["actor_rollout_ref.actor.policy_loss.dro_beta=0.1"],
}


def finite(rows, name):
    return all(math.isfinite(row[name]) for row in rows)


@pytest.fixture
def losses_seen(around):
    """Every call of the policy objective: its case for the loop references, its totals, and the pg_loss it reported."""
    losses = []

    def call(original, self, outputs, batch, totals):
        log_prob, columns = outputs["log_probs"].detach().double(), batch.batch
        old = columns["old_log_probs"] if "old_log_probs" in columns.keys() else log_prob
        tensors = [old.double(), log_prob, log_prob, columns["advantages"].double(), columns["response_mask"]]
        loss, metrics = original(self, outputs, batch, totals)
        case = loss_references.Case(*(t.tolist() for t in tensors), None)
        losses.append((case, (totals.num_tokens, totals.num_sequences), metrics["pg_loss"].value))
        return loss, metrics

    around(PolicyObjective, "__call__", call)
    return losses


def reference_columns(batch):
    """The batch in float64, as the references of tests/algorithms read it."""
    columns = {k: v.double() if v.is_floating_point() else v for k, v in batch.batch.items()}
    parts = batch.non_tensor_batch["reward_parts"]
    columns["reward_parts"] = {k: torch.tensor([float(p[k]) for p in parts]) for k in ("letters", "short")}
    return {**columns, "uid": list(batch.non_tensor_batch["uid"])}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_trains_on_its_float64_reference(tiny_run, tiny_llama, batches, name):
    extra = [f"critic.model.path={tiny_llama}", "critic.optim.lr=0.001"] if name == "gae" else EXTRA.get(name, [])
    rows = tiny_run(f"algorithm.adv_estimator={name}", *extra).training_rows()
    assert [row["step"] for row in rows] == [1, 2]
    assert finite(rows, "actor/pg_loss")
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    reference = getattr(advantage_references, name.removesuffix("_vectorized"))
    settings = {"gdpo_reward_weights": (1.0, 0.5)} if name == "gdpo" else {}
    for batch in batches:
        for name, values in zip(
            ("advantages", "returns"), reference(reference_columns(batch), **settings), strict=True
        ):
            torch.testing.assert_close(batch.batch[name].double(), torch.tensor(values).double(), atol=2e-4, rtol=1e-4)
        assert batch.batch["advantages"].abs().max() > 0


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_trains_on_its_float64_reference(tiny_run, losses_seen, name):
    """Several optimizer steps a batch, so that ratios differ from one."""
    rows = tiny_run(
        f"actor_rollout_ref.actor.policy_loss.loss_mode={name}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_epochs=2",
        *EXTRA.get(name, []),
    ).training_rows()
    assert len(rows) == 2
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert len(losses_seen) == 2 * 2 * 2
    settings = {
        "dro": {"dro_beta": 0.1},
        "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.05, "clip_cov_ub": 1.0},
    }.get(name, {})
    for case, totals, pg_loss in losses_seen:
        expected = getattr(loss_references, name)(case, "token-mean", totals=totals, **settings)
        assert pg_loss == pytest.approx(expected, abs=2e-5, rel=1e-4)
    assert any(case.old != case.lp for case, _, _ in losses_seen)


@pytest.mark.parametrize(
    "correction",
    [
        ["loss_type=ppo_clip", "rollout_rs=token_k1", "rollout_rs_threshold=2.0"],
        ["loss_type=reinforce", "rollout_is=token"],
    ],
    ids=["rejected tokens", "weighted tokens"],
)
def test_bypass_mode_trains(tiny_run, correction):
    rows = tiny_run(
        "algorithm.rollout_correction.bypass_mode=True", *(f"algorithm.rollout_correction.{c}" for c in correction)
    ).training_rows()
    assert finite(rows, "actor/pg_loss")
    assert all(row["actor/grad_norm"] > 0 for row in rows)


# rewards of a sample; its group agrees on them for every second prompt
HALF_DECIDED = """
share = sum(c.isalpha() for c in solution_str) / max(len(solution_str), 1)
return share if int(ground_truth) % 2 else 1.0
"""


def test_decoupled_correction_reports_its_figures(tiny_run):
    rows = tiny_run(
        "algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
    ).training_rows()  # fmt: skip
    for row in rows:
        assert row["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-3)
        assert row["rollout_corr/rollout_rs_masked_fraction"] == 0


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_samples_without_advantage_are_left_out_and_nothing_else_changes(tiny_run, tmp_path, estimator):
    """The groups of one half of the prompts always agree on their reward."""
    common = [f"algorithm.adv_estimator={estimator}", write_reward(tmp_path, HALF_DECIDED)]
    rows = tiny_run(*common, folder="skips").training_rows()
    full = tiny_run(*common, "actor_rollout_ref.actor.skip_zero_advantages=False", folder="full").training_rows()
    assert any(row["actor/skipped_row_ratio"] > 0 for row in rows)
    for row, expected in zip(rows, full, strict=True):
        assert expected["actor/skipped_row_ratio"] == 0
        assert set(row) == set(expected)
        for name in ("actor/grad_norm", "actor/pg_loss", "critic/score/mean", "response_length/mean"):
            assert row[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name


def test_kl_terms_and_reference(tiny_run, tiny_llama):
    rows = tiny_run(
        "algorithm.adv_estimator=gae",
        f"critic.model.path={tiny_llama}",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "trainer.total_training_steps=3",
    ).training_rows()
    # the policy is the reference at first and has moved away from it later
    assert rows[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert rows[2]["actor/kl_loss"] > 1e-5
    assert rows[0]["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-4)
    assert 0 < rows[0]["actor/entropy"] < math.log(264) + 1e-3
    assert finite(rows, "critic/vf_loss")


def test_the_reference_has_the_adapters_that_training_starts_from(tiny_run):
    model = "actor_rollout_ref.model"
    first = tiny_run(
        f"{model}.lora_rank=4", "actor_rollout_ref.actor.optim.lr=0.05", "trainer.save_freq=2", folder="first"
    )
    adapters = f"{model}.lora_adapter_path={first.folder}/global_step_2/actor/lora_adapter"
    rows = tiny_run(adapters, "actor_rollout_ref.actor.use_kl_loss=True").training_rows()
    assert rows[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert rows[1]["actor/kl_loss"] > 1e-5


@pytest.mark.parametrize(
    ("key", "name"), [("algorithm.use_kl_in_reward", "kl_in_reward"), ("actor_rollout_ref.actor.use_kl_loss", "kl_ref")]
)
def test_the_line_of_a_step_has_the_kl_to_the_reference(tiny_run, capsys, key, name):
    tiny_run(f"{key}=True", "trainer.logger=[console]", "trainer.total_training_steps=1", "data.val_files=null")
    (line,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("step=1/1")]
    assert f" {name}=" in line


def test_critic_warmup_does_not_train_the_actor(tiny_run, tiny_llama):
    rows = tiny_run(
        "algorithm.adv_estimator=gae", f"critic.model.path={tiny_llama}", "trainer.critic_warmup=1",
    ).training_rows()  # fmt: skip
    assert "actor/pg_loss" not in rows[0]
    assert "actor/pg_loss" in rows[1]


def test_group_filter_drops_silent_groups(tiny_run, tiny_task, tmp_path, capsys):
    run = tiny_run(
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=score",
        "algorithm.filter_groups.max_num_gen_batches=8",
        write_reward(tmp_path, HALF_DECIDED),
        "trainer.total_training_steps=null",
        "trainer.total_epochs=1",
    )
    assert "algorithm: grpo, vanilla loss; groups of equal rewards are replaced\n" in capsys.readouterr().out
    rows = run.training_rows()
    assert 24 <= rows[-1]["training/next_ordinal"] < 24 + 4 * 8  # one pass, and what its last step took beyond
    assert all(row["training/next_ordinal"] < 24 for row in rows[:-1])
    for row in rows:
        assert row["training/filter_groups/num_gen_batches"] >= 2
        # of all samples, the solved ones too
        assert row["training/filter_groups/score/mean"] > row["critic/score/mean"]
    assert len(run.samples_of(1) + run.samples_of(2)) == 2 * 16


def test_validation_metrics_and_val_only(tiny_run):
    val = [
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "actor_rollout_ref.rollout.val_kwargs.also_greedy=True",
    ]
    run = tiny_run(*val, "trainer.val_before_train=True", "trainer.test_freq=1")
    first = run.rows[0]
    assert first["step"] == 0
    assert 0 < first["val/reward"] < 1
    assert "val/greedy" in first
    assert any(k.startswith("val-core/letters/") and k.endswith("mean@4") for k in first)
    before = run.rows
    tiny_run(*val, "trainer.val_only=True")  # into the folder of the run; it changes no row there
    assert run.rows == before
    assert Run(run.folder / "eval").rows[0]["val/reward"] == first["val/reward"]


def test_an_evaluation_has_the_weights_of_a_run(tiny_run):
    """Rounded to nearest they would lose most updates of a small rate, as the run's own validation shows."""
    settings = ("actor_rollout_ref.actor.fsdp_config.dtype=bfloat16", "trainer.val_before_train=True")
    run = tiny_run(*settings, "trainer.total_training_steps=1")
    tiny_run(*settings, "trainer.val_only=True")
    validated, evaluated = (
        [(row["response_ids"], row["log_probs"]) for row in one.samples_of(0, "val")]
        for one in (run, Run(run.folder / "eval"))
    )
    assert evaluated == validated


def test_an_evaluation_has_the_adapters_that_it_names(tiny_run):
    model = "actor_rollout_ref.model"
    trained = tiny_run(
        f"{model}.lora_rank=4", "actor_rollout_ref.actor.optim.lr=0.05", "trainer.save_freq=2", "trainer.test_freq=2"
    )
    adapter = f"{model}.lora_adapter_path={trained.folder}/global_step_2/actor/lora_adapter"
    log_probs = {}
    for name, keys in {"adapted": (adapter,), "base": ()}.items():
        run = tiny_run(*keys, "trainer.val_only=True", folder=name)
        log_probs[name] = [row["log_probs"][0] for row in Run(run.folder / "eval").samples_of(0, "val")]
    tiny_run(f"{model}.lora_rank=4", "trainer.val_only=True")  # the checkpoint of the folder, as existing releases do
    tiny_run(f"{model}.path={trained.folder}", "trainer.val_only=True", folder="of_a_run")
    validated = [row["log_probs"][0] for row in trained.samples_of(2, "val")]
    for folder in (trained.folder, trained.folder.parent / "of_a_run"):
        evaluated = [row["log_probs"][0] for row in Run(folder / "eval").samples_of(0, "val")]
        assert evaluated == pytest.approx(validated, abs=1e-4)
    tiny_run("trainer.val_only=True", "trainer.resume_mode=disable")
    first = [row["log_probs"][0] for row in Run(trained.folder / "eval").samples_of(0, "val")]
    assert first == log_probs["base"]
    assert log_probs["adapted"] == pytest.approx(validated, abs=1e-4)
    assert log_probs["base"] != pytest.approx(validated, abs=1e-2)


def test_unknown_reward_part_is_named(tiny_run):
    from verl.errors import ConfigError

    with pytest.raises(ConfigError, match="nothing_like_it"):
        tiny_run("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[nothing_like_it]")
    with pytest.raises(ConfigError, match="letters, short"):
        tiny_run("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=accuracy", folder="filter")
