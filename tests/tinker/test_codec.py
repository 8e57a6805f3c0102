"""The wire's form: round trips of the SDK's messages, and bytes that are none."""

import numpy as np
import pytest

pytest.importorskip("tinker", reason="the extra tinker is not installed")

import torch  # noqa: E402
import zstandard  # noqa: E402
from tinker import types  # noqa: E402
from tinker.proto import tinker_public_pb2 as wire  # noqa: E402
from tinker.proto.request_conv import forward_backward_request_to_proto  # noqa: E402
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response  # noqa: E402

from tests.tinker.data import array, datum  # noqa: E402
from verl.data_proto.samples import Completion  # noqa: E402
from verl.tinker import codec  # noqa: E402
from verl.tinker.records import RefusedRequest, SampleOutput, TopTokens, TrainingOutput  # noqa: E402


def message(data, loss="cross_entropy", settings=None):
    rows = types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=settings)
    request = types.ForwardBackwardRequest(forward_backward_input=rows, model_id="m", seq_id=3)
    return codec.training_message(forward_backward_request_to_proto(request).SerializeToString())


def test_rows_arrive_as_they_were_sent():
    rows = [datum(seed, policy=seed % 2 == 0) for seed in range(1000)]
    for start in range(0, 1000, 2):
        for row, loss in ((rows[start], "ppo"), (rows[start + 1], "cross_entropy")):
            request = codec.training_request(message([row], loss), 32, 64)
            assert request.data[0].tokens.tolist() == row.model_input.to_ints()
            for name, values in request.data[0].inputs.items():
                assert np.array_equal(values, array(row.loss_fn_inputs[name]))
    assert codec.training_request(message([rows[0]], "ppo"), 32, 64).settings == {
        "clip_low_threshold": 0.8,
        "clip_high_threshold": 1.2,
    }


def test_several_targets_come_sparse():
    targets, weights = torch.zeros(40, 5, dtype=torch.int64), torch.zeros(40, 5)
    targets[3, 1], targets[39, 4], weights[3, 1], weights[39, 4] = 7, 9, 0.5, 2.0
    inputs = {
        name: types.TensorData.from_torch_sparse(value)
        for name, value in (("target_tokens", targets), ("weights", weights))
    }
    row = types.Datum(model_input=types.ModelInput.from_ints([1] * 40), loss_fn_inputs=inputs)
    assert row.loss_fn_inputs["weights"].sparse_crow_indices is not None
    decoded = codec.training_request(message([row]), 32, 64).data[0].inputs
    assert np.array_equal(decoded["target_tokens"], targets.numpy())
    assert np.array_equal(decoded["weights"], weights.numpy())
    policy = {"target_tokens": targets, "logprobs": weights, "advantages": weights}
    dense = {name: types.TensorData.from_torch(value) for name, value in policy.items()}
    row = types.Datum(model_input=types.ModelInput.from_ints([1] * 40), loss_fn_inputs=dense)
    with pytest.raises(RefusedRequest, match="several targets"):
        codec.training_request(message([row], "dro", {"beta": 0.1}), 32, 64)


@pytest.mark.parametrize(
    ("loss", "settings", "rows", "sentence"),
    [
        ("gspo", None, 1, "no loss 'gspo'"),
        ("cross_entropy", {"beta": 1.0}, 1, "no setting 'beta'"),
        ("dro", None, 1, "setting beta of the loss dro is None"),
        ("cross_entropy", None, 0, "no data"),
        ("ppo", None, 1, "no 'logprobs'"),
    ],
)
def test_what_cannot_be_computed_is_refused_with_a_sentence(loss, settings, rows, sentence):
    with pytest.raises(RefusedRequest, match=sentence):
        codec.training_request(message([datum(0)] * rows, loss, settings), 32, 64)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda d: d.model_input[0].encoded_text.ClearField("tokens"), "0 tokens"),
        (lambda d: setattr(d.model_input[0].encoded_text, "tokens", b"123"), "no whole numbers"),
        (lambda d: setattr(d.model_input[0].encoded_text, "tokens", b"\xff" * 32), "none of the model's 32"),
        (lambda d: d.model_input[0].image.SetInParent(), "not text"),
        (lambda d: d.loss_fn_inputs["weights"].shape.append(9), "values and shape"),
        (lambda d: setattr(d.loss_fn_inputs["weights"], "dtype", 77), "unknown dtype"),
        (lambda d: d.loss_fn_inputs["weights"].shape.extend([1 << 40, 1 << 40]), "too large"),
        (lambda d: setattr(d.loss_fn_inputs["weights"], "dense", b"\x00\x00\xc0\x7f" * 8), "not finite"),
        (lambda d: d.loss_fn_inputs["weights"].sparse_csr.SetInParent(), "sparse matrix"),
    ],
)
def test_a_malformed_row_is_refused_with_a_sentence(change, sentence):
    sent = message([datum(0, length=8)])
    change(sent.data[0])
    with pytest.raises(RefusedRequest, match=sentence):
        codec.training_request(sent, 32, 64)


