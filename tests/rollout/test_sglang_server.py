"""`rollout.name=sglang` without an address: a server is started, takes weights, is missed when it dies; SGLang is simulated."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from tests.rollout.conftest import EOS, make_prompts
from tests.rollout.simulated import send, weight_transfer
from tests.rollout.test_engine_names import write_sources
from tests.runtime.ranks import still_there
from verl.config import RolloutConfig
from verl.config.sections.rollout import EngineKwargsConfig, ServiceConfig
from verl.data_proto.samples import SamplingParams
from verl.errors import MissingExtraError, ModelError, WorkerLostError
from verl.parallel.child_processes import __file__ as ANCESTRY
from verl.rollout.api import ENGINES
from verl.rollout.http import client
from verl.rollout.http.server import _folder_in_memory, arguments
from verl.rollout.http.sglang import SGLangRollout

ROOT = Path(__file__).resolve().parents[2]
PARAMS = SamplingParams(n=2, max_new_tokens=2)


@pytest.fixture
def note(tmp_path, monkeypatch):
    """The file in which the server notes how it was started. SGLang is installed, and waits are short."""
    place = str(shutil.copytree(Path(__file__).parent / "simulated_sglang", tmp_path / "simulated"))
    write_sources(tmp_path / "simulated", "sglang")
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([place, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    monkeypatch.setenv("VERL_TEST_SGLANG", str(tmp_path / "note"))
    monkeypatch.setattr(client, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setattr("verl.rollout.http.server._POLL_S", 0.02)
    monkeypatch.setattr("verl.rollout.http.server._MAIN", "sglang.launch_server")
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    return tmp_path / "note"


@pytest.fixture
def make(load, tokenizer, note):
    engines = []

    def build(**config):
        settings = RolloutConfig(
            name="sglang", max_num_seqs=4, max_model_len=64, tensor_model_parallel_size=2, **config
        )
        spec = dataclasses.replace(weight_transfer("a/model"), visible_devices=("4", "5"), start_timeout_s=60.0)
        engines.append(ENGINES.get("sglang")(load("llama"), tokenizer, settings, eos_token_ids=[EOS], transfer=spec))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def test_a_server_is_started_takes_weights_and_ends_with_the_engine(make, note, load):
    engine = make()
    said = json.loads(note.read_text())
    assert (said["--tp-size"], said["--max-running-requests"], said["seen"]) == ("2", "4", "4,5")
    prompts = make_prompts([3, 6])
    for version in (1, 2):
        send(engine, load("llama"), version)
        completions = engine.generate(prompts, PARAMS, step=0)
        assert {c.token_ids[1] for c in completions} == {version}, "the weights that were sent last"
        assert {c.weight_version for c in completions} == {version}
    folder, process = Path(engine.server.weights_dir), psutil.Process(said["pid"])
    assert folder.is_dir()
    engine.close()
    assert not still_there([process])
    assert not folder.exists()


def test_a_server_frees_its_memory_while_something_trains(make, note, load, caplog, tmp_path):
    """Except while dropped requests still run. New weights and generations bring the memory back. Weights are only freed if
    new ones come."""
    engine = make(
        engine_kwargs=EngineKwargsConfig(sglang={"enable_memory_saver": True}),
        service=ServiceConfig(weights_dir=str(tmp_path)),
    )
    assert Path(engine.server.weights_dir).parent == tmp_path
    assert json.loads(note.read_text())["--enable-memory-saver"] is True

    def released():
        return engine.client.get("/simulated_memory").at(list, "released")

    engine.release()
    assert "keeps its GPU memory during this training step" in caplog.text
    assert released() == []
    engine.release()
    assert released() == ["kv_cache"]
    engine.release()
    assert len(engine.generate(make_prompts([3]), PARAMS, step=0)) == 2
    assert released() == []
    engine.syncs = True
    engine.release()  # busy
    engine.release()
    assert sorted(released()) == ["kv_cache", "weights"]
    with pytest.raises(ModelError, match="did not come. They cannot generate"):
        engine.generate(make_prompts([3]), PARAMS, step=0)
    send(engine, load("llama"), 1)
    assert released() == ["kv_cache"]
    assert len(engine.generate(make_prompts([3]), PARAMS, step=0)) == 2
    assert released() == []


def test_weights_are_in_shared_memory_if_it_has_space_for_them(load, monkeypatch):
    sizes = {"free": 1 << 30}
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(**sizes))
    assert _folder_in_memory(load("llama"), torch.float32) == "/dev/shm"
    sizes["free"] = 1 << 16
    assert _folder_in_memory(load("llama"), torch.float32) is None


def test_a_server_that_dies_is_a_lost_process_of_the_run(make, note, load):
    engine = make()
    send(engine, load("llama"), 1)
    os.kill(json.loads(note.read_text())["pid"], signal.SIGKILL)
    with pytest.raises(WorkerLostError, match=rf"server \(pid {engine.server.pid}\) was ended by SIGKILL"):
        engine.generate(make_prompts([3]), PARAMS, step=0)


def test_a_server_that_does_not_start_says_why(make, note):
    note.write_text("fail")
    with pytest.raises(ModelError, match="exit code 1 .*no kernel for this device.* while it was starting"):
        make()


def test_without_sglang_both_ways_are_named():
    with pytest.raises(MissingExtraError, match=r"sglang<0.6,>=0.5.23', or set actor_rollout_ref.rollout.service.url"):
        SGLangRollout.require_package(RolloutConfig(name="sglang"))


def test_arguments_follow_the_config(load):
    config = RolloutConfig(
        prompt_length=20, response_length=12, seed=5, enable_prefix_caching=False, gpu_memory_utilization=0.4
    )
    more = {"schedule_conservativeness": 0.5, "cuda_graph_bs": [1, 2], "random_seed": 7, "dtype": None}
    config = dataclasses.replace(config, engine_kwargs=dataclasses.replace(config.engine_kwargs, sglang=more))
    words = arguments(config, weight_transfer("a/model"), load("llama"), 8123)
    said = " ".join(words)
    for part in (
        "--model-path a/model", "--port 8123", "--context-length 40", "--mem-fraction-static 0.4", "--disable-radix-cache",
        "--schedule-conservativeness 0.5", "--cuda-graph-bs 1 2", "--random-seed 7", "--host 127.0.0.1",
    ):  # fmt: skip
        assert part in said
    for absent in ("--dtype", "--trust-remote-code", "--json-model-override-args", "--disable-cuda-graph"):
        assert absent not in words


def test_a_gpu_has_no_graphs_where_told_so_and_its_memory_is_freed(load):
    config = RolloutConfig(prompt_length=20, response_length=12, enforce_eager=True)
    on_gpu = dataclasses.replace(weight_transfer("a/model"), device=torch.device("cuda"))
    freed = {"--enable-memory-saver"}
    eager = {"--disable-decode-cuda-graph", "--disable-prefill-cuda-graph"}
    assert freed | eager <= set(arguments(config, on_gpu, load("llama"), 8123))
    assert not freed & set(arguments(dataclasses.replace(config, free_cache_engine=False), on_gpu, load("llama"), 8123))
    assert not freed & set(arguments(config, weight_transfer("a/model"), load("llama"), 8123))


def test_a_program_that_becomes_another_ends_with_its_parent():
    """The parent is killed; its child, without a request to end with it, ends too."""
    code = (
        "import os, subprocess, sys, time;"
        f"p = subprocess.Popen([sys.executable, {ANCESTRY!r}, str(os.getpid()), '/bin/sleep', '600']);"
        "print(p.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    while "sleep" not in " ".join(child.cmdline()[:1]):
        assert child.is_running()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert not still_there([child])
