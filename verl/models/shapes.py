"""Shapes of decoders: parameters, and the sizes for memory and time. Without torch and without weights.

ModelShape.from_config(json.load(open("config.json")))        a Hugging Face config, as a dict or an object
known_shape("Qwen/Qwen2.5-7B-Instruct")                       a published model, by its name (shapes.yaml)
ModelShape.gpt(num_layers=96, hidden=12288, heads=96)         GPT: GELU, no grouped keys, 12 L h^2 parameters
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from verl.config.keys import read_yaml
from verl.errors import ConfigError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# the first three are needed
_SIZES = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "num_experts", "n_routed_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size", "n_shared_experts", "first_k_dense_replace", "kv_lora_rank", "q_lora_rank",
    "qk_rope_head_dim", "v_head_dim", "max_position_embeddings", "linear_num_value_heads", "linear_num_key_heads",
    "linear_key_head_dim", "linear_value_head_dim",
)  # fmt: skip
_SIZE = re.compile(r"-\d+(\.\d+)?[bm](-|$)")  # of a model in its name, as in -7b
_MODELS = Path(__file__).with_name("shapes.yaml")


@dataclass(frozen=True)
class Tower:
    """A vision tower: the sizes of its layers, `patches` of an image for each token that they become, and parameters of the
    `connector` behind it. Attention sees all of the image, or with a `window` that many patches in all but `whole_layers`
    layers."""

    num_layers: int
    hidden: int
    heads: int
    intermediate: int
    gated: bool = False
    patches: int = 1
    connector: int = 0
    window: int = 0
    whole_layers: int = 0

    @cached_property
    def shape(self) -> ModelShape:
        """Its layers as a decoder without a vocabulary."""
        size, heads = self.hidden // self.heads, self.heads
        return ModelShape(self.num_layers, self.hidden, heads, heads, size, self.intermediate, gated=self.gated)

    @property
    def num_parameters(self) -> int:
        return self.shape.block_parameters + self.connector

    def attended(self, patches: float) -> float:
        """Patches that a patch sees in an image of `patches`, on average over the layers."""
        share = self.whole_layers / self.num_layers if self.window else 1.0
        return share * patches + (1 - share) * min(self.window, patches)


@dataclass(frozen=True)
class LinearAttention:
    """Layers with a matrix of key_dim x value_dim for each of `heads` in place of keys and values (verl/models/delta_net.py).
    `keys` and `values` are the elements of all heads of a token."""

    CHUNK: ClassVar[int] = 64  # tokens
    num_layers: int
    heads: int
    key_dim: int
    keys: int
    values: int

    def parameters(self, hidden: int) -> int:
        """Of one layer: queries, keys, values, gates and output, and two numbers for each head."""
        return hidden * (2 * self.keys + 3 * self.values + 2 * self.heads)

    @property
    def kept_bytes(self) -> float:
        """Bytes that a layer keeps of a token for its backward pass, in float32 behind its convolution."""
        keys, channels = self.heads * self.key_dim, 2 * self.keys + self.values
        chunk = 5 * self.CHUNK * self.heads + 2 * self.key_dim * self.values / self.CHUNK
        return 4 * (channels + 6 * (keys + self.values) + chunk) + 2 * (2 * channels + 4 * self.values)

    @property
    def operations(self) -> float:
        """Operations of a layer for a token, but for its projections: with the matrices, and with the tokens of its chunk."""
        return 6 * self.key_dim * self.values + self.CHUNK * (5 * self.key_dim * self.heads + 3 * self.values)

    @property
    def state_elements(self) -> int:
        """Elements of the matrices of a row, in all layers."""
        return self.num_layers * self.key_dim * self.values


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. `intermediate` is a dense layer's MLP size; a mixture has `dense_layers` dense layers before its
    expert layers. With `kv_lora_rank` attention is multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).
    With `linear` some layers have no other, and the output of the others has a gate."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int = 0
    tied: bool = False
    gated: bool = True  # two matrices in (gate, up) and one out; else one in and one out
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0  # of the experts that every token passes
    shared_gate: bool = False  # weighs their output
    dense_layers: int = 0
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    rope_head_dim: int = 0
    value_head_dim: int = 0
    name: str = ""
    max_positions: int | None = None
    counted: int = 0  # parameters of the module, if it was built: with norms and biases
    tower: Tower | None = None
    linear: LinearAttention | None = None

    @classmethod
    def gpt(cls, num_layers: int, hidden: int, heads: int, vocab: int = 0, name: str = "") -> ModelShape:
        """A GPT of 12 L h^2 parameters (and V h of a tied embedding)."""
        return cls(num_layers, hidden, heads, heads, hidden // heads, 4 * hidden, vocab, True, False, name=name)

    @classmethod
    def from_config(
        cls, config: Mapping[str, object] | PreTrainedConfig, name: str = "", counted: int = 0
    ) -> ModelShape:
        """From a Hugging Face config of a decoder, a mapping or an object; `counted` are its parameters, if they are known.
        Raises ConfigError when a size is missing."""
        mapping = _as_mapping(config)
        vision = _as_mapping(mapping.get("vision_config") or {})
        mapping = {**mapping, **_as_mapping(mapping.get("text_config") or {})}
        for size in _SIZES:
            needed = size in _SIZES[:3]
            if not isinstance(mapping.get(size) or (None if needed else 0), int) or (needed and mapping[size] < 1):
                raise ConfigError(
                    f"The model's config has no positive whole number as {size}; the planner needs the config of a decoder. "
                    "Give a folder with a config.json, or the name of a published model."
                )
        sizes = {**_dense_sizes(mapping), **_expert_sizes(mapping), **_latent_sizes(mapping)}
        tower, linear = _tower(vision, mapping) if vision else None, _linear(mapping)
        max_positions = mapping.get("max_position_embeddings")
        return cls(**sizes, name=name, max_positions=max_positions, counted=counted, tower=tower, linear=linear)

    @property
    def is_mixture(self) -> bool:
        return self.num_experts > 0

    @property
    def is_latent(self) -> bool:
        return self.kv_lora_rank > 0

    @property
    def num_mixture_layers(self) -> int:
        return self.num_layers - self.dense_layers if self.is_mixture else 0

    @property
    def num_cached_layers(self) -> int:
        """Layers with keys and values."""
        return self.num_layers - (self.linear.num_layers if self.linear else 0)

    def has_stages(self, num: int) -> bool:
        """Whether `num` stages of a pipeline with equally many layers, but for fewer in the last one, all have some."""
        return -(-self.num_layers // num) * (num - 1) < self.num_layers

    @property
    def num_in(self) -> int:
        """Matrices into an MLP: gate and up, or one."""
        return 2 if self.gated else 1

    @property
    def query_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def output_size(self) -> int:
        """Elements of the attention's output of a token, before its projection."""
        return self.heads * (self.value_head_dim or self.head_dim)

    @property
    def kv_elements(self) -> int:
        """Elements in the KV cache of one token and layer."""
        return self.kv_lora_rank + self.rope_head_dim if self.is_latent else 2 * self.kv_heads * self.head_dim

    @cached_property
    def attention_parameters(self) -> int:
        out = self.hidden * self.output_size
        if not self.is_latent:
            queries = self.query_size * (2 if self.linear else 1)  # and their gate
            return out + self.hidden * (queries + 2 * self.kv_heads * self.head_dim)
        rank, nope = self.kv_lora_rank, self.head_dim - self.rope_head_dim
        queries = (
            self.q_lora_rank * (self.hidden + self.query_size) if self.q_lora_rank else self.hidden * self.query_size
        )
        keys = self.hidden * (rank + self.rope_head_dim) + rank * self.heads * (nope + self.value_head_dim)
        return out + queries + keys

    @cached_property
    def expert_parameters(self) -> int:
        return (self.num_in + 1) * self.hidden * self.expert_intermediate

    def mlp_parameters(self, *, mixture: bool) -> int:
        """Parameters of one layer's MLP, with the router, and without the experts that it chooses (`expert_parameters`)."""
        if not mixture:
            return (self.num_in + 1) * self.hidden * self.intermediate
        return (self.num_in + 1) * self.hidden * self.shared_intermediate + self.hidden * self.num_experts

    @cached_property
    def routed_parameters(self) -> int:
        """Parameters of all routed experts of all layers, divided by expert parallelism."""
        return self.num_mixture_layers * self.num_experts * self.expert_parameters

    @cached_property
    def block_parameters(self) -> int:
        """Parameters of all layers, without the routed experts, norms and biases."""
        dense = self.num_layers - self.num_mixture_layers
        mlp = dense * self.mlp_parameters(mixture=False) + self.num_mixture_layers * self.mlp_parameters(mixture=True)
        linear = self.linear.num_layers * self.linear.parameters(self.hidden) if self.linear else 0
        return self.num_cached_layers * self.attention_parameters + linear + mlp

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding, and of the output projection if it is not tied."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @cached_property
    def num_parameters(self) -> int:
        tower = self.tower.num_parameters if self.tower else 0
        return self.counted or self.block_parameters + self.routed_parameters + self.embedding_parameters + tower

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that a token passes: only the chosen ones of the routed experts; without the embedding."""
        routed = self.num_mixture_layers * self.experts_per_token * self.expert_parameters
        return self.block_parameters + routed + self.vocab * self.hidden

    @property
    def flops(self) -> tuple[float, float]:
        """(a, b): a forward pass over a sequence of T tokens takes a T + b T^2 operations. Attention is causal."""
        scores = self.heads * (self.head_dim + (self.value_head_dim or self.head_dim))
        recurrence = 6 * self.linear.state_elements if self.linear else 0  # two reads of the matrices and a write
        return 2.0 * self.active_parameters + recurrence, float(self.num_cached_layers * scores)


def _as_mapping(config: object) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    return config.to_dict() if hasattr(config, "to_dict") else vars(config)


def _dense_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    activation = str(config.get("hidden_act") or config.get("activation_function") or "silu")
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "intermediate": config.get("intermediate_size") or 4 * hidden,
        "vocab": config.get("vocab_size") or 0,
        "tied": bool(config.get("tie_word_embeddings", False)),
        "gated": activation in ("silu", "swish", "swiglu", "gelu_pytorch_tanh") and "n_inner" not in config,
    }


def _expert_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    experts = config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts") or 0
    if not experts:
        return {}
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    gated = config.get("shared_expert_intermediate_size")
    return {
        "num_experts": experts,
        "experts_per_token": config.get("num_experts_per_tok") or 1,
        "expert_intermediate": inner,
        "shared_intermediate": gated or inner * (config.get("n_shared_experts") or 0),
        "shared_gate": bool(gated),
        "dense_layers": config.get("first_k_dense_replace") or 0,
    }


def _latent_sizes(config: Mapping[str, object]) -> dict[str, Any]:
    if not config.get("kv_lora_rank"):
        return {}
    rope = config.get("qk_rope_head_dim") or 0
    return {
        "kv_lora_rank": config["kv_lora_rank"],
        "q_lora_rank": config.get("q_lora_rank") or 0,
        "rope_head_dim": rope,
        "value_head_dim": config.get("v_head_dim") or 0,
    }


def _linear(config: Mapping[str, Any]) -> LinearAttention | None:
    """The layers of a config with the gated delta rule; transformers' class has the same default of every fourth layer."""
    heads, keys = config.get("linear_num_value_heads"), config.get("linear_num_key_heads")
    if not heads or not keys:
        return None
    layers, key_dim, every = (
        config["num_hidden_layers"],
        config["linear_key_head_dim"],
        config.get("full_attention_interval"),
    )
    kinds = config.get("layer_types")
    num = kinds.count("linear_attention") if kinds else layers - layers // (every or 4)
    return LinearAttention(num, heads, key_dim, keys * key_dim, heads * config["linear_value_head_dim"])


