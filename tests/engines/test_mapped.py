"""A reference policy whose weights are a mapped file: the same numbers, and no second copy in memory."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engines.test_contract import folder, make_batch  # noqa: F401 - folder is a fixture
from verl.config import FSDPConfig, ModelConfig
from verl.engines.api import ENGINES, MicroBatching
from verl.errors import ConfigError

pytestmark = pytest.mark.seed("C8")

MEMORY = """
import sys
from pathlib import Path

import torch

from tests.engines.test_contract import make_batch
from verl.config import FSDPConfig, ModelConfig
from verl.engines.api import MicroBatching
from verl.engines.local import LocalEngine


def resident(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(kind)).split()[1]) / 1e3


engine = LocalEngine(
    model=ModelConfig(path=sys.argv[1]), engine=FSDPConfig(dtype="float32"), optim=None, head="lm", device=torch.device("cpu"),
    total_steps=1, trainable=False,
)


def log_probs():
    return engine.forward(make_batch(1), ("log_probs",), MicroBatching(max_tokens=100))["log_probs"]


before, anonymous, mapped = log_probs(), resident("RssAnon"), resident("RssFile")
engine.map_weights(Path(sys.argv[2]), "ext4")
for _ in range(2):
    assert torch.equal(log_probs(), before)
print(engine._mapped.num_bytes / 1e6, anonymous - resident("RssAnon"), resident("RssFile") - mapped)
"""


def engine_of(folder, dtype):  # noqa: F811
    return ENGINES.get("local")(
        model=ModelConfig(path=str(folder)), engine=FSDPConfig(dtype=dtype), optim=None, head="lm",
        device=torch.device("cpu"), total_steps=1, trainable=False,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_numbers_are_those_of_a_copy(folder, tmp_path, dtype):  # noqa: F811
    found = []
    for maps in (False, True):
        engine = engine_of(folder, dtype)
        if maps:
            engine.map_weights(tmp_path, "ext4")
        outputs = [
            engine.forward(make_batch(seed), ("log_probs",), MicroBatching(max_tokens=30))["log_probs"]
            for seed in (1, 2)
        ]
        found.append(outputs)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert list(tmp_path.iterdir()) == [], "the file has no name, and goes with the process"


def test_memory_is_given_back(tmp_path):
    from verl.models.tiny import make_tiny_model

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12}
    model = make_tiny_model(tmp_path / "model", **sizes)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(model), str(tmp_path / "run")], capture_output=True, text=True, timeout=120,
        check=False, env={"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    weights, anonymous, mapped = map(float, done.stdout.split())
    assert weights > 30
    assert mapped < 0.2 * weights, "pages of the file are not resident between two calls"
    assert anonymous - mapped > 0.8 * weights, "of the loaded weights some are pages of the model's file already"
    assert anonymous > 0.4 * weights


def test_folders_and_devices_that_cannot(folder, tmp_path):  # noqa: F811
    engine = engine_of(folder, "float32")
    with pytest.raises(ConfigError, match="which is tmpfs: in memory too"):
        engine.map_weights(tmp_path, "tmpfs")
    engine.device = torch.device("cuda")
    with pytest.raises(ConfigError, match=r"the reference computes on cuda. Set .*param_offload=True"):
        engine.map_weights(tmp_path, "ext4")


def test_a_run_with_a_mapped_reference(tiny_llama, tmp_path, no_pictures):
    from tests.letters_task import write_task
    from verl.config import load_config
    from verl.run.host import train
    from verl.tracking.files import read_metrics

    task, found = write_task(tmp_path), []
    for maps in (False, True):
        settings = [
            f"actor_rollout_ref.model.path={tiny_llama}", f"data.train_files={task}/train.jsonl", "data.train_batch_size=4",
            "data.val_files=[]", "data.max_response_length=4", "actor_rollout_ref.rollout.n=2", "algorithm.adv_estimator=grpo",
            f"reward.custom_reward_function.path={task}/reward.py", "reward.num_workers=1", "trainer.total_training_steps=2",
            "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.optim.lr=0.01", "trainer.logger=[file]",
            "trainer.val_before_train=False", f"trainer.default_local_dir={tmp_path}/{maps}",
            f"actor_rollout_ref.ref.memory_map={maps}",
        ]  # fmt: skip
        assert train(load_config(settings)) == 0
        rows = read_metrics(tmp_path / str(maps) / "metrics.jsonl")
        found.append([(row["actor/kl_loss"], row["actor/grad_norm"]) for row in rows])
    assert found[0] == found[1]
    assert found[0][1][0] != 0


def test_several_devices_are_refused():
    from verl.config import load_config
    from verl.programs.ppo_roles import ppo_roles
    from verl.runtime.build import _engine
    from verl.runtime.rank import RankContext

    keys = [
        "actor_rollout_ref.ref.memory_map=True",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "trainer.n_gpus_per_node=2",
    ]
    config = load_config(keys, check=False).config
    specs = ppo_roles(config)
    context = RankContext(config, specs, specs.place(None), 0, torch.device("cpu"), 1, [])
    assert replace(context.spec("reference"), memory_map=False) != context.spec("reference")
    with pytest.raises(ConfigError, match="maps the weights of one device, and the reference is on 2"):
        _engine(context, context.spec("reference"))
