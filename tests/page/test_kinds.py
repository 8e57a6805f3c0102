"""Runs of every kind on a tiny model: what they keep for the page, and that all of their pages open."""

import json
import re

import pytest

from tests.letters_task import write_task
from verl.config import PREFERENCE, RM, SFT, load_config
from verl.page.pages import Site
from verl.run.host import train

_COMMON = ["data.train_batch_size=4", "trainer.logger=[file]", "trainer.total_training_steps=2"]


def conversation(i):
    return {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "ab" * (i % 3 + 1)}]}


def pair(i):
    return {"prompt": f"say {i}", "chosen": "ab" * (i % 3 + 1), "rejected": "x" * (i % 2 + 1)}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    for name, made in (("sft", conversation), ("pairs", pair)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(made(i)) + "\n" for i in range(12)))
    return folder


@pytest.fixture(scope="module")
def quiet_pictures(no_pictures):
    """Nobody looks at them."""


@pytest.fixture
def made(tiny_llama, rows, tmp_path, quiet_pictures):
    """`made(program, schema, "key=value", ...)` is the Site of a run of two steps."""
    sites = []

    def made(program, schema, *overrides, kind="sft"):
        folder = tmp_path / "run"
        given = [
            f"model.path={tiny_llama}",
            f"data.train_files={rows}/{kind}.jsonl",
            f"data.val_files={rows}/{kind}.jsonl",
        ]
        loaded = load_config([*given, *_COMMON, f"trainer.default_local_dir={folder}", *overrides], schema=schema)
        assert train(loaded, program=program) == 0
        return open_site(folder, tmp_path, sites)

    yield made
    for site in sites:
        site.close()


def open_site(folder, cache, sites):
    site = Site([folder], cache=cache)
    site.views["run"].index.update()
    sites.append(site)
    return site


def sample_data(site, path):
    found = re.search(r'id="tokens-data">(.*?)</script>', site.page(path), re.DOTALL)
    return json.loads(found.group(1))


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


def test_sft_keeps_rows_with_the_log_probs_of_their_tokens(made):
    site = made("sft", SFT, "trainer.test_freq=1")
    visit(site)
    assert site.views["run"].run.kind == "sft"
    data = sample_data(site, "/run/run/train/1/s/0")
    trained = [v for v in data["columns"]["log_prob"] if v is not None]
    assert trained
    assert all(value < 0 for value in trained)
    assert any(text.strip() for text in data["texts"])


def test_the_margins_of_pairs_are_those_of_the_metrics(made):
    site = made("preference", PREFERENCE, kind="pairs")
    visit(site)
    view = site.views["run"]
    assert view.run.kind == "preference"
    for step in (1, 2):
        rows = [
            json.loads(line)
            for line in (view.run.folder / "samples" / "train" / f"step_{step:06d}.jsonl").read_text().splitlines()
        ]
        margins = [a["score"] - b["score"] for a, b in zip(rows[::2], rows[1::2], strict=True)]
        assert [row["chosen"] for row in rows[::2]] == [True] * 4
        series = view.run.metrics["train/rewards/margins"]
        expected = dict(zip(series.steps, series.values, strict=True))[step]
        assert sum(margins) / len(margins) == pytest.approx(expected, abs=2e-5)
    page = site.page("/run/run/train/2/u/" + str(rows[0]["ordinal"]))
    assert "margin" in page
    assert "rejected" in page


@pytest.mark.slow
def test_reward_models_show_held_out_pairs(made):
    site = made("rm", RM, "trainer.test_freq=1", kind="pairs")
    visit(site)
    row = site.views["run"].index.rows("SELECT unit FROM samples WHERE chosen = 1 LIMIT 1")[0]
    assert "margin" in site.page(f"/run/run/val/1/u/{row['unit']}")


@pytest.mark.parametrize("estimator", ["grpo", pytest.param("gae", marks=pytest.mark.slow)])
def test_policies_keep_what_the_trainer_computes(tiny_llama, tmp_path, quiet_pictures, estimator):
    folder, task = tmp_path / "run", write_task(tmp_path)
    actor = "actor_rollout_ref.actor"
    loaded = load_config(
        [*_COMMON, f"algorithm.adv_estimator={estimator}", f"trainer.default_local_dir={folder}", "trainer.test_freq=1",
         f"actor_rollout_ref.model.path={tiny_llama}", f"critic.model.path={tiny_llama}", f"{actor}.entropy_coeff=0.001",
         f"data.train_files={task}/train.jsonl", f"data.val_files={task}/val.jsonl", "data.max_prompt_length=64",
         "data.max_response_length=6", "actor_rollout_ref.rollout.n=4", f"{actor}.ppo_mini_batch_size=4",
         f"{actor}.fsdp_config.dtype=float32", f"reward.custom_reward_function.path={task}/reward.py"]
    )  # fmt: skip
    assert train(loaded) == 0
    sites = []
    try:
        site = open_site(folder, tmp_path, sites)
        pages = visit(site)
        assert any(path.startswith("/val/") for path in pages)
        rows = [
            json.loads(line) for line in (folder / "samples" / "train" / "step_000001.jsonl").read_text().splitlines()
        ]
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
        known = set(site.views["run"].run.tokens)
        assert {i for row in rows for i in row["prompt_ids"] + row["response_ids"]} <= known
    finally:
        for site in sites:
            site.close()
