"""Override lists of launch scripts for vision-language models: each trains two steps on a tiny model of its family, or gets its
sentence. Paths, counts, devices and the rollout engine are changed, nothing else."""

import json

import pytest

from tests.letters_task import REWARD, merge, overrides
from tests.run.conftest import train_run
from tests.run.test_vision import dots
from tests.slow import slow
from tests.vision_families import vision_folders
from verl.config import PPO, SFT, load_config
from verl.errors import ConfigError, ModelError

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
GEO3K = (
    "algorithm.use_kl_in_reward=False data.image_key=images data.filter_overlong_prompts=True data.truncation=error "
    f"{MODEL}.use_remove_padding=True {MODEL}.enable_gradient_checkpointing=True {ACTOR}.use_kl_loss=True "
    f"{ACTOR}.kl_loss_coef=0.01 {ACTOR}.kl_loss_type=low_var_kl {ACTOR}.entropy_coeff=0 "
    f"{ACTOR}.fsdp_config.param_offload=False {ACTOR}.fsdp_config.optimizer_offload=False "
    "actor_rollout_ref.ref.fsdp_config.param_offload=True trainer.critic_warmup=0"
)
MICRO = (
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=2 {ROLLOUT}.log_prob_micro_batch_size_per_gpu=4 "
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4"
)
DYNAMIC = (
    f"{ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_max_token_len_per_gpu=4096 {ROLLOUT}.log_prob_use_dynamic_bsz=True "
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu=4096 actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True "
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=4096 trainer.balance_batch=True"
)
EAGER = f"{ROLLOUT}.enable_chunked_prefill=False {ROLLOUT}.enforce_eager=False {ROLLOUT}.free_cache_engine=True"
CACHES = (
    f"+{ROLLOUT}.engine_kwargs.vllm.disable_mm_preprocessor_cache=True",
    f"+{ROLLOUT}.engine_kwargs.vllm.mm_processor_cache_gb=0",
)
MEGATRON = (
    f"{ACTOR}.megatron.param_offload=True {ACTOR}.megatron.optimizer_offload=True {ACTOR}.megatron.grad_offload=True "
    "actor_rollout_ref.ref.megatron.param_offload=True"
)

# name -> (family, overrides)
RUNS = {
    "qwen2.5-vl": ("qwen2_5_vl", f"{GEO3K} {MICRO} {EAGER} {CACHES[0]}"),
    "qwen2.5-vl fsdp2": ("qwen2_5_vl", f"{GEO3K} {DYNAMIC} {ACTOR}.strategy=fsdp2 {MODEL}.use_fused_kernels=True "
                         f"{ROLLOUT}.multi_stage_wake_up=True"),
    "qwen2.5-vl lora": ("qwen2_5_vl", f"{GEO3K} {MICRO} {EAGER} {MODEL}.lora_rank=4 {MODEL}.lora_alpha=8 "
                        f"{MODEL}.target_modules=all-linear {MODEL}.exclude_modules=.*visual.*"),
    "qwen2.5-vl frozen tower": ("qwen2_5_vl", f"{GEO3K} {MICRO} {ACTOR}.freeze_vision_tower=True"),
    "qwen2.5-vl megatron": ("qwen2_5_vl", f"data.image_key=images {DYNAMIC} model_engine=megatron {MEGATRON} "
                            f"{ACTOR}.megatron.use_mbridge=True {ACTOR}.use_kl_loss=True"),
    "qwen2-vl dapo": ("qwen2_vl", f"data.image_key=images {ACTOR}.clip_ratio_low=0.2 {ACTOR}.clip_ratio_high=0.28 "
                      f"{ACTOR}.loss_agg_mode=token-mean"),
    "qwen3-vl": ("qwen3_vl", f"{GEO3K} {DYNAMIC} {EAGER} {CACHES[1]}"),
    "qwen3-vl moe": ("qwen3_vl_moe", f"{GEO3K} {DYNAMIC}"),
    "glm-4.1v": ("glm4v", f"{GEO3K} {MICRO} {EAGER}"),
    "internvl": ("internvl", f"{GEO3K} {DYNAMIC} {ACTOR}.strategy=fsdp2 data.trust_remote_code=True "
                 f"{MODEL}.trust_remote_code=True {MODEL}.use_fused_kernels=False"),
}  # fmt: skip
QUICK = ("qwen2.5-vl lora",)

