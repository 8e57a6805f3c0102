"""`data`: training and validation files, and their rows as prompts or training sequences."""

from dataclasses import dataclass
from typing import Any

from verl.config.keys import Section, section, used
from verl.config.sections.multi_turn import TOOLS
from verl.config.sections.rollout import AGENTS

ROW_FORMATS = (None, "messages", "conversations", "prompt_completion", "text", "alpaca", "prompt_response")


@dataclass(frozen=True)
class CustomClassConfig(Section):
    path: str | None = used(None, "file or module of a dataset class that replaces the built-in one", path=True)
    name: str | None = used(None, "name of that class", when="has_path")


@dataclass(frozen=True)
class SamplerClassConfig(Section):
    class_path: str | None = used(
        None, "file or module of a torch sampler class that gives the order of rows", path=True
    )
    class_name: str | None = used(None, "name of that class", when="has_class_path")


@dataclass(frozen=True)
class DataConfig(Section):
    train_files: str | list[str] = used(
        "~/data/rlhf/gsm8k/train.parquet", "training files: parquet, JSON, JSONL, or a data set", path=True
    )
    val_files: str | list[str] | None = used(
        "~/data/rlhf/gsm8k/test.parquet", "validation files; null: no validation", path=True
    )
    train_max_samples: int = used(-1, "rows to use for training; 0 or -1: all", ge=-1)
    val_max_samples: int = used(-1, "rows to use for validation; 0 or -1: all", ge=-1)
    prompt_key: str = used("prompt", "field that holds the messages")
    reward_fn_key: str = used("data_source", "field that chooses the scorer")
    max_prompt_length: int = used(512, "longest prompt in tokens", ge=1)
    max_response_length: int = used(512, "longest response in tokens", ge=1)
    train_batch_size: int = used(1024, "prompts per step", ge=1)
    gen_batch_size: int | None = used(
        None, "prompts per generation; null: train_batch_size", when="algorithm.filter_groups.enable", ge=1
    )
    val_batch_size: int | None = used(None, "prompts per validation batch; null: all at once", sizing=True, ge=1)
    shuffle: bool = used(True, "a new order of rows in each epoch")
    seed: int | None = used(None, "seed of the order of rows; null: 42")
    sampler: SamplerClassConfig = section(SamplerClassConfig, "the user's order of rows, in place of shuffle and seed")
    filter_overlong_prompts: bool = used(False, "leave out rows whose prompt is longer than max_prompt_length")
    truncation: str = used("error", "what happens to a longer prompt", choices=("error", "left", "right", "middle"))
    check: str = used(
        "first",
        "rows that are checked before training; first: 8,192 rows, and the others while the run trains; all",
        choices=("first", "all"),
    )
    apply_chat_template_kwargs: dict[str, Any] = used({}, "further arguments of the chat template")
    tools_key: str = used("tools", "field that holds the tools' JSON schemas")
    enable_thinking_key: str = used("enable_thinking", "field that holds enable_thinking of the chat template")
    image_key: str = used("images", "field that holds images, of rows for a vision-language model")
    mm_processor_kwargs: dict[str, Any] = used(
        {}, "further arguments of the model's image processor, such as max_pixels, and of videos: fps, nframes"
    )
    video_key: str = used("videos", "field that holds videos, of rows for a model that reads them")
    audio_key: str = used("audios", "field that holds audio; rows that have any are refused")
    custom_cls: CustomClassConfig = section(CustomClassConfig, "the user's dataset class")
    tool_config_path: str | None = used(None, "file that declares tools", when=AGENTS, strict=TOOLS, path=True)
    function_tool_path: str | None = used(
        None, "file of functions that are tools, or file.py:name for one of them", when=AGENTS, strict=TOOLS, path=True
    )


