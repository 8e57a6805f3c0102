"""Other people's projects on the existing release: what their trainer classes and entries ask for, in small stand-ins."""

import contextlib
import importlib.util
import json
import re
import socket
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from tests.compat.test_own_fit import metrics, tree_of, weights
from tests.compat.test_runner_scripts import TEMPLATE
from tests.house.source import ROOT
from verl import DataProto
from verl.checkpoint_engine import CheckpointEngineManager
from verl.compat.replaced import ReplacedModuleError
from verl.compat.sections import loaded_config
from verl.errors import ConfigError, VerlError
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils import hf_tokenizer
from verl.workers.rollout.llm_server import LLMServerManager


@pytest.fixture
def project(tiny_llama, tmp_path):
    """The config of a project as it composes it: keys of a section that it adds, no files of rows."""
    tree = tree_of(tiny_llama, tmp_path)
    tree["algorithm"] = {"adv_estimator": "grpo"}
    tree["actor_rollout_ref"]["model"]["custom_chat_template"] = TEMPLATE
    tree["data"] |= {"val_files": None, "max_prompt_length": 100}
    tree["trainer"] |= {"total_training_steps": 2, "save_freq": -1}
    composed = OmegaConf.create(asdict(loaded_config(tree).config))
    return OmegaConf.merge(composed, tree, {"agentlightning": {"agl_key": "", "async_rollout": {"enabled": False}}})


def memory_rows(count):
    pytest.importorskip("ray")
    from tests.compat.recipes.outside_agents import MemoryRows

    return MemoryRows([{"question": "x"}] * count)


def test_the_page_says_what_projects_get():
    """Files that it names exist, names of trainers are there, and modules that it names have a sentence."""
    page = (ROOT / "docs" / "coming-from-verl.md").read_text(encoding="utf-8")
    section = page.split("## Projects on the released verl")[1].split("\n## ")[0]
    named = re.findall(r"`([\w.]+(?:/[\w./]+)?)`", section)
    modules = [name for name in named if name.startswith("verl.")]
    assert len(modules) >= 6
    for module in modules:
        with pytest.raises(ReplacedModuleError):
            importlib.import_module(module)
    assert all((ROOT / name).is_file() for name in named if "/" in name)
    for name in ("async_rollout_manager", "llm_server_manager", "_compute_old_log_prob", "_update_actor"):
        assert name in section
        assert hasattr(RayPPOTrainer, name)


def test_agents_outside_train_two_steps_through_the_address_of_the_sampler(project):
    pytest.importorskip("ray")
    from tests.compat.recipes.outside_agents import AgentsTrainer, run

    AgentsTrainer.trainers.clear()
    run(project, [{"question": f"Say {number}.", "answer": str(number)} for number in range(12)])
    (trainer,) = AgentsTrainer.trainers
    folder = Path(project.trainer.default_local_dir)
    assert sorted(metrics(folder)) == [1, 2]
    assert trainer.answers == (2, [True, True])
    assert max(trainer.gaps) < 1e-4  # the policy at the address is the policy that trains
    assert any(row["actor/grad_norm"] > 0 for row in metrics(folder).values())
    assert weights(folder, 2)


@pytest.mark.parametrize("repeats_first", [False, True])
def test_rows_loaders_and_rewards_of_a_project_train_two_steps(project, repeats_first):
    """As reasoning-gym's trainer has them: a sample of each repeated row, or rollout.n of each row."""
    from tests.compat.recipes.own_rewards import PuzzleTrainer

    PuzzleTrainer.trainers.clear()
    project.algorithm.use_kl_in_reward = not repeats_first
    trainer = PuzzleTrainer(project, hf_tokenizer(project.actor_rollout_ref.model.path), repeats_first)
    trainer.init_workers()
    trainer.fit()
    folder = Path(project.trainer.default_local_dir)
    assert sorted(metrics(folder)) == [1, 2]
    assert any(row["actor/grad_norm"] > 0 for row in metrics(folder).values())
    assert weights(folder, 2)
    batch, n = trainer.steps[0], project.actor_rollout_ref.rollout.n
    assert len(batch) == n * project.data.train_batch_size
    texts = [trainer.tokenizer.decode(row["prompts"], skip_special_tokens=True) for row in batch.batch]
    assert [f"Puzzle {index}" in text for index, text in zip(batch.non_tensor_batch["index"], texts, strict=True)]
    answers = batch.batch["responses"].tolist()
    assert len({tuple(answer) for answer in answers}) > len(answers) / 2  # samples of a prompt differ


