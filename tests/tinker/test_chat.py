"""The endpoint for clients of OpenAI's API samples what the SDK samples."""

import json
import socket

import pytest

tinker = pytest.importorskip("tinker", reason="the extra tinker is not installed")
openai = pytest.importorskip("openai", reason="openai is not installed")

from tinker import types  # noqa: E402

from tests.processes import wait_until  # noqa: E402
from tests.tinker.data import datum  # noqa: E402

ODD = "{% if m['role'] == 'odd' %}{{ raise_exception('no') }}{% endif %}"
TEMPLATE = "{% for m in messages %}" + ODD + "{{ m['content'] }}{% endfor %}"


@pytest.fixture
def chat(served, monkeypatch):
    monkeypatch.setattr(served.service.bases.bench().tokenizer, "chat_template", TEMPLATE)
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="tml-test", max_retries=0) as client:
        yield client


def test_a_checkpoint_answers_with_the_samples_of_the_sdk(served, chat):
    trainer, tokenizer = served.trainer(), served.service.bases.bench().tokenizer
    trainer.forward_backward([datum(0)], "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=0.1)).result()
    path = trainer.save_weights_for_sampler("a").result().path
    assert {served.service.bases.names[0], path} <= {model.id for model in chat.models.list()}
    prompt, params = tokenizer.encode("abc"), types.SamplingParams(max_tokens=6, seed=5)
    texts = {}
    for model in (path, served.service.bases.names[0]):
        source = {"model_path": model} if model == path else {"base_model": model}
        sampler = served.client().create_sampling_client(**source).result()
        sequences = sampler.sample(types.ModelInput.from_ints(prompt), 2, params).result().sequences
        texts[model] = [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in sequences]
        settings = {"model": model, "max_tokens": 6, "n": 2, "seed": 5}
        answer = chat.chat.completions.create(messages=[{"role": "user", "content": "abc"}], logprobs=True, **settings)
        assert [choice.message.content for choice in answer.choices] == texts[model]
        scores = [token.logprob for token in answer.choices[0].logprobs.content]
        assert scores == pytest.approx(list(sequences[0].logprobs))
        assert answer.usage.completion_tokens == sum(len(sequence.tokens) for sequence in sequences)
        plain = chat.completions.create(prompt=prompt, **settings)
        assert [choice.text for choice in plain.choices] == texts[model]
    assert texts[path] != texts[served.service.bases.names[0]]


def test_parts_of_text_are_one_text(served, chat):
    settings = {"model": served.service.bases.names[0], "max_tokens": 4, "seed": 1}
    parts = [{"type": "text", "text": text} for text in ("a", "bc")]
    texts = [
        chat.chat.completions.create(messages=[{"role": "user", "content": content}], **settings).choices[0].message
        for content in ("abc", parts)
    ]
    assert texts[0] == texts[1]


def test_a_stop_ends_the_text_before_it(served, chat):
    settings = {"model": served.service.bases.names[0], "max_tokens": 20, "seed": 1, "prompt": "abc"}
    text = chat.completions.create(**settings).choices[0].text
    stop = next(
        letter for letter in text[1:] if letter.isascii() and letter != text[0]
    )  # others may be parts of tokens
    stopped = chat.completions.create(stop=["", stop], **settings).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text.partition(stop)[0], "stop")
    assert chat.completions.create(stop="", **settings).choices[0].text == text


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": "other"}, "no base model"),
        ({"model": "tinker://a/weights/b"}, "no checkpoint"),
        ({"stream": True}, "stream"),
        ({"tools": []}, "tools"),
        ({"temperature": -1.0}, "temperature"),
        ({"n": 0}, "samples"),
        ({"n": "2"}, "valid integer"),
        ({"stop": "x" * 1001}, "at most 1000 letters"),
        ({"messages": [{"role": "user", "content": "x" * 10**6}]}, "characters exceeds"),
        ({"messages": []}, "must be a list of messages"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has no text 'content'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}, "images"),
        ({"messages": [{"role": "odd", "content": ""}]}, "chat template"),
    ],
)
def test_what_is_not_served_is_a_sentence(served, chat, change, sentence):
    settings = {
        "model": served.service.bases.names[0],
        "messages": [{"role": "user", "content": "abc"}],
        "max_tokens": 2,
    }
    with pytest.raises(openai.APIStatusError, match=sentence) as raised:
        chat.chat.completions.create(**{**settings, **change})
    assert raised.value.status_code in (400, 404)


def test_a_request_whose_client_has_gone_is_not_computed_to_its_end(served, chat):
    """One at a time of a tenant's large requests runs; it and the ones behind it leave with their clients."""
    base = served.service.bases.bases[0]
    body = {"model": base.names[0], "prompt": "abc", "n": 64, "max_tokens": 1000}
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nx-api-key: tml-test\r\ncontent-length: "
    content = json.dumps(body)
    address = served.url.removeprefix("http://").split(":")
    for _ in range(6):
        with socket.create_connection((address[0], int(address[1]))) as gone:
            gone.sendall(f"{head}{len(content)}\r\n\r\n{content}".encode())
    assert wait_until(lambda: len([f for f in served.service.futures.values() if f.is_gone]) >= 5, 60)
    assert wait_until(lambda: all(f.answer is not None for f in served.service.futures.values()), 60)
    failed = [f.answer.failure for f in served.service.futures.values() if f.is_gone]
    assert sum(reason == "The client has gone." for reason in failed) >= 5
    assert not served.service.bases.bench(base).samplers[0]._lanes
    assert chat.completions.create(model=base.names[0], prompt="abc", max_tokens=2).choices
