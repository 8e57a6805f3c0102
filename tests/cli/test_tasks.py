"""`verl eval --tasks` on tasks in local files, without a network."""

import importlib.util
import json

import pytest
import torch

from tests.json_lines import write_lines
from verl.cli.main import main

ROWS = [
    {"question": "2 and 3", "choices": ["yes", "no", "five"], "answer": 2},
    {"question": "is a an a?", "choices": ["yes", "no", "x"], "answer": 0},
    {"question": "abc", "choices": ["d", "q", "zz"], "answer": 1},
]
COMMON = """dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
doc_to_text: "{{{{question}}}}:"
"""
CHOICE = (
    COMMON
    + """task: local_choice
output_type: multiple_choice
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
)
WRITING = (
    COMMON
    + """task: local_writing
output_type: generate_until
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
)


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder with two tasks; data sets are cached next to it."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = folder / "rows.json"
    write_lines(rows, ROWS)
    for name, text in (("choice", CHOICE), ("writing", WRITING)):
        (folder / f"{name}.yaml").write_text(text.format(rows=rows))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return folder


def chosen(folder, row):
    """The choice with the largest sum of log-probs, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sums = []
    for choice in row["choices"]:
        context, answer = (tokenizer.encode(t, add_special_tokens=False) for t in (f"{row['question']}:", f" {choice}"))
        with torch.no_grad():
            logits = module(torch.tensor([context + answer])).logits[0, len(context) - 1 : -1]
        sums.append(float(logits.log_softmax(-1)[range(len(answer)), answer].sum()))
    return sums


@pytest.mark.slow
def test_results_are_of_the_model(tasks, tiny_llama, tmp_path, capsys):
    pytest.importorskip("lm_eval")
    output = tmp_path / "results.json"
    options = [f"--include-path={tasks}", f"--output={output}", "--device=cpu", "--batch-size=2"]
    assert main(["eval", "--tasks", "local_choice,local_writing", str(tiny_llama), *options]) == 0
    results = json.loads(output.read_text())
    expected = [chosen(tiny_llama, row) for row in ROWS]
    right = [max(range(3), key=sums.__getitem__) == row["answer"] for sums, row in zip(expected, ROWS)]
    assert results["results"]["local_choice"]["acc,none"] == pytest.approx(sum(right) / len(right))
    for sample in results["samples"]["local_choice"]:
        sums = [float(answer[0][0]) for answer in sample["resps"]]
        assert sums == pytest.approx(expected[sample["doc_id"]], abs=1e-3)
    assert len(results["samples"]["local_writing"]) == len(ROWS)
    printed = capsys.readouterr().out
    assert "local_choice" in printed
    assert "exact_match" in printed
    assert main(["eval", "--tasks=local_choise", str(tiny_llama), *options]) == 2
    assert "no task 'local_choise'; did you mean 'local_choice'" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_the_extra_is_named(tiny_llama, capsys):
    assert main(["eval", "--tasks", "arc_easy", str(tiny_llama)]) == 7
    assert "pip install 'lm_eval[hf]>=0.4.13'" in capsys.readouterr().err
