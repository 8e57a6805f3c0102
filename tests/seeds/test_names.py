"""Names in the seed documents, and their effect here."""

import ast
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
import torch

import verl
from tests import letters_task
from tests.commands import python
from verl import ExperienceBuffer
from verl.config import load_config
from verl.errors import ConfigError, ModelError, install_command
from verl.models.forward import computed_by
from verl.models.load import load_model
from verl.run.host import train
from verl.tracking.console import Console
from verl.trainer import PPOTrainer
from verl.trainer.rl_trainer import RLTrainer
from verl.utils import check_model_consistency
from verl.utils.fsdp_utils import get_init_weight_context_manager
from verl.worker import ActorRolloutRefWorker, RolloutWorker, UpdateWorker, init_context
from verl.workers.sharding_manager.megatron_vllm import MegatronVLLMShardingManager

SMALL = ["actor_rollout_ref.actor.fsdp_config.dtype=float32", "data.max_response_length=4"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory, tiny_llama):
    """Two steps on the letters task, without a reward function."""
    task = letters_task.write_task(tmp_path_factory.mktemp("task"))
    return [
        f"actor_rollout_ref.model.path={tiny_llama}", f"data.train_files={task}/train.jsonl", "data.train_batch_size=2",
        f"data.val_files={task}/val.jsonl", "data.max_response_length=4", "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo", "reward.debug=True", "trainer.total_training_steps=1", "trainer.logger=[file]",
        "trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1", "max_prompt_length=64",
    ]  # fmt: skip


def letters(data_source, solution_str, ground_truth, extra_info=None):
    """The reward of this file; reward processes load it."""
    return sum(c.isalpha() for c in solution_str) / max(len(solution_str), 1)


@pytest.mark.slow
@pytest.mark.seed("G3")
def test_the_parts_of_a_step_by_their_names(settings, tmp_path):
    with RLTrainer([*settings, f"trainer.default_local_dir={tmp_path}"], reward_fn=letters) as trainer:
        metrics = trainer.step()
    assert 0 < metrics["share/rollout_step"] == metrics["timing_s/gen"] / metrics["perf/time_per_step"] < 1
    assert 0 <= metrics["share/reward_fn"] < 1
    assert 0 <= metrics["critic/score/mean"] <= 1
    assert metrics["reward/num_defaulted"] == 0


@pytest.mark.seed("G3")
def test_a_reward_fn_without_a_file_is_refused(settings):
    for reward_fn in (lambda **_: 1.0, len):
        with pytest.raises(ConfigError, match="give a function at the top level of a file"):
            PPOTrainer(settings, reward_fn=reward_fn)


@pytest.mark.seed("G7")
def test_the_consistency_of_a_loaded_model(tiny_llama):
    report = check_model_consistency(str(tiny_llama))
    assert report["forward"] == "packed"
    assert report["largest_difference"] < 1e-5
    with ActorRolloutRefWorker(str(tiny_llama), overrides=SMALL) as worker:
        assert isinstance(worker.rollout, RolloutWorker)
        module = worker.actor.engine.module
        assert check_model_consistency(str(tiny_llama), module) == report
        with torch.no_grad():
            module.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-3
        with pytest.raises(
            ModelError, match=r"model.layers.0.mlp.up_proj.weight of the loaded LlamaForCausalLM is not what"
        ):
            check_model_consistency(str(tiny_llama), module)
    with pytest.raises(ModelError, match="the log-probs of a forward pass differ"):
        check_model_consistency(str(tiny_llama), tolerance=0.0 if report["largest_difference"] else -1.0)


@pytest.mark.seed("A7")
@pytest.mark.usefixtures("forked_engines")
def test_the_four_parts_of_a_loop(tiny_llama):
    """A controller (this test) moves samples of a rollout worker through a buffer to an update worker."""
    with (
        ActorRolloutRefWorker(str(tiny_llama), overrides=SMALL) as worker,
        ExperienceBuffer(max_groups=4, place="process") as buffer,
    ):
        assert isinstance(worker.rollout, RolloutWorker)
        assert isinstance(worker.actor, UpdateWorker)
        batch = worker.generate_sequences(["2 + 2?"], n=2)
        batch.union(worker.compute_log_prob(batch)).union(worker.compute_ref_log_prob(batch))
        batch.batch["advantages"] = batch.batch["response_mask"] * torch.tensor([[1.0], [-1.0]])
        buffer.put(batch, version=0)
        before = [parameter.clone() for parameter in worker.actor.engine.module.parameters()]
        worker.update_actor(buffer.sample(2, version=0))
        after = list(worker.actor.engine.module.parameters())
        assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.seed("G7")