@dataclass(frozen=True)
class TextDataConfig(Section):
    """Keys of `data` that programs on given texts share: files, batches, lengths, chat templates."""

    train_files: str | list[str] = used(
        "~/data/gsm8k/train.parquet", "training files: parquet, JSON, JSONL, or a data set", path=True
    )
    val_files: str | list[str] | None = used(None, "validation files; null: no validation", path=True)
    train_max_samples: int = used(-1, "rows to use for training; 0 or -1: all", ge=-1)
    val_max_samples: int = used(-1, "rows to use for validation; 0 or -1: all", ge=-1)
    train_batch_size: int = used(256, "rows of one optimizer step, over all devices", ge=1)
    use_dynamic_bsz: bool = used(True, "cut micro-batches by token count instead of rows", sizing=True)
    max_token_len_per_gpu: int = used(8192, "tokens per micro-batch when cut by token count", sizing=True, ge=1)
    micro_batch_size_per_gpu: int | None = used(
        4, "rows per forward and backward pass", when="fixed_bsz", sizing=True, ge=1
    )
    tools_key: str = used("tools", "field that holds the tools' JSON schemas")
    enable_thinking_key: str = used("enable_thinking", "field that holds enable_thinking of the chat template")
    enable_thinking_default: bool | None = used(None, "its value for rows without the field; null: the template's own")
    max_length: int | None = used(1024, "longest sequence in tokens; null: no limit", ge=2)
    truncation: str = used("error", "what happens to a longer sequence", choices=("error", "left", "right"))
    ignore_input_ids_mismatch: bool = used(
        False, "train on rows whose turns have other tokens by themselves than in the whole conversation"
    )
    train_on_line_end: bool = used(
        False, "train also the blanks that a chat template writes behind a turn, as TRL does; sampling ends before them"
    )
    apply_chat_template_kwargs: dict[str, Any] = used({}, "further arguments of the chat template")
    shuffle: bool = used(True, "a new order of rows in each epoch")
    seed: int | None = used(None, "seed of the order of rows; null: trainer.seed")
    image_key: str = used("images", "field that holds images, of rows for a vision-language model")
    mm_processor_kwargs: dict[str, Any] = used(
        {}, "further arguments of the model's image processor, such as max_pixels, and of videos: fps, nframes"
    )
    video_key: str = used("videos", "field that holds videos, of rows for a model that reads them")


@dataclass(frozen=True)
class SFTDataConfig(TextDataConfig):
    """`data` of supervised fine-tuning: files of conversations, and their rows as training sequences."""

    row_format: str | None = used(
        None, "format of the rows; null: found by the columns of each row", choices=ROW_FORMATS
    )
    messages_key: str = used("messages", "field that holds the messages")
    text_key: str = used("text", "field that holds a text to train on as it is")
    prompt_key: str | None = used(None, "field of a single question, with response_key")
    response_key: str | None = used(None, "field of the answer to it")
    prompt_dict_keys: list[str] = used([], "fields inside prompt_key that lead to the question, outermost first")
    response_dict_keys: list[str] = used([], "the same for the answer")
    loss_on: str | None = used(
        None,
        "tokens that train: those that the assistant would sample, all after the prompt, or all; null: by the format "
        "of the row. A message with loss_mask: 0 or 1 decides for itself",
        choices=(None, "assistant", "completion", "all"),
    )
    custom_cls: CustomClassConfig = section(CustomClassConfig, "the user's dataset class")


@dataclass(frozen=True)
class PreferenceDataConfig(TextDataConfig):
    """`data` of preference optimization and reward models: pairs of a chosen and a rejected completion, or labelled ones."""

    train_files: str | list[str] = used(
        "~/data/preferences/train.parquet", "training files: parquet, JSON, JSONL, or a data set", path=True
    )
    train_batch_size: int = used(
        32, "rows (pairs, or labelled completions) of one optimizer step, over all devices", ge=1
    )
    micro_batch_size_per_gpu: int | None = used(
        4,
        "completions per forward and backward pass; the two of a pair are never parted",
        when="fixed_bsz",
        sizing=True,
        ge=1,
    )
    prompt_key: str = used("prompt", "field that holds the prompt: text or messages")
    chosen_key: str = used("chosen", "field that holds the better completion: text or messages")
    rejected_key: str = used("rejected", "field that holds the worse completion")
    completion_key: str = used("completion", "field that holds the only completion of a labelled row")
    label_key: str = used("label", "field that says whether the completion of a labelled row is desirable")
    margin_key: str = used("margin", "field that says by how much the chosen completion is better; optional")

    @property
    def loss_on(self) -> str:
        """As SFTDataConfig.loss_on: everything after the prompt is the completion."""
        return "completion"
