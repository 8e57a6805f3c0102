"""Runs of every kind on a tiny model: the records that they keep for the page, and all of their pages open."""

import json
import re

import pytest

from tests.json_lines import read_lines
from tests.page.runs import train_kind
from verl.page.pages import Site


@pytest.fixture
def site_of(tiny_llama, tmp_path):
    """`site_of(kind)` is the Site of a run of two steps."""
    sites = []
    yield lambda kind: open_site(train_kind(kind, tmp_path, tiny_llama), tmp_path, sites)
    for site in sites:
        site.close()


def open_site(folder, cache, sites):
    site = Site([folder], cache=cache)
    site.views["run"].index.update()
    sites.append(site)
    return site


def sample_data(site, path):
    match = re.search(r'id="tokens-data">(.*?)</script>', site.page(path), re.DOTALL)
    return json.loads(match.group(1))


def visit(site):
    """All pages of the run, of one step with a group and a sample of each split."""
    pages = ["", "/metrics", "/config", "/log", "/samples"]
    view = site.views["run"]
    for row in view.index.rows(
        "SELECT split, step, unit, line FROM samples JOIN files ON files.id = file GROUP BY split, step"
    ):
        base = f"/{row['split']}/{row['step']}"
        pages += [base, f"{base}/u/{row['unit']}", f"{base}/s/{row['line']}"]
    for path in pages:
        assert "<main" in site.page(f"/run/run{path}")
    return pages


def test_sft_keeps_rows_with_the_log_probs_of_their_tokens(site_of):
    site = site_of("sft")
    visit(site)
    assert site.views["run"].run.kind == "sft"
    data = sample_data(site, "/run/run/train/1/s/0")
    trained = [v for v in data["columns"]["log_prob"] if v is not None]
    assert trained
    assert all(value < 0 for value in trained)
    assert any(text.strip() for text in data["texts"])
    rows = read_lines(site.views["run"].run.folder / "samples/train/step_000001.jsonl")
    assert {row["prompt"].rpartition("<|im_start|>")[2] for row in rows} == {
        "assistant\n"
    }  # not at the first difference of rows
    assert {row["response"].strip() for row in rows} <= {"ab", "abab", "ababab"}
    assert all(len(row["response_ids"]) == len(row["train_log_probs"]) for row in rows)
    step = site.page("/run/run/train/1")
    assert "longest" in step
    assert "spread of rewards" not in step  # rows have neither rewards nor a sampler
    assert "sampler against trainer" not in step


def test_the_margins_of_pairs_match_the_metrics(site_of):
    site = site_of("dpo")
    visit(site)
    view = site.views["run"]
    assert view.run.kind == "preference"
    for step in (1, 2):
        rows = read_lines(view.run.folder / "samples" / "train" / f"step_{step:06d}.jsonl")
        margins = [a["score"] - b["score"] for a, b in zip(rows[::2], rows[1::2], strict=True)]
        assert [row["chosen"] for row in rows[::2]] == [True] * 4
        series = view.run.metrics["train/rewards/margins"]
        expected = dict(zip(series.steps, series.values, strict=True))[step]
        assert sum(margins) / len(margins) == pytest.approx(expected, abs=2e-5)
    page = site.page("/run/run/train/2/u/" + str(rows[0]["ordinal"]))
    assert "margin" in page
    assert "rejected" in page


@pytest.mark.slow
def test_reward_models_show_held_out_pairs(site_of):
    site = site_of("rm")
    assert 'href="/run/run/val/2"' in site.page("/run/run/train/2")  # only its rows are kept
    visit(site)
    row = site.views["run"].index.rows("SELECT unit FROM samples WHERE chosen = 1 LIMIT 1")[0]
    assert "margin" in site.page(f"/run/run/val/1/u/{row['unit']}")


@pytest.mark.parametrize("kind", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_policies_keep_what_the_trainer_computes(site_of, kind):
    site = site_of(kind)
    folder = site.views["run"].run.folder
    pages = visit(site)
    assert any(path.startswith("/val/") for path in pages)
    rows = read_lines(folder / "samples" / "train" / "step_000001.jsonl")
    trained = [row for row in rows if "train_log_probs" in row]
    assert trained
    for row in rows:
        assert ("train_log_probs" in row) == any(row["advantages"]), "rows without an advantage are not computed"
    for row in trained:
        assert row["train_log_probs"] == pytest.approx(row["log_probs"], abs=1e-3)
        assert all(value > 0 for value in row["entropy"])
    line = rows.index(trained[0])
    text = site.page(f"/run/run/train/1/s/{line}")
    assert "scored" in text
    assert "trained" in text
    assert set(sample_data(site, f"/run/run/train/1/s/{line}")["columns"]) >= {
        "log_prob",
        "gap",
        "entropy",
        "advantage",
    }
    tokens = set(site.views["run"].run.tokens)
    assert {i for row in rows for i in row["prompt_ids"] + row["response_ids"]} <= tokens
