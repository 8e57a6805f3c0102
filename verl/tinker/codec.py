"""The wire's form of requests and results: messages of the installed SDK to records, and records to messages.

Numbers of the protobuf messages are little-endian arrays in bytes fields.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, cast

import numpy as np
import pydantic
import pydantic_core
import zstandard
from tinker import types
from tinker.proto import tinker_public_pb2 as wire

from verl.data_proto.samples import SamplingParams
from verl.tinker.records import (
    Datum,
    RefusedRequest,
    SampleOutput,
    SamplingRequest,
    Targets,
    TopTokens,
    TrainingOutput,
    TrainingRequest,
)
from verl.tinker.sum_losses import SUM_LOSSES

PROTOBUF = "application/x-protobuf"
MAX_BYTES = 64 << 20  # of a request, decompressed
TOO_LARGE = f"The body has more than {MAX_BYTES >> 20} MiB. Send fewer rows in a request."
_PART_BYTES, _HEAD = 1 << 16, 256  # read at a time; characters of a damaged body that are looked at
_MAX_SAMPLES, _MAX_TOP = 1024, 100
_MOST_STOPS, _MOST_LETTERS = 64, 1000
_MOST_TARGETS = 1024  # a token of the prompt
_MAX_TEMPERATURE = 1e6  # beyond, float32 cannot divide by it
_DTYPES = {wire.DTYPE_FLOAT32: "<f4", wire.DTYPE_INT64: "<i8", wire.DTYPE_INT32: "<i4", wire.DTYPE_BFLOAT16: "<u2"}


def decompressed(body: bytes, encoding: str) -> tuple[bytes, RefusedRequest | None]:
    """The body of a request without its Content-Encoding, and why it is refused: an encoding other than zstd, damage, or more
    than MAX_BYTES. Then the bytes are its beginning, as far as it can be read."""
    if not encoding:
        return body, None
    if encoding != "zstd":
        return b"", RefusedRequest(f"Content-Encoding {encoding!r} is not supported; send zstd or none.")
    plain = bytearray()
    with zstandard.ZstdDecompressor().stream_reader(body) as reader:
        try:
            while part := reader.read(min(_PART_BYTES, MAX_BYTES + 1 - len(plain))):
                plain += part
        except zstandard.ZstdError as error:
            return bytes(plain), RefusedRequest(f"The body is not zstd: {error}.")
    return bytes(plain), RefusedRequest(TOO_LARGE) if len(plain) > MAX_BYTES else None


class _Numbered(pydantic.BaseModel):
    model_id: str
    seq_id: int


def request_number(body: bytes) -> tuple[str, int] | None:
    """The model and the number that a request names, in JSON or protobuf that may be damaged behind them; None if they cannot
    be read."""
    text = body.decode(errors="replace")
    cut = text.rstrip("0123456789")  # digits at the end may be half a number
    readers: list[Callable[[], Any]] = [
        partial(pydantic_core.from_json, part, allow_partial=True) for part in (cut, cut[:_HEAD])
    ]
    if body.startswith(b"\n"):  # the tag of the first field in protobuf
        readers = [partial(_protobuf_numbers, body)]
    for read in readers:
        with contextlib.suppress(Exception):  # what is not read here is refused elsewhere, with the reason
            numbered = _Numbered.model_validate(read(), from_attributes=True)
            return numbered.model_id, numbered.seq_id
    return None


def _protobuf_numbers(body: bytes) -> wire.ForwardBackwardRequest:
    """The first two fields of a message."""
    start = 3 + body[1]  # a tag, a length below 128, the model, a tag
    end = next(at for at in range(start, start + 10) if body[at] < 0x80)
    return training_message(body[: end + 1])


def training_message(body: bytes) -> wire.ForwardBackwardRequest:
    """The message of a forward_backward request. Raises RefusedRequest for bytes that are none."""
    message = wire.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception as error:  # protobuf's implementations raise different types
        raise RefusedRequest("The body is not a ForwardBackwardRequest in protobuf.") from error
    return message


def training_request(message: wire.ForwardBackwardRequest, vocabulary: int, longest: int) -> TrainingRequest:
    """The checked request. Raises RefusedRequest for everything that could not be computed."""
    loss = SUM_LOSSES.get(message.loss_fn)
    if loss is None:
        raise RefusedRequest(f"There is no loss {message.loss_fn!r} here; there are {', '.join(SUM_LOSSES)}.")
    if not message.data:
        raise RefusedRequest("The request has no data.")
    settings = _settings(message)
    data = [_datum(datum, number, loss.inputs, vocabulary, longest) for number, datum in enumerate(message.data)]
    if message.loss_fn != "cross_entropy" and any(d.inputs["target_tokens"].ndim > 1 for d in data):
        raise RefusedRequest("Only cross_entropy takes several targets for a position.")
    return TrainingRequest(message.model_id, message.loss_fn, settings, data, message.forward_only)


def _settings(message: wire.ForwardBackwardRequest) -> dict[str, float]:
    defaults = SUM_LOSSES[message.loss_fn].settings
    sent: dict[str, Any] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        sent[name] = value.number if value.WhichOneof("value") == "number" else value.text
    unknown = [name for name in sent if name not in defaults]
    if unknown:
        names = ", ".join(defaults) or "none"
        raise RefusedRequest(f"The loss {message.loss_fn} has no setting {unknown[0]!r}; it has {names}.")
    values = {**defaults, **sent}
    for name, value in values.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise RefusedRequest(f"The setting {name} of the loss {message.loss_fn} is {value!r}; give a number.")
    if values.get("clip_low_threshold", 0) > values.get("clip_high_threshold", 0):
        raise RefusedRequest("clip_low_threshold is above clip_high_threshold, so every ratio would be clipped.")
    return {name: float(value) for name, value in values.items()}


def _datum(message: Any, number: int, names: Sequence[str], vocabulary: int, longest: int) -> Datum:
    place = f"data[{number}]"
    for chunk in message.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise RefusedRequest(f"{place} has a chunk that is not text. The model reads only text.")
    parts = [_numbers(chunk.encoded_text.tokens, "<i4", place) for chunk in message.model_input]
    tokens = np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)
    if not 1 <= len(tokens) <= longest:
        raise RefusedRequest(f"{place} has {len(tokens)} tokens; the model takes 1 to {longest}.")
    inputs = {}
    for name in ("target_tokens", *names):
        if name not in message.loss_fn_inputs:
            raise RefusedRequest(f"{place} has no {name!r} among its loss_fn_inputs.")
        array = _array(message.loss_fn_inputs[name], f"{name} of {place}")
        if array.ndim not in (1, 2) or len(array) != len(tokens) or 0 in array.shape:
            raise RefusedRequest(
                f"{name} of {place} has shape {list(array.shape)}; the input has {len(tokens)} tokens."
            )
        inputs[name] = array
    if any(array.shape != inputs["target_tokens"].shape for array in inputs.values()):
        raise RefusedRequest(f"The loss_fn_inputs of {place} have different shapes.")
    for name, ids in (("model_input", tokens), ("target_tokens", inputs["target_tokens"])):
        if ids.dtype.kind != "i" or ids.min() < 0 or ids.max() >= vocabulary:
            raise RefusedRequest(f"{name} of {place} has a value that is none of the model's {vocabulary} tokens.")
    if not all(np.isfinite(array).all() for array in inputs.values()):
        raise RefusedRequest(f"A value in the loss_fn_inputs of {place} is not finite.")
    return Datum(tokens, inputs)


def _numbers(data: bytes, dtype: str, place: str) -> np.ndarray:
    try:
        return np.frombuffer(data, dtype)
    except ValueError as error:
        raise RefusedRequest(f"{place} has {len(data)} bytes, which are no whole numbers of type {dtype}.") from error


def _array(tensor: wire.Tensor, place: str) -> np.ndarray:
    """A tensor as int64 or float32; entries that a sparse one does not list are 0."""
    dtype, shape = _DTYPES.get(tensor.dtype), tuple(tensor.shape)
    if dtype is None:
        raise RefusedRequest(f"{place} has an unknown dtype.")
    if math.prod(shape) * 4 > MAX_BYTES or any(size < 0 for size in shape):
        raise RefusedRequest(f"{place} has shape {list(shape)}, which is too large.")
    is_sparse = tensor.HasField("sparse_csr")
    values = _numbers(tensor.sparse_csr.values if is_sparse else tensor.dense, dtype, place)
    if tensor.dtype == wire.DTYPE_BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    values = values.astype(np.int64 if values.dtype.kind == "i" else np.float32)
    if is_sparse:
        return _dense(tensor.sparse_csr, values, shape, place)
    if shape and math.prod(shape) != len(values):
        raise RefusedRequest(f"{place} has {len(values)} values and shape {list(shape)}.")
    return values.reshape(shape or -1)


def _dense(csr: wire.SparseCsr, values: np.ndarray, shape: tuple[int, ...], place: str) -> np.ndarray:
    starts, columns = (_numbers(data, "<i8", place) for data in (csr.crow_indices, csr.col_indices))
    counts = np.diff(starts)
    fits = (
        len(shape) == 2
        and len(starts) == shape[0] + 1
        and len(counts) == shape[0]
        and (counts >= 0).all()
        and starts[0] == 0
        and starts[-1] == len(columns) == len(values)
        and (not len(columns) or (columns.min() >= 0 and columns.max() < shape[1]))
    )
    if not fits:
        raise RefusedRequest(f"{place} is no sparse matrix of shape {list(shape)}.")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def training_result(output: TrainingOutput) -> bytes:
    """A ForwardBackwardOutput, with one record for each run of data with equally many targets."""
    message = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics.update(output.metrics)
    for trailing, members in groupby(output.log_probs, key=lambda array: array.shape[1:]):
        arrays = list(members)
        tensor = message.loss_fn_outputs.add(num_datums=len(arrays)).fields["logprobs"]
        tensor.dtype = wire.DTYPE_FLOAT32
        tensor.data = b"".join(array.astype("<f4").tobytes() for array in arrays)
        tensor.offsets = np.cumsum([0, *(array.size * 4 for array in arrays)]).astype("<i8").tobytes()
        tensor.trailing_shape.extend(trailing)
    return cast("bytes", message.SerializeToString())


def sampling_request(request: types.SampleRequest, vocabulary: int, longest: int) -> SamplingRequest:
    """The checked request. Raises RefusedRequest for everything that could not be computed."""
    unavailable = ("prompt_alt_tokens_k", "record_stability_info")
    if names := [name for name in unavailable if getattr(request, name)]:
        raise RefusedRequest(f"{names[0]} is not available in this version. Leave it out.")
    if any(not isinstance(chunk, types.EncodedTextChunk) for chunk in request.prompt.chunks):
        raise RefusedRequest("The prompt has a chunk that is not text. The model reads only text.")
    tokens = tuple(request.prompt.to_ints())
    if not tokens or min(tokens) < 0 or max(tokens) >= vocabulary:
        raise RefusedRequest(f"The prompt is empty or has a value that is none of the model's {vocabulary} tokens.")
    sampling, room = request.sampling_params, longest - len(tokens)
    limit = room if sampling.max_tokens is None else sampling.max_tokens
    if not 1 <= limit <= room:
        raise RefusedRequest(
            f"A prompt of {len(tokens)} tokens with max_tokens={limit} exceeds the model's {longest} tokens or samples none."
        )
    tops, most_top = (request.topk_prompt_logprobs, request.topk_sample_logprobs), min(_MAX_TOP, vocabulary)
    if not 1 <= request.num_samples <= _MAX_SAMPLES or not all(0 <= (top or 0) <= most_top for top in tops):
        raise RefusedRequest(f"A request has 1 to {_MAX_SAMPLES} samples and 0 to {most_top} top log-probs.")
    if not 0 <= (request.prompt_logprobs_last_n or 0) <= len(tokens):
        raise RefusedRequest(f"prompt_logprobs_last_n is at most {len(tokens)}, the tokens of the prompt.")
    identity = ("seed", sampling.seed) if sampling.seed is not None else (request.sampling_session_id, request.seq_id)
    return SamplingRequest(
        tokens,
        request.num_samples,
        limit,
        _sampling_params(sampling),
        int.from_bytes(hashlib.sha256(repr(identity).encode()).digest()[:8], "little") >> 2,
        prompt_log_probs=bool(request.prompt_logprobs),
        top_of_prompt=request.topk_prompt_logprobs,
        top_of_samples=request.topk_sample_logprobs,
        last_tokens=request.prompt_logprobs_last_n,
        targets=None if request.target_prompt_logprobs is None else _targets(request, len(tokens) - 1, vocabulary),
    )


def _targets(request: types.SampleRequest, num_rows: int, vocabulary: int) -> Targets:
    """The tokens of `target_prompt_logprobs`, which pydantic has read as a model with lists."""
    place, tensor = "target_prompt_logprobs", cast("Any", request.target_prompt_logprobs)
    shape = tuple(tensor.shape or ())
    if tensor.dtype != "int64" or len(shape) != 2 or shape[0] != num_rows or not 1 <= shape[1] <= _MOST_TARGETS:
        raise RefusedRequest(
            f"{place} is an int64 matrix of shape [{num_rows}, 1 to {_MOST_TARGETS}]: a row for each token but the first."
        )
    is_sparse, lists = tensor.sparse_crow_indices is not None, (tensor.sparse_crow_indices, tensor.sparse_col_indices)
    try:
        values, starts, columns = (np.asarray(one or [], np.int64).reshape(-1) for one in (tensor.data, *lists))
    except (OverflowError, ValueError, TypeError) as error:
        raise RefusedRequest(f"{place} has a number that does not fit 64 bits.") from error
    if is_sparse:
        csr = wire.SparseCsr(crow_indices=starts.tobytes(), col_indices=columns.tobytes())
        ids = _dense(csr, values + 1, shape, place) - 1
    elif values.size == math.prod(shape):
        ids = values.reshape(shape)
    else:
        raise RefusedRequest(f"{place} has {values.size} values and shape {list(shape)}.")
    if ids.size and not -1 <= ids.min() <= ids.max() < vocabulary:
        raise RefusedRequest(f"{place} has a value that is none of the model's {vocabulary} tokens, and not -1.")
    return Targets(ids, starts, columns) if is_sparse else Targets(ids)


def _sampling_params(sampling: types.SamplingParams) -> SamplingParams:
    """Rules of sampling. Stops that a request names replace the end-of-sequence tokens."""
    stop = [sampling.stop] if isinstance(sampling.stop, str) else list(sampling.stop or ())
    texts = [text for text in stop if isinstance(text, str)]
    if len(texts) > _MOST_STOPS or any(len(text) > _MOST_LETTERS for text in texts):  # each step looks back as far
        raise RefusedRequest(f"A request has at most {_MOST_STOPS} stop texts of at most {_MOST_LETTERS} letters.")
    in_range = 0 <= sampling.temperature <= _MAX_TEMPERATURE and 0 < sampling.top_p <= 1
    if not in_range or not -1 <= sampling.top_k < 1 << 31:
        raise RefusedRequest(
            f"temperature is 0 to {_MAX_TEMPERATURE:g}, top_p above 0 and at most 1, and top_k from -1 to 2^31."
        )
    if not all(0 <= token < 1 << 31 for token in stop if isinstance(token, int)):
        raise RefusedRequest("A stop is a text or the number of a token.")
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or -1,
        stop=tuple(sorted(texts)),
        stop_token_ids=tuple(sorted(token for token in stop if isinstance(token, int))),
        ignore_eos=sampling.stop is not None,
    )


def sample_result(output: SampleOutput) -> bytes:
    message = wire.SampleResponse()
    for number, completion in enumerate(output.completions):
        stopped = completion.finish_reason == "stop"
        sequence = message.sequences.add(
            stop_reason=wire.STOP_REASON_STOP if stopped else wire.STOP_REASON_LENGTH,
            tokens=np.asarray(completion.token_ids, "<i4").tobytes(),
            logprobs=np.asarray(completion.log_probs, "<f4").tobytes(),
        )
        if output.sample_tops:
            sequence.topk_sampled_logprobs.CopyFrom(_top(output.sample_tops[number]))
    if output.prompt_log_probs is not None:
        message.prompt_logprobs = output.prompt_log_probs.astype("<f4").tobytes()
    if output.prompt_top is not None:
        message.topk_prompt_logprobs.CopyFrom(_top(output.prompt_top))
    if output.targets is not None:
        message.target_prompt_logprobs.CopyFrom(_target_tensor(output.targets))
    return cast("bytes", message.SerializeToString())


def _target_tensor(targets: Targets) -> wire.Tensor:
    values, starts, columns = targets.ids, targets.starts, targets.columns
    tensor = wire.Tensor(dtype=wire.DTYPE_FLOAT32, shape=values.shape)
    if starts is None or columns is None:
        tensor.dense = values.astype("<f4").tobytes()
    else:
        listed = values[np.repeat(np.arange(len(values)), np.diff(starts)), columns].astype("<f4").tobytes()
        csr = wire.SparseCsr(values=listed, crow_indices=starts.tobytes(), col_indices=columns.tobytes())
        tensor.sparse_csr.CopyFrom(csr)
    return tensor


def _top(top: TopTokens) -> wire.TopkLogprobs:
    length, k = top.ids.shape
    ids, log_probs = top.ids.astype("<i4").tobytes(), top.log_probs.astype("<f4").tobytes()
    return wire.TopkLogprobs(token_ids=ids, logprobs=log_probs, k=k, length=length)
