"""`*.fsdp_config` and `critic.fsdp`: the PyTorch-native training engine."""

from dataclasses import dataclass

from verl.config.keys import Family, Section, ours, section, used
from verl.config.sections.deepspeed import DeepSpeedConfig
from verl.config.sections.megatron import MegatronConfig
from verl.families import TRAINING_ENGINES

STRATEGIES = Family("training engine", tuple(n for n in TRAINING_ENGINES.built_in if n != "local"), plugins=True)
MASTER_ROUNDINGS = ("dithered", "nearest")
DTYPES = ("auto", "bfloat16", "bf16", "float32", "fp32", "float16", "fp16", "float64")


@dataclass(frozen=True)
class WrapPolicyConfig(Section):
    min_num_params: int = used(
        0, "parameters from which on a module is sharded by itself; 0: each decoder layer is", sizing=True
    )
    transformer_layer_cls_to_wrap: list[str] | None = used(
        None, "classes that are sharded by themselves, in place of decoder layers", sizing=True
    )


@dataclass(frozen=True)
class MixedPrecisionConfig(Section):
    reduce_dtype: str = used("fp32", "dtype in which gradients are summed over devices")


@dataclass(frozen=True)
class FSDPConfig(Section):
    dtype: str = used(
        "auto",
        "compute dtype; auto: bfloat16 where the device computes it natively, else float32",
        choices=DTYPES,
        neutral=("bfloat16", "bf16"),
    )
    master_rounding: str = used(
        "dithered",
        "rounding of float32 master weights to bfloat16 compute weights; dithered: a fixed random offset per element, so that "
        "small updates show; nearest: hides updates below half a step of bfloat16",
        choices=MASTER_ROUNDINGS,
        neutral=("nearest",),
    )
    mixed_precision: MixedPrecisionConfig = section(MixedPrecisionConfig, "dtypes in addition to the compute dtype")
    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig, "modules that are sharded by themselves")
    wrap_policy_fn: str | None = used(
        None,
        "path/to/file.py:name of a function that chooses them: a wrap policy of FSDP, (module, recurse, nonwrapped_numel) -> "
        "bool, or a function without arguments that returns one",
        sizing=True,
        path=True,
    )
    param_offload: bool = used(
        False,
        "keep parameters on the CPU between uses; on one device only a frozen model, and of a trained one the float32 "
        "masters and their gradients",
        sizing=True,
    )
    optimizer_offload: bool = used(False, "keep optimizer state on the CPU between uses", sizing=True)
    offload_policy: bool = used(
        False, "FSDP2's own CPU offload: parameters, gradients and the step are there", sizing=True
    )
    reshard_after_forward: bool = used(True, "free gathered parameters after the forward pass", sizing=True)
    fsdp_size: int = used(
        -1, "data-parallel devices per shard group (others are replicas); -1: all", when="several_devices", sizing=True
    )
    forward_prefetch: bool = used(False, "gather the next layer during this one", sizing=True)
    tensor_parallel_size: int = used(
        1, "devices that divide each layer of a training model", when="several_devices", sizing=True
    )
    expert_parallel_size: int = used(
        1, "devices of a shard group that divide the experts of each layer", when="several_devices", sizing=True
    )
    use_no_sync_for_gradient_accumulation: bool = used(
        False, "sum gradients over devices once per optimizer step; keeps whole gradients until then", sizing=True
    )
    ulysses_sequence_parallel_size: int = used(
        1, "devices that share one packed row of tokens", when="several_devices", sizing=True
    )
    adapt_micro_batches: bool = used(
        False,
        "adapt the tokens of a micro-batch to free memory, beginning with the configured limit; losses stay the same, except "
        "for rounding",
    )
    use_3d_hybrid: bool = used(False, "divide training work in three dimensions: layers, sequence, batch")
    model_dimension: str = ours(
        "layer",
        "how the devices of a shard group divide the model: by layer (each holds a shard of every parameter, and gathers layer "
        "by layer) or by head (each holds and computes some attention heads, and its part of the feed-forward, of every layer)",
        when=".use_3d_hybrid",
        choices=("layer", "head"),
    )
    layer_per_group: int = ours(
        1,
        "decoder layers whose parameters several devices gather together, and send at a time to those that generate; fixed "
        "during a run",
        when=".use_3d_hybrid",
        ge=1,
    )
    enable_chunked_attention: bool = ours(
        False,
        "compute feed-forward, and attention without a flash kernel, over chunk_size tokens at a time, once more in the "
        "backward: less memory",
        when=".use_3d_hybrid",
    )
    chunk_size: int = ours(512, "tokens of such a chunk", when=".use_3d_hybrid", ge=1)
    batch_group_size: int = ours(
        1,
        "micro-batches for which several devices gather parameters and add up gradients once: less communication, more "
        "memory",
        when=".use_3d_hybrid",
        ge=1,
    )

    def describe_dimensions(self) -> list[str]:
        """The parts of the three dimensions of use_3d_hybrid; none without it."""
        if not self.use_3d_hybrid:
            return []
        by_layer = f"{self.layer_per_group} layer{'' if self.layer_per_group == 1 else 's'} at a time"
        chunks = f"{self.chunk_size} tokens at a time" if self.enable_chunked_attention else "whole"
        return [
            f"3D hybrid: model by {'head' if self.model_dimension == 'head' else by_layer}",
            f"sequences {chunks}",
            f"{self.batch_group_size} micro-batch{'' if self.batch_group_size == 1 else 'es'} between exchanges",
        ]

    def describe(self, *, without_gpus: bool = False) -> str:
        """The sharding policy, for the header of a run. Ranks of a host `without_gpus` share memory, if it can be had."""
        sizes = {"tensor": self.tensor_parallel_size, "sequence": self.ulysses_sequence_parallel_size,
                 "expert": self.expert_parallel_size}  # fmt: skip
        offloaded = {"parameters": self.param_offload, "optimizer": self.optimizer_offload, "all": self.offload_policy}
        parts = [
            "all data-parallel devices" if self.fsdp_size < 1 else f"groups of {self.fsdp_size} devices",
            *self.describe_dimensions(),
            *(f"{name} parallel {size}" for name, size in sizes.items() if size > 1),
            f"gradients summed in {self.mixed_precision.reduce_dtype}",
            "one copy of the parameters in the shared memory of a host"
            if without_gpus
            else f"parameters {'freed' if self.reshard_after_forward else 'kept'} after the forward",
            *(f"offload of {name}" for name, is_on in offloaded.items() if is_on),
        ]
        return ", ".join(parts)


@dataclass(frozen=True)
class SFTEngineConfig(FSDPConfig):
    """`engine` of supervised fine-tuning: the training engine by name, and the settings of the PyTorch-native one."""

    strategy: str = used("fsdp", "training engine; fsdp and fsdp2 are the PyTorch-native one", family=STRATEGIES)
    megatron: MegatronConfig = section(MegatronConfig, "Megatron engine", when=".strategy=megatron", sizing=True)
    deepspeed: DeepSpeedConfig = section(DeepSpeedConfig, "DeepSpeed engine", when=".strategy=deepspeed", sizing=True)
