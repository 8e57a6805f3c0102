"""The protocols of services: one class per kind, chosen by `rollout.service.api`."""

import json
import logging
import math
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from verl.config import full_key
from verl.data_proto.samples import SamplingParams
from verl.errors import ConfigError, ModelError, RefusedError, VerlError
from verl.foreign_text import clean
from verl.rollout.http.answers import SampleReply, SampleRequest, checked_reply, require_prompt
from verl.rollout.http.client import Client
from verl.rollout.vllm.sample import draw_arguments
from verl.rollout.vllm.weights import Description, Manifest

log = logging.getLogger(__name__)

_GENERATE = "/inference/v1/generate"  # of vLLM from 0.32 on
_WEIGHT_INFO = "/weight_info"  # of vLLM
_OF_REQUEST = ("model", "prompt", "return_token_ids")  # fields of a request; its further ones are sampling parameters
_NO_PENALTIES = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
CONTEXT_MARGIN = 8  # tokens of SGLang's context that no sequence gets
MESSAGE, OWN_SERVER = (
    "verl",
    "VERL_OWN_SGLANG",
)  # an entry of zmq_handles and an environment variable that in_sglang.py reads
_BEGIN, _END = "/begin_weight_update", "/end_weight_update"  # of SGLang
_PAUSE: tuple[str, dict[str, object]] = ("/pause_generation", {"mode": "abort"})
_CONTINUE = "/continue_generation"
_UNFINISHED = "unfinished"  # version of weights between begin and end of an update
_SEED_MASK = (1 << 31) - 1
_SEED_STEP = 0x9E3779B1  # odd: a sample that resumes gets its own seed


class Dialect(Protocol):
    """`vocab_size` is the model's. `advice` is a clause: how a service is started that reads weights in memory."""

    advice: str

    def check(self, client: Client, path: str, name: str | None, vocab_size: int) -> None:
        """Raise ConfigError when the service has another model than `path` (served as `name`), or lacks an option."""

    def longest(self, client: Client) -> tuple[int | None, str]:
        """Tokens of the longest sequence that the service takes, None if it does not say, and the option that sets it for
        sequences of {0} tokens."""

    def sample(self, client: Client, request: SampleRequest) -> SampleReply:
        """One sample. Raises ModelError for an answer that cannot be one."""

    def try_bucket(self, client: Client, bucket: Description, reader: str) -> None:
        """Let the service read a bucket without loading it. Raises ModelError when it does not."""

    def update(self, client: Client, buckets: Iterable[Description], reader: str) -> None:
        """Let the service read the described buckets, or one folder, and drop results of the old weights; `reader` names our
        function that reads them. Raises ModelError when it did not."""

    def label(self, client: Client, version: str) -> None:
        """Tell the service the version of the weights that it holds."""

    def version(self, client: Client) -> str | None:
        """The version of the weights that the service reports, or None."""