def test_init_context_makes_parameters_in_host_memory():
    for context in (init_context, get_init_weight_context_manager(use_meta_tensor=True, mesh=None)):
        with torch.device("meta"), context():
            assert torch.nn.Linear(2, 2).weight.device.type == "cpu"


@pytest.mark.seed("C4", "G8")
def test_the_switch_as_a_block(tiny_llama):
    with ActorRolloutRefWorker(str(tiny_llama), overrides=SMALL) as worker:
        manager = MegatronVLLMShardingManager(worker)
        torch.manual_seed(3)
        expected = torch.rand(2)
        torch.manual_seed(3)
        with manager:
            batch = manager.postprocess_data(worker.generate_sequences(manager.preprocess_data(["2 + 2?"]), n=2))
            torch.rand(5)  # sampling of an engine is no part of training
        assert torch.equal(torch.rand(2), expected)
        assert set(batch.batch["weight_version"].tolist()) == {1}
    with pytest.raises(
        ConfigError, match="was given actor_module, inference_engine; it takes an ActorRolloutRefWorker"
    ):
        MegatronVLLMShardingManager(actor_module=None, inference_engine=None)


@pytest.mark.seed("E9")
def test_an_older_python_gets_a_sentence():
    """The first lines are read by every Python 3, and raise before any other file is."""
    source = Path(verl.__file__).read_text()
    start = source.partition("from typing import")[0]
    ast.parse(start, feature_version=(3, 5))
    code = "import sys; sys.version_info = (3, 9, 2, 'final', 0); import verl"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.splitlines()[-1].startswith("ImportError: verl needs Python 3.10 or newer, and this is 3.9 (")