def test_a_folder_of_scripts_and_packages_trains(project):
    """As reasoning-gym has it: keys that only the script beside the packages reads, and sections for it. Worker
    groups of init_workers, as RAGEN builds them."""
    pytest.importorskip("ray")
    from tests.compat.recipes.own_rewards import GroupsTrainer
    from verl.single_controller.ray import RayWorkerGroup, ResourcePoolManager
    from verl.trainer.ppo.ray_trainer import Role
    from verl.workers.engine_workers import ActorRolloutRefWorker

    added = {"trainer": {"puzzle_level": 2}, "puzzles": {"size": 12}, "seed": {"train": 1}}
    tokenizer = hf_tokenizer(project.actor_rollout_ref.model.path)
    pools = ResourcePoolManager({"global_pool": [1]}, {Role.ActorRollout: "global_pool"})
    workers = ({Role.ActorRollout: ActorRolloutRefWorker}, pools, RayWorkerGroup)
    trainer = GroupsTrainer(OmegaConf.merge(project, added), tokenizer, workers=workers)
    trainer.init_workers()
    trainer.fit()
    folder = Path(project.trainer.default_local_dir)
    assert (sorted(metrics(folder)), trainer.config.trainer.puzzle_level) == ([1, 2], 2)
    assert weights(folder, 2)


def test_episodes_without_a_dataset_train_two_steps(project):
    """As RAGEN has them: turns by token rows, its rewards and saves, and a worker group by its class."""
    pytest.importorskip("ray")
    from tests.compat.recipes.own_rewards import EpisodesTrainer

    project.actor_rollout_ref.rollout.n = 1
    handed_on = {"micro_batch_size_per_gpu": 2, "actor_rollout_ref": {"actor": {"ppo_micro_batch_size_per_gpu": 2}}}
    project = OmegaConf.merge(project, handed_on)  # as ${micro_batch_size_per_gpu} is, once resolved
    trainer = EpisodesTrainer(project, hf_tokenizer(project.actor_rollout_ref.model.path))
    trainer.init_workers()
    trainer.fit()
    folder = Path(project.trainer.default_local_dir)
    assert sorted(metrics(folder)) == [1, 2]
    assert all(row["actor/grad_norm"] > 0 for row in metrics(folder).values())
    assert (len(trainer.measured), max(trainer.gaps) < 1e-4) == (1, True)
    assert weights(folder, 2)
    answers = trainer.held_out.batch["responses"]
    assert answers[::2].equal(answers[1::2])  # of equal prompts, greedy as val_kwargs say
    with pytest.raises(ConfigError, match="give the trainer class train_dataset"):
        _ = trainer.train_dataloader
    project.trainer.total_training_steps = None
    with pytest.raises(ConfigError, match="set trainer.total_training_steps"):
        EpisodesTrainer(project, trainer.tokenizer).init_workers()
    project.actor_rollout_ref.rollout.n = 2
    with pytest.raises(ConfigError, match="Set it to 1, and repeat the rows"):
        EpisodesTrainer(project, trainer.tokenizer).init_workers()