class OpenAI:
    """`/v1/completions` with token ids in and out, as of vLLM's server and similar ones. The service samples
    by itself: log-probs must be at the sampling temperature (vLLM: --logprobs-mode processed_logprobs). It takes no
    weights. Prompts with images go to vLLM's route for token ids, with one token in place of each image."""

    advice = ""

    def __init__(self) -> None:
        self._model, self._row = "", 0

    def check(self, client: Client, path: str, name: str | None, vocab_size: int) -> None:
        self._model, self._row, root = served_model(client, name, path)
        if root and Path(root).name != Path(path).name:
            raise ConfigError(
                f"The service at {client.url} serves {root}, but this run trains {path}; start it with that model."
            )

    def longest(self, client: Client) -> tuple[int | None, str]:
        return client.get("/v1/models").get(int, "data", self._row, "max_model_len"), "--max-model-len {0}"

    def sample(self, client: Client, request: SampleRequest) -> SampleReply:
        seed = (request.key + request.num_drawn * _SEED_STEP) & _SEED_MASK
        return self._reply(client, {**self._request(request), **_filters(request.params), "seed": seed}, request)

    def try_bucket(self, client: Client, bucket: Description, reader: str) -> None:
        raise ModelError(
            f"The service at {client.url} has no known route for new weights. Set "
            f"{full_key('rollout.service.api')} to vllm or sglang, if it is one of these."
        )

    def update(self, client: Client, buckets: Iterable[Description], reader: str) -> None:
        self.try_bucket(client, {}, reader)

    def label(self, client: Client, version: str) -> None:
        """Nothing: the weights of such a service never change."""

    def version(self, client: Client) -> str | None:
        return None

    def _request(self, request: SampleRequest) -> dict[str, object]:
        return {
            "model": request.adapter or self._model,
            "prompt": list(request.token_ids),
            "max_tokens": request.params.max_new_tokens,
            "logprobs": 0,
            "return_token_ids": True,
            "stop": request.stop_strings,
            "skip_special_tokens": False,  # stop strings are looked for in the complete text
            "spaces_between_special_tokens": False,
            "stop_token_ids": request.stop_token_ids,
            "ignore_eos": True,  # they are among the stop tokens if they count
            **_NO_PENALTIES,
        }

    def _reply(self, client: Client, body: dict[str, object], request: SampleRequest) -> SampleReply:
        if request.files.contents:
            return self._reply_to_images(client, body, request)
        answer = client.post("/v1/completions", body, num_tokens=request.num_tokens)
        tokens = answer.get(list, "choices", 0, "token_ids")
        if tokens is None:
            raise answer.unusable(
                "has text at most and no token ids, which training needs. Use a service that knows return_token_ids (vLLM "
                "0.10.2 or newer), or SGLang"
            )
        prompt = answer.get(list, "choices", 0, "prompt_token_ids")
        require_prompt(answer, prompt in (None, body["prompt"]), request)
        log_probs = answer.at(list, "choices", 0, "logprobs", "token_logprobs")
        return checked_reply(answer, tokens, log_probs, answer.at(str, "choices", 0, "finish_reason"), request)

    def _reply_to_images(self, client: Client, body: dict[str, object], request: SampleRequest) -> SampleReply:
        names = {"vllm_xargs": "extra_args"}
        params = {names.get(name, name): v for name, v in body.items() if name not in _OF_REQUEST}
        parts = [{"type": f"{kind}_url", "url": url} for kind, url in request.urls]
        call = {name: body[name] for name in ("model", "return_token_ids")}
        call |= {"token_ids": body["prompt"], "content_parts": parts, "sampling_params": params}
        answer = client.post(_GENERATE, call, num_tokens=request.num_tokens)
        if (ids := answer.at(list, "prompt_token_ids")) != list(request.files.token_ids):
            raise answer.unusable(
                f"has other tokens ({len(ids)}) for the prompt and images of {request.name} than this run "
                f"({request.num_prompt_tokens}): start it with --mm-processor-kwargs as data.mm_processor_kwargs, for videos "
                """with --media-io-kwargs '{"video": {"num_frames": -1, "fps": 2}}'"""
            )
        tokens = answer.at(list, "choices", 0, "token_ids")
        rows = answer.at(list, "choices", 0, "logprobs", "content")
        log_probs = [row.get("logprob") if type(row) is dict else None for row in rows]
        return checked_reply(answer, tokens, log_probs, answer.at(str, "choices", 0, "finish_reason"), request)


