"""verl.trainer.ppo.reward, verl.workers.reward_manager, verl.utils.reward_score and verl.experimental.reward_loop."""

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from verl import DataProto
from verl.data_proto.merge import object_array
from verl.errors import ConfigError, RewardError
from verl.experimental.reward_loop import migrate_legacy_reward_impl
from verl.models.tiny import make_tokenizer
from verl.registry import load_module
from verl.rewards.functions import RewardFunctionSpec, load_reward_function
from verl.rewards.managers import REWARD_MANAGERS
from verl.trainer.ppo.reward import compute_reward, extract_reward, get_custom_reward_fn, load_reward_manager
from verl.utils.reward_score import math_dapo, math_reward
from verl.utils.reward_score.math_dapo import normalize_final_answer
from verl.utils.reward_score.math_reward import is_equiv, last_boxed_only_string, remove_boxed
from verl.workers.reward_manager import BatchRewardManager, get_reward_manager_cls
from verl.workers.reward_manager.abstract import AbstractRewardManager

SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    hit = float(solution_str == ground_truth)
    return {"score": hit + bonus, "acc": hit, "turns": extra_info["num_turns"]}

def batched(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [float(len(s)) for s in solution_strs]
"""


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def scorer(tmp_path):
    (tmp_path / "score.py").write_text(SCORER)
    return str(tmp_path / "score.py")


@pytest.fixture
def batch(tokenizer):
    """Replies "ab" (2 tokens) and "xyz" (3), prompts "q" and "pq" padded on the left."""
    pad = tokenizer.pad_token_id
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in ("q", "pq", "ab", "xyz")]
    return DataProto.from_dict(
        {
            "prompts": torch.tensor([[pad, *ids[0]], ids[1]]),
            "responses": torch.tensor([[*ids[2], pad, pad], [*ids[3], pad]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]),
        },
        {
            "data_source": object_array(["letters", "letters"]),
            "reward_model": object_array([{"ground_truth": "ab"}, {"ground_truth": "ab"}]),
            "extra_info": object_array([{"index": 0}, {"index": 1}]),
            "__num_turns__": object_array([2, 4]),
        },
    )


class TestManagers:
    def test_the_score_is_on_the_last_token(self, batch, tokenizer):
        from verl.workers.reward_manager import NaiveRewardManager

        calls = []

        def compute_score(data_source, solution_str, ground_truth, extra_info):
            calls.append((data_source, solution_str, ground_truth, extra_info["num_turns"], extra_info["index"]))
            return 1.5

        manager = NaiveRewardManager(tokenizer=tokenizer, num_examine=0, compute_score=compute_score)
        assert manager(batch).tolist() == [[0, 1.5, 0, 0], [0, 0, 1.5, 0]]
        assert calls == [("letters", "ab", "ab", 2, 0), ("letters", "xyz", "ab", 4, 1)]
        returned = manager(batch, return_dict=True)
        assert returned["reward_extra_info"] == {}
        assert torch.equal(returned["reward_tensor"], manager(batch))
        assert batch.non_tensor_batch["extra_info"][0] == {"index": 0}  # the rows stay as they were

    def test_a_dict_is_reported_with_the_score(self, batch, tokenizer, caplog):
        from verl.workers.reward_manager.naive import NaiveRewardManager

        async def compute_score(data_source, solution_str, ground_truth, extra_info):
            return {"score": 1.0, "acc": solution_str == ground_truth}

        with caplog.at_level("INFO"):
            returned = NaiveRewardManager(tokenizer, 1, compute_score)(batch, return_dict=True)
        assert returned["reward_extra_info"] == {"score": [1.0, 1.0], "acc": [True, False]}
        assert caplog.text.count("[letters]") == 1

    def test_values_of_some_rows_and_a_response_without_tokens(self, batch, tokenizer):
        from verl.workers.reward_manager.naive import NaiveRewardManager

        batch.batch["attention_mask"][0, 2:] = 0
        results = iter([{"score": 1.0, "acc": True}, {"score": 2.0, "kind": "b"}])
        returned = NaiveRewardManager(tokenizer, 0, lambda **_: next(results))(batch, return_dict=True)
        assert returned["reward_tensor"].tolist() == [[0, 0, 0, 0], [0, 0, 2, 0]]
        assert returned["reward_extra_info"] == {"score": [1.0, 2.0], "acc": [True, None], "kind": [None, "b"]}

    def test_what_is_scored_already(self, batch, tokenizer):
        from verl.workers.reward_manager import NaiveRewardManager

        batch.batch["rm_scores"] = torch.eye(2, 4)
        batch.non_tensor_batch["acc"] = np.array([1, 0], dtype=object)
        batch.meta_info["reward_extra_keys"] = ["acc"]
        manager = NaiveRewardManager(tokenizer, 0)
        assert torch.equal(manager(batch), torch.eye(2, 4))
        assert list(manager(batch, return_dict=True)["reward_extra_info"]["acc"]) == [1, 0]

    def test_dapo(self, batch, tokenizer):
        """2 of at most 4 tokens are free; 3 of 4 cost half of the penalty of 2."""
        buffer = {"enable": True, "len": 2, "penalty_factor": 2.0, "log": True}
        cls = get_reward_manager_cls("dapo")
        score = lambda **_: {"score": 1.0}  # noqa: E731
        manager = cls(tokenizer, 0, score, max_resp_len=4, overlong_buffer_cfg=buffer)
        returned = manager(batch, return_dict=True)
        assert returned["reward_tensor"].sum(1).tolist() == [1.0, 0.0]
        assert returned["reward_extra_info"]["overlong_reward"] == [0.0, -1.0]
        with pytest.raises(ConfigError, match="len=2 needs"):
            cls(tokenizer, 0, score, max_resp_len=1, overlong_buffer_cfg=buffer)

    def test_batch(self, batch, tokenizer):
        def compute_score(data_sources, solution_strs, ground_truths, extra_infos, weight):
            return [weight * len(text) for text in solution_strs]

        manager = BatchRewardManager(tokenizer, 0, compute_score, weight=10)
        assert manager(batch).sum(1).tolist() == [20, 30]
        with pytest.raises(ConfigError, match="takes lists"):
            BatchRewardManager(tokenizer, 0)

    def test_names(self):
        from verl.workers.reward_manager import NaiveRewardManager, get_reward_manager_cls, register

        @register("compat_mine")
        class Mine(AbstractRewardManager):
            def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key="data_source", **kwargs): ...

            def __call__(self, data, return_dict=False):
                return 1

        try:
            assert get_reward_manager_cls("compat_mine") is Mine
            assert Mine(None, 0, None)(None) == 1
            assert get_reward_manager_cls("naive") is get_reward_manager_cls("prime") is NaiveRewardManager
            with pytest.raises(ConfigError, match="registered already"):
                register("naive")(Mine)
            with pytest.raises(ConfigError, match="did you mean 'naive'"):
                get_reward_manager_cls("naif")
        finally:
            REWARD_MANAGERS.remove("compat_mine")


class TestOfAConfig:
    def test_a_function(self, scorer):
        arguments = ("letters", "ab", "ab", {"num_turns": 1})
        for tree in (
            {"custom_reward_function": {"path": scorer, "name": None}},
            {"reward": {"custom_reward_function": {"path": scorer}}},
        ):
            assert get_custom_reward_fn(OmegaConf.create(tree))(*arguments)["score"] == 1.0
        tree["reward"]["custom_reward_function"]["reward_kwargs"] = {"bonus": 0.5}
        bound = get_custom_reward_fn(OmegaConf.create(tree))
        assert bound(*arguments)["score"] == 1.5
        assert bound.__name__ == "compute_score"
        assert get_custom_reward_fn(OmegaConf.create({"custom_reward_function": {"path": None}})) is None
        with pytest.raises(RewardError, match="no reward function 'compute_scor'"):
            get_custom_reward_fn({"custom_reward_function": {"path": scorer, "name": "compute_scor"}})

    def test_a_manager(self, batch, tokenizer, scorer):
        config = OmegaConf.create(
            {"reward": {"custom_reward_function": {"path": scorer, "reward_kwargs": {"bonus": 0.25}}, "num_workers": 8}}
        )
        manager = load_reward_manager(config, tokenizer, num_examine=0)
        rewards, extra = compute_reward(batch, manager)
        assert rewards.tolist() == [[0, 1.25, 0, 0], [0, 0, 0.25, 0]]
        assert extra == {"score": [1.25, 0.25], "acc": [1.0, 0.0], "turns": [2, 4]}

    def test_the_managers_of_older_keys(self, batch, tokenizer, scorer):
        config = OmegaConf.create(
            {"reward_model": {"reward_manager": "batch"}, "custom_reward_function": {"path": scorer, "name": "batched"}}
        )
        config.reward_model.reward_kwargs = {"dapo": {"alpha": 1.0}}  # of another manager
        assert load_reward_manager(config, tokenizer, 0)(batch).sum(1).tolist() == [2, 3]
        config.reward_model.reward_kwargs = {}
        config.reward_model.reward_manager = "dapo"
        config.custom_reward_function.name = "compute_score"
        manager = load_reward_manager(
            config, tokenizer, 0, max_resp_len=4, overlong_buffer_cfg={"enable": True, "len": 2, "penalty_factor": 2.0}
        )
        assert manager(batch).sum(1).tolist() == [1, -1]

    def test_scores_of_a_batch(self, batch):
        batch.batch["rm_scores"] = torch.ones(2, 4)
        batch.non_tensor_batch["acc"] = np.array([1, 0], dtype=object)
        batch.meta_info["reward_extra_keys"] = ["acc"]
        scores, extra = extract_reward(batch)
        assert compute_reward(batch, None)[0] is scores
        assert scores.sum() == 8
        assert list(extra["acc"]) == [1, 0]

    @pytest.mark.slow
    def test_in_a_ray_worker(self, batch, tokenizer):
        ray = pytest.importorskip("ray")
        from verl.trainer.ppo.reward import compute_reward_async
        from verl.workers.reward_manager import NaiveRewardManager

        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        try:
            manager = NaiveRewardManager(tokenizer, 0, lambda **kwargs: float(kwargs["solution_str"] == "ab"))
            rewards, extra = ray.get(compute_reward_async.remote(data=batch, reward_fn=manager), timeout=300)
        finally:
            ray.shutdown()
        assert rewards.sum(1).tolist() == [1, 0]
        assert extra == {}


def test_older_reward_sections_are_moved():
    config = OmegaConf.create(
        {
            "custom_reward_function": {"path": "score.py", "name": "compute_score", "reward_kwargs": None},
            "reward_model": {
                "num_workers": 4, "reward_manager": "dapo", "enable": True, "model": {"path": "rm"},
                "rollout": {"response_length": 8, "name": None},
            },
            "sandbox_fusion": {"url": None},
            "reward": {"num_workers": 8, "reward_manager": {"name": "naive"}},
        }
    )  # fmt: skip
    OmegaConf.set_struct(config, True)
    assert migrate_legacy_reward_impl(config) is config
    assert OmegaConf.to_container(config) == {
        "reward": {
            "num_workers": 4,
            "reward_manager": {"name": "dapo"},
            "custom_reward_function": {"path": "score.py", "name": "compute_score"},
            "reward_model": {"enable": True, "model_path": "rm", "rollout": {"response_length": 8}},
        }
    }
    assert migrate_legacy_reward_impl(OmegaConf.create({"reward": {"num_workers": 1}})) == {
        "reward": {"num_workers": 1}
    }


class TestBoxes:
    @pytest.mark.parametrize(
        ("text", "box", "inside"),
        [
            (r"so \boxed{\frac{1}{2}} it is", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
            (r"\boxed{1} then \boxed{2}", r"\boxed{2}", "2"),
            (r"\fbox{a{b}c}.", r"\fbox{a{b}c}", "a{b}c"),
            (r"is $\boxed 7$ here", r"\boxed 7", "7"),
            (r"\boxed{}", r"\boxed{}", ""),
        ],
    )
    def test_the_last_one(self, text, box, inside):
        for module in (math_reward, math_dapo):
            assert module.last_boxed_only_string(text) == box
            assert module.remove_boxed(box) == inside

    @pytest.mark.parametrize("text", ["none", r"\boxed{1", r"boxed{1}"])
    def test_none(self, text):
        assert last_boxed_only_string(text) is None
        with pytest.raises(ValueError, match="is not a"):
            remove_boxed(text)

    @pytest.mark.parametrize(
        ("answer", "normal"),
        [
            ("x = 1,000 dollars", "1000"),
            (r"\frac12", r"\frac{1}{2}"),
            (r"\sqrt3", r"\sqrt{3}"),
            (r"the $\boxed{5}$ units", "5"),
            (r"90^\circ", "90"),
            (r"\text{east}", "east"),
            ("1,2,x", "1,2,x"),
            (r"\$32.50", "32.50"),
        ],
    )
    def test_answers_as_minerva_compares_them(self, answer, normal):
        assert normalize_final_answer(answer) == normal

    def test_equivalence(self):
        assert is_equiv("0.5", r"\frac{1}{2}")
        assert not is_equiv("0.5", "0.6")


class TestFilesInThePackage:
    """Reward files that scripts name by their path in a checkout."""

    GOLD = '<think> t </think>\n<tool_call>\n{"name": "get", "parameters": {"city": "Rome", "day": 3}}\n</tool_call>'

    @pytest.mark.parametrize(
        ("reply", "form", "correct"),
        [
            (GOLD, 1, 3.0),
            (GOLD.replace("Rome", "Oslo"), 1, 6 * 3 / 4 - 3),  # name 1, parameter names 1, one of two values
            (GOLD.replace('"city": "Rome", ', ""), 1, 6 * (1 + 0.5 + 1) / 4 - 3),
            (GOLD.replace("get", "put"), 1, -3.0),
            (GOLD.replace("<think> t </think>", ""), 0, 3.0),
            (GOLD.replace('"day": 3}', "day}"), 1, -3.0),
            ("<think> t </think>\n<response> no </response>", 0, -3.0),
        ],
    )
    def test_tool_calls(self, reply, form, correct, tmp_path, monkeypatch):
        """At most 1 for the names, 1 for the parameter names and 2 for the values, scaled to -3 ... 3."""
        monkeypatch.chdir(tmp_path)
        spec = RewardFunctionSpec("verl/utils/reward_score/rlla.py")
        score = load_reward_function(spec)(data_source="rlla", solution_str=reply, ground_truth=self.GOLD)
        parts = {"format_reward": form, "accuracy_reward": pytest.approx(correct)}
        assert score == {"score": pytest.approx(form + correct), **parts}
        assert spec.file_digest() is None  # a module, not a file of the user

    def test_replies_without_calls(self):
        from verl.utils.reward_score.rlla import compute_score

        gold = "<think> t </think>\n<response> hi </response>"
        assert compute_score(gold, gold)["score"] == 4
        assert compute_score(self.GOLD, gold)["accuracy_reward"] == -3

    @pytest.mark.parametrize(
        ("reply", "score"),
        [
            ("<think>a</think>\n<answer>0.5</answer>", 1.0),
            (r"<think>a</think> <answer>\boxed{\frac{1}{2}}</answer>", 1.0),
            ("<answer>0.5</answer>", 0.9),
            ("<think>a</think> <answer>0.6</answer>", 0.1),
            ("0.5", 0.0),
        ],
    )
    def test_tagged_answers(self, reply, score):
        from verl.utils.reward_score.tinyllava_video_r1 import compute_score  # openr1mm's

        assert compute_score(solution_str=reply, ground_truth="<answer> 0.5 </answer>")["score"] == pytest.approx(score)

    def test_a_file_that_is_not_there(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigError, match="nothing.py does not exist"):
            load_module("verl/utils/reward_score/nothing.py")
        (tmp_path / "verl/utils/reward_score").mkdir(parents=True)
        (tmp_path / "verl/utils/reward_score/gsm8k.py").write_text("HERE = 1")
        assert load_module("verl/utils/reward_score/gsm8k.py").HERE == 1  # a checkout goes first
