"""Every key of an existing release at its default and at two other values: it acts, is noticed, or is refused by the policy."""

import dataclasses
import re
import typing
from pathlib import Path

import pytest

from tests.slow import slow
from verl.config import PPO, load_config
from verl.config.checks import verdict
from verl.config.schema import value_at
from verl.config.user_settings import Setting
from verl.errors import ConfigError
from verl.families import ADVANTAGES, POLICY_LOSSES

from .helpers import ACTOR, GRPO, ROLLOUT, fixture_lines, load, refused

LISTED = [line.partition("=")[::2] for line in fixture_lines("keys.txt")]
SECTIONS = sorted({".".join(key.split(".")[:2]) for key, _ in LISTED})

# two values other than the default if the type does not list the valid values
VALUES = {
    **dict.fromkeys(
        (f"{ACTOR}.fsdp_config.qat", f"{ACTOR}.megatron.qat"),
        ("{quantization_config_path:x}", "{activation_observer:minmax}"),
    ),
    "algorithm.adv_estimator": ("grpo", "rloo"),
    f"{ACTOR}.policy_loss.loss_mode": ("gspo", "mine.py:loss"),
    "distillation.distillation_loss.policy_loss_mode": ("gspo", "mine.py:loss"),
    "distillation.distillation_loss.log_prob_min_clamp": ("-10.0", "-5.0"),
    f"{ROLLOUT}.name": ("hf", "trtllm"),
    "reward.reward_model.rollout.name": ("hf", "trtllm"),
    f"{ROLLOUT}.agent.default_agent_loop": ("tool_agent", "mine"),
    f"{ROLLOUT}.multi_turn.format": ("qwen3_coder", "glm"),
    **dict.fromkeys((f"{ACTOR}.strategy", "actor_rollout_ref.ref.strategy", "critic.strategy"), ("fsdp2", "veomni")),
    "trainer.logger": ("[console,wandb]", "tensorboard"),
    "trainer.device": ("cpu", "npu"),
    "reward.reward_manager.name": ("dapo", "rate_limited"),
    "algorithm.rollout_correction.rollout_is_threshold": ("5.0", "0.5_2.0"),
    "algorithm.rollout_correction.rollout_rs": ("token_k1", "seq_max_k2"),
    "algorithm.rollout_correction.rollout_rs_threshold": ("2.0", "0.5_2.0"),
    "trainer.resume_mode": ("auto", "disable"),
    f"{ACTOR}.optim.betas": ("[0.9,0.95]", "[0.8,0.99]"),
    "critic.optim.betas": ("[0.9,0.95]", "[0.8,0.99]"),
    f"{ROLLOUT}.top_p": ("0.9", "0.5"),
    f"{ROLLOUT}.val_kwargs.top_p": ("0.9", "0.5"),
    f"{ROLLOUT}.max_model_len": ("2048", "4096"),
    f"{ACTOR}.clip_ratio_c": ("10.0", "4.0"),
    **{f"{role}.checkpoint.{end}": ("[model]", "[model,hf_model]")
       for role in (ACTOR, "critic") for end in ("save_contents", "load_contents")},
    **dict.fromkeys(("algorithm.gamma", "algorithm.lam"), ("0.9", "0.95")),
}  # fmt: skip

# phrases of refusals: the sentences of policy.py, of values, and of keys that contradict one another
REASONS = (
    "is not available in this version", "is not read: ", "has no effect: ", "must be", "must lie", "is not one of", "needs",
    "is not an existing folder", "is no folder", "is smaller than", "but there a",
)  # fmt: skip
CONDITION_REASONS = {PPO.condition(*condition).because for leaf in PPO.leaves.values() for condition in leaf.conditions}


def path_of(key):
    return PPO.locate(PPO.resolve(key)[0])


# the others act, or have no effect, whatever else is set
CONDITIONAL = [key for key, _ in LISTED if PPO.leaves[path_of(key)].conditions and not PPO.leaves[path_of(key)].inert]


def other_values(key):
    """Two valid values of a key other than its default, as a command line gives them."""
    path = path_of(key)
    if path in VALUES or key in VALUES:
        return VALUES.get(key) or VALUES[path]
    leaf = PPO.leaves[path]
    if leaf.key.choices:
        choices = [c for c in leaf.key.choices if c not in (leaf.default, None)]
        return tuple(str(c) for c in (choices * 2)[:2])
    kinds = [t for t in (typing.get_args(leaf.annotation) or (leaf.annotation,)) if t is not type(None)]
    kind, default = kinds[0], leaf.default
    if leaf.free or kind is dict or typing.get_origin(kind) is dict:
        return ("{a:1}", "{enable:False}")
    if kind is bool:
        return (str(not default), str(not default).lower())
    if kind is int:
        number = default if isinstance(default, int) and default > 0 else 1
        return (str(number + 1), str(number * 2))
    if kind is float:
        number = default if isinstance(default, float) and default > 0 else 1.0
        return (str(number / 2), str(number / 4))
    if "list" in str(kind):
        return ("[1]", "[1,2]") if "int" in str(kind) else ("[a]", "[a,b]")
    return ("some", "other")