class VLLM(OpenAI):
    """vLLM's server with our sampling and our receiver of weights, so that it gives the native engine's samples:

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model PATH --logprobs-mode processed_logits
        --logits-processors verl.rollout.vllm.library:Sampler --worker-extension-cls verl.rollout.vllm.weights.WeightReceiver
    with verl on its PYTHONPATH; for prompts with images also --enable-scale-out; before vLLM 0.32, or with
    VLLM_USE_V2_MODEL_RUNNER=0, also --no-async-scheduling.
    """

    def __init__(self) -> None:
        super().__init__()
        self._labels = True  # whether the server has routes for the version of its weights

    def check(self, client: Client, path: str, name: str | None, vocab_size: int) -> None:
        super().check(client, path, name, vocab_size)
        require_log_probs(
            self, client, vocab_size, "with --logits-processors verl.rollout.vllm.library:Sampler --logprobs-mode "
            "processed_logits, or set service.api=openai",
        )  # fmt: skip
        self._labels = bool(client.get(_WEIGHT_INFO, may_lack=True).value)
        if not self._labels:
            log.warning(
                "The service at %s keeps no version of its weights, as vLLM does from 0.32 on. Weights that another client "
                "changes, or that a restart loses, are not noticed.",
                client.url,
            )

    def sample(self, client: Client, request: SampleRequest) -> SampleReply:
        draw = draw_arguments(request.key, request.num_drawn, request.params)
        return self._reply(client, {**self._request(request), "temperature": 0.0, "vllm_xargs": draw}, request)

    def try_bucket(self, client: Client, bucket: Description, reader: str) -> None:
        self._on_workers(client, "verl_try", json.dumps({"reader": reader, "bucket": bucket}))

    def update(self, client: Client, buckets: Iterable[Description], reader: str) -> None:
        manifest = Manifest()
        self.label(client, _UNFINISHED)  # for a client that generates meanwhile
        self._on_workers(client, "verl_begin")
        try:
            for bucket in buckets:
                self._on_workers(client, "verl_load", json.dumps({"reader": reader, "bucket": bucket}))
                manifest.add(bucket)
        except VerlError:
            with suppress(VerlError):  # what went wrong first is raised
                client.post("/collective_rpc", {"method": "verl_abandon"})
            raise
        self._on_workers(client, "verl_finish", manifest.digest)
        if not client.post("/reset_prefix_cache", {}).get(bool, "success"):
            raise ModelError(f"The service at {client.url} did not drop what it computed with the old weights.")

    def label(self, client: Client, version: str) -> None:
        if self._labels:
            client.post("/update_weight_version", {"new_version": version})

    def version(self, client: Client) -> str | None:
        return client.get(_WEIGHT_INFO).label("weight_version") if self._labels else None

    def _on_workers(self, client: Client, method: str, *args: str) -> None:
        answer = client.post("/collective_rpc", {"method": method, "args": list(args)})
        for worker in range(max(1, len(answer.at(list, "results")))):
            if "error" in answer.at(dict, "results", worker):
                raise ModelError(f"The service at {client.url}: {answer.label('results', worker, 'error')}")