@pytest.mark.seed("E9")
def test_the_extras_of_the_documents_exist():
    project = tomllib.loads((Path(verl.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {"vllm", "megatron", "tracking"} <= set(extras)
    held = {name: re.findall(r"verl\[([\w,-]+)\]", " ".join(packages)) for name, packages in extras.items()}
    assert {part for names in held.values() for text in names for part in text.split(",")} <= set(extras)
    assert project["requires-python"] == ">=3.10"


def test_a_missing_package_is_installed_by_its_name():
    """The index has another project under verl's name."""
    assert install_command("gguf", "gguf") == "pip install 'gguf>=0.10' 'accelerate>=1.0'"
    assert install_command("tinker", "tinker").startswith("pip install 'tinker<0.39,>=0.38' ")
    assert install_command("page", "starlette") == "pip install 'starlette'"  # in the default set


@pytest.mark.seed("E10")
@pytest.mark.parametrize(("level", "is_printed"), [("DEBUG", "a detail"), ("INFO", None)])
def test_log_level(level, is_printed, monkeypatch, capsys):
    monkeypatch.setenv("LOG_LEVEL", level)
    with Console():
        logging.getLogger("verl.part").debug("a detail")
    assert ("a detail" in capsys.readouterr().out) == bool(is_printed)


@pytest.mark.seed("E10")
def test_the_log_of_a_run_for_debugging(settings, tmp_path, monkeypatch):
    """LOG_LEVEL=DEBUG: phases with their seconds, calls of roles, optimizer steps, micro-batches, weights, generation."""
    monkeypatch.setenv("LOG_LEVEL", "DEBUG")
    task = letters_task.write_task(tmp_path)
    files = [f"reward.custom_reward_function.path={task}/reward.py", f"trainer.default_local_dir={tmp_path}/run"]
    assert train(load_config([*settings, *files])) == 0
    text = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    for words in (
        "DEBUG", "gen took 0.", "actor.update on 1 ranks, rows", "Step 1, actor: optimizer steps of [4] rows",
        "Micro-batches of [", "Weights of version 1 are shared", "Generation: {",
    ):  # fmt: skip
        assert words in text, words


@pytest.mark.seed("E10", "G9")
def test_lines_appear_once_with_basic_config():
    code = """
import logging
logging.basicConfig(level=logging.INFO)
from verl.tracking.console import Console
log = logging.getLogger("verl.part")
log.info("before")
with Console():
    log.info("during")
    logging.getLogger("own").info("mine")
log.info("after")
"""
    done = python("-c", code)
    lines = done.stdout.splitlines() + done.stderr.splitlines()
    assert sorted(lines) == ["INFO: during", "INFO: mine", "INFO:verl.part:after", "INFO:verl.part:before"]


@pytest.mark.seed("B8")
def test_the_implementation_that_runs_is_said(settings, tiny_llama, tmp_path, capsys):
    """Every name of impl_backend is accepted, and the start names the implementation that computes."""
    task = letters_task.write_task(tmp_path)
    keys = ["model.use_fused_kernels=True", "model.fused_kernel_options.impl_backend=xformers"]
    files = [f"reward.custom_reward_function.path={task}/reward.py", f"trainer.default_local_dir={tmp_path}/run"]
    loaded = load_config([*settings, *keys, *files, "trainer.logger=[console]"])
    (notice,) = (notice for notice in loaded.notices if "impl_backend" in notice)
    assert "the fused implementation here is verl's own in torch, whatever the name" in notice
    assert train(loaded) == 0
    words = "kernels: verl's decoder for CPUs; log-probs in chunks of torch matmuls, without whole logits"
    assert words in capsys.readouterr().out.splitlines()


@pytest.mark.seed("B8")
def test_use_fused_kernels_chooses(settings, tiny_llama, tmp_path, capsys):
    """Whole logits by torch or chunks of them: the header names them, and a step of training is the same."""
    task, rows = letters_task.write_task(tmp_path), {}
    for fused, words in (
        ("True", "log-probs in chunks of torch matmuls"),
        ("False", "log-probs from whole logits by torch"),
    ):
        run = tmp_path / fused
        files = [f"reward.custom_reward_function.path={task}/reward.py", f"trainer.default_local_dir={run}"]
        keys = [
            f"model.use_fused_kernels={fused}",
            "trainer.logger=[console,file]",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        ]
        assert train(load_config([*settings, *keys, *files])) == 0
        assert words in capsys.readouterr().out
        rows[fused] = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    for name in ("actor/grad_norm", "actor/pg_loss", "rollout/log_prob_sum", "training/rollout_probs_diff_max"):
        if name in rows["True"]:
            assert rows["False"][name] == pytest.approx(rows["True"][name], rel=1e-4, abs=1e-6), name
    assert rows["True"]["actor/grad_norm"] > 0


@pytest.mark.seed("B8")
def test_the_implementation_of_a_model_that_takes_no_packed_batch(tiny_llama):
    module, cpu = load_model(tiny_llama), torch.device("cpu")
    module.forward_kind = "padded"
    assert computed_by(module, cpu).startswith("the model's own padded forward; log-probs in chunks")
    module.forward_kind = "logits"
    assert computed_by(module, cpu) == "the model's own padded forward, whole logits"


@pytest.mark.seed("G6")
def test_loss_kl_and_reward_are_on_every_line(settings, tmp_path, capsys):
    from verl.run.host import train

    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    task = letters_task.write_task(tmp_path)
    changes = ["algorithm.adv_estimator=gae", "trainer.logger=[console,tensorboard]", "data.train_batch_size=4"]
    files = [f"reward.custom_reward_function.path={task}/reward.py", f"trainer.default_local_dir={tmp_path}/run"]
    assert train(load_config([*settings, *changes, *files])) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("step=1/1"))
    assert {"reward", "loss", "kl"} <= {part.split("=")[0] for part in line.split()}
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert {"loss/critic", "loss/actor", "reward/mean"} <= set(events.Tags()["scalars"])
    assert events.Scalars("loss/critic")[0].value == events.Scalars("critic/vf_loss")[0].value
