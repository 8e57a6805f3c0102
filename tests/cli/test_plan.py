"""`verl plan`: tables, JSON, overrides that load, refusals."""

import json
import re

import pytest

from verl.config import SCHEMAS, load_config
from verl.errors import ConfigError
from verl.models.tiny import make_tiny_model
from verl.planner import Cluster, Lengths
from verl.planner.request import PlanRequest, read_lengths, shape_of

ARGUMENTS = (
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.rollout.n=4",
    "data.max_response_length=1024",
    "plan.cluster={gpu: h100_sxm, nodes: 1, gpus_per_node: 4}",
)


def test_a_plan_as_tables(verl):
    said = verl.ends(0, "plan", *ARGUMENTS, "plan.async=off", "plan.workload.response=[100, 300, 700, 1024]")
    for words in (
        "a step takes about",
        "placement: actor, reference on 4",
        "runner-up: ",
        "GB per device",
        "bound by",
        "overrides",
    ):
        assert words in said
    assert "plan.cluster names no GPU" not in said


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("max_engine_restarts=2", "once a step and stay in its memory"),
        ("max_engine_restarts=0", "once a step\n"),
        ("checkpoint_engine.backend=delta", "once a step and stay in its memory"),
    ],
)
def test_weights_for_an_engine_that_takes_them_whole(verl, key, words):
    rollout = "actor_rollout_ref.rollout"
    keys = "name=vllm", "max_engine_restarts=0", key
    said = verl.ends(0, "plan", *ARGUMENTS, *(f"{rollout}.{key}" for key in keys))
    assert re.search(r"weights of \d+\.\d GB go to each host " + words, said)


def test_overrides_load(verl):
    said = verl.ends(0, "plan", *ARGUMENTS, "--json", "plan.async=off")
    plans = json.loads(said)
    best = plans["best"]
    keys_of_run = [a for a in ARGUMENTS if not a.startswith("plan.")]
    config = load_config([*keys_of_run, *best["overrides"], "data.train_files=x.parquet"], check=False).config
    assert config.trainer.n_gpus_per_node == 4
    choice = best["placement"][0]["choices"]["actor"]
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == choice["rollout"]["tensor"]
    assert config.actor_rollout_ref.actor.fsdp_config.tensor_parallel_size == choice["layout"]["tensor"]
    assert best["step_s"] <= plans["runner_up"]["step_s"]


def test_the_overrides_of_a_disaggregated_plan_load(verl):
    said = verl.ends(0, "plan", *ARGUMENTS, "--json", "plan.async=on")
    best = json.loads(said)["best"]
    keys_of_run = [a for a in ARGUMENTS if not a.startswith("plan.")]
    config = load_config([*keys_of_run, *best["overrides"]], check=False).config
    assert best["asynchronous"]
    assert set(config.trainer.placement) == {"actor", "reference", "rollout"}
    assert config.trainer.v1.trainer_mode == "separate_async"


def test_a_simulated_run_can_be_shown(verl, tmp_path):
    verl.ends(0, "plan", *ARGUMENTS, "--simulate", tmp_path / "run", "--steps", "12", words=["simulated 12 steps"])
    verl("plan", *ARGUMENTS, "plan.cluster.hbm_gb=60", "--beside", tmp_path / "run")
    said = verl.ends(0, "show", tmp_path / "run", words=["a step takes"])
    assert re.search(r"planned were \S+ s a step, .*, measured \S+ s \([+-]\d+%\); \w+ differs most: ", said)


@pytest.mark.parametrize(
    ("program", "settings", "words"),
    [
        ("sft", ("model.path=Qwen/Qwen2.5-0.5B", "model.lora_rank=8"), ("sft, Qwen2.5-0.5B on 4", "actor train")),
        ("rm", ("model.path=Qwen/Qwen2.5-7B-Instruct",), ("rm, Qwen2.5-7B on 4", "actor train")),
        ("preference", ("model.path=Qwen/Qwen2.5-7B", "ref.precompute=False"), ("reference forward", "actor train")),
    ],
)
def test_programs_on_rows_of_a_file(verl, program, settings, words):
    arguments = ("--program", program, *settings, "trainer.n_gpus_per_node=4", "data.max_length=4096")
    said = verl.ends(0, "plan", *arguments)
    assert all(w in said for w in words)
    code, said = verl("plan", *arguments, "--json")
    best = json.loads(said)["best"]
    config = load_config([*settings, *best["overrides"]], schema=SCHEMAS[program], check=False).config
    assert config.trainer.n_gpus_per_node == 4
    assert config.data.max_token_len_per_gpu == best["placement"][0]["choices"]["actor"]["layout"]["micro_batch"]


