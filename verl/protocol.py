"""The name that recipes import; the code lives in verl/data_proto/."""

from verl.data_proto.future import DataProtoFuture
from verl.data_proto.merge import union_numpy_dict, union_tensor_dict
from verl.data_proto.padding import (
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from verl.data_proto.proto import DataProto, DataProtoItem
from verl.data_proto.settings import DataProtoConfig
from verl.data_proto.storage import (
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)

__all__ = [
    "DataProto", "DataProtoConfig", "DataProtoFuture", "DataProtoItem", "collate_fn", "deserialize_single_tensor",
    "deserialize_tensordict", "fold_batch_dim", "pad_dataproto_to_divisor", "serialize_single_tensor",
    "serialize_tensordict", "unfold_batch_dim", "union_numpy_dict", "union_tensor_dict", "unpad_dataproto",
]  # fmt: skip
