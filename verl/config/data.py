"""`data`: training and validation files, and how rows become prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.keys import Section, inert, section, used
from verl.config.rollout import TOOLS

TEXT_ONLY = "rows are text in this version"
NOT_READ_THERE = "it has no effect in existing releases either"


@dataclass(frozen=True)
class CustomClassConfig(Section):
    path: str | None = used(None, "file or module of a dataset class that replaces the built-in one")
    name: str | None = used(None, "name of that class", when="has_path")


@dataclass(frozen=True)
class DataConfig(Section):
    train_files: str | list[str] = used(
        "~/data/rlhf/gsm8k/train.parquet", "training files: parquet, JSON, JSONL, or a data set"
    )
    val_files: str | list[str] = used("~/data/rlhf/gsm8k/test.parquet", "validation files")
    train_max_samples: int = used(-1, "rows to use for training; -1: all")
    val_max_samples: int = used(-1, "rows to use for validation; -1: all")
    prompt_key: str = used("prompt", "field that holds the messages")
    reward_fn_key: str = used("data_source", "field that chooses the scorer")
    max_prompt_length: int = used(512, "longest prompt in tokens")
    max_response_length: int = used(512, "longest response in tokens")
    train_batch_size: int = used(1024, "prompts per step")
    gen_batch_size: int | None = used(None, "prompts per generation; null: train_batch_size", when="filter_groups")
    val_batch_size: int | None = used(None, "prompts per validation batch; null: all at once", sizing=True)
    shuffle: bool = used(True, "a new order of rows in each epoch")
    validation_shuffle: bool = inert(False, "shuffle the validation rows", "all of them are used")
    seed: int | None = used(None, "seed of the order of rows; null: 42")
    filter_overlong_prompts: bool = used(False, "leave out rows whose prompt is longer than max_prompt_length")
    filter_overlong_prompts_workers: int = inert(
        1, "processes that measure prompts", "prompts are made in the run's own process"
    )
    truncation: str = used("error", "what happens to a longer prompt", choices=("error", "left", "right", "middle"))
    apply_chat_template_kwargs: dict[str, Any] = used({}, "further arguments of the chat template")
    custom_cls: CustomClassConfig = section(CustomClassConfig, "dataset class of one's own")
    tool_config_path: str | None = used(None, "file that declares tools", when="multi_turn", strict=TOOLS)
    function_tool_path: str | None = used(None, "file of functions that are tools", when="multi_turn", strict=TOOLS)
    trust_remote_code: bool = inert(
        False,
        "run Python code that comes with the tokenizer",
        "model.trust_remote_code decides for model and tokenizer",
    )
    use_shm: bool = inert(False, "copy the data to shared memory first", "files are read where they are")
    dataloader_num_workers: int = inert(8, "processes that read rows", "prompts are made in the run's own process")
    return_raw_input_ids: bool = inert(False, "keep token ids before templating", NOT_READ_THERE)
    return_raw_chat: bool = inert(True, "keep the messages", "the messages are always kept")
    return_full_prompt: bool = inert(False, "keep the templated text", NOT_READ_THERE)
    return_multi_modal_inputs: bool = inert(True, "keep processed images", TEXT_ONLY)
    image_key: str = inert("images", "field that holds images", TEXT_ONLY)
    video_key: str = inert("videos", "field that holds videos", TEXT_ONLY)
    audio_key: str = inert("audios", "field that holds audio", TEXT_ONLY)
    image_patch_size: int = inert(14, "pixels of a patch", TEXT_ONLY)
    mm_processor_kwargs: dict[str, Any] = inert({}, "further arguments of the processor", TEXT_ONLY)
