"""Damaged answers of services, and their handling by the engines and judges.

    found = outcome(random.Random(7), module, folder)     # ("sglang: /generate, retyped", "ModelError")

An answer is used or refused with an error of verl, within the deadline. A used answer holds tokens of the vocabulary
with log-probs of at most 0, or a reply that can be written to a file.
"""

import copy
import json
import math
import time

from transformers import AutoModelForCausalLM

from tests.damage import parent_of, places
from tests.foreign_text import foreign_text
from tests.rollout.service import Raw, running
from tests.rollout.simulated import weight_transfer
from verl.config import RewardModelConfig, RolloutConfig
from verl.config.sections.reward import JudgeServiceConfig, RewardModelRolloutConfig
from verl.config.sections.rollout import ServiceConfig
from verl.data_proto.samples import PromptRequest, SamplingParams
from verl.errors import VerlError
from verl.models.tiny import make_tiny_model, make_tokenizer
from verl.roles.judges import ServiceJudge
from verl.rollout.api import ENGINES
from verl.rollout.requests import vocab_size

TIMEOUT_S = 0.2
PARAMS = SamplingParams(n=1, max_new_tokens=4)
MODELS = {"object": "list", "data": [{"id": "served", "object": "model", "root": "somewhere/model"}]}
_DEEP = "@@deep@@"
_VALUES = (
    None, True, False, 0, -1, 1, 2.5, 10**9, 2**63, 10**400, -1e39, 1e39, 5.0, math.nan, math.inf, -math.inf, "", "stop",
    "abort", "\ud800", "\x1b[2Jgone", "a" * 5000, [], {}, [[]], [None], [1, 2], [[-0.5, 1]], {"a": 1}, {"type": "stop"}, _DEEP,
)  # fmt: skip


def completion(log_prob):
    text = {"tokens": ["a", "b"], "token_logprobs": [log_prob, -0.25], "text_offset": [0, 1]}
    choice = {"index": 0, "text": "ab", "token_ids": [5, 6], "logprobs": text, "finish_reason": "stop"}
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": {"total_tokens": 5}}