def _tower(vision: Mapping[str, Any], config: Mapping[str, Any]) -> Tower | None:
    """The tower of a vision_config in the `config` of its model. Families name sizes differently; None without sizes."""
    hidden = vision.get("embed_dim") or vision.get("hidden_size")  # with embed_dim, hidden_size is the language model's
    layers = vision.get("depth") or vision.get("num_hidden_layers")
    heads = vision.get("num_heads") or vision.get("num_attention_heads")
    if not (isinstance(hidden, int) and isinstance(layers, int) and isinstance(heads, int)):
        return None
    merged = {**config, **vision}.get("spatial_merge_size") or config.get("scale_factor")
    patches = round(merged or 1 / (config.get("downsample_ratio") or 1)) ** 2
    # of one matrix, or of two if a family has a merger
    merger = hidden * patches if vision.get("spatial_merge_size") else 0
    inner = vision.get("intermediate_size") or int(hidden * (vision.get("mlp_ratio") or 4))
    gated = vision.get("model_type") == "pixtral" or vision.get("hidden_act") in ("silu", "swish")
    num_full = len(vision.get("fullatt_block_indexes") or ())
    window = (vision["window_size"] // vision["patch_size"]) ** 2 if num_full and vision.get("window_size") else 0
    connector = hidden * patches * (merger + config["hidden_size"])
    return Tower(layers, hidden, heads, inner, gated, patches, connector, window, num_full)


@cache
def known_shapes() -> dict[str, ModelShape]:
    names = {field.name for field in fields(ModelShape)}
    rows = read_yaml(_MODELS)["models"]
    parts = {"tower": Tower, "linear": LinearAttention}
    rows = {
        name: row | {part: kind(**row[part]) for part, kind in parts.items() if part in row}
        for name, row in rows.items()
    }
    return {name: ModelShape(**{k: v for k, v in row.items() if k in names}, name=name) for name, row in rows.items()}


def known_shape(name: str) -> ModelShape:
    """The published model `name`; a suffix such as -Instruct and the organisation may be left out or differ. Raises
    ConfigError."""
    shapes = known_shapes()
    short = name.rstrip("/").split("/")[-1].lower()
    # the longest name that begins it, if what follows is no size: DeepSeek-R1-Distill-X-9B is no DeepSeek-R1
    for family_name in sorted(shapes, key=len, reverse=True):
        rest = short.removeprefix(family_name.lower())
        if rest == "" or (rest != short and rest.startswith("-") and not _SIZE.search(rest)):
            return shapes[family_name]
    raise ConfigError(
        f"The shape of {name!r} is not known: it is no folder with a config.json, and no published model of "
        f"verl/models/shapes.yaml{nearest(name.rstrip('/').split('/')[-1], shapes) or '.'} Give actor_rollout_ref.model.path "
        "such a folder; its weights are not needed."
    )
