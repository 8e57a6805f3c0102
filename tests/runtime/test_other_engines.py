"""Whole runs with engines that need an extra, on several ranks: tokens, losses and weights equal a single process's."""

from functools import cache

import pytest

from tests.json_lines import write_lines
from tests.runtime.conftest import PPO, assert_same, assert_same_weights, train_here
from tests.runtime.ranks import run
from verl.config import SCHEMAS, load_config
from verl.models.tiny import make_tiny_model
from verl.run.host import train

pytestmark = pytest.mark.slow

MODULES = {"deepspeed": "deepspeed", "megatron": "megatron.core"}
FLOAT32 = ("actor_rollout_ref.actor.fsdp_config.dtype=float32", "actor_rollout_ref.actor.optim.lr=0.00002")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TENSOR, STAGES, EXPERTS = (f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert"))
FAMILIES = ("llama", "qwen3_moe")
ROWS = {  # library, ranks -> name -> keys of the engine's section
    ("deepspeed", 2): {f"zero{stage}": {"zero_stage": stage} for stage in (0, 1, 2, 3)},
    ("megatron", 2): {
        "data2": {},
        "data2_whole_optimizer": {"use_distributed_optimizer": False},
        "tensor2": {TENSOR: 2},
        "pipeline2": {STAGES: 2},
        "experts2": {EXPERTS: 2},
        "experts2_whole_optimizer": {EXPERTS: 2, "use_distributed_optimizer": False},
    },
    ("megatron", 4): {"tensor2_pipeline2": {TENSOR: 2, STAGES: 2}, "pipeline2_data2": {STAGES: 2}},
}
LORA = ["actor_rollout_ref.model.lora_rank=4", f"{ACTOR}.use_kl_loss=True"]
ADAPTERS = {"lora": LORA, "dora": [*LORA, "actor_rollout_ref.model.use_dora=True"]}
DIVIDES_ROLLOUT = ("tensor2", "pipeline2_data2")  # they generate on two ranks together
FOUR_LAYERS = {"num_hidden_layers": 4}


def rows(library, num_ranks, family):
    """The rows of ROWS that apply to `family`."""
    cases = ROWS[library, num_ranks]
    return {name: keys for name, keys in cases.items() if EXPERTS not in keys or family == "qwen3_moe"}


def reinforcement(library, name, keys):
    """Overrides of a run that generates."""
    engine = "model_engine=megatron" if library == "megatron" else f"{ACTOR}.strategy=deepspeed"
    divided = [f"{ROLLOUT}.tensor_model_parallel_size=2"] if name in DIVIDES_ROLLOUT else []
    return [engine, *(f"{ACTOR}.{library}.{key}={value}" for key, value in keys.items()), *divided]


def fine_tuning(library, keys):
    """The same for a run on given rows, in the spelling of scripts."""
    if library == "megatron":
        return ["engine=megatron", *(f"engine.{key}={value}" for key, value in keys.items())]
    return ["engine.strategy=deepspeed", *(f"engine.deepspeed.{key}={value}" for key, value in keys.items())]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Family -> folder of a model of four layers."""
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": make_tiny_model(root / "llama", **FOUR_LAYERS),
        "qwen3_moe": make_tiny_model(root / "moe", "qwen3_moe", moe_intermediate_size=16, **FOUR_LAYERS),
        "teacher": make_tiny_model(root / "teacher", seed=1),
    }


@pytest.fixture(scope="module")
def alone(jobs, models, given_rows):
    """(program, family) -> the run in one process, in float32."""

    @cache
    def of(program, family):
        if program == "sft":
            folder = jobs.run(f"alone_sft_{family}").folder
            assert train(load_config(given_rows(models[family], folder), schema=SCHEMAS["sft"]), "sft") == 0
            return jobs.run(folder.name)
        added = {"ppo": PPO, **ADAPTERS, "distillation": taught_by(models["teacher"])}.get(program, [])
        changes = [f"actor_rollout_ref.model.path={models[family]}", *FLOAT32, *added]
        return train_here(jobs, f"alone_{program}_{family}", *changes)

    return of


@pytest.fixture(scope="module")
def given_rows(tmp_path_factory):
    """Overrides of fine-tuning, by model and run folder."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_lines(file, ({"prompt": f"{i}?", "completion": "ab" * (i % 5 + 1)} for i in range(15)))
    return lambda model, folder: [
        f"model.path={model}",
        f"data.train_files={file}",
        f"data.val_files={file}",
        "data.train_batch_size=5",
        "engine.dtype=float32",
        "optim.lr=0.0002",
        "trainer.logger=[file]",
        "trainer.total_epochs=1",
        f"trainer.default_local_dir={folder}",
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("library", "num_ranks"), ROWS)
def test_runs_on_several_ranks_match_one_process(alone, jobs, models, given_rows, library, num_ranks, family):
    """GRPO, PPO with a critic, and fine-tuning."""
    pytest.importorskip(MODULES[library], reason=f"needs the extra {library}")
    names = rows(library, num_ranks, family)
    for name, keys in names.items():
        changes = [f"actor_rollout_ref.model.path={models[family]}", *FLOAT32, *reinforcement(library, name, keys)]
        jobs.add(f"grpo_{name}_{family}", *changes)
        jobs.add(f"ppo_{name}_{family}", *PPO, *changes)
        folder = jobs.run(f"sft_{name}_{family}").folder
        settings = [*given_rows(models[family], folder), *fine_tuning(library, keys)]
        jobs.noted.append({"program": "sft", "overrides": settings})
    run(num_ranks, "tests.runtime.several_runs", jobs.file(), timeout_s=580)
    for name in names:
        for program in ("grpo", "ppo"):
            actual = jobs.run(f"{program}_{name}_{family}")
            assert_same(actual, alone(program, family), 1e-5)
            assert_same_weights(actual, alone(program, family), 3, 1e-5)
        assert_same_losses(jobs.run(f"sft_{name}_{family}"), alone("sft", family))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_on_several_ranks_match_one_process(alone, jobs, models, kind):
    """GRPO of adapters, sent by a weight sync."""
    pytest.importorskip(MODULES["megatron"], reason="needs the extra megatron")
    common = [f"actor_rollout_ref.model.path={models['llama']}", *FLOAT32, *ADAPTERS[kind]]
    names = ("tensor2", "pipeline2")
    for name in names:
        jobs.add(f"{kind}_{name}", *common, *reinforcement("megatron", name, ROWS["megatron", 2][name]))
    run(2, "tests.runtime.several_runs", jobs.file(), timeout_s=280)
    for name in names:
        assert_same(jobs.run(f"{kind}_{name}"), alone(kind, "llama"), 1e-5)
        assert_same_weights(jobs.run(f"{kind}_{name}"), alone(kind, "llama"), 3, 1e-5)


def taught_by(folder):
    """Overrides of distillation."""
    teacher = "distillation.teacher_models.teacher_model"
    return ["distillation.enabled=True", f"{teacher}.model_path={folder}", f"{teacher}.inference.dtype=float32"]


def test_other_roles_with_megatron_match_one_process(alone, jobs, models):
    """A teacher on a device of its own, and a rollout."""
    pytest.importorskip(MODULES["megatron"], reason="needs the extra megatron")
    devices = ["trainer.n_gpus_per_node=2", "distillation.nnodes=1", "distillation.n_gpus_per_node=1"]
    engine = reinforcement("megatron", "tensor2", {TENSOR: 2})
    common = [f"actor_rollout_ref.model.path={models['llama']}", *FLOAT32, *engine]
    jobs.add("distillation", *common, *taught_by(models["teacher"]), *devices)
    placed = ["trainer.placement={actor:[0,1],rollout:[2]}", "trainer.n_gpus_per_node=3"]
    jobs.add("grpo", *common, *placed, f"{ROLLOUT}.tensor_model_parallel_size=1")
    run(3, "tests.runtime.several_runs", jobs.file(), timeout_s=280)
    for program in ("distillation", "grpo"):
        assert_same(jobs.run(program), alone(program, "llama"), 1e-5)
        assert_same_weights(jobs.run(program), alone(program, "llama"), 3, 1e-5)


CONTINUED = {  # library -> keys of its section before and after the other engine has trained, and further ones
    "deepspeed": ({"zero_stage": 3}, {"zero_stage": 2}, []),
    "megatron": ({STAGES: 2}, {TENSOR: 2}, []),
    "megatron_adapters": ({STAGES: 2}, {TENSOR: 2}, LORA),
}


@pytest.mark.parametrize("name", CONTINUED)
def test_a_run_resumes_bit_for_bit_and_continues_on_the_other_engine(jobs, models, name):
    """With FSDP for two steps of six, and back."""
    library, (*sections, further) = name.partition("_")[0], CONTINUED[name]
    pytest.importorskip(MODULES[library], reason=f"needs the extra {library}")
    common = [
        f"actor_rollout_ref.model.path={models['llama']}",
        *FLOAT32,
        *further,
        "trainer.save_freq=2",
        "trainer.test_freq=-1",
    ]
    first, last = (reinforcement(library, "", keys) for keys in sections)
    legs = {"unbroken": [(6, first)], "resumed": [(4, first), (6, first)], "changed": [(2, first), (4, []), (6, last)]}
    for leg, parts in legs.items():
        for steps, engine in parts:
            jobs.add(f"{name}_{leg}", *common, f"trainer.total_training_steps={steps}", *engine)
    run(2, "tests.runtime.several_runs", jobs.file(), timeout_s=280)
    unbroken, resumed, changed = (jobs.run(f"{name}_{leg}") for leg in legs)
    assert_same(resumed, unbroken, 0.0)
    assert_same_weights(resumed, unbroken, 6, 0.0)
    assert_same(changed, unbroken, 1e-5)
    assert_same_weights(changed, unbroken, 6, 1e-5)


def assert_same_losses(actual, reference):
    """Of fine-tuning, step by step."""
    assert [row["step"] for row in actual.rows] == [row["step"] for row in reference.rows]
    for row, expected in zip(actual.rows, reference.rows, strict=True):
        for name in ("train/loss", "train/grad_norm", "val/loss"):
            assert (name in row) == (name in expected)
            if name in expected:
                assert row[name] == pytest.approx(expected[name], rel=1e-5), (actual.folder.name, row["step"], name)
