"""verl.trainer.main_ppo, verl.trainer.ppo.ray_trainer.RayPPOTrainer and verl.experimental.dataset.sampler: runs and data sets
from Python."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import RandomSampler, SequentialSampler

from tests.json_lines import read_lines
from verl.errors import ConfigError
from verl.experimental.dataset.sampler import AbstractCurriculumSampler, AbstractSampler
from verl.registry import load_object
from verl.trainer.main_ppo import TaskRunner, create_rl_dataset, create_rl_sampler, run_ppo
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, Role
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils import hf_tokenizer
from verl.utils.dataset import RLHFDataset, collate_fn
from verl.worker import ActorRolloutRefWorker


def rows_of(tree):
    return read_lines(Path(tree["trainer"]["default_local_dir"]) / "metrics.jsonl")


class TestDatasets:
    def test_rows(self, tiny_tree, tiny_llama):
        section = OmegaConf.create({"max_prompt_length": 64, "custom_key": 5})
        rows = create_rl_dataset(
            tiny_tree["data"]["train_files"], section, hf_tokenizer(str(tiny_llama)), None, is_train=True
        )
        assert type(rows) is RLHFDataset
        assert len(rows) == 8
        assert rows[3]["raw_prompt"] == [{"role": "user", "content": "train 3"}]
        assert rows.config.get("custom_key") == 5
        assert rows.config.prompt_key == "prompt"
        assert list(collate_fn([rows[0], rows[1]])["data_source"]) == ["letters", "letters"]
        few = create_rl_dataset(tiny_tree["data"]["train_files"], {"shuffle": False}, None, max_samples=3)
        assert [row["raw_prompt"][0]["content"] for row in few] == ["train 0", "train 1", "train 2"]

    def test_a_class_of_a_recipe(self, tiny_tree, tmp_path):
        (tmp_path / "mine.py").write_text(
            "from verl.utils.dataset.rl_dataset import RLHFDataset\n"
            "class Mine(RLHFDataset):\n"
            "    def __getitem__(self, item):\n"
            "        return {**super().__getitem__(item), 'level': self.config.level}\n"
        )
        section = OmegaConf.create({"custom_cls": {"path": f"{tmp_path}/mine.py", "name": "Mine"}, "level": 2})
        assert create_rl_dataset(tiny_tree["data"]["train_files"], section, None)[0]["level"] == 2

    def test_order(self):
        rows = list(range(10))
        plain = create_rl_sampler(OmegaConf.create({"shuffle": False}), rows)
        assert isinstance(plain, SequentialSampler)
        assert list(plain) == rows
        drawn = create_rl_sampler(OmegaConf.create({"shuffle": True, "seed": 3}), rows)
        assert isinstance(drawn, RandomSampler)
        expected = torch.randperm(10, generator=torch.Generator().manual_seed(3)).tolist()
        assert list(drawn) == expected

    def test_an_order_of_a_recipe(self, tmp_path):
        (tmp_path / "order.py").write_text(
            "from verl.experimental.dataset.sampler import AbstractCurriculumSampler, AbstractSampler\n"
            "class Backwards(AbstractSampler):\n"
            "    def __init__(self, data_source, data_config):\n"
            "        self.count = len(data_source)\n"
            "    def __iter__(self):\n"
            "        return iter(range(self.count - 1, -1, -1))\n"
            "    def __len__(self):\n"
            "        return self.count\n"
            "class Learning(AbstractCurriculumSampler, Backwards):\n"
            "    def update(self, batch):\n"
            "        self.count -= 1\n"
            "class Other:\n"
            "    pass\n"
        )

        def order_of(name, **settings):
            sampler = {"class_path": f"{tmp_path}/order.py", "class_name": name}
            return create_rl_sampler(OmegaConf.create({"sampler": sampler, **settings}), [0, 1, 2])

        assert list(order_of("Backwards")) == [2, 1, 0]
        learning = order_of("Learning", dataloader_num_workers=0)
        learning.update(None)
        assert list(learning) == [1, 0]
        with pytest.raises(ConfigError, match="dataloader_num_workers=0"):
            order_of("Learning")
        with pytest.raises(ConfigError, match="not a subclass of AbstractSampler"):
            order_of("Other")

    def test_the_bases_are_abstract(self):
        for base in (AbstractSampler, AbstractCurriculumSampler):
            with pytest.raises(TypeError, match="abstract"):
                base([1], {})


class TestRuns:
    def test_the_trainer_trains_as_a_command_does(self, tiny_tree, tmp_path):
        tokenizer = hf_tokenizer(tiny_tree["actor_rollout_ref"]["model"]["path"])
        trainer = RayPPOTrainer(
            config=OmegaConf.create(tiny_tree),
            tokenizer=tokenizer,
            role_worker_mapping={Role.ActorRollout: ActorRolloutRefWorker},
            resource_pool_manager=None,
            reward_fn=load_reward_manager(tiny_tree, tokenizer, 0),
        )
        trainer.init_workers()
        trainer.fit()
        (row,) = rows_of(tiny_tree)
        tiny_tree["trainer"]["default_local_dir"] = f"{tmp_path}/again"
        TaskRunner().run(OmegaConf.create(tiny_tree))
        (again,) = rows_of(tiny_tree)
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean"):
            assert row[name] == again[name]

    def test_a_runner_of_a_recipe(self, tiny_tree):
        ran = []

        class Mine(TaskRunner):
            def run(self, config):
                ran.append(config.trainer.total_training_steps)

        class Remote:  # as ray.remote(Mine) looks
            class __ray_metadata__:
                modified_class = Mine

        run_ppo(OmegaConf.create(tiny_tree), task_runner_class=Mine)
        run_ppo(OmegaConf.create(tiny_tree), task_runner_class=Remote)
        assert ran == [1, 1]

        class Workers(TaskRunner):
            def add_critic_worker(self, config): ...

        with pytest.raises(ConfigError, match="Workers.add_critic_worker would not be called"):
            run_ppo(OmegaConf.create(tiny_tree), task_runner_class=Workers)
        two = OmegaConf.create({"trainer": {"nnodes": 1, "n_gpus_per_node": 2}})
        assert TaskRunner().init_resource_pool_mgr(two).get_n_gpus() == 2

    def test_keys_of_the_script(self, tiny_tree, tmp_path):
        """Sections that a recipe adds to the config, and keys that its trainer class reads (`agent_period` here)."""
        (tmp_path / "mine.py").write_text(
            "from verl.trainer.ppo.ray_trainer import RayPPOTrainer\n"
            "class Mine(RayPPOTrainer):\n"
            "    def fit(self): return self.config.lightning.port + self.config.trainer.agent_period\n"
        )
        Mine = load_object(f"{tmp_path}/mine.py:Mine")
        tiny_tree |= {"lightning": {"port": 8000, "judge": {"model": "m"}}}
        tiny_tree["trainer"]["agent_period"] = 2
        tiny_tree["data"]["datagen"] = {"path": "rows"}
        trainer = Mine(OmegaConf.create(tiny_tree))
        assert trainer.fit() == 8002
        (notice,) = (text for text in trainer._loaded.notices if "for the program that composed" in text)
        for key in (
            "lightning.port=8000",
            "lightning.judge.model=m",
            "trainer.agent_period=2",
            "data.datagen.path=rows",
        ):
            assert key in notice
        for section, key in (("trainer", "agent_perod"), ("actor_rollout_ref", "rollouts"), ("data", "batch_size")):
            tree = {**tiny_tree, section: {**tiny_tree[section], key: {"n": 2} if key == "rollouts" else 2}}
            with pytest.raises(ConfigError, match=f"There is no key '{section}.{key}"):
                Mine(OmegaConf.create(tree))

    def test_what_would_not_be_called_is_refused(self, tiny_tree):
        class Steps(RayPPOTrainer):
            def _validate(self): ...

        class Own(RayPPOTrainer):
            def my_own_method(self):
                return 7

        class Worker: ...

        class Rows:
            def __len__(self):
                return 1

        config = OmegaConf.create(tiny_tree)
        with pytest.raises(ConfigError, match="Steps._validate would not be called"):
            Steps(config)
        assert Own(config).my_own_method() == 7
        for arguments, named in (
            ({"role_worker_mapping": {Role.Critic: Worker}}, "The worker class Worker"),
            ({"reward_fn": lambda batch: 0}, "reward_fn"),
            ({"train_sampler": [3, 1]}, "The sampler list"),
            ({"train_dataset": Rows()}, "The rows of Rows"),
            ({"something_new": 1}, "'something_new'"),
        ):
            with pytest.raises(ConfigError, match=named):
                RayPPOTrainer(config, **arguments)
        with pytest.raises(AttributeError, match="'actor_rollout_workers'"):
            _ = RayPPOTrainer(config).actor_rollout_workers