def outcome(key, value):
    """Verdict of a whole load of only this key: "acts", "noticed" or "refused"; a refusal has one of the REASONS."""
    try:
        loaded = load_config([f"{key}={value}"])
    except ConfigError as error:
        sentences = str(error).splitlines()
        assert sentences
        for sentence in sentences:
            assert any(reason in sentence for reason in REASONS), (key, value, sentence)
            assert "There is no key" not in sentence
        return "refused"
    spelled = re.escape(key) + r"($|[=.,) ])"
    notices = [notice for notice in loaded.notices if notice.startswith("No effect: ")]
    return "noticed" if any(re.search(spelled, notice) for notice in notices) else "acts"


def keys_of(section):
    return [key for key, _ in LISTED if ".".join(key.split(".")[:2]) == section]


@pytest.mark.parametrize("number", [0, slow(1)])
@pytest.mark.parametrize("section", SECTIONS)
def test_every_single_key(section, number):
    """Declared inert: noticed or refused. Declared used: acts, unless the condition that it names does not hold."""
    assert keys_of(section)
    for key in keys_of(section):
        leaf, judged = PPO.leaves[path_of(key)], outcome(key, other_values(key)[number])
        if leaf.inert:
            assert judged == "refused" if leaf.key.refused else judged in ("noticed", "refused"), key
        elif judged == "noticed":
            assert leaf.conditions or key == "global_profiler.tool", key  # two of its values act


ESTIMATORS = [(name, f"algorithm.adv_estimator={name}") for name in ADVANTAGES.built_in]
LOSSES = [(name, f"{ACTOR}.policy_loss.loss_mode={name}") for name in POLICY_LOSSES.built_in if name != "bypass_mode"]
BYPASS = [("bypass", "algorithm.rollout_correction.bypass_mode=True")]


@pytest.mark.parametrize(("name", "choice"), [*ESTIMATORS, *LOSSES, *BYPASS], ids=lambda v: "" if "=" in v else v)
def test_every_key_with_each_estimator_and_loss(name, choice):
    """The verdict on each key at both values: refused keys are in docs/config/train.md, noticed keys have a condition."""
    base = load_config([*GRPO, choice] if "estimator" not in choice else [choice, f"{ROLLOUT}.n=4"], check=False)
    kinds = set()
    for key in CONDITIONAL:
        path = path_of(key)
        leaf = PPO.leaves[path]
        for value in other_values(key):
            setting = Setting(path, value, "command line", key, value)
            config = replaced(base.config, path.split("."), fitted(key, value, path))
            judged = verdict(dataclasses.replace(base, config=config, settings={path: setting}), path, setting)
            kinds.add(judged.kind)
            if judged.kind == "refused":
                assert leaf.strict, (key, judged.reason)
                assert "Remove it" in judged.reason
            elif judged.kind == "noticed":
                assert judged.reason in CONDITION_REASONS, (key, judged.reason)
    assert kinds == {"acts", "noticed", "refused"}


def fitted(key, value, path):
    """The value as a load makes it of the text."""
    if (key, value) not in _FITTED:
        loaded = load_config([f"{key}={value}"], check=False)
        _FITTED[key, value] = value_at(loaded.config, path)
    return _FITTED[key, value]


_FITTED: dict = {}


def replaced(node, names, value):
    head, *rest = names
    return dataclasses.replace(node, **{head: replaced(node[head], rest, value) if rest else value})


def test_the_table_of_refusals_is_short_and_each_has_its_reason():
    text = (
        (Path(__file__).parents[2] / "docs/config/train.md")
        .read_text(encoding="utf-8")
        .partition("## Refused where not read")[2]
    )
    rows = text.partition("\n## ")[0].strip().splitlines()[4:]
    declared = [leaf for leaf in PPO.leaves.values() if (leaf.strict and not leaf.inert) or leaf.key.refused]
    assert 10 < len(rows) < 40
    assert all(len(row.split(" | ")) == 3 for row in rows)
    for leaf in declared:
        assert any(leaf.path.rpartition(".")[2] in row for row in rows), leaf.path


def test_older_keys_are_noticed_too():
    for row in PPO.compat.removed:
        key = row.key + "x" if row.key.endswith(".") else row.key
        assert any(row.why in notice and key in notice for notice in load(f"+{key}=False").notices), key


def test_strict_config_makes_errors_of_all_of_them():
    keys = ["data.use_shm=True", "critic.optim.lr=3e-5", "+trainer.npu_profile.x=1", *GRPO]
    assert len(load(*keys).notices) == 3
    assert len(refused(*keys, "trainer.strict_config=True").splitlines()) == 3