def test_nodes_devices_and_engine_follow_the_config(verl):
    keys_of_run = [a for a in ARGUMENTS if not a.startswith("plan.")]
    keys = ("trainer.nnodes=2", "trainer.n_gpus_per_node=4", "actor_rollout_ref.actor.strategy=megatron")
    code, said = verl("plan", *keys_of_run, *keys, "actor_rollout_ref.rollout.nnodes=1", "plan.async=off")
    assert code == 0, said
    assert "on 12 x h100_sxm" in said
    assert said.startswith(
        "plan.cluster names no GPU: this plan is for h100_sxm, not for this machine (plan.cluster.gpu=cpu)."
    )
    assert "actor_rollout_ref.actor.strategy=megatron" in said
    assert "actor_rollout_ref.rollout.nnodes=0" in said


@pytest.mark.parametrize(("engine", "refused"), [("megatron", True), ("fsdp", False)])
def test_a_plan_whose_engine_refuses_the_model_says_so(engine, refused, verl):
    changes = (
        "actor_rollout_ref.model.path=DeepSeek-V3",
        "plan.cluster={gpu: h100_sxm, nodes: 64}",
        f"plan.engine={engine}",
    )
    said = verl.ends(0, "plan", *ARGUMENTS[1:-1], *changes, "plan.async=off")
    assert ("verl train cannot start this plan: the model has latent attention and shared experts" in said) == refused


def test_keys_that_a_plan_does_not_follow_are_named(verl, tmp_path):
    make_tiny_model(tmp_path, max_position_embeddings=512)
    changes = (f"actor_rollout_ref.model.path={tmp_path}", "trainer.placement={actor: [0], rollout: [1]}")
    fp8 = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.quantization=fp8")
    said = verl.ends(0, "plan", *ARGUMENTS[1:-1], *changes, *fp8)
    assert "are longer than the model's max_position_embeddings=512" in said
    assert "the plan chooses trainer.placement in place of the value of this command" in said
    assert "rollout.quantization=fp8 is planned with the times and bytes of the model's dtype" in said


def test_a_plan_that_is_applied_runs_with_its_prediction(verl, overrides, task):
    plan_keys = ("plan.cluster={gpu:h100_sxm,gpus_per_node:1}", "plan.async=off", "plan.apply=true")
    verl.ends(0, "plan", *overrides({"trainer.total_training_steps": 1}), *plan_keys, "--steps", "2")
    assert (task / "run" / "metrics.jsonl").is_file()
    code, said = verl("show", task / "run")
    assert "planned were" in said


@pytest.mark.slow
def test_this_processor_as_the_cluster(verl, overrides):
    verl.ends(0, "plan", *overrides(), "plan.cluster.gpu=cpu", words=["on 1 x cpu"])
    said = verl.ends(2, "plan", *overrides({"actor_rollout_ref.model.path": "Llama-3.1-405B"}), "plan.cluster.gpu=cpu")
    assert "Take a smaller model" in " ".join(said.split())


def test_overrides_undo_what_the_command_says_otherwise(verl):
    keys_of_run = [a for a in ARGUMENTS if not a.startswith("plan.")]
    keys = ("actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=4",
             "actor_rollout_ref.actor.fsdp_config.param_offload=True", "trainer.n_gpus_per_node=4")  # fmt: skip
    said = verl.ends(0, "plan", *keys_of_run, *keys, "plan.async=off", "--json")
    best = json.loads(said)["best"]
    config = load_config([*keys_of_run, *keys, *best["overrides"]], check=False).config
    layout = best["placement"][0]["choices"]["actor"]["layout"]
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    assert (
        (fsdp.ulysses_sequence_parallel_size, fsdp.param_offload)
        == (layout["context"], layout["offload"])
        == (1, False)
    )