def answers_of(kind, vocabulary):
    """Right answers of a service, by path."""
    if kind == "judge":
        message = {"role": "assistant", "content": "4 of 5"}
        chat = {"id": "chat-1", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        return {"/v1/models": MODELS, "/v1/chat/completions": chat}
    if kind == "openai":
        return {"/v1/models": MODELS, "/v1/completions": completion(-0.5)}
    if kind == "vllm":
        flat = completion(-math.log(vocabulary))
        flat["choices"][0] |= {"token_ids": [5], "logprobs": {"token_logprobs": [-math.log(vocabulary)]}}
        return {
            "/v1/models": MODELS,
            "/v1/completions": flat,
            "/collective_rpc": {"results": [{}]},
            "/reset_prefix_cache": {"success": True},
            "/update_weight_version": {"success": True},
            "/weight_info": {"weight_version": "3-run"},
        }
    meta = {
        "id": "1",
        "finish_reason": {"type": "length", "length": 1},
        "output_token_logprobs": [[-math.log(vocabulary), 5, "a"]],
        "weight_version": "3-run",
    }
    return {
        "/get_model_info": {"model_path": "somewhere/model", "weight_version": "3-run"},
        "/server_info": {"max_req_input_len": 1 << 20},
        "/generate": {"text": "a", "meta_info": meta},
        "/update_weights_from_disk": {"success": True, "message": "done"},
        "/update_weight_version": {"success": True},
    }


KINDS = ("openai", "vllm", "sglang", "judge")


def use(kind, url, module, folder, timeout_s=TIMEOUT_S):
    """Everything that a run asks of such a service."""
    settings = {"url": url, "timeout_s": timeout_s, "num_retries": 0}
    if kind == "judge":
        rollout = RewardModelRolloutConfig(name="http", service=JudgeServiceConfig(**settings), response_length=8)
        (reply,) = ServiceJudge(RewardModelConfig(rollout=rollout)).replies(["How good is it?"])
        reply.encode()
        return
    service = ServiceConfig(api=kind, weights_dir=str(folder), **settings)
    name = "sglang" if kind == "sglang" else "http"
    config = RolloutConfig(name=name, max_num_seqs=1, service=service)
    engine = ENGINES.get(name)(
        module, make_tokenizer(), config, eos_token_ids=[258], transfer=weight_transfer("somewhere/model")
    )
    if kind != "openai":
        engine.run_name = "run"
        engine.load(list(module.named_parameters()))
        engine.publish(3)
    (sample,) = engine.generate([PromptRequest(0, (1, 2, 3))], PARAMS, step=0)
    assert 1 <= len(sample.token_ids) == len(sample.log_probs) <= PARAMS.max_new_tokens, sample
    assert all(type(token) is int and 0 <= token < vocab_size(module) for token in sample.token_ids), sample
    assert all(type(value) is float and -3.4e38 < value <= 0 for value in sample.log_probs), sample


# -- what can happen to an answer: (rng, answer) -> (status, text) or Raw ---------------------------------------------------


def with_value(answer, path, value):
    """`answer` with something else at `path`; ... leaves it out."""
    if not path:
        return {} if value is ... else value
    changed = copy.deepcopy(answer)
    parent = parent_of(changed, path)
    if value is ...:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return changed


def _said(answer):
    return 200, json.dumps(answer).replace(json.dumps(_DEEP), "[" * 50_000 + "]" * 50_000)


def dropped(rng, answer):
    return _said(with_value(answer, rng.choice(list(places(answer))), ...))


def retyped(rng, answer):
    value = foreign_text(rng)[1] if rng.random() < 0.2 else rng.choice(_VALUES)
    return _said(with_value(answer, rng.choice(list(places(answer))), value))


def multiplied(rng, answer):
    lists = [path for path in places(answer) if path and isinstance(path[-1], int)]
    if not lists:
        return _said([answer] * 3)
    path = rng.choice(lists)[:-1]
    number = parent_of(answer, (*path, None))
    return _said(with_value(answer, path, number * rng.choice([2, 3, 1000])))


def cut(rng, answer):
    text = json.dumps(answer)
    return 200, text[: rng.randrange(len(text))]


def garbled(rng, answer):
    text = bytearray(json.dumps(answer).encode())
    for _ in range(rng.choice([1, 3, 20])):
        text[rng.randrange(len(text))] = rng.randrange(256)
    return _raw(bytes(text))


def refused(rng, answer):
    status = rng.choice([201, 204, 301, 302, 307, 400, 401, 403, 404, 418, 422, 429, 500, 502, 503, 504, 599])
    return status, rng.choice(["", "no", "\x1b[31mred", json.dumps(answer)])


def compressed(rng, answer):
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: {rng.choice(['gzip', 'br', 'deflate', 'zstd', 'made-up'])}\r\n\r\n"
    return Raw(lambda: [head.encode(), json.dumps(answer).encode()])


def broken(rng, answer):
    """Not HTTP, or HTTP with wrong headers."""
    text = json.dumps(answer).encode()
    heads = (
        b"", b"\0" * 100, b"HTTP/1.1 ", b"HTTP/9.9 200 OK\r\n\r\n", b"HTTP/1.1 99999 OK\r\n\r\n", b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"a" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, b"HTTP/1.1 200 \xff\xfe\r\nB\xe9: \xff\r\n\r\n",
    )  # fmt: skip
    head = rng.choice(heads)
    return Raw(lambda: [head, text])


def dripped(rng, answer):
    """A byte now and then, of the head or of the body."""
    start = b"HTTP/1.1 200 OK\r\nServer: " if rng.random() < 0.5 else b"HTTP/1.1 200 OK\r\n\r\n"

    def parts():
        yield start
        until = time.monotonic() + 10 * TIMEOUT_S
        while time.monotonic() < until:
            yield b" "
            time.sleep(TIMEOUT_S / 20)

    return Raw(parts)


def endless(rng, answer):
    start = rng.choice([b'{"choices": "', b"[" * 10, b'{"data": [', b" "])

    def parts():
        yield b"HTTP/1.1 200 OK\r\n\r\n"
        yield start
        until = time.monotonic() + 10 * TIMEOUT_S
        while time.monotonic() < until:
            yield b"1," * 50_000

    return Raw(parts)


def _raw(content):
    return Raw(lambda: [b"HTTP/1.1 200 OK\r\n\r\n", content])


DAMAGE = {
    retyped: 40, dropped: 20, multiplied: 8, cut: 8, garbled: 8, refused: 6, broken: 5, compressed: 2, dripped: 1, endless: 1,
}  # fmt: skip


def outcome(rng, module, folder):
    """(protocol, path and damage; "used" or the name of the error) of one use of a service with one damaged answer."""
    kind = rng.choice(KINDS)
    answers = answers_of(kind, vocab_size(module))
    path, damage = rng.choice(list(answers)), rng.choices(list(DAMAGE), list(DAMAGE.values()))[0]
    answers[path] = damage(rng, answers[path])
    sentence = ""
    with running(answers) as service:
        try:
            use(kind, service.url, module, folder)
            result = "used"
        except VerlError as error:
            result, sentence = type(error).__name__, str(error)
        except BaseException as error:
            raise AssertionError(f"{kind}, {path}, {damage.__name__}: {str(answers[path])[:1000]}") from error
    assert sentence.isprintable(), sentence
    return f"{kind}: {damage.__name__}", result


def cases(rng, count, folder):
    """`outcome` of `count` answers."""
    module = AutoModelForCausalLM.from_pretrained(make_tiny_model(folder / "model"))
    for _ in range(count):
        yield outcome(rng, module, folder / "weights")
