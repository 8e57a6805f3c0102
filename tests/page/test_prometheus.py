"""Metrics for Prometheus, and the keys rollout.prometheus.*"""

import stat

import pytest
import yaml

from tests.page.folders import append, make_run
from verl.config import load_config
from verl.page.pages import Site
from verl.page.server import exposition, write_scrape_config


def test_the_newest_values_are_exposed(tmp_path):
    folder = make_run(tmp_path / "run")
    append(folder / "metrics.jsonl", {"step": 4, "time": 1.0, "critic/score/mean": 0.75, 'a"b\n/c': 2.0})
    site = Site([folder], cache=tmp_path)
    try:
        lines = exposition(site, {"model_name": 'tiny "x"\\'}).splitlines()
    finally:
        site.close()
    labels = '{run="run",model_name="tiny \\"x\\"\\\\"}'
    assert f"verl_critic_score_mean{labels} 0.75" in lines
    assert f"verl_step{labels} 4" in lines
    assert f"verl_running{labels} 0" in lines
    assert f"verl_actor_grad_norm{labels} {1 / 3!r}" in lines
    samples = [line for line in lines if not line.startswith("#")]
    assert all(line.startswith("verl_") and line.count("} ") == 1 for line in samples)
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))


def test_the_settings_of_prometheus_are_private(tmp_path):
    file = tmp_path / "deep" / "prometheus.yml"
    write_scrape_config(file, "127.0.0.1", 4711, "secret-of-a-page")
    (job,) = yaml.safe_load(file.read_text())["scrape_configs"]
    assert job["authorization"]["credentials"] == "secret-of-a-page"
    assert job["static_configs"] == [{"targets": ["127.0.0.1:4711"]}]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_keys_start_a_page_and_write_its_place(tmp_path):
    pytest.importorskip("starlette", reason="the extra `page` is not installed")
    pytest.importorskip("uvicorn", reason="the extra `page` is not installed")
    pytest.importorskip("sse_starlette", reason="the extra `page` is not installed")
    from verl.cli.page import page_of
    from verl.tracking import run_folder

    file = tmp_path / "prometheus.yml"
    prometheus = "actor_rollout_ref.rollout.prometheus"
    loaded = load_config(
        [f"trainer.default_local_dir={tmp_path / 'run'}", f"{prometheus}.enable=True", f"{prometheus}.file={file}",
         f"{prometheus}.port=1", f"{prometheus}.served_model_name=tiny"], check=False,
    )  # fmt: skip
    with page_of(loaded, whole_process=False):
        (target,) = yaml.safe_load(file.read_text())["scrape_configs"][0]["static_configs"][0]["targets"]
        assert run_folder.address_of_page.startswith(f"http://{target}/?token=")
    assert not run_folder.address_of_page
