"""`verl data preferences`: rows that a judge labels, with a chat service; its replies follow from the question."""

import pytest

from tests.json_lines import read_lines
from tests.rollout.service import running
from verl.data.files import write_parquet
from verl.programs.label import Candidates, preferences

MODELS = {"data": [{"id": "judge"}]}
NO = float("nan")


def longer_wins(body):
    """An unbiased judge of PAIR_TEMPLATE; of a rubric, it grades by length."""
    question = body["messages"][0]["content"]
    if "Criterion" in question:
        reply = str(len(question.split("Response:\n")[1].split("\n")[0]))
    else:
        first, second = (question.split(f"Response {x}:\n")[1].split("\n")[0] for x in "AB")
        reply = "[[C]]" if len(first) == len(second) else "[[A]]" if len(first) > len(second) else "[[B]]"
    return {"choices": [{"message": {"content": reply}, "finish_reason": "stop"}]}


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "responses.parquet"
    prompts = [[{"role": "user", "content": f"question {i}"}] for i in range(3)]
    responses = [["no", "a longer one", "middle"], ["ab", "cd"], ["same", "same"]]
    write_parquet(file, [{"prompt": p, "responses": r} for p, r in zip(prompts, responses, strict=True)])
    return file


@pytest.fixture
def label(rows, tmp_path, capsys):
    """`label(service, *options)`: (exit code, written rows, output) of the command."""
    from verl.cli.main import main

    def run(url, *options, name="pairs.jsonl", source=rows):
        output = tmp_path / name
        code = main(["data", "preferences", "--input", str(source), "--output", str(output), "--judge", url, *options])
        said = capsys.readouterr()
        labelled = read_lines(output) if output.exists() else []
        return code, labelled, said.out + said.err

    return run


def answers(row):
    return row["chosen"][0]["content"], row["rejected"][0]["content"], row["margin"]


def test_pairs_are_asked_in_both_orders_and_once(label, tmp_path):
    with running({"/v1/models": MODELS, "/v1/chat/completions": longer_wins}) as service:
        cache = ("--cache", str(tmp_path / "replies.jsonl"))
        code, labelled, said = label(service.url, *cache)
        assert code == 0, said
        assert [answers(row) for row in labelled] == [("a longer one", "no", pytest.approx(4 / 3))]
        assert labelled[0]["prompt"] == [{"role": "user", "content": "question 0"}]
        assert "have the same verdict: 1.000" in said
        assert "shown first: 0.500" in said
        num_requests = len(service.bodies("/v1/chat/completions"))
        assert num_requests == 2 * 3 + 2  # of the third prompt both responses are equal
        _, again, _ = label(service.url, *cache, "--pairs", "all")
        assert len(service.bodies("/v1/chat/completions")) == num_requests
        assert [answers(row)[:2] for row in again] == [
            ("a longer one", "no"),
            ("middle", "no"),
            ("a longer one", "middle"),
        ]


def test_the_rows_train_preferences(label, tiny_llama, tmp_path):
    from verl.config import RM, load_config
    from verl.programs.reward_model import RewardModelProgram

    with running({"/v1/models": MODELS, "/v1/chat/completions": longer_wins}) as service:
        label(service.url, "--pairs", "all")
    settings = [f"model.path={tiny_llama}", f"data.train_files={tmp_path}/pairs.jsonl", "data.train_batch_size=3"]
    rows = RewardModelProgram.load_data(load_config(settings, schema=RM).config).train.dataset
    assert [sequence.chosen for number in range(3) for sequence in rows[number]] == [True, False] * 3


def test_a_rubric_grades_each_response(label, tmp_path):
    (tmp_path / "rubric.yaml").write_text("- {name: length, question: Is it long?}\n")
    with running({"/v1/models": MODELS, "/v1/chat/completions": longer_wins}) as service:
        code, labelled, said = label(service.url, "--rubric", str(tmp_path / "rubric.yaml"))
        assert code == 0, said
        assert [answers(row) for row in labelled] == [("a longer one", "no", 10.0)]
        assert len(service.bodies("/v1/chat/completions")) == 5
        assert "Mean score: 4.800; responses without one: 0 of 5." in said


def test_a_judge_that_decides_nothing_is_an_error(label):
    first = {"choices": [{"message": {"content": "[[A]]"}}]}
    with running({"/v1/models": MODELS, "/v1/chat/completions": lambda body: first}) as service:
        code, labelled, said = label(service.url)
    assert (code, labelled) == (3, [])
    assert "preferred no response" in said
    assert "shown first: 1.000" in said


def test_a_bad_row_is_named_before_the_judge_is_asked(label, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "p", "responses": "one text"}\n')
    code, labelled, said = label("http://127.0.0.1:1", source=file)
    assert (code, labelled) == (3, [])
    assert "'responses' must be a list of texts" in said
    assert "bad.jsonl" in said


@pytest.mark.parametrize(
    ("pairs", "gaps", "expected"),
    [
        ("best_worst", {(0, 1): 1.0, (0, 2): -1.0, (1, 2): 1.0}, []),  # all are as good
        ("best_worst", {(0, 1): 1.0, (0, 2): 0.5, (1, 2): NO}, [("x", "y", pytest.approx(2.5 / 3))]),
        ("first_last", {(0, 1): 1.0, (0, 2): -0.5, (1, 2): 1.0}, [("z", "x", 0.5)]),
        ("first_last", {(0, 2): NO}, []),
        ("all", {(0, 1): 1.0, (0, 2): 0.0, (1, 2): -1.0}, [("x", "y", 1.0), ("z", "y", 1.0)]),
    ],
)
def test_rows_of_a_prompt_with_three_responses(pairs, gaps, expected):
    labelled = preferences(Candidates("p", ("x", "y", "z")), gaps, pairs)
    assert [(row["chosen"], row["rejected"], row["margin"]) for row in labelled] == expected