def test_rows_in_memory_without_agents_get_a_sentence(project):
    class Own(RayPPOTrainer):
        def fit(self):
            self.global_steps = 1
            columns = next(iter(self.train_dataloader))
            self.async_rollout_manager.generate_sequences(DataProto.from_single_dict(columns))

    with pytest.raises(ConfigError, match="reach the policy at async_rollout_manager.server_addresses"):
        Own(project, train_dataset=memory_rows(6)).fit()
    with pytest.raises(ConfigError, match="The rows of MemoryRows would not be used"):
        RayPPOTrainer(project, train_dataset=memory_rows(1))
    assert torch.is_tensor(memory_rows(1)[0]["fake_ids"])


def test_worker_groups_that_a_project_builds_are_the_run(project, caplog):
    """As rLLM's backend has them: `mini_batch_size` and `epochs` of the rows decide the optimizer steps."""
    pytest.importorskip("ray")
    from tests.compat.recipes.own_worker_groups import Backend

    backend = Backend(project, steps=2)
    before = backend.workers._run.loop.state.step
    caplog.set_level("DEBUG", "verl.roles.model")
    for number in (1, 2):
        backend.step(number, [[65 + row, 66, *range(70, 70 + row)] for row in range(6)])
    assert max(backend.gaps) < 1e-4  # the sampler has the weights that train
    assert all(row["actor/grad_norm"] > 0 for row in backend.metrics)
    assert caplog.text.count("actor: optimizer steps of [3, 3, 3, 3] rows") == 2
    assert "here they are means over the 5 rows that train" in caplog.text
    assert (before, backend.workers._run.step) == (0, 2)
    assert weights(Path(project.trainer.default_local_dir), 2)
    summary = json.loads((Path(project.trainer.default_local_dir) / "summary.json").read_text())
    assert summary["steps"] == 2  # Ray may end the process without a word
    backend.workers.load_checkpoint("runs/global_step_2/actor")
    with pytest.raises(ConfigError, match="resumed from global_step_2"):
        backend.workers.load_checkpoint("runs/global_step_1/actor")
    backend.workers.close()


def test_workers_that_would_not_be_used_get_a_sentence(project):
    pytest.importorskip("ray")
    from tests.compat.recipes.own_worker_groups import ChosenLoss, own_loss
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine_workers import ActorRolloutRefWorker
    from verl.workers.utils.losses import ppo_loss

    class Own(ActorRolloutRefWorker):
        pass

    with pytest.raises(ReplacedModuleError, match=r"classes of verl\.workers\.engine_workers stand for the roles"):
        importlib.import_module("verl.workers.actor")
    section = project.actor_rollout_ref
    for cls, config, message in (
        (Own, section, "The worker class Own would not be used"),
        (ActorRolloutRefWorker, OmegaConf.to_container(section), "not a copy of that section"),
    ):
        with pytest.raises(ConfigError, match=message):
            RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(cls=cls, config=config))
    workers = RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(cls=ActorRolloutRefWorker, config=section))
    project.trainer.total_training_steps = None
    with pytest.raises(ConfigError, match="set trainer.total_training_steps"):
        workers.init_model()
    for loss in (own_loss, lambda model_output, data, dp_group: 0.0):
        with pytest.raises(ConfigError, match="register_policy_loss"):
            workers.set_loss_fn(loss)
    with pytest.raises(ConfigError, match="takes no model outputs"):
        ppo_loss(section.actor, {"log_probs": 0}, {})
    chosen = ChosenLoss(section.actor)
    workers.set_loss_fn(chosen)
    rows = tu.get_tensordict({"input_ids": torch.ones(2, 3)})
    with pytest.raises(ConfigError, match="no padded column prompts"):
        workers.compute_log_prob(rows)


def test_servers_of_workers_of_a_script_get_a_sentence():
    for create in (LLMServerManager.create, CheckpointEngineManager):
        with pytest.raises(ConfigError, match="give it the actor_rollout_wg of a RayPPOTrainer"):
            create(object())


