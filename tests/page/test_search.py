"""Search over samples, and two runs side by side."""

import json
import math

import pytest

from tests.page.folders import make_run, sample, write_samples
from verl.page import panels, search
from verl.page.index import SampleIndex
from verl.page.pages import Site
from verl.page.summaries import final_answer, largest_gap, last_message, summary_of, without_arrays


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("runs") / "run", steps=1)
    rows = [
        sample(0, 0, score=1.0, response="The answer is \\boxed{42}."),
        sample(0, 1, score=0.0, response="so: \\boxed{42}"),
        sample(1, 0, score=0.0, response='say "quoted" 100% of_it', finish_reason="length"),
        sample(1, 1, score=0.5, response="中文回答", reward_error="ValueError: no number"),
        sample(2, 0, score=0.25, response="zz", response_ids=[1] * 50),
    ]
    write_samples(folder, "train", 1, rows)
    write_samples(folder, "val", 1, [sample(9, 0, score=1.0, response="held out 42")])
    opened = SampleIndex(folder, folder.parent)
    opened.update()
    return opened


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"q": "boxed{42}"}, [("train", 0), ("train", 1)]),
        ({"q": '"quoted"'}, [("train", 2)]),
        ({"q": "100% of_it"}, [("train", 2)]),
        ({"q": "zz"}, [("train", 4)]),
        ({"q": "0%"}, [("train", 2)]),
        ({"q": "文回"}, [("train", 3)]),
        ({"q": "42", "split": "val"}, [("val", 0)]),
        ({"conflict": "1"}, [("train", 0), ("train", 1)]),
        ({"cut": "1"}, [("train", 2)]),
        ({"failed": "1"}, [("train", 3)]),
        ({"min": "0.25", "max": "0.5", "sort": "score"}, [("train", 4), ("train", 3)]),
        ({"longer": "40"}, [("train", 4)]),
        ({"from": "2"}, []),
        ({"min": "x", "q": "zz"}, [("train", 4)]),
        ({"q": "' OR 1=1 --"}, []),
    ],
)
def test_samples_that_match(index, query, expected):
    rows = search.find_samples(index, query, limit=10)
    assert [(row["split"], row["line"]) for row in rows] == expected


def test_the_place_is_marked(index):
    (row, _) = search.find_samples(index, {"q": "boxed"}, limit=10)
    assert ("boxed", True) in row["excerpt"]


@pytest.mark.parametrize(
    ("response", "answer"),
    [("\\boxed{a{b}c} then \\boxed{7}", "7"), ("#### 1,234", "1234"), ("The answer is 5.\nso", "5"), ("3 and 4", "4"),
     ("first\nlast line", "last line"), ("", ""), ("\n\n", "")],
)  # fmt: skip
def test_final_answers(response, answer):
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n", "How?"),
     ("[INST] How? [/INST]", "How?"), ("How?", "How?"), ("<|user|>", "<|user|>")],
)  # fmt: skip
def test_the_last_message_of_a_prompt(prompt, message):
    assert last_message(prompt) == message


def test_two_runs(tmp_path):
    one, other = make_run(tmp_path / "one"), make_run(tmp_path / "other", steps=2)
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("grpo", "rloo"))
    site = Site([one, other], cache=tmp_path)
    try:
        for view in site.views.values():
            view.index.update()
        context = panels.compare_context(site.views, {"a": "one", "b": "other"})
        assert context["keys"] == [("algorithm.adv_estimator", "grpo", "rloo")]
        assert context["steps"] == [1, 2]
        assert len(context["prompts"]) == 4
        reward = context["charts"]["panels"][0]
        assert {series["run"] for series in reward["series"]} == {0, 1}
        assert "rloo" in site.page("/compare", {"a": "one", "b": "other", "step": "1"})
        assert "one" in site.page("/compare", {"a": "nobody"})
    finally:
        site.close()


@pytest.mark.parametrize(
    ("sampled", "trained", "gap"),
    [([-1.0, -9.0], [-0.5, -20.0], math.exp(-0.5) - math.exp(-1)), ([-1.0, None], [-0.5, "x"], math.exp(-0.5) - math.exp(-1)),
     ([0.0], [1e300], 0.0), ([], [], None), (None, [-1.0], None)],
)  # fmt: skip
def test_the_gap_of_a_sample_is_one_of_probabilities(sampled, trained, gap):
    assert largest_gap({"log_probs": sampled, "train_log_probs": trained}) == (gap and pytest.approx(gap))


def test_rows_are_read_without_the_numbers_that_no_summary_needs():
    row = sample(
        3, 0, response='"entropy": [1, 2] \\" \\"prompt_ids\\": [3]', entropy=[0.5, 1.5], reward_parts={"entropy": [1]}
    )
    for more in ({}, {"old_log_probs": [0.0] * 6}, {"train_log_probs": None, "old_log_probs": [-9.0] * 6},
                 {"token_versions": [[1, 2], [3]]}, {"ref_log_probs": ["a] b"]}, {"entropy": []}):  # fmt: skip
        content = json.dumps({**row, **more}).encode()
        short = without_arrays(content)
        assert len(short) < len(content)
        try:
            read = json.loads(short)
        except ValueError:
            assert more == {"token_versions": [[1, 2], [3]]}  # the caller reads the whole row
            continue
        assert summary_of(read, 0) == summary_of({**row, **more}, 0)
