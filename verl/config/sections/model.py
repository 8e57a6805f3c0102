"""`actor_rollout_ref.model` and `critic.model`: which model, and how it is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.keys import Section, used


@dataclass(frozen=True)
class ModelConfig(Section):
    path: str = used("~/models/deepseek-llm-7b-chat", "folder or hub name of a Hugging Face model", path=True)
    tokenizer_path: str | None = used(None, "folder or hub name of the tokenizer; null: the model's", path=True)
    trust_remote_code: bool = used(False, "run Python code that comes with the model")
    custom_chat_template: str | None = used(None, "chat template in place of the tokenizer's", path=True)
    text_tokens: list[str] = used(
        [], "special tokens that count as text, such as <think>: reward functions, judges and samples see them"
    )
    external_lib: str | list[str] | None = used(
        None, "Python modules that are imported first, to register models, losses or estimators", path=True
    )
    override_config: dict[str, Any] = used({}, "entries of the model's config.json to replace")
    enable_gradient_checkpointing: bool = used(True, "recompute activations in the backward pass, for memory")
    use_fused_kernels: bool = used(
        True, "compute log-probabilities in chunks, without whole logits; false: whole logits by torch, for comparison"
    )
    lora_rank: int = used(0, "rank of LoRA adapters; 0: train all weights")
    lora_alpha: int = used(16, "scale of LoRA adapters", when="lora")
    target_modules: Any = used("all-linear", "modules that get an adapter", when="lora")
    exclude_modules: Any = used(None, "modules that get none", when="lora")
    use_rslora: bool = used(False, "scale adapters by lora_alpha / sqrt(lora_rank) (rsLoRA)", when="lora")
    use_dora: bool = used(False, "train the lengths of the weights' rows too (DoRA)", when="lora")
    modules_to_save: list[str] = used([], "modules that train as a whole in addition to adapters", when="lora")
    lora_adapter_path: str | None = used(
        None, "folder of adapters to start from; without lora_rank they bring their rank and scale", path=True
    )

    @property
    def lends_its_base(self) -> bool:
        """Whether the model without its adapters is the one that training has started from."""
        return self.lora_rank > 0 and not self.modules_to_save


@dataclass(frozen=True)
class SFTModelConfig(ModelConfig):
    neftune_alpha: float | None = used(
        None, "scale of uniform noise on the embeddings in training (NEFTune, arXiv 2310.05914); null: none", gt=0
    )