def reply(address, body):
    """Status and body of an answer to a chat; `body` may be bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(f"http://{address}/v1/chat/completions", content, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def status_of(address, size):
    """The status of a chat that says to have `size` bytes."""
    place, _, path = address.partition("/")
    host, _, port = place.partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(
            f"POST /{path}/v1/chat/completions HTTP/1.1\r\nContent-Length: ".encode() + size + b"\r\n\r\n"
        )
        return connection.makefile("rb").readline().split()[1]


def test_requests_at_the_address_have_choices_and_stops_and_faults_are_refused(project):
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    answers = {}

    class Asked(RayPPOTrainer):
        def fit(self):
            self.global_steps = 1
            address = self.async_rollout_manager.server_addresses[0]
            answers["n"] = reply(address, chat | {"n": 3, "max_tokens": 4})
            answers["stop"] = reply(address, chat | {"stop": list("abcdefghijklmnop")})
            answers["schema"] = reply(address, chat | {"response_format": {"type": "json_object"}})
            for name, body in (("deep", b"[" * 100_000), ("list", b"[1]"), ("long", chat | {"max_tokens": 0})):
                answers[name] = reply(address, body)
            answers["token"] = reply(address[:-1], chat)
            answers["nan"] = reply(address, b'{"messages": [{"role": "user", "content": "x"}], "model": NaN}')
            for number, size in enumerate((b"-1", b"ten", b"9" * 5000)):
                answers[f"size {number}"] = status_of(address, size)

    Asked(project, train_dataset=memory_rows(6)).fit()
    assert [len(choice["token_ids"]) <= 4 for choice in answers["n"][1]["choices"]] == [True] * 3
    assert not set(answers["stop"][1]["choices"][0]["message"]["content"]) & set("abcdefghijklmnop")
    if importlib.util.find_spec("xgrammar"):
        assert answers["schema"][1]["choices"][0]["message"]["content"].lstrip()[:1] == "{"
    else:
        assert answers["schema"][0] == 400
    assert [answers[name][0] for name in ("deep", "list", "long", "nan", "token")] == [400, 400, 400, 400, 404]
    assert [answers[f"size {number}"] for number in range(3)] == [b"400"] * 3


def test_connections_that_wait_do_not_keep_agents_out(project, monkeypatch):
    monkeypatch.setattr("verl.compat.endpoint._MOST_WAITING", 4)
    results = {}

    class Asked(RayPPOTrainer):
        def fit(self):
            self.global_steps = 1
            address = self.async_rollout_manager.server_addresses[0]
            host, _, port = address.partition("/")[0].partition(":")
            with contextlib.ExitStack() as stack:
                silent = [stack.enter_context(socket.create_connection((host, int(port)), 60)) for _ in range(8)]
                results["closed"] = [connection.recv(1) for connection in silent[:4]]
                results["chat"] = reply(address, {"messages": [{"role": "user", "content": "hi"}]})
                results["fifth"] = silent[4].recv(1)
                silent[7].settimeout(0)
                with pytest.raises(BlockingIOError):
                    silent[7].recv(1)

    Asked(project, train_dataset=memory_rows(6)).fit()
    assert (results["closed"], results["fifth"], results["chat"][0]) == ([b""] * 4, b"", 200)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("attention_mask", None, "no column attention_mask"),
        ("input_ids", lambda ids: ids + 10**6, "a token id is a whole number from 0"),
        ("input_ids", lambda ids: ids + 1, "have different tokens"),
    ],
)
def test_rows_of_agents_that_no_model_reads_are_refused(project, name, change, message):
    ids = torch.arange(5, 45).view(4, 10)
    columns = {
        "prompts": ids[:, :4], "responses": ids[:, 4:], "input_ids": ids, "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(10).repeat(4, 1),
    }  # fmt: skip
    columns[name] = change(columns[name]) if change else None

    class Own(RayPPOTrainer):
        def fit(self):
            self.global_steps = 1
            self._compute_old_log_prob(DataProto.from_dict({k: v for k, v in columns.items() if v is not None}))

    with pytest.raises(VerlError, match=message):
        Own(project, train_dataset=memory_rows(6)).fit()