# name -> (family, overrides, error, its sentence)
REFUSED = {
    "trtllm": ("qwen2_vl", f"{ROLLOUT}.name=trtllm", ConfigError, "rollout engine is not available"),
    "npu": ("qwen2_vl", "trainer.device=npu", ConfigError, "kind of device is not available"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    return vision_folders(tmp_path_factory)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Folder with train.jsonl and val.jsonl of rows like geometry3k's, sft.jsonl and reward.py."""
    folder = tmp_path_factory.mktemp("geometry")
    question = [{"role": "user", "content": "<image>How many?"}]
    rows = [
        {"data_source": "dots", "prompt": question, "images": [dots(i % 4)], "ability": "math",
         "reward_model": {"style": "rule", "ground_truth": str(i % 4)}, "extra_info": {"split": "train", "index": i}}
        for i in range(8)
    ]  # fmt: skip
    sft = [
        {"messages": [*question, {"role": "assistant", "content": f"{i % 4}"}], "images": [dots(i % 4)]}
        for i in range(8)
    ]
    for name, written in (("train", rows), ("val", rows[:2]), ("sft", sft)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    (folder / "reward.py").write_text(REWARD)
    return folder


def settings_of(model, task, text):
    return merge(overrides(model, task, "data.max_prompt_length=300"), text.split())


@pytest.mark.parametrize("name", [slow(name, when=name not in QUICK) for name in RUNS])
def test_a_list_trains_two_steps(name, folder_of, task, tmp_path):
    family, text = RUNS[name]
    run = train_run(tmp_path / "run", settings_of(folder_of(family), task, text))
    assert [row["step"] for row in run.training_rows() if row["actor/grad_norm"] > 0] == [1, 2]


@pytest.mark.parametrize("name", RUNS)
def test_a_list_passes_the_checks(name, folder_of, task):
    load_config(settings_of(folder_of("qwen2_vl"), task, RUNS[name][1]), schema=PPO)


@pytest.mark.slow
def test_the_list_of_fine_tuning_trains_two_steps(folder_of, task, tmp_path):
    """messages_key, padding, dynamic micro-batches, and keys of a training engine."""
    text = (
        f"data.train_files={task}/sft.jsonl data.train_batch_size=4 data.max_length=300 data.pad_mode=no_padding "
        "data.truncation=error data.use_dynamic_bsz=True data.max_token_len_per_gpu=1024 data.messages_key=messages "
        "data.ignore_input_ids_mismatch=True model.use_remove_padding=True optim.lr=2e-3 optim.lr_warmup_steps_ratio=0.01 "
        "optim.weight_decay=0.1 optim.betas=[0.9,0.95] optim.clip_grad=1.0 optim.lr_scheduler_type=cosine engine=fsdp "
        "trainer.logger=[file] trainer.total_training_steps=2 engine.dtype=float32"
    )
    run = train_run(tmp_path / "run", [f"model.path={folder_of('qwen3_vl')}", *text.split()], program="sft")
    assert [row["step"] for row in run.training_rows() if row["train/grad_norm"] > 0] == [1, 2]
    assert (
        load_config([f"model.path={folder_of('qwen3_vl')}", *text.split()], schema=SFT).config.data.image_key
        == "images"
    )


@pytest.mark.parametrize("name", REFUSED)
def test_a_list_gets_its_sentence(name, folder_of, task, tmp_path):
    family, text, kind, sentence = REFUSED[name]
    with pytest.raises(kind, match=sentence):
        train_run(tmp_path / "run", settings_of(folder_of(family), task, text))


def test_a_family_of_other_code_gets_its_sentence(folder_of, task, tmp_path):
    """MiniCPM-o has its code in its folder, and no module of transformers."""
    folder = tmp_path / "minicpm"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "minicpmo", "architectures": ["MiniCPMO"]}))
    with pytest.raises(ModelError):
        train_run(tmp_path / "run", settings_of(folder, task, GEO3K))