class SGLang:
    """SGLang's own routes. Its log-probs are at the sampling temperature and of all tokens, as ours. A server with verl inside
    (in_sglang.py) gives the native engine's samples, and takes buckets. Else samples are by SGLang's seeds, which it reads with
    --enable-deterministic-inference, and weights by a folder."""

    advice = (
        ", or start SGLang on this host by `python -m verl.rollout.http.in_sglang`, with the options of its own command"
    )

    def __init__(self) -> None:
        self._info = "/model_info"
        self._has_receiver = False
        self._adapter: str | None = None  # its name; None: the model without one

    def check(self, client: Client, path: str, name: str | None, vocab_size: int) -> None:
        if not client.get(self._info, may_lack=True).value:
            self._info = "/get_model_info"  # of older servers
        info = client.get(self._info)
        served = info.label("model_path") or "no model"  # after an update, the folder of the weights
        if Path(name or path).name not in (Path(served).name, Path(info.label("tokenizer_path") or "").name):
            raise ConfigError(
                f"The service at {client.url} serves {served}, but this run trains {name or path}; start it with that model."
            )
        client.command(_CONTINUE, {}, may_lack=True)  # after a run that ended within an update
        require_log_probs(self, client, vocab_size, "without SGLANG_RETURN_ORIGINAL_LOGPROB")

    def longest(self, client: Client) -> tuple[int | None, str]:
        """See Dialect. SGLang keeps some tokens of its context, and of its memory for keys and values, for itself."""
        length = client.get("/server_info", may_lack=True).get(int, "max_req_input_len")
        return length, f"--context-length {{0}} + {CONTEXT_MARGIN}, with enough memory for it"

    def sample(self, client: Client, request: SampleRequest) -> SampleReply:
        params = request.params
        body: dict[str, object] = {
            "input_ids": list(request.token_ids),
            "return_logprob": True,
            "sampling_params": {
                **_filters(params),
                **_NO_PENALTIES,
                "min_new_tokens": 0,
                "max_new_tokens": params.max_new_tokens,
                "stop": request.stop_strings,
                "stop_token_ids": request.stop_token_ids,
                "ignore_eos": not request.stop_token_ids,  # True: no token ends a sample, not even these
                "no_stop_trim": True,
                "skip_special_tokens": False,
                "custom_params": draw_arguments(request.key, request.num_drawn, params),
                "sampling_seed": request.key & _SEED_MASK,  # SGLang hashes it with the place in the sequence
            },
        }
        if any(kind == "video" for kind, _ in request.urls):
            raise ModelError("Videos cannot be sent to SGLang in this version. Leave out rows and tools with videos.")
        if request.files.contents:
            body["image_data"] = [url for _, url in request.urls]
        if adapter := request.adapter or self._adapter:
            body["lora_path"] = adapter
        answer = client.post("/generate", body, num_tokens=request.num_tokens)
        num_read = None if request.files.contents else answer.get(int, "meta_info", "prompt_tokens")
        require_prompt(answer, num_read in (None, len(request.token_ids)), request)
        rows = answer.at(list, "meta_info", "output_token_logprobs")
        if not all(type(row) is list and len(row) > 1 for row in rows):
            raise answer.unusable(
                "has rows of meta_info.output_token_logprobs that are not [log-probability, token id, ...]"
            )
        reason = answer.at(str, "meta_info", "finish_reason", "type")
        version = answer.label("meta_info", "weight_version")
        return checked_reply(answer, [row[1] for row in rows], [row[0] for row in rows], reason, request, version)

    def try_bucket(self, client: Client, bucket: Description, reader: str) -> None:
        self._send(client, "try", reader=reader, bucket=bucket)
        self._has_receiver = True

    def update(self, client: Client, buckets: Iterable[Description], reader: str) -> None:
        """See Dialect. Nothing is sampled from the beginning of an update to its success: the server stays paused after an
        error."""
        client.command(*_PAUSE, may_lack=True)
        if self._has_receiver:
            self._load(client, buckets, reader)
        else:
            for description in buckets:
                body = {"model_path": description["folder"], "flush_cache": True}
                self._post(client, "/update_weights_from_disk", body)
        client.command(_CONTINUE, {}, may_lack=True)

    def load_adapter(self, client: Client, name: str, folder: Path) -> None:
        """Let the service read an adapter, which samples use from now on; the one before is dropped. Raises ModelError."""
        client.command(*_PAUSE, may_lack=True)
        self._post(client, "/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        if self._adapter is not None:
            self._post(client, "/unload_lora_adapter", {"lora_name": self._adapter})
        self._adapter = name
        client.command("/flush_cache", {})
        client.command(_CONTINUE, {}, may_lack=True)

    def _load(self, client: Client, buckets: Iterable[Description], reader: str) -> None:
        try:
            self._post(client, _BEGIN, {})
        except RefusedError:  # a run ended within an update
            self._post(client, _END, {})
            self._post(client, _BEGIN, {})
        manifest = Manifest()
        self._send(client, "begin", weight_version=_UNFINISHED)
        for bucket in buckets:
            self._send(client, "load", reader=reader, bucket=bucket)
            manifest.add(bucket)
        self._send(client, "finish", manifest=manifest.digest)
        self._post(client, _END, {})
        client.command("/flush_cache", {})

    def _send(self, client: Client, step: str, weight_version: str | None = None, **arguments: object) -> None:
        message = json.dumps({"step": step, **arguments})
        body = {"zmq_handles": {MESSAGE: message}, "flush_cache": False, "weight_version": weight_version}
        self._post(client, "/update_weights_from_ipc", body)

    def _post(self, client: Client, path: str, body: dict[str, object]) -> None:
        answer = client.post(path, body)
        if not answer.get(bool, "success"):
            raise ModelError(f"The service at {client.url} did not take the new weights: {answer.label('message')}")

    def label(self, client: Client, version: str) -> None:
        client.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def version(self, client: Client) -> str | None:
        return client.get(self._info).label("weight_version")


def _filters(params: SamplingParams) -> dict[str, object]:
    """The distribution of a sample. A service has defaults of its own for values that are not sent, from the model's
    generation_config.json."""
    top_k = params.top_k if params.top_k > 0 else -1
    return {"temperature": params.temperature, "top_p": params.top_p, "top_k": top_k, "min_p": params.min_p}


def require_log_probs(dialect: Dialect, client: Client, vocab_size: int, start: str) -> None:
    """Raise ConfigError when log-probs are not at the sampling temperature. At a high one each token is as likely as any
    other."""
    if abs(_log_prob(dialect, client, vocab_size, temperature=1e6) + math.log(vocab_size)) > 0.1:
        raise ConfigError(
            f"The service at {client.url} does not sample as this run asks: its log-probabilities are not at the sampling "
            f"temperature. Start it {start}."
        )


def require_tempered(dialect: Dialect, client: Client, vocab_size: int) -> None:
    """As `require_log_probs`, for services that know temperatures up to 2: raise ConfigError when the likeliest token is as
    likely at each of two."""
    one, two = (_log_prob(dialect, client, vocab_size, temperature=value, top_k=1) for value in (1.0, 2.0))
    if one < -0.01 and abs(one - two) < 0.01:
        raise ConfigError(
            f"The service at {client.url} gives log-probabilities at temperature 1, whatever the sampling temperature is. "
            f"Start it with --logprobs-mode processed_logprobs, or set {full_key('rollout.temperature')}=1."
        )


def _log_prob(dialect: Dialect, client: Client, vocab_size: int, temperature: float, top_k: int = -1) -> float:
    """The log-prob of a token that the service samples with these parameters."""
    sampling = SamplingParams(temperature=temperature, top_k=top_k, max_new_tokens=1)
    request = SampleRequest((0,), sampling, [], key=1, num_drawn=0, vocab_size=vocab_size)
    return dialect.sample(client, request).log_probs[0]


DIALECTS: dict[str, type[Dialect]] = {"openai": OpenAI, "vllm": VLLM, "sglang": SGLang}


def served_model(client: Client, name: str | None, path: str | None) -> tuple[str, int, str | None]:
    """The name of the model at an OpenAI-compatible service: `name`, its only one, or `path`; its row; and the folder
    that it says the model is from. Raises ConfigError when it does not serve it, or several and none was chosen."""
    answer = client.get("/v1/models")
    served = [clean(answer.at(str, "data", row, "id")) for row in range(len(answer.at(list, "data")))]
    model = name or (served[0] if len(served) == 1 else path)
    if model not in served:
        names = ", ".join(served[:8]) or "nothing"
        raise ConfigError(
            f"The service at {client.url} serves {names}, not {model or 'one model'}. Set {client.keys}.served_model_name to "
            "one of these, or start it with the model of this run."
        )
    row = served.index(model)
    return model, row, answer.label("data", row, "root")