def test_bytes_that_are_no_message_and_bombs_are_refused():
    for body in (b"\xff" * 50, b"{}"):
        with pytest.raises(RefusedRequest, match="protobuf"):
            codec.training_message(body)
    bomb = zstandard.compress(bytes(codec.MAX_BYTES + 1))
    for packed, encoding, sentence in (
        (bomb, "zstd", "MiB"),
        (b"abc", "zstd", "not zstd"),
        (b"abc", "br", "not supported"),
    ):
        assert sentence in codec.decompressed(packed, encoding)[1].sentence
    assert codec.decompressed(zstandard.compress(b"abc"), "zstd") == (b"abc", None)


@pytest.mark.parametrize(
    ("body", "number"),
    [
        (b'{"model_id": "m", "seq_id": 12, "rate": NaN}', ("m", 12)),
        (b'{"seq_id": "12", "model_id": "m", "path": "a', ("m", 12)),
        (b'{"a": {"seq_id": 3}, "model_id": "m"}', None),
        (b'{"model_id": "m", "seq_id": 12', None),  # perhaps of 123
        (b'{"model_id": "m", "seq_id": 1.5}', None),
        (b'{"seq_id": 12, "model_id": "m', None),
        (b"\n\x01m\x10\xac\x02\x1a\xff", ("m", 300)),
        (b"\n\x01m\x10\xac", None),
        (b"\n\x01\xff\x10\x01", None),
        (b"[12]", None),
        (b"", None),
        (b"\n", None),
    ],
)
def test_the_number_of_a_damaged_request_is_read_if_it_is_certain(body, number):
    assert codec.request_number(body) == number


def test_results_are_read_by_the_sdk():
    arrays = [np.arange(3, dtype=np.float32), np.ones(1, np.float32), np.ones((2, 4), np.float32)]
    output = deserialize_forward_backward_output(codec.training_result(TrainingOutput(arrays, {"loss:sum": 1.5})))
    assert output.metrics == {"loss:sum": 1.5}
    for sent, read in zip(arrays, output.loss_fn_outputs, strict=True):
        assert np.array_equal(array(read["logprobs"]), sent)
    completions = [Completion(1, 0, [4, 5], [-1.0, -2.0], "stop", 0), Completion(1, 1, [6], [-3.0], "length", 0)]
    prompt = np.array([np.nan, -0.5], np.float32)
    top = TopTokens(np.array([[0, 0], [3, 4]]), np.array([[-99999.0, -99999.0], [-0.5, -1.0]]))
    sample = deserialize_sample_response(codec.sample_result(SampleOutput(completions, prompt, top, [])))
    assert [list(sequence.tokens) for sequence in sample.sequences] == [[4, 5], [6]]
    assert [sequence.stop_reason for sequence in sample.sequences] == ["stop", "length"]
    assert sample.prompt_logprobs == [None, -0.5]
    assert sample.topk_prompt_logprobs[1] == [(3, -0.5), (4, -1.0)]
    assert isinstance(codec.training_result(TrainingOutput([], {})), bytes)
    assert wire.ForwardBackwardOutput.FromString(codec.training_result(TrainingOutput([], {}))).metrics == {}