def test_float32_counts(verl):
    """Frozen weights have the compute dtype; `model_dtype` has no effect in a run, and so none in a plan."""
    lora = (*ARGUMENTS, "actor_rollout_ref.model.lora_rank=8", "plan.async=off", "--json")
    fsdp = "actor_rollout_ref.actor.fsdp_config"

    def weights(*keys):
        said = verl.ends(0, "plan", *lora, *keys)
        return json.loads(said)["best"]["placement"][0]["choices"]["actor"]["bytes"]["train"]["weights"]

    assert weights(f"{fsdp}.dtype=float32") == pytest.approx(2 * weights())
    assert weights(f"{fsdp}.model_dtype=fp32") == weights()


def test_a_teacher_has_a_role(verl):
    keys = ("distillation.enabled=True", "distillation.teacher_models.teacher_model.model_path=Qwen/Qwen2.5-7B")
    code, said = verl("plan", *ARGUMENTS, *keys, "plan.async=on")
    assert code == 0, said
    assert "teacher forward" in said
    # quotes keep the shell from expanding the braces
    assert "'trainer.placement={" in said


def test_mappings_without_blanks():
    request = PlanRequest.parse(["plan.cluster={gpu:h20,nodes:2}", "plan.workload.response=[1,2,3,4]"])
    assert (request.cluster.gpu, request.cluster.nodes, request.workload.response) == ("h20", 2, [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("plan.objective=gpu_hours", "also tried fewer devices; verl plan takes the fastest step now"),
        ("plan.clustr.nodes=2", "There is no key plan.clustr.nodes; did you mean 'cluster'?"),
        ("plan.cluster.gpu=h100", "is no known device; did you mean 'h100_sxm'"),
        ("plan.cluster.nodes=0", "plan.cluster.nodes=0 does not fit"),
        ("plan.cluster.nodes=many", "does not fit: it takes a positive number"),
        ("plan.workload.response=[500, 100, 900, 1000]", "does not ascend"),
        ("plan.workload.response=7", "four lengths"),
        (
            "plan.workload.response=[100, 300, 900, 1025]",
            "has longer responses than the run: data.max_response_length=1024",
        ),
        ("actor_rollout_ref.model.mtp={enable:true,enable_train:true}", "only a policy on one device does"),
        ("plan.engine=nccl", "none of fsdp, megatron"),
        ("plan.workload.samples=no/file.jsonl", "does not exist"),
        ("actor_rollout_ref.model.path=Qwen/Qwen25-7B", "did you mean 'Qwen2.5-7B'"),
    ],
)
def test_refusals(verl, setting, words):
    said = verl.ends(2, "plan", *ARGUMENTS, setting)
    assert words in " ".join(said.split())


def test_a_model_that_does_not_fit(verl):
    said = verl.ends(2, "plan", *ARGUMENTS, "actor_rollout_ref.model.path=Llama-3.1-70B")
    assert "It fits on 16: set plan.cluster.nodes" in " ".join(said.split())


def test_on_and_off_are_words():
    assert PlanRequest.parse(["plan.async=off"]).asynchronous == "off"
    assert PlanRequest.parse(["plan.asynchronous=on", "plan.apply=true"]).apply is True


def test_a_folder_with_a_config(tmp_path, tiny_llama):
    assert shape_of(str(tiny_llama)).num_layers == 2
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(Exception, match="holds no mapping"):
        shape_of(str(tmp_path))


def test_lengths_of_an_earlier_run(tmp_path):
    file = tmp_path / "10.jsonl"
    file.write_text("".join(json.dumps({"response_ids": [0] * n}) + "\n" for n in (10, 20, 30)) + "cut sho")
    assert read_lengths(file) == [10, 20, 30]
    file.write_text('{"response": "x"}\n')
    with pytest.raises(ConfigError, match="no response lengths"):
        Lengths.from_samples(read_lengths(file))


def test_network_of_a_node_is_shared_by_its_devices():
    assert Cluster.of("a100_sxm", 16, inter_gbps=200).inter_bytes_s == 200e9 / 8 / 8


def test_the_plan_next_to_a_run(verl, tmp_path):
    from verl.page.reader import RunReader

    verl.ends(0, "plan", *ARGUMENTS, "plan.async=off", "--beside", str(tmp_path / "run"), "--steps", "3")
    run = RunReader(tmp_path / "run", "run")
    run.refresh(0)
    assert [row["step"] for row in run.planned] == [1, 2, 3]
    assert run.has_plan
    assert run.problems == ["No step has been written to metrics.jsonl."]
    for row in run.planned:
        assert sum(row["phases"].values()) == pytest.approx(row["seconds"])
        assert row["phases"]["rollout"] > 0
