"""Model families, by `model_type` of config.json, and what verl does with each besides calling its own modules.

A family without a row runs with its own modules, if they pass the checks at load. A row needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_BEHIND = "cannot be sent to vLLM, which gives text behind a video other positions than transformers"
_ONE_TOKEN = (
    "cannot be read: GLM-4.1V has one token for images and videos, which its forward cannot tell apart in a batch"
)
_BOTH_WAYS = "see one another in both directions, and packed attention is causal"


@dataclass(frozen=True)
class Vision:
    """Images and videos of a family. Pixel tensors of several prompts are joined along `axis`."""

    axis: int = 0
    no_videos: str = ""  # the reason why no videos are read
    not_sent: str = ""  # the reason why only the engines native and hf read videos
    refused: str = ""  # the reason why images cannot train


@dataclass(frozen=True)
class ModelFamily:
    """`decoder` is the class of transformers that verl.models.decoder reads, for training and every sampler. The three fields
    behind it are for the reader: `norms` are names in a layer, before and behind attention, before and behind the MLP. If it
    `adds_one`, a norm multiplies by 1 + its weight. `pairs`: the rotary embedding turns neighbours. `tensor`, `experts` and
    `megatron`: available with tensor parallelism, with expert parallelism, and with Megatron. `tiny`: config entries of a tiny
    random model (verl.models.tiny)."""

    decoder: str = ""
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    adds_one: bool = False
    pairs: bool = False
    tensor: bool = False
    experts: bool = False
    megatron: bool = False
    vision: Vision | None = None
    tiny: Mapping[str, object] | None = None


_GEMMA = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)  # fmt: skip
_GLM4 = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_TINY_GEMMA = {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}
_TINY_GLM = {"head_dim": 16}
_TINY_DELTA = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}
_TINY_SHARED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}

FAMILIES: Mapping[str, ModelFamily] = {
    "llama": ModelFamily("LlamaModel", tensor=True, megatron=True, tiny={}),
    "mistral": ModelFamily("MistralModel", tensor=True, megatron=True, tiny={"sliding_window": None}),
    "qwen2": ModelFamily("Qwen2Model", tensor=True, megatron=True, tiny={}),
    "qwen3": ModelFamily("Qwen3Model", tensor=True, megatron=True, tiny={"head_dim": 16}),
    "phi3": ModelFamily("Phi3Model", tiny={"sliding_window": None}),  # its own projections are joined already
    "gemma": ModelFamily("GemmaModel", adds_one=True, tensor=True, tiny={"head_dim": 16}),
    "gemma2": ModelFamily("Gemma2Model", _GEMMA, adds_one=True, tensor=True, tiny=_TINY_GEMMA),
    "gemma3_text": ModelFamily("Gemma3TextModel", _GEMMA, adds_one=True, tensor=True, tiny=_TINY_GEMMA),
    "glm": ModelFamily("GlmModel", pairs=True, tiny=_TINY_GLM),
    "glm4": ModelFamily("Glm4Model", _GLM4, pairs=True, tiny=_TINY_GLM),
    "bloom": ModelFamily(tiny={}),  # whose attention takes no packed batches
    "qwen3_moe": ModelFamily(
        "Qwen3MoeModel",
        tensor=True,
        experts=True,
        megatron=True,
        tiny={"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "mixtral": ModelFamily(
        "MixtralModel",
        tensor=True,
        experts=True,
        megatron=True,
        tiny={"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen2_moe": ModelFamily("Qwen2MoeModel", tiny=_TINY_SHARED),
    "qwen3_5_text": ModelFamily(tiny=_TINY_DELTA),
    "qwen3_5_moe_text": ModelFamily(experts=True, tiny={**_TINY_DELTA, **_TINY_SHARED}),
    "glm4_moe": ModelFamily(
        "Glm4MoeModel",
        megatron=True,
        tiny={
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek_v3": ModelFamily(
        "DeepseekV3Model",
        pairs=True,
        experts=True,
        megatron=True,
        tiny={
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
        },
    ),
    # families with images, in whose positions a token may have several axes
    "qwen2_vl": ModelFamily("Qwen2VLTextModel", vision=Vision(not_sent=_BEHIND)),
    "qwen2_5_vl": ModelFamily("Qwen2_5_VLTextModel", vision=Vision(not_sent=_BEHIND)),
    "qwen3_vl": ModelFamily("Qwen3VLTextModel", vision=Vision()),
    "qwen3_vl_moe": ModelFamily(vision=Vision()),
    "qwen3_5": ModelFamily(vision=Vision()),
    "qwen3_5_moe": ModelFamily(vision=Vision()),
    "glm4v": ModelFamily(vision=Vision(no_videos=_ONE_TOKEN)),
    "llava": ModelFamily(vision=Vision(no_videos="cannot be read: LLaVA has no videos")),
    "llava_onevision": ModelFamily(
        vision=Vision(
            no_videos="cannot be read: LLaVA-OneVision computes videos of a batch together only if all have as many frames"
        )
    ),
    "internvl": ModelFamily(
        vision=Vision(not_sent="cannot be sent to vLLM, which has other tokens for frames of InternVL")
    ),
    "mistral3": ModelFamily(vision=Vision(no_videos="cannot be read: Mistral 3 has no videos")),
    "smolvlm": ModelFamily(vision=Vision(1, not_sent="cannot be sent to vLLM, which has no videos for SmolVLM")),
    "idefics3": ModelFamily(vision=Vision(1, no_videos="cannot be read: Idefics3 has no videos")),
    "gemma3": ModelFamily(vision=Vision(refused=f"tokens of an image {_BOTH_WAYS}")),
    "paligemma": ModelFamily(vision=Vision(refused=f"tokens of a prompt {_BOTH_WAYS}")),
}

# those that read images
VISION: Mapping[str, Vision] = {
    name: row.vision for name, row in FAMILIES.items() if row.vision is not None and not row.vision.refused
}


def families_with(column: str) -> tuple[str, ...]:
    """The names of the families whose rows have `column`."""
    return tuple(name for name, row in FAMILIES.items() if getattr(row, column))
